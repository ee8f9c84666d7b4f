"""The ranks of one trainer: how they find each other, and the board on which they leave messages for each other.

A `RankGroup` is made from ``torch.distributed`` when that is initialised, or by hand; a trainer of one process is a
group of one. Its board is a ``torch.distributed.Store`` (any backend has one), never a collective: a message waits for
its reader, every wait has a deadline, and a rank that dies neither hangs nor poisons the trainer's process group.
Messages are bytes, nothing is pickled. `WeightClient` makes the group at its first push; `exchange` has the messages.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial as bind
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from vllm_nixl_plugin.errors import InvalidRequest, RankLost

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

PART_NBYTES = 4 << 20
"""Longer values are cut: a TCPStore refuses messages above 8 MiB and closes the connection."""
CLOSE_S = 2.0
"""How long closing waits for what was deleted last."""
LEADER = 0
"""The rank that speaks with the servers."""


class RankGroup:
    """The processes that call ``push_weights`` together.

    Args:
        store: a ``torch.distributed.Store`` that all of them reach, used for nothing else (a ``PrefixStore`` will do).
        rank: this process, from 0; rank 0 speaks with the servers.
        size: how many they are.
    """

    def __init__(self, store: Store | _Memory, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise InvalidRequest(f"rank {rank} of a group of {size}; expected a rank from 0 to {size - 1}")
        self.rank, self.size = rank, size
        self.board = Board(store)
        self._numbers = itertools.count(1)
        self._kept: dict[str, str] = {}
        self._held: dict[str, list[str]] = {}
        self._past: list[str] = []
        self._lock = threading.Lock()

    @classmethod
    def alone(cls) -> RankGroup:
        """A group of this one process, also where ``torch.distributed`` is initialised."""
        return cls(_Memory(), 0, 1)

    @classmethod
    def find(cls, group: RankGroup | ProcessGroup | None) -> RankGroup:
        """The group itself, or the ranks of a process group (None: all, or this process where there is none).

        Every rank calls this as often and in the same order. Errors: InvalidRequest when this process is not in it.
        """
        if isinstance(group, RankGroup):
            return group
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return cls.alone()
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        rank = dist.get_rank(group)
        if rank < 0:
            raise InvalidRequest(
                f"this process (rank {dist.get_rank()}) is not among ranks {ranks} of the group: call push_weights on "
                "those only"
            )
        if len(ranks) == 1:
            return cls.alone()
        name = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        with _finding:
            number = _found[name] = _found.get(name, 0) + 1
        store = dist.distributed_c10d._get_default_store()
        own = store.clone() if hasattr(store, "clone") else store  # a connection that nobody else blocks
        return cls(dist.distributed_c10d.PrefixStore(f"nixl-push/{name}/{number}/", own), rank, len(ranks))

    def next_number(self) -> int:
        """Number of the next push: the same on every rank, because each counts every push."""
        return next(self._numbers)

    def keep(self, slot: str, data: bytes) -> str:
        """Leave ``data`` on the board until ``slot`` gets other data; its digest, by which any rank can `fetch` it."""
        digest = hashlib.sha256(data).hexdigest()
        with self._lock:
            if digest not in self._held:
                self._held[digest] = self.board.set(f"kept/{digest}", data)
            self._kept[slot] = digest
        return digest

    def fetch(self, digest: str) -> bytes:
        """What a rank keeps on the board. Errors: InvalidRequest when it is something else."""
        data = self.board.get([f"kept/{digest}"])[0]
        if hashlib.sha256(data).hexdigest() != digest:
            raise InvalidRequest(f"the message {digest} of another rank is altered")
        return data

    def finished(self, keys: Iterable[str]) -> None:
        """A push is over that has left these messages; others may still read them."""
        self._past += keys

    def sweep(self) -> None:
        """Every rank has begun the present push: take down what earlier ones have left, and what was replaced.

        Does not wait until that is done.
        """
        with self._lock:
            stale = self._held.keys() - self._kept.values()
            keys = [key for digest in sorted(stale) for key in self._held.pop(digest)] + self._past
            self._past = []
        self.board.delete(dict.fromkeys(keys))


_found: dict[str, int] = {}
_finding = threading.Lock()


class Board:
    """Messages by key. Every failure of the store becomes `RankLost`: whoever hosts it is gone.

    The store is asked from a thread of its own, because a call to one whose host stands still never returns; after
    ``patience_s`` the host counts as gone. That is final.
    """

    def __init__(self, store: Store | _Memory) -> None:
        self._store = store
        self.patience_s = 30.0
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._gone = ""
        self._lock = threading.Lock()

    def close(self) -> None:
        """End the thread; the next call starts another."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._calls.put(None)
        if thread is not None and not self._gone:
            thread.join(CLOSE_S)

    def set(self, key: str, data: bytes) -> list[str]:
        """Leave a message of any length, which is there as a whole or not at all; the keys to `delete` it by."""
        parts = [data[at : at + PART_NBYTES] for at in range(0, len(data), PART_NBYTES)] or [b""]
        more = [f"{key}+{number}" for number in range(1, len(parts))]
        for name, part in zip(more, parts[1:], strict=True):
            self._call("set", name, part)
        self._call("set", key, len(more).to_bytes(4, "big") + parts[0])
        return [key, *more]

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Messages that are there, as `has` has said."""
        messages = []
        for key, first in zip(keys, self._get(keys), strict=True):
            more = [f"{key}+{number}" for number in range(1, int.from_bytes(first[:4], "big") + 1)]
            messages.append(b"".join([first[4:], *self._get(more)]))
        return messages

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all these messages are there."""
        return not keys or bool(self._call("check", list(keys)))

    def claim(self, key: str, text: str) -> str:
        """Write ``text`` if there is nothing yet; what stands there then."""
        return bytes(self._call("compare_set", key, "", text)).decode()

    def read(self, key: str) -> str:
        """What `claim` has written."""
        return bytes(self._call("get", key)).decode()

    def delete(self, keys: Iterable[str]) -> None:
        """Take messages down, without waiting for it: what is asked next waits."""
        names = list(keys)

        def delete() -> None:
            for name in names:
                self._store.delete_key(name)

        if isinstance(self._store, _Memory):
            delete()
        elif names and not self._gone:
            self._ask_for(delete)

    def _get(self, keys: Sequence[str]) -> list[bytes]:
        store: Any = self._store
        if len(keys) > 1 and getattr(store, "has_extended_api", bool)():
            return [bytes(value) for value in self._call("multi_get", list(keys))]
        return [bytes(self._call("get", key)) for key in keys]

    def _call(self, operation: str, *arguments: Any) -> Any:
        call = bind(getattr(self._store, operation), *arguments)
        if isinstance(self._store, _Memory):
            return call()
        cause: Exception | None = None
        if not self._gone:
            try:
                return self._ask_for(call).result(self.patience_s)
            except TimeoutError:
                self._gone = f"no answer for {self.patience_s:g} s"
            except Exception as error:  # noqa: BLE001 - those of the store have no class in common
                cause, self._gone = error, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise RankLost(
            f"the store through which the ranks of this trainer talk does not answer ({self._gone}): the process that "
            "hosts it, usually rank 0, is gone or stopped. Restart the trainer; the servers keep what they serve"
        ) from cause

    def _ask_for(self, call: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._ask, name="nixl-store", daemon=True)
                self._thread.start()
            self._calls.put((answer, call))
        return answer

    def _ask(self) -> None:
        while (item := self._calls.get()) is not None:
            answer, call = item
            try:
                answer.set_result(call())
            except Exception as error:  # noqa: BLE001 - raised where the call was made
                answer.set_exception(error)


def told(ranks: Sequence[int]) -> str:
    """For messages: ``rank 3``, ``ranks 0, 2 and 40 more``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more}"


class _Memory:
    """The store of a group of one."""

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}

    def set(self, key: str, value: bytes, /) -> None:
        self._held[key] = value

    def get(self, key: str, /) -> bytes:
        return self._held[key]

    def check(self, keys: list[str], /) -> bool:
        return all(key in self._held for key in keys)

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        return self._held.setdefault(key, desired.encode())

    def delete_key(self, key: str, /) -> bool:
        return self._held.pop(key, None) is not None
