"""Stage 4 of a push: the bytes of prepared routes, by one-sided WRITEs, to all workers of one server.

`Transfer` is made once per routes, bindings and source addresses, and `run` on every push:

    post the direct writes of every worker, straight from parameter memory
    for each batch: wait until its send buffer is free -> fill it -> post it      (packing overlaps with the wire)
    wait until every write is done

In mode ``streamed`` it does the first two for one group of the plan after the other, each when the workers have handed
back its place in their windows (`credits`).

Each write tells its worker, in a `Landed` message behind the bytes, how many bytes of which update have come.
Giving up does not stop bytes that are under way: after an error
call `drain`, and touch neither sources nor buffers unless it returns True or the agent is closed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trainer_client.batching import Runs
from trainer_client.credits import Credits
from trainer_client.packing import PreparedBatch
from trainer_client.registration import BUFFERS, Place, SendBuffers, SourceMemory
from trainer_client.report import Span
from trainer_client.routing import Route
from trainer_client.sources import as_bytes
from trainer_client.sums import Sums, Tally
from vllm_nixl_plugin.encoding import encode_landed
from vllm_nixl_plugin.errors import DeadlineExceeded, FabricError, InvalidRequest
from vllm_nixl_plugin.fabric import Descriptors, Fabric, Memory, Write, wait_all
from vllm_nixl_plugin.wire import Binding, Landed

if TYPE_CHECKING:
    import torch

WRITE_NBYTES = 256 << 20
WRITE_RUNS = 1 << 16
"""A direct write is closed when it has this many bytes or runs, so that its completion can be reported."""
TICK_S = 0.1
LOOK_S = 0.0005
"""How often a writer looks for credits."""
MAX_SPANS = 64


@dataclass
class Sent:
    """What a run did. ``wire_s``: from the first post to the last completion, less ``pack_s``.

    ``spans``: what was packed when and for whom, and when writes were under way to each worker; from the begin of the
    run. A completion is seen when it is waited for.
    """

    nbytes: int = 0
    packed_nbytes: int = 0
    pack_s: float = 0.0
    wire_s: float = 0.0
    spans: tuple[Span, ...] = ()
    sums: Sums = field(default_factory=dict)
    """Where the run was to be verified."""


@dataclass
class Lane:
    """The way to one worker: its plan, its memory and the route to it. ``parts``: the route of each group, for a worker
    with a window."""

    plan: str
    binding: Binding
    route: Route
    parts: tuple[Route, ...] = ()
    direct: list[Write] = field(default_factory=list)
    posts: int = 0
    first_post: float = 0.0


@dataclass(frozen=True)
class _Packed:
    """A batch bound to its buffer: fill, then post the writes. ``slot`` names the buffer. ``group``: None without a
    window."""

    lane: Lane
    slot: tuple[str, int]
    batch: PreparedBatch
    writes: tuple[Write, ...]
    buffer: torch.Tensor
    runs: Runs
    group: int | None = None

    def source(self, index: int) -> torch.Tensor:
        """What the writes read: the buffer, which is their only source."""
        return self.buffer

    @property
    def nbytes(self) -> int:
        """Bytes that are written from the buffer."""
        return sum(write.nbytes for write in self.writes)


class Transfer:
    """All prepared writes to one server. Belongs to one thread at a time."""

    def __init__(
        self,
        fabric: Fabric,
        memory: SourceMemory,
        buffers: SendBuffers,
        lanes: Sequence[Lane],
        credits: Credits | None = None,
    ) -> None:
        """Connects, registers and prepares. ``credits``: of the fabric, where lanes have windows.

        Errors: FabricError, RegistrationFailed, PlanRefused; then nothing is left.
        """
        self._fabric, self._memory, self._credits = fabric, memory, credits or Credits(fabric)
        self._lanes = tuple(lanes)
        self._packed: list[_Packed] = []
        self._turns: list[_Turn] = []
        self._posted: list[Write] = []
        self._devices = sorted({batch.device for lane in self._lanes for batch in lane.route.batches})
        try:
            for lane in self._lanes:
                self._connect(lane)
            with apart(self._devices):
                self._prepare(buffers)
        except BaseException:
            self.release()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of one run."""
        return sum(lane.route.nbytes for lane in self._lanes)

    def run(
        self, update_id: str, deadline: float, *, check: Callable[[], None], progress: Callable[[int], None],
        verify: bool = False,
    ) -> Sent:  # fmt: skip
        """Send everything for one update. ``deadline`` is on time.monotonic.

        ``check`` is called now and then and may raise to give up; ``progress`` is told the bytes of completed writes.
        ``verify``: also work out the checksums of what is sent.
        Errors: FabricError, DeadlineExceeded, whatever ``check`` raises; then call `drain`.
        """
        sent = Sent(nbytes=self.nbytes, packed_nbytes=sum(lane.route.packed_nbytes for lane in self._lanes))
        begin = time.monotonic()
        busy: dict[tuple[str, int], tuple[Write, ...]] = {}
        self._posted = []
        watch = _Watch(self._posted, deadline, check, progress)
        fills: list[Span] = []
        tally = Tally() if verify else None
        for lane in self._lanes:
            lane.posts = 0
        agents = [(lane.binding.agent, lane.plan) for lane in self._lanes if lane.parts]
        with self._credits.expect(update_id, agents):
            for turn in self._turns:
                self._wait_for_room(turn, update_id, watch)
                for lane, write in turn.direct:
                    self._post(lane, write, update_id, turn.group)
                if tally is not None:
                    self._count_direct(tally)
                for packed in turn.packed:
                    watch.wait(busy.pop(packed.slot, ()))
                    filling = time.monotonic()
                    with apart(self._devices):
                        packed.batch.fill()
                        synchronize(packed.slot[0])
                    filled = time.monotonic() - filling
                    sent.pack_s += filled
                    fills.append(Span("pack", filling - begin, filled, packed.nbytes, packed.lane.binding.worker))
                    for write in packed.writes:
                        self._post(packed.lane, write, update_id, packed.group)
                    busy[packed.slot] = packed.writes
                    if tally is not None:
                        with apart(self._devices):
                            tally.add(packed.lane.binding.worker, packed.source, packed.runs)
                            synchronize(packed.slot[0])
            watch.wait(self._posted)
        sent.wire_s = max(time.monotonic() - begin - sent.pack_s, 0.0)
        sent.spans = (*_fewer(fills), *self._under_way(begin, watch.done_at))
        if tally is not None:
            sent.sums = tally.sums()
        return sent

    def _count_direct(self, tally: Tally) -> None:
        """Checksums of what is written straight from parameter memory, which is read meanwhile."""
        sources = self._memory.sources

        @cache
        def memory(index: int) -> torch.Tensor:
            return as_bytes(sources.owners[index], sources.storages[index].device)

        with apart(sorted({storage.device for storage in sources.storages})):
            for lane in self._lanes:
                tally.add(lane.binding.worker, memory, lane.route.direct)

    def _under_way(self, begin: float, done_at: Mapping[int, float]) -> Iterator[Span]:
        """For each worker, from the first post to the last completion that was seen."""
        writes: dict[int, list[Write]] = {id(lane): list(lane.direct) for lane in self._lanes}
        for packed in self._packed:
            writes[id(packed.lane)] += packed.writes
        for lane in self._lanes:
            if mine := writes[id(lane)]:
                end = max(done_at[id(write)] for write in mine)
                start = lane.first_post - begin
                yield Span("wire", start, end - lane.first_post, lane.route.nbytes, lane.binding.worker)

    def drain(self, timeout_s: float) -> bool:
        """Wait for what is under way after a failed run.

        True: every handle is done, nothing of this update moves any more.
        """
        with suppress(FabricError, DeadlineExceeded):
            wait_all([write for write in self._posted if write.state == "in_flight"], timeout_s)
        return all(write.state == "done" for write in self._posted)

    @property
    def in_flight(self) -> bool:
        """Whether bytes may still be under way."""
        return any(write.state == "in_flight" for write in self._posted)

    def release(self) -> None:
        """Free all handles. Errors: FabricError while one is in flight."""
        for lane in self._lanes:
            for write in lane.direct:
                write.release()
            lane.direct.clear()
        for packed in self._packed:
            for write in packed.writes:
                write.release()
        self._packed.clear()
        self._turns.clear()

    def _wait_for_room(self, turn: _Turn, update_id: str, watch: _Watch) -> None:
        """Until all workers that get bytes of this group have room for it; the writes before it go on meanwhile.

        Errors: FabricError, DeadlineExceeded naming the worker.
        """
        for lane in turn.lanes:
            window = lane.binding.window
            before = -1 if window is None or turn.group is None else window.after[turn.group]
            while before >= 0 and self._credits.look(update_id, lane.binding.agent) < before:
                watch.look(
                    f"worker {lane.binding.worker} did not hand back the place of group {before} in its window: it has "
                    "not been installed; see the server's log, or raise timeout_s"
                )
                time.sleep(LOOK_S)

    def _post(self, lane: Lane, write: Write, update_id: str, group: int | None) -> None:
        landed = Landed(update_id=update_id, sequence=lane.posts, nbytes=write.nbytes, plan=lane.plan[:16], group=group)
        if not lane.posts:
            lane.first_post = time.monotonic()
        lane.posts += 1
        self._posted.append(write)
        write.post(encode_landed(landed))

    def _connect(self, lane: Lane) -> None:
        binding = lane.binding
        if not lane.route.nbytes:
            return
        remote = self._fabric.connect(binding.agent_metadata)
        if remote != binding.agent:
            raise InvalidRequest(f"worker {binding.worker} names agent {binding.agent!r}, but its metadata {remote!r}")

    def _prepare(self, buffers: SendBuffers) -> None:
        """The writes of all turns, in their order."""
        largest: dict[str, int] = {}
        for route in (route for lane in self._lanes for route in lane.parts or (lane.route,)):
            for batch in route.batches:
                largest[batch.device] = max(largest.get(batch.device, 0), batch.nbytes)
        count: dict[str, int] = {}
        whole = [(lane, lane.route) for lane in self._lanes if not lane.parts]
        for number in range(max((len(lane.parts) for lane in self._lanes), default=0)):
            parts = [(lane, lane.parts[number]) for lane in self._lanes if number < len(lane.parts)]
            self._prepare_turn(_Turn(number), parts, buffers, largest, count)
        self._prepare_turn(_Turn(None), whole, buffers, largest, count)

    def _prepare_turn(
        self, turn: _Turn, routes: Sequence[tuple[Lane, Route]], buffers: SendBuffers, largest: Mapping[str, int],
        count: dict[str, int],
    ) -> None:  # fmt: skip
        """``largest``: bytes of the largest batch, and ``count``: batches so far, of each device."""
        self._turns.append(turn)
        for lane, route in routes:
            for write in self._direct(lane, route.direct):
                lane.direct.append(write)
                turn.direct.append((lane, write))
        owners = self._memory.sources.owners
        rounds = max((len(route.batches) for _, route in routes), default=0)
        for number in range(rounds):
            for lane, route in ((lane, route) for lane, route in routes if number < len(route.batches)):
                batch = route.batches[number]
                slot = count.get(batch.device, 0) % BUFFERS
                count[batch.device] = count.get(batch.device, 0) + 1
                buffer = buffers.get(batch.device, slot, largest[batch.device])
                at = np.full(len(batch.writes), buffer.data_ptr(), dtype=np.int64)
                writes = self._writes(lane, batch.writes, at, Place.of(batch.device))
                prepared = PreparedBatch(batch, owners, buffer, self._memory.sources.makers)
                packed = _Packed(lane, (batch.device, slot), prepared, tuple(writes), buffer, batch.writes, turn.group)
                self._packed.append(packed)
                turn.packed.append(packed)

    def _direct(self, lane: Lane, runs: Runs) -> Iterator[Write]:
        """Straight from parameter memory."""
        self._memory.require(np.unique(runs.src).tolist())
        for place in dict.fromkeys(self._memory.places):
            here = np.array([p == place for p in self._memory.places], dtype=np.bool_)
            for part in _chunks(runs.take(here[runs.src])):
                yield from self._writes(lane, part, self._memory.addresses[part.src], place)

    def _writes(self, lane: Lane, runs: Runs, bases: npt.NDArray[np.int64], place: Place) -> list[Write]:
        """One write for each kind of memory that the worker has destinations in."""
        binding = lane.binding
        addresses = np.array(binding.addresses, dtype=np.int64)
        other = np.zeros(len(addresses), dtype=np.bool_)
        other[list(binding.memories)] = True
        writes = []
        for is_other in (False, True):
            chosen = other[runs.dst] == is_other
            if not chosen.any():
                continue
            part = runs.take(chosen)
            memory: Memory = binding.memory if not is_other else ("DRAM" if binding.memory == "VRAM" else "VRAM")
            device_id = binding.device_id if memory == "VRAM" else 0
            source = Descriptors(bases[chosen] + part.src_offset, part.nbytes, place.memory, place.device_id)
            target = Descriptors(addresses[part.dst] + part.dst_offset, part.nbytes, memory, device_id)
            writes.append(self._fabric.prepare_write(binding.agent, source, target))
        return writes


@dataclass(frozen=True)
class _Turn:
    """What is written in one go: everything, or one group (a number) of the plans of all workers with a window."""

    group: int | None
    direct: list[tuple[Lane, Write]] = field(default_factory=list)
    packed: list[_Packed] = field(default_factory=list)

    @property
    def lanes(self) -> list[Lane]:
        """Those that get something."""
        found = [lane for lane, _ in self.direct] + [packed.lane for packed in self.packed]
        return list({id(lane): lane for lane in found}.values())


class _Watch:
    """Waits for posted writes of one run, calling ``check`` and telling ``progress`` on the way."""

    def __init__(
        self, posted: list[Write], deadline: float, check: Callable[[], None], progress: Callable[[int], None]
    ) -> None:
        self._posted, self._deadline = posted, deadline
        self._check, self._progress = check, progress
        self._seen = 0
        self._untold: list[Write] = []
        self.done_at: dict[int, float] = {}
        """When writes were first seen to be done, by id."""

    def wait(self, writes: Sequence[Write]) -> None:
        """Until all of ``writes`` are done. Errors: FabricError, DeadlineExceeded."""
        while True:
            self._check()
            left = self._deadline - time.monotonic()
            try:
                wait_all(writes, max(min(left, TICK_S), 0.0))
                return
            except DeadlineExceeded as error:
                if failure := error.details.get("failure"):
                    raise FabricError(str(failure)) from error
                if left <= TICK_S:
                    raise self._too_late() from error
            finally:
                self._tell()

    def look(self, late: str) -> None:
        """Drive on what is posted. Errors: FabricError; DeadlineExceeded with that text, when it is ``late``."""
        self._check()
        for write in self._posted:
            if write.state == "in_flight":
                write.done()
        self._tell()
        if time.monotonic() >= self._deadline:
            raise DeadlineExceeded(late)

    def _tell(self) -> None:
        self._untold += self._posted[self._seen :]
        self._seen = len(self._posted)
        if done := [write for write in self._untold if write.state == "done"]:
            self.done_at |= dict.fromkeys(map(id, done), time.monotonic())
            self._progress(sum(write.nbytes for write in done))
            self._untold = [write for write in self._untold if write.state != "done"]

    def _too_late(self) -> DeadlineExceeded:
        moving = sum(write.state == "in_flight" for write in self._posted)
        return DeadlineExceeded(
            f"{moving} of {len(self._posted)} writes were still in flight when the time of this push ran out: raise "
            "timeout_s, or look for a stopped server"
        )


def _fewer(spans: list[Span]) -> Iterator[Span]:
    """At most `MAX_SPANS`, by laying neighbours together."""
    step = -(-len(spans) // MAX_SPANS) or 1
    for at in range(0, len(spans), step):
        first, *_, last = part = [*spans[at : at + step], spans[min(at + step, len(spans)) - 1]]
        worker = first.worker if {span.worker for span in part} == {first.worker} else None
        nbytes = sum(span.nbytes for span in part[:-1])
        yield Span(first.name, first.start, last.start + last.seconds - first.start, nbytes, worker)


def _chunks(runs: Runs) -> Iterable[Runs]:
    """Consecutive parts of about `WRITE_NBYTES` and at most `WRITE_RUNS`."""
    if len(runs):
        part = (np.cumsum(runs.nbytes) - 1) // WRITE_NBYTES + np.arange(len(runs)) // WRITE_RUNS
        for number in np.unique(part):
            yield runs.take(part == number)


@contextmanager
def apart(devices: Iterable[str]) -> Iterator[None]:
    """Queue on streams of our own, so that packing does not stand in line behind a training that goes on meanwhile.

    What it reads has to be there already.
    """
    import torch

    with ExitStack() as streams:
        for device in devices:
            if device.startswith("cuda"):
                streams.enter_context(torch.cuda.stream(_stream(device)))
        yield


@cache
def _stream(device: str) -> torch.cuda.Stream:
    """One for each device, for all servers: the allocator keeps memory apart by stream."""
    import torch

    return torch.cuda.Stream(torch.device(device))


def synchronize(device: str) -> None:
    """Wait until what this thread has queued on ``device`` is done; nothing to do on a CPU."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.current_stream(torch.device(device)).synchronize()
