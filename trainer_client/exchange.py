"""The messages of one push between the ranks of a trainer, on the board of their `RankGroup`.

    every rank   `post` under a stage  ->  `gather` by the leader (or by any rank that is meant)
    leader       `say` one entry after the other in its log  ->  `hear` by every other rank, in order
    any rank     `fail`: the first error is that of the push, and every wait of every rank raises it

While an `Exchange` is entered, a thread lets the heart of this rank beat and watches others: the leader all of them,
they the leader. One that stands still for ``rank_timeout_s`` ends the push with `RankLost`. What a rank has written for
a push it takes down once all ranks have begun a later one. `WeightClient` makes one exchange for each push.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from trainer_client.group import LEADER, RankGroup, told
from vllm_nixl_plugin.errors import DeadlineExceeded, PushWeightsError, RankLost, from_wire

SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 0.0001, 0.02
PATIENCE = 16
"""A wait sleeps for one part in so many of what it has lasted, so that it ends that much late at most."""
LOOK_S = 0.05
"""How often a wait, or the `Exchange.check` of a transfer, looks for the failure of another rank."""
LATER_S = 5.0
"""How much longer than the leader the others wait, so that it is the leader who says what is missing."""

Entry = dict[str, Any]


class Exchange:
    """One push among the ranks of a group. A context manager; an exception that leaves it fails the push for all."""

    def __init__(self, group: RankGroup, *, timeout_s: float, rank_timeout_s: float) -> None:
        """``timeout_s``: by when every rank has to have begun this push."""
        self.group, self.rank, self.size = group, group.rank, group.size
        self.number = group.next_number()
        self._board = group.board
        self._board.patience_s = rank_timeout_s
        self._timeout_s, self._rank_timeout_s = timeout_s, rank_timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._all_here = False
        self._written: list[str] = []
        self._said = self._heard = 0
        self._lock = threading.Lock()
        self._failure: dict[str, Any] | None = None
        self._looked = 0.0
        self.lost: set[int] = set()
        """Ranks that gave no sign of life."""
        self._over = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="nixl-ranks", daemon=True)

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks with the servers."""
        return self.rank == LEADER

    def __enter__(self) -> Exchange:
        if self.size > 1:
            self._write(f"beat/{self.rank}", b"0")
            self._pulse.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._leave(error)
        finally:
            self._over.set()
            if self._pulse.ident is not None:
                self._pulse.join()
            if self._all_here and error is None:
                self.group.sweep()
            self.group.finished(self._written)

    def post(self, stage: str, answer: Entry | bytes) -> None:
        """This rank's answer in a stage."""
        self._write(f"{stage}/{self.rank}", _packed(answer))

    def gather(self, stage: str, ranks: Sequence[int] | None = None) -> list[bytes]:
        """The answers of all ranks (or of ``ranks``) in a stage, in their order.

        Errors: the failure of the push; DeadlineExceeded naming the ranks that have not begun it.
        """
        return self.take([f"{stage}/{rank}" for rank in (range(self.size) if ranks is None else ranks)])

    def put(self, key: str, data: bytes) -> None:
        """A message for whoever `take`\\ s it."""
        self._write(key, data)

    def take(self, keys: Sequence[str], check: Callable[[], None] | None = None) -> list[bytes]:
        """Messages of this push, when all are there. ``check`` may raise to give up. Errors: see `gather`."""
        names = [self._key(key) for key in keys]
        self._wait(names, check or self.check)
        return self._board.get(names)

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """Messages of this push that are there, also after it has failed."""
        return self._board.get([self._key(key) for key in keys])

    def missing(self, stage: str, ranks: Sequence[int]) -> list[int]:
        """Those of ``ranks`` that have not answered yet."""
        return [rank for rank in ranks if not self._board.has([self._key(f"{stage}/{rank}")])]

    def say(self, entry: Entry) -> None:
        """The leader's next entry."""
        with self._lock:
            self._write(f"log/{self._said}", _packed(entry))
            self._said += 1

    def hear(self) -> Entry:
        """The leader's next entry, when it is there. Errors: the failure of the push."""
        entry: Entry = json.loads(self.take([f"log/{self._heard}"])[0])
        self._heard += 1
        return entry

    def begun(self) -> None:
        """Every rank has begun this push: the traces of earlier ones can go, when this one is over."""
        self._deadline = float("inf")
        self._all_here = True

    def fail(self, error: BaseException) -> PushWeightsError:
        """Fail the push on every rank; the error that it fails with: the first that any rank has."""
        self._failure = self._claim("failure", self.wire(error))
        return from_wire(self._failure)

    def check(self) -> None:
        """Errors: the failure of the push, on whatever rank. Cheap: asks the board every `LOOK_S`."""
        if self._failure is None and self.size > 1 and time.monotonic() - self._looked >= LOOK_S:
            self._looked = time.monotonic()
            self._failure = self._claimed("failure")
        if self._failure is not None:
            raise from_wire(self._failure)

    def raise_alarm(self, stage: str, error: BaseException) -> None:
        """Tell whoever asks for the `alarm` of a stage what went wrong here; the first to do so is heard."""
        self._claim(f"{stage}/alarm", self.wire(error))

    def alarm(self, stage: str) -> dict[str, Any] | None:
        """The error, as on the wire, with which a rank has raised the alarm in a stage."""
        return self._claimed(f"{stage}/alarm")

    def wire(self, error: BaseException) -> dict[str, Any]:
        """The error as on the wire, with the rank that met it."""
        if not isinstance(error, PushWeightsError):
            error = PushWeightsError(f"unexpected {type(error).__name__}: {error}")
        if self.size == 1 or error.details.keys() & {"rank", "ranks"}:
            return error.to_wire()
        details = error.details | {"rank": self.rank}
        return {"error": {"code": error.code, "message": f"rank {self.rank}: {error.message}", "details": details}}

    @property
    def failed(self) -> bool:
        """Whether the push has failed for all ranks, as far as this one knows."""
        return self._failure is not None

    def _key(self, name: str) -> str:
        return f"{self.number}/{name}"

    def _write(self, name: str, data: bytes) -> None:
        self._written += self._board.set(self._key(name), data)

    def _wait(self, keys: Sequence[str], check: Callable[[], None]) -> None:
        begin = looked = time.monotonic()
        while not self._board.has(keys):
            now = time.monotonic()
            if now - looked >= LOOK_S:
                looked = now
                check()
                if now > self._deadline + (0.0 if self.is_leader else LATER_S):
                    raise self._too_late()
            time.sleep(min(max((now - begin) / PATIENCE, SHORTEST_SLEEP_S), LONGEST_SLEEP_S))

    def _too_late(self) -> DeadlineExceeded:
        absent = self.missing("hello", range(self.size)) or [LEADER]
        return DeadlineExceeded(
            f"{told(absent)} of {self.size} did not call push_weights within timeout_s={self._timeout_s:g} s: call it "
            "on every rank, as often and in the same order; a rank that pushes alone gives "
            "WeightClient(group=RankGroup.alone())", ranks=absent,
        )  # fmt: skip

    def _leave(self, error: BaseException) -> None:
        """Fail with ``error``, or raise the one with which the push fails instead."""
        try:
            first = self.fail(error)
            self.post("left", b"")
        except RankLost:
            return  # the board is gone: whoever is left finds that out by itself
        if self.size > 1 and isinstance(error, Exception) and first.to_wire() != getattr(error, "to_wire", dict)():
            raise first from error

    def _claim(self, name: str, wire: dict[str, Any]) -> dict[str, Any]:
        if self.size == 1:
            return wire
        key = self._key(name)
        self._written.append(key)
        found: dict[str, Any] = json.loads(self._board.claim(key, json.dumps(wire)))
        return found

    def _claimed(self, name: str) -> dict[str, Any] | None:
        key = self._key(name)
        return json.loads(self._board.read(key)) if self._board.has([key]) else None

    def _beat(self) -> None:
        pause_s = min(max(self._rank_timeout_s / 10, 0.05), 1.0)
        seen: dict[int, tuple[bytes, float]] = {}
        watched = [rank for rank in range(self.size) if rank != self.rank] if self.is_leader else [LEADER]
        count = 0
        while not self._over.wait(pause_s) and self._failure is None:
            count += 1
            try:
                self._board.set(self._key(f"beat/{self.rank}"), str(count).encode())
                here = [rank for rank in watched if rank in seen or self._board.has([self._key(f"beat/{rank}")])]
                beats = self._board.get([self._key(f"beat/{rank}") for rank in here])
                now = time.monotonic()
                for rank, beat in zip(here, beats, strict=True):
                    if rank not in seen or seen[rank][0] != beat:
                        seen[rank] = beat, now
                    elif now - seen[rank][1] > self._rank_timeout_s and not self._over.is_set():
                        self.lost.add(rank)
                        self.fail(self._lost(rank))
            except RankLost as error:
                self._failure = error.to_wire()

    def _lost(self, rank: int) -> RankLost:
        return RankLost(
            f"rank {rank} of {self.size} gives no sign of life for rank_timeout_s={self._rank_timeout_s:g} s in the "
            "middle of a push: it is gone or stopped. Restart the trainer; the servers keep what they serve", rank=rank,
        )  # fmt: skip


def _packed(message: Entry | bytes) -> bytes:
    return message if isinstance(message, bytes) else json.dumps(message).encode()
