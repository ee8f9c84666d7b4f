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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer_client.batching import RUN, Batch, Filler, PackItem, Runs, join_runs, moved
from trainer_client.conversion import Conversion
from trainer_client.sources import Shard
from vllm_nixl_plugin.errors import PlanRefused
from vllm_nixl_plugin.layout import Copy, box, compose, run_nbytes, runs, simplify, split
from vllm_nixl_plugin.wire import Step, WeightSpec, WorkerPlan


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
        """``devices``: the device of each storage."""
        self.devices = tuple(devices)
        self._shards: dict[str, list[Shard]] = {}
        for shard in shards:
            self._shards.setdefault(shard.name, []).append(shard)
        self._conversion = conversion
        self._index = {weight.name: i for i, weight in enumerate(conversion.weights)}
        self._legs: dict[int, tuple[Leg, ...]] = {}

    def legs(self, weight: WeightSpec) -> tuple[Leg, ...]:
        """The legs to ``weight``. Errors: PlanRefused when the plan has a weight that is not offered like that."""
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
        if index not in self._legs:
            self._legs[index] = tuple(self._make(index))
        return self._legs[index]

    def nbytes(self, weight: WeightSpec) -> int:
        """Bytes of an offered weight."""
        return sum(part.copy.dst_nbytes for part in self._conversion.parts[self._index[weight.name]])

    def _make(self, index: int) -> Iterator[Leg]:
        for part in self._conversion.parts[index]:
            for shard in self._shards[part.source]:
                if shard.shape == part.copy.shape and shard.strides_bytes == part.copy.src_strides and part.is_whole:
                    yield Leg(shard, moved(part.copy, src=shard.offset_bytes), part.program, plain=True)
                    continue
                memory = box(
                    shard.global_shape,
                    shard.offsets,
                    shard.shape,
                    shard.itemsize,
                    shard.offset_bytes,
                    shard.strides_bytes,
                )
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
    offered = [(offer.legs(weight), offer.nbytes(weight)) for weight in plan.weights]
    for planned in plan.copies:
        legs, nbytes = offered[planned.weight]
        if not _reads_within(planned.copy_, nbytes):
            raise PlanRefused(
                f"the plan reads past the end of weight {plan.weights[planned.weight].name}: {planned.copy_}"
            )
        for leg in legs:
            for copy in _share(_from_storage(leg, planned.copy_), leg.shard):
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


def _share(copies: list[Copy], shard: Shard) -> list[Copy]:
    """The part of ``copies`` that this one of the replicas of a shard sends:

    every byte is sent by exactly one of them.
    """
    if shard.replica_count == 1:
        return copies
    mine: list[Copy] = []
    for number, copy in enumerate(copies):
        pieces = split(copy, max(-(-copy.dst_nbytes // shard.replica_count), copy.dst_itemsize))
        mine += [p for i, p in enumerate(pieces) if (i + number) % shard.replica_count == shard.replica_index]
    return mine


def _rows(storage: int, destination: int, copy: Copy) -> npt.NDArray[np.void]:
    src_offsets, dst_offsets, nbytes = runs(copy)
    rows = np.empty(len(src_offsets), dtype=RUN)
    rows["src"], rows["dst"], rows["nbytes"] = storage, destination, nbytes
    rows["src_offset"], rows["dst_offset"] = src_offsets, dst_offsets
    return rows
