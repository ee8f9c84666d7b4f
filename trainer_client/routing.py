"""Stage 3 of a push, pure: which bytes of this process go where at one worker.

`compute_route` composes three maps, all in bytes: from the storages of this process to its tensors (shards), from the
tensors to the weights of the checkpoint (conversion), from the weights to the worker's destinations (plan). What comes
out is cut in two:

- *direct runs*: contiguous on both sides, long enough and unchanged, written straight from parameter memory;
- *batches* for the rest: items that are packed into a send buffer, cast on the way if need be. The buffer holds the
  bytes in the order of the destination, and each contiguous stretch of it is one write.

Called by `WeightClient` once per layout (plan digests and shard geometry), not per push. No device, network or clock.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trainer_client.batching import RUN, Batch, Filler, PackItem, Runs, join_runs, moved
from trainer_client.conversion import Conversion
from trainer_client.sources import Shard
from vllm_nixl_plugin.errors import PlanRefused
from vllm_nixl_plugin.layout import Copy, box, compose, contiguous_strides, run_nbytes, runs, simplify
from vllm_nixl_plugin.wire import PlannedCopy, Step, WeightSpec, WorkerPlan

SHARE_NBYTES = 4 << 10
"""Smaller parts are not worth an operation of their own, when replicas share the sending."""
SHARE_NUMEL = 64
"""Parts begin at multiples of so many elements."""


@dataclass(frozen=True)
class Route:
    """All that this process sends to one worker: every byte once."""

    direct: Runs
    batches: tuple[Batch, ...]

    @property
    def packed_nbytes(self) -> int:
        """Bytes that go through send buffers."""
        return sum(batch.writes.total_nbytes for batch in self.batches)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole route."""
        return self.direct.total_nbytes + self.packed_nbytes


class Offer:
    """What this process can send: for each weight, where in the storages its elements lie. Shared by all workers."""

    def __init__(self, shards: Sequence[Shard], devices: Sequence[str], conversion: Conversion) -> None:
        """``shards``: those of this process, of some of the tensors. ``devices``: the device of each storage."""
        self.devices = tuple(devices)
        self._shards: dict[str, list[Shard]] = {}
        for shard in shards:
            self._shards.setdefault(shard.name, []).append(shard)
        self._conversion = conversion
        self._index = {weight.name: i for i, weight in enumerate(conversion.weights)}
        self._legs: dict[tuple[int, bool], tuple[Leg, ...]] = {}

    def legs(self, weight: WeightSpec, *, packed: bool = False) -> tuple[Leg, ...]:
        """The legs to ``weight``. ``packed``: those from replicas begin at the box, packed at offset 0: the same legs

        for all holders, however each has it in memory; `_placed` leads from there to the memory.
        Errors: PlanRefused when the plan has a weight that is not offered like that.
        """
        index = self._index.get(weight.name)
        if index is None:
            raise PlanRefused(
                f"the plan needs weight {weight.name}, which this push does not offer", missing=[weight.name]
            )
        offered = self._conversion.weights[index]
        if offered != weight:
            raise PlanRefused(
                f"the plan was made for weight {weight.name} as {weight.dtype}{list(weight.shape)}, but this push "
                f"offers {offered.dtype}{list(offered.shape)}", misshaped=[weight.name],
            )  # fmt: skip
        if (index, packed) not in self._legs:
            self._legs[index, packed] = tuple(self._make(index, packed))
        return self._legs[index, packed]

    def nbytes(self, weight: WeightSpec) -> int:
        """Bytes of an offered weight."""
        return sum(part.copy.dst_nbytes for part in self._conversion.parts[self._index[weight.name]])

    def _make(self, index: int, packed: bool) -> Iterator[Leg]:
        for part in self._conversion.parts[index]:
            for shard in self._shards.get(part.source, ()):
                at, strides = shard.offset_bytes, shard.strides_bytes
                if packed and shard.replica_count > 1:
                    at, strides = 0, contiguous_strides(shard.shape, shard.itemsize)
                if shard.shape == part.copy.shape and strides == part.copy.src_strides and part.is_whole:
                    yield Leg(shard, moved(part.copy, src=at), part.program, plain=True)
                    continue
                memory = box(shard.global_shape, shard.offsets, shard.shape, shard.itemsize, at, strides)
                for copy in compose(memory, part.copy):
                    yield Leg(shard, copy, part.program)


@dataclass(frozen=True, slots=True)
class Leg:
    """Elements of one weight that lie in a shard. ``plain``: the whole weight, contiguous and unchanged."""

    shard: Shard
    copy: Copy
    program: tuple[Step, ...]
    plain: bool = False


def compute_route(offer: Offer, plan: WorkerPlan, *, direct_run_bytes: int, buffer_bytes: int) -> Route:
    """The route to the worker of ``plan``. Runs of at least ``direct_run_bytes`` that need no cast are written
    directly.

    Errors: PlanRefused when the plan names a weight that is not offered, or reads past one.
    """
    direct: list[npt.NDArray[np.void]] = []
    blocks: list[tuple[int, int, int, int, int]] = []
    items: dict[tuple[str, int], list[PackItem]] = {}
    needed = {planned.weight: plan.weights[planned.weight] for planned in plan.copies}  # a few of very many, perhaps
    offered = {i: (offer.legs(weight, packed=True), offer.nbytes(weight)) for i, weight in needed.items()}
    for planned in plan.copies:
        legs, nbytes = offered[planned.weight]
        if not _reads_within(planned.copy_, nbytes):
            raise PlanRefused(
                f"the plan reads past the end of weight {plan.weights[planned.weight].name}: {planned.copy_}"
            )
        for leg in legs:
            for copy in _share(_from_storage(leg, planned.copy_), leg.shard, planned.destination):
                program = leg.program + planned.program
                longest = 0 if program or copy.src_itemsize != copy.dst_itemsize else run_nbytes(copy)
                if longest < max(direct_run_bytes, 1):
                    item = PackItem(leg.shard.storage, leg.shard.dtype, copy, program)
                    items.setdefault((offer.devices[leg.shard.storage], planned.destination), []).append(item)
                elif longest == copy.dst_nbytes:
                    blocks.append((leg.shard.storage, copy.src_offset, planned.destination, copy.dst_offset, longest))
                else:
                    direct.append(_rows(leg.shard.storage, planned.destination, copy))
    rows = np.concatenate([*direct, np.array(blocks, dtype=RUN)])
    batches: list[Batch] = []
    for device in sorted({device for device, _ in items}):
        filler = Filler(device, buffer_bytes)
        for destination in sorted(dst for of, dst in items if of == device):
            filler.add(destination, items[device, destination])
        batches += filler.finish()
    return Route(join_runs(rows), tuple(batches))


def cut(plan: WorkerPlan) -> Iterator[WorkerPlan]:
    """The part of a plan that has the copies of each of its groups, in their order."""
    number = {destination: of for of, group in enumerate(plan.groups) for destination in group.destinations}
    copies: list[list[PlannedCopy]] = [[] for _ in plan.groups]
    for planned in plan.copies:
        copies[number[planned.destination]].append(planned)
    for mine in copies:
        yield plan.model_copy(update={"copies": tuple(mine)})


def _from_storage(leg: Leg, planned: Copy) -> list[Copy]:
    """From the storage of the leg to the worker's destination."""
    if not planned.numel:
        return []
    if leg.plain:
        return [simplify(moved(planned, src=leg.copy.src_offset))]
    return compose(leg.copy, planned)


def _reads_within(copy: Copy, nbytes: int) -> bool:
    end = copy.src_offset + copy.src_itemsize
    for extent, stride in zip(copy.shape, copy.src_strides, strict=True):
        end += (extent - 1) * stride
    return 0 in copy.shape or (copy.src_offset >= 0 and end <= nbytes)


def _share(copies: list[Copy], shard: Shard, destination: int) -> Iterator[Copy]:
    """The part of ``copies`` that this one of the replicas of a shard sends: every byte is sent by exactly one.

    A copy is cut in equal parts of at least `SHARE_NBYTES`, which the replicas take in turn, beginning with another one
    for each copy: small tensors go to one replica each, and all have about the same to send.
    """
    count = shard.replica_count
    if count == 1:
        yield from copies
        return
    for copy in copies:
        parts = max(min(count, copy.dst_nbytes // SHARE_NBYTES), 1)
        edges = [copy.numel * part // parts // SHARE_NUMEL * SHARE_NUMEL for part in range(parts)] + [copy.numel]
        turn = zlib.crc32(f"{shard.name} {shard.offsets} {destination} {copy.dst_offset}".encode())
        for part in range(parts):
            if (part + turn) % count == shard.replica_index:
                for piece in stretch(copy, edges[part], edges[part + 1]):
                    yield from _placed(piece, shard)


def _placed(copy: Copy, shard: Shard) -> list[Copy]:
    """From the storage that the shard lies in, for a copy from the shard as it would be packed at offset 0."""
    packed = contiguous_strides(shard.shape, shard.itemsize)
    if shard.strides_bytes == packed:
        return [moved(copy, src=shard.offset_bytes)]
    memory = Copy(shard.shape, shard.offset_bytes, shard.strides_bytes, shard.itemsize, 0, packed, shard.itemsize)
    return compose(memory, copy)


def stretch(copy: Copy, start: int, stop: int) -> list[Copy]:
    """Elements ``start`` to ``stop`` of a copy, counted over its dims in order, the last one fastest."""
    if (start, stop) == (0, copy.numel):
        return [copy]
    if start >= stop:
        return []
    inner = copy.numel // copy.shape[0]
    first, last = -(-start // inner), stop // inner
    if first > last:
        return stretch(_outer(copy, last), start - last * inner, stop - last * inner)
    pieces = stretch(_outer(copy, first - 1), start - (first - 1) * inner, inner) if start < first * inner else []
    if first < last:
        pieces.append(_outer(copy, first, last))
    return pieces + (stretch(_outer(copy, last), 0, stop - last * inner) if last * inner < stop else [])


def _outer(copy: Copy, index: int, stop: int | None = None) -> Copy:
    """What is left of a copy at one index of its first dim, or at some in a row."""
    at = moved(copy, src=index * copy.src_strides[0], dst=index * copy.dst_strides[0])
    if stop is not None:
        return replace(at, shape=(stop - index, *copy.shape[1:]))
    return replace(at, shape=copy.shape[1:], src_strides=copy.src_strides[1:], dst_strides=copy.dst_strides[1:])


def _rows(storage: int, destination: int, copy: Copy) -> npt.NDArray[np.void]:
    src_offsets, dst_offsets, nbytes = runs(copy)
    rows = np.empty(len(src_offsets), dtype=RUN)
    rows["src"], rows["dst"], rows["nbytes"] = storage, destination, nbytes
    rows["src_offset"], rows["dst_offset"] = src_offsets, dst_offsets
    return rows
