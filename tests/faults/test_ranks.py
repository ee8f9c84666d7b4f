"""The rank that hosts the board of messages has died: the others stop writing all the same."""

from __future__ import annotations

import threading
import time
from typing import Any, NoReturn

import pytest

from trainer_client import team
from vllm_nixl_plugin.errors import RankLost


class GoneBoard:
    """An exchange that hands out one order; after that nothing answers any more."""

    rank, size = 1, 2

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = [{"server": 0, "order": "send", "number": 1}]

    def hear(self) -> dict[str, Any]:
        if self._entries:
            return self._entries.pop()
        raise RankLost("the store does not answer")

    def fail(self, error: BaseException) -> NoReturn:
        raise RankLost("the store does not answer")


def test_a_rank_stops_writing_when_the_board_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = threading.Event()

    def writes_until_called_off(part: Any, entry: dict[str, Any]) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                part._check(entry["number"])
            except RankLost:
                stopped.set()
                return
            time.sleep(0.01)

    monkeypatch.setattr(team._Part, "obey", writes_until_called_off)
    with pytest.raises(RankLost):
        team.follow(GoneBoard(), [object()], object(), lambda: False)  # type: ignore[arg-type,list-item]
    assert stopped.is_set()
