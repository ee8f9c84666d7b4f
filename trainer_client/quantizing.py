"""Block FP8 on the trainer, for servers that load such checkpoints: half the bytes, and the values of the whole tensor.

Between conversion and routing a `Quantizer` replaces every chosen weight of the checkpoint by two: the weight in
float8_e4m3fn, and its ``…_scale_inv`` in float32, one number for each block. A push then runs

    measure   the largest magnitude of every block, from the local shards, and with other ranks where shards cut it
              (`cut_blocks`); the scales lie in memory of their own and are sent from there like any weight
    fill      `transfer` fills its send buffers with quantized elements instead of copied ones: the FP8 weights have no
              memory of their own; what this takes beyond the send buffers is the scales and `PATCH_NUMEL` elements

`measure` is called once in a push, by `WeightClient`; the weights stand still from there to the end of the transfer.
The bytes are those of `block_fp8.quantize` on the gathered tensor, on a CPU and on CUDA, whatever the shards.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainer_client.batching import PackItem
from trainer_client.block_fp8 import FP8, BlockFP8, cast, scale_of, scale_spec
from trainer_client.conversion import Conversion, Part
from trainer_client.cut_blocks import CutBlocks, Held, Ranks
from trainer_client.packing import Operation, operation_of, view
from trainer_client.routing import Offer
from trainer_client.sources import Shard, Sources, Storage
from trainer_client.tiles import Grid, Patch, Tile, patches, rectangles, tiles
from trainer_client.transfer import synchronize
from vllm_nixl_plugin.layout import Copy, identity
from vllm_nixl_plugin.wire import Step, WeightSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Indices = npt.NDArray[np.int64]

PATCH_NUMEL = 1 << 21
"""Elements that are quantized at a time, with 4 bytes each of temporary memory."""


@dataclass(frozen=True, eq=False, slots=True)
class _Piece:
    """Where a rectangle of a weight lies in the memory of the trainer, and what is done to its elements first."""

    tile: Tile
    program: tuple[Step, ...]


@dataclass(frozen=True, eq=False, slots=True)
class _Local:
    """A rectangle of weight number ``weight`` that this process has in ``shard``, the same on all replicas of it.

    ``pieces`` of it lie side by side in one way or another in the memory of this one. ``start``: where it begins, row
    by row, in the imagined memory of all FP8 weights of ``device``.
    """

    weight: int
    shard: Shard
    tile: Tile
    pieces: tuple[_Piece, ...]
    device: str
    start: int


@dataclass(frozen=True, slots=True)
class _Numbers:
    """One number for each block of a weight: from ``start`` on among those of all weights on ``device``."""

    grid: Grid
    device: str
    start: int

    def of(self, numbers: Tensor) -> Tensor:
        """The numbers of this weight, as rows and columns of blocks."""
        rows, columns = self.grid.n_blocks
        return numbers[self.start : self.start + rows * columns].view(rows, columns)


class Quantizer:
    """The replacement of chosen weights, for one geometry of sources. `bind` it to their memory, then `measure`.

    ``conversion`` and ``shards`` are to be pushed instead of those that it was made from.
    """

    def __init__(
        self,
        sources: Sources,
        conversion: Conversion,
        scheme: BlockFP8,
        chosen: Iterable[str],
        ranks: Ranks | None = None,
    ) -> None:
        """``chosen``: checkpoint names. All ``ranks`` make theirs in the same push, of the same names."""
        names = set(chosen)
        self._devices = tuple(storage.device for storage in sources.storages)
        self._weights = [weight for weight in conversion.weights if weight.name in names]
        grids = [Grid.over(weight.shape, scheme.block) for weight in self._weights]
        self._locals: dict[str, list[_Local]] = {}
        self._imagined: dict[str, int] = {}
        self._find(sources, conversion, grids)
        self._numbers: dict[int, _Numbers] = {}
        self._n_numbers: dict[str, int] = {}
        for local in self._all():
            if local.weight not in self._numbers:
                grid, start = grids[local.weight], self._n_numbers.get(local.device, 0)
                self._numbers[local.weight] = _Numbers(grid, local.device, start)
                self._n_numbers[local.device] = start + math.prod(grid.n_blocks)
        held = [Held(x.weight, x.tile, (x.shard.replica_index, x.shard.replica_count)) for x in self._all()]
        self._cuts = CutBlocks(self._weights, grids, held, ranks)
        self.conversion = _replaced(conversion, self._weights, grids, scheme.block)
        self.shards = (*sources.shards, *self._imagined_shards(len(sources.storages)), *self._scale_shards(sources))
        self._scales: dict[str, Tensor] = {}
        self._inverses: dict[str, Tensor] = {}
        self._patches: list[tuple[Tensor, tuple[Operation, ...], Tensor]] = []

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each storage that `shards` lie in."""
        return (*self._devices, *self._imagined, *self._n_numbers)

    def bind(self, sources: Sources) -> Sources:
        """What to push instead of ``sources``, which have the geometry of those that this was made from."""
        import torch

        for device, count in self._n_numbers.items():
            if device not in self._scales:
                self._scales[device], self._inverses[device] = (torch.zeros(count, device=device) for _ in range(2))
        self._patches = []
        for local in self._all():
            numbers = self._numbers[local.weight]
            amax = numbers.of(self._scales[numbers.device])
            for piece in local.pieces:
                whole, operations = _tensor(sources, local, piece.tile), _operations(piece.program)
                for patch in patches(piece.tile, numbers.grid, PATCH_NUMEL):
                    self._patches.append((_cut(whole, patch), operations, _among(amax, patch)))
        storages, owners, makers = list(sources.storages), list(sources.owners), dict(sources.makers)
        for device, nbytes in self._imagined.items():
            makers[len(storages)] = partial(self._moves, sources, device)
            storages.append(Storage(0, nbytes, device))
            owners.append(torch.UntypedStorage(0))
        for device, scales in self._scales.items():
            storages.append(Storage(scales.data_ptr(), scales.untyped_storage().nbytes(), device))
            owners.append(scales.untyped_storage())
        return replace(sources, shards=self.shards, storages=tuple(storages), owners=tuple(owners), makers=makers)

    def measure(self, ranks: Ranks | None = None) -> None:
        """The scales of the present values; ``ranks`` as in the making of this. Errors: those of the exchange."""
        import torch

        with torch.no_grad():
            for numbers in self._scales.values():
                numbers.zero_()
            for values, operations, amax in self._patches:
                for operate in operations:
                    values = operate(values)
                found = values.abs().amax((1, 3)).to(amax.device, torch.float32)
                amax.copy_(torch.maximum(amax, found))
            if ranks is not None and self._cuts.is_needed:
                self._meet(ranks)
            for device, numbers in self._scales.items():
                numbers.copy_(scale_of(numbers))
                self._inverses[device].copy_(numbers.reciprocal())
                synchronize(device)

    def _all(self) -> Iterator[_Local]:
        for locals_ in self._locals.values():
            yield from locals_

    def _find(self, sources: Sources, conversion: Conversion, grids: Sequence[Grid]) -> None:
        devices = self._devices
        offer = Offer(sources.shards, devices, conversion)
        for number, weight in enumerate(self._weights):
            width = grids[number].shape[1]
            here = [(leg, tile) for leg in offer.legs(weight) for tile in tiles(leg.copy, width)]
            for leg in offer.legs(weight, packed=True):
                device = devices[leg.shard.storage]
                for tile in tiles(leg.copy, width):
                    pieces: tuple[_Piece, ...] = (_Piece(tile, leg.program),)
                    if leg.shard.replica_count > 1:
                        parts = ((other, t.within(tile)) for other, t in here if other.shard is leg.shard)
                        pieces = tuple(_Piece(part, other.program) for other, part in parts if part is not None)
                    start = self._imagined.get(device, 0)
                    self._locals.setdefault(device, []).append(_Local(number, leg.shard, tile, pieces, device, start))
                    self._imagined[device] = start + tile.n_rows * tile.n_columns

    def _imagined_shards(self, storage: int) -> Iterator[Shard]:
        for number, device in enumerate(self._imagined, storage):
            for local in self._locals[device]:
                tile = local.tile
                yield replace(
                    local.shard, name=_imagined_name(self._weights[local.weight]), dtype=FP8, itemsize=1,
                    global_shape=self._numbers[local.weight].grid.shape, offsets=(tile.row, tile.column),
                    shape=(tile.n_rows, tile.n_columns), storage=number, offset_bytes=local.start,
                    strides_bytes=(tile.n_columns, 1),
                )  # fmt: skip

    def _scale_shards(self, sources: Sources) -> Iterator[Shard]:
        storages = {d: len(sources.storages) + len(self._imagined) + i for i, d in enumerate(self._n_numbers)}
        owned = dict(self._cuts.owned())
        for number, numbers in self._numbers.items():
            mine = np.zeros(numbers.grid.n_blocks, dtype=np.bool_)
            mine.reshape(-1)[owned[number]] = True
            for (index, count), mask in ((0, 1), mine), *self._cuts.whole[number].items():
                for row, column, n_rows, n_columns in rectangles(mask):
                    pitch = numbers.grid.n_blocks[1]
                    yield Shard(
                        name=_scales_name(self._weights[number]), dtype="float32", itemsize=4,
                        global_shape=numbers.grid.n_blocks, offsets=(row, column), shape=(n_rows, n_columns),
                        storage=storages[numbers.device], offset_bytes=4 * (numbers.start + row * pitch + column),
                        strides_bytes=(4 * pitch, 4), replica_index=index, replica_count=count,
                    )  # fmt: skip

    def _meet(self, ranks: Ranks) -> None:
        """Cut blocks get the largest magnitude that any rank has in them."""
        import torch

        at, places = self._places()
        values = np.zeros(sum(map(len, at.values())), dtype=np.float32)
        for device, here in at.items():
            values[here] = self._scales[device][torch.from_numpy(places[device]).to(device)].cpu().numpy()
        values = self._cuts.largest(values, ranks)
        for device, here in at.items():
            found = torch.from_numpy(values[here]).to(device)
            self._scales[device][torch.from_numpy(places[device]).to(device)] = found

    def _places(self) -> tuple[dict[str, Indices], dict[str, Indices]]:
        """Of the cut blocks of each device: which they are in the order of `CutBlocks`, and their numbers' places."""
        at: dict[str, list[Indices]] = {}
        places: dict[str, list[Indices]] = {}
        count = 0
        for number, cut in sorted(self._cuts.cut.items()):
            numbers = self._numbers[number]
            at.setdefault(numbers.device, []).append(np.arange(count, count + len(cut)))
            places.setdefault(numbers.device, []).append(numbers.start + cut)
            count += len(cut)
        return {d: np.concatenate(x) for d, x in at.items()}, {d: np.concatenate(x) for d, x in places.items()}

    def _moves(self, sources: Sources, device: str, item: PackItem, buffer: Tensor) -> Iterator[Callable[[], None]]:
        """What fills the part of a send buffer that ``item`` describes, which reads the imagined memory of a device."""
        locals_ = self._locals[device]
        local = locals_[bisect_right(locals_, item.copy.src_offset, key=lambda x: x.start) - 1]
        numbers, after = self._numbers[local.weight], _operations(item.program[1:])
        inverses = numbers.of(self._inverses[numbers.device])
        for tile in tiles(_back(item.copy, int(buffer.storage_offset()), local.start), local.tile.n_columns):
            wanted = replace(tile, row=tile.row + local.tile.row, column=tile.column + local.tile.column)
            for piece in local.pieces:
                part, to = piece.tile.within(wanted), wanted.within(piece.tile)
                if part is None or to is None:
                    continue
                source, before = _tensor(sources, local, part), _operations(piece.program)
                target = _view(buffer.untyped_storage(), buffer.device, item.program[-1].dtype, to)
                for patch in patches(part, numbers.grid, PATCH_NUMEL):
                    inverse = _among(inverses, patch)[:, None, :, None]
                    yield partial(_fill, _cut(target, patch), _cut(source, patch), inverse, before, after)


def _fill(
    target: Tensor, values: Tensor, inverse: Tensor, before: Sequence[Operation], after: Sequence[Operation]
) -> None:
    for operate in before:
        values = operate(values)
    values = cast(values, inverse.to(values.device))
    for operate in after:
        values = operate(values)
    target.copy_(values)


def _operations(program: Iterable[Step]) -> tuple[Operation, ...]:
    return tuple(operation_of(step) for step in program)


def _tensor(sources: Sources, local: _Local, tile: Tile) -> Tensor:
    """A rectangle of ``local`` as the trainer has it: of its own dtype, before any program."""
    return _view(sources.owners[local.shard.storage], local.device, local.shard.dtype, tile)


def _view(storage: torch.UntypedStorage, device: Any, dtype: str, tile: Tile) -> Tensor:
    shape, strides = (tile.n_rows, tile.n_columns), (tile.row_stride_bytes, tile.column_stride_bytes)
    return view(storage, device, dtype, shape, tile.offset_bytes, strides)


def _cut(matrix: Tensor, patch: Patch) -> Tensor:
    """A patch of a tile, as block row, row, block column, column."""
    (n, m), height, width = patch.n_blocks, patch.height, patch.width
    part = matrix[patch.row : patch.row + n * height, patch.column : patch.column + m * width]
    cut: Tensor = part.unflatten(1, (m, width)).unflatten(0, (n, height))
    return cut


def _among(numbers: Tensor, patch: Patch) -> Tensor:
    """The numbers of the blocks of a patch."""
    (i, j), (n, m) = patch.first_block, patch.n_blocks
    return numbers[i : i + n, j : j + m]


def _back(copy: Copy, buffer_offset: int, start: int) -> Copy:
    """From a send buffer to the imagined rectangle that ``copy`` reads, which begins at ``start``."""
    return Copy(
        copy.shape, copy.dst_offset + buffer_offset, copy.dst_strides, copy.dst_itemsize,
        copy.src_offset - start, copy.src_strides, copy.src_itemsize,
    )  # fmt: skip


def _imagined_name(weight: WeightSpec) -> str:
    return f"{weight.name} in FP8"


def _scales_name(weight: WeightSpec) -> str:
    return f"{weight.name} by blocks"


def _replaced(
    conversion: Conversion, weights: Sequence[WeightSpec], grids: Sequence[Grid], block: tuple[int, int]
) -> Conversion:
    """Each of ``weights`` as FP8, with its scales behind it."""
    step = Step(op="block_fp", args=block, dtype=FP8)
    made = {
        weight.name: (
            Part(_imagined_name(weight), identity(grid.shape, 1), (step,), is_whole=True),
            Part(_scales_name(weight), identity(grid.n_blocks, 4), is_whole=True),
        )
        for weight, grid in zip(weights, grids, strict=True)
    }
    specs: list[WeightSpec] = []
    parts: list[tuple[Part, ...]] = []
    for weight, old in zip(conversion.weights, conversion.parts, strict=True):
        if weight.name not in made:
            specs.append(weight)
            parts.append(old)
            continue
        specs += (WeightSpec(name=weight.name, shape=weight.shape, dtype=FP8), scale_spec(weight, block))
        parts += ((part,) for part in made[weight.name])
    return Conversion(tuple(specs), tuple(parts))
