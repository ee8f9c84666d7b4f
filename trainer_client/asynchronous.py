"""Pushes that run while training goes on: `WeightClient.push_weights_async` copies, hands the push over and returns.

    sources -> Snapshot.take -> Pushes.start -> PushHandle     (in the caller's thread)
               the push itself, as `push_weights` does it      (in one worker thread per client, in the order of calls)

A `Snapshot` lies on the device of the weights if an eighth of that device stays free, else in pinned host memory. Its
memory is kept from push to push, and with it everything that was prepared on it, until the shapes change or the client
is closed. There is one, so taking it waits until the push that reads the last one is over. On a GPU the copy is queued
on the caller's stream, before whatever the caller queues there next, and the worker waits for it (`queued`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from trainer_client.progress import Progress, ServerProgress
from trainer_client.sources import Sources, Storage, as_bytes
from vllm_nixl_plugin.errors import DeadlineExceeded, PushWeightsError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from trainer_client.report import PushReport

FREE_PART = 8
"""A snapshot leaves one part in so many of a GPU's memory free."""


class PushHandle:
    """A push under way. As a context manager: the push is over when the block is left.

    with client.push_weights_async(model):
        train()
    """

    def __init__(self, future: Future[PushReport], progress: Progress) -> None:
        self._future, self._progress = future, progress

    def wait(self, timeout_s: float | None = None) -> PushReport:
        """The report, when the push is over. Errors: those of ``push_weights``.

        DeadlineExceeded after ``timeout_s``: the push goes on, and this may be called again.
        """
        try:
            return self._future.result(timeout_s)
        except TimeoutError:
            if self._future.done():
                raise
            raise DeadlineExceeded(
                f"the push is still running after {timeout_s:g} s of waiting; it goes on: call wait() again"
            ) from None

    def done(self) -> bool:
        """Whether it is over, well or badly; then `wait` returns or raises at once."""
        return self._future.done()

    def progress(self) -> Mapping[str, ServerProgress]:
        """Stage, bytes sent and bytes to send, by server. Only rank 0 of a trainer of several ranks knows."""
        return self._progress.servers()

    def __enter__(self) -> PushHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(*() if error is None else (PushWeightsError,)):
            self.wait()


class Pushes:
    """The worker thread of a client. All methods belong to the threads that call the client, one at a time."""

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._pool: ThreadPoolExecutor | None = None
        self._running: dict[Future[PushReport], threading.Event] = {}
        self._reading: Future[PushReport] | None = None

    def copy(self, sources: Sources) -> Sources:
        """The weights as they are now, in memory of our own. Waits until the push that reads it is over."""
        if self._reading is not None:
            wait([self._reading])
        return self._snapshot.take(sources)

    def start(
        self, push: Callable[[Progress, threading.Event], PushReport], progress: Progress, *, reads_copy: bool
    ) -> PushHandle:
        """Run ``push`` behind all that were started before. It gives up when the event is set."""
        self._pool = self._pool or ThreadPoolExecutor(max_workers=1, thread_name_prefix="nixl-async")
        cancel = threading.Event()
        future = self._pool.submit(push, progress, cancel)
        self._running = {f: c for f, c in self._running.items() if not f.done()} | {future: cancel}
        if reads_copy:
            self._reading = future
        return PushHandle(future, progress)

    def settle(self) -> None:
        """Wait until every push that was started is over, well or badly."""
        wait(self._running)
        self._running.clear()

    def close(self, *, cancel: bool) -> None:
        """Wait for all pushes, and let the memory go. ``cancel``: they give up first. Doing it twice is fine."""
        if cancel:
            for event in self._running.values():
                event.set()
        if self._pool is not None:
            self._pool.shutdown()
        self._pool, self._reading = None, None
        self._running.clear()
        self._snapshot.release()


class Snapshot:
    """A copy of `Sources` in memory that is used again for sources of the same storages."""

    def __init__(self) -> None:
        self._like: tuple[tuple[int, str], ...] = ()
        self._owners: tuple[torch.UntypedStorage, ...] = ()
        self._storages: tuple[Storage, ...] = ()
        self._targets: list[Tensor] = []
        self._taken: tuple[weakref.ref[Sources], Sources] | None = None

    def take(self, sources: Sources) -> Sources:
        """The same shards in the copy. On a GPU it is queued on the current stream of the weights' device.

        The memory of the last one is written over: nobody may be reading it.
        """
        import torch

        if self._taken is None or self._taken[0]() is not sources:
            like = sources.geometry()[1]
            if like != self._like:
                self.release()
                self._allocate(sources)
                self._like = like
            self._taken = weakref.ref(sources), replace(sources, storages=self._storages, owners=self._owners)
        with torch.no_grad():
            for target, source in zip(self._targets, sources.memory, strict=True):
                target.copy_(source, non_blocking=True)
        return self._taken[1]

    def release(self) -> None:
        """Let go of the memory."""
        self._like, self._owners, self._storages, self._targets, self._taken = (), (), (), [], None

    def _allocate(self, sources: Sources) -> None:
        import torch

        needed: dict[str, int] = {}
        for storage in sources.storages:
            needed[storage.device] = needed.get(storage.device, 0) + storage.nbytes
        places = {device: device if _fits(device, nbytes) else "cpu" for device, nbytes in needed.items()}
        owners, storages = [], []
        for storage in sources.storages:
            place = places[storage.device]
            owner = torch.empty(
                storage.nbytes, dtype=torch.uint8, device=place, pin_memory=place == "cpu" != storage.device
            ).untyped_storage()
            owners.append(owner)
            storages.append(Storage(owner.data_ptr(), storage.nbytes, place))
        self._owners, self._storages = tuple(owners), tuple(storages)
        self._targets = [as_bytes(owner, storage.device) for owner, storage in zip(owners, storages, strict=True)]


def queued(devices: Iterable[str]) -> Callable[[], None]:
    """A function that returns when everything is done which is queued on the current streams of ``devices`` now."""
    import torch

    events = []
    for device in sorted({device for device in devices if device.startswith("cuda")}):
        events.append(torch.cuda.Event())
        events[-1].record(torch.cuda.current_stream(torch.device(device)))

    def ready() -> None:
        for event in events:
            event.synchronize()

    return ready


def _fits(device: str, nbytes: int) -> bool:
    """Whether ``nbytes`` more leave enough of the device free; a CPU pages, and is taken at its word."""
    if not device.startswith("cuda"):
        return True
    import torch

    free, total = torch.cuda.mem_get_info(torch.device(device))
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached - nbytes >= total // FREE_PART
