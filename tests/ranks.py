"""Several ranks of a trainer in one process: a thread and a client each, one store, fake servers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import HashStore

from fake_server import TOKEN, Servers
from trainer_client import RankGroup, WeightClient

T = TypeVar("T")


def on_all(tasks: list[Callable[[], T]]) -> list[T | Exception]:
    """What each returns or raises, run at once."""
    found: list[Any] = [None] * len(tasks)

    def run(number: int) -> None:
        try:
            found[number] = tasks[number]()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def groups_of(size: int) -> list[RankGroup]:
    """The ranks of a group."""
    store = HashStore()
    return [RankGroup(store, rank, size) for rank in range(size)]


class Trainer:
    """Ranks with a client each."""

    def __init__(self, servers: Servers, size: int, **options: Any) -> None:
        defaults = {
            "token": TOKEN, "progress": False, "direct_run_bytes": 64, "send_buffer_bytes": 4096, "timeout_s": 20.0,
        }  # fmt: skip
        self.groups = groups_of(size)
        self.clients = [
            WeightClient(
                [s.url for s in servers.all], transport=servers.transport, fabric=servers.fabric, group=group,
                **(defaults | options),
            )
            for group in self.groups
        ]  # fmt: skip

    def push(self, parts: list[Any], **options: Any) -> list[Any]:
        """Every rank pushes its part; what each returns or raises. An option that is a list is one for each rank."""

        def of(rank: int) -> Callable[[], Any]:
            mine = {name: value[rank] if isinstance(value, list) else value for name, value in options.items()}
            return lambda: self.clients[rank].push_weights(parts[rank], **mine)

        return on_all([of(rank) for rank in range(len(self.clients))])

    def close(self) -> None:
        for client in self.clients:
            client.close()
