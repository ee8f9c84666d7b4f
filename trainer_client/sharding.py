"""What one value of a trainer is on this rank: boxes of a global tensor, each a view of memory that is there already.

`local_shards` takes what stands under a name, a plain tensor, a ``DTensor`` (FSDP2, HSDP, TP and their mixtures), the
``ShardedTensor`` of an FSDP1 state dict, or declared `LocalShard`s, and brings all to one form: `LocalShard`s of plain
tensors. It looks at metadata only: no copy, no communication. `sources.collect` calls it for every name of a push.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_nixl_plugin.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Where the wrappers of compile, activation checkpointing and FSDP1 keep the module that they wrap."""

Runs = tuple[tuple[int, int], ...]
"""Indices along one dim, in the order of the local tensor, as ranges ``[start, stop)``."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """A box of a global tensor that this rank holds; for trainers that keep plain tensors and know their layout.

    Args:
        tensor: its values: any strides, on CPU or CUDA. A ``DTensor`` may stand here too, for a box that is itself
            sharded over a smaller mesh (experts of one expert-parallel rank under FSDP).
        global_shape: the shape of the whole tensor, in elements.
        offsets: where the box begins in it, in elements, one per dim.

    A mapping that is pushed may hold one of them or a list for each name; a rank that has nothing of a tensor leaves
    it out. Ranks that declare the very same box are replicas and share the sending.
    """

    tensor: Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


def local_shards(name: str, value: Any) -> list[LocalShard]:
    """The boxes of ``name`` on this rank that are not empty, as views of the memory they lie in.

    A tensor without elements gives its one empty box, so that the name stays known.
    Errors: InvalidRequest that names the tensor, what is wrong, and the remedy.
    """
    if isinstance(value, LocalShard):
        return _declared(name, [value])
    if isinstance(value, (list, tuple)):
        return _declared(name, value)
    shape, shards = _of_tensor(name, value)
    return [shard for shard in shards if shard.tensor.numel() or 0 in shape]


def unmarked(name: str) -> str:
    """The name without the path segments that wrappers of modules add, and without empty ones."""
    return ".".join(part for part in name.split(".") if part and part not in WRAPPERS)


def _of_tensor(name: str, tensor: Any) -> tuple[tuple[int, ...], Iterable[LocalShard]]:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise InvalidRequest(
            f"{name} is {type(tensor).__name__}, expected a torch.Tensor or LocalShard: leave it out of the push"
        )
    if not _is_plain(tensor) and torch.distributed.is_available():
        from torch.distributed._shard.sharded_tensor.api import ShardedTensor
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            return tuple(tensor.shape), _of_dtensor(name, tensor)
        if isinstance(tensor, ShardedTensor):
            return tuple(tensor.size()), _of_sharded_tensor(name, tensor)
    _check(name, tensor)
    shape = tuple(tensor.shape)
    return shape, [LocalShard(tensor, shape, (0,) * len(shape))]


def _declared(name: str, values: Sequence[Any]) -> list[LocalShard]:
    """Boxes that the caller declares, checked against each other."""
    found: list[LocalShard] = []
    for value in values:
        if not isinstance(value, LocalShard):
            raise InvalidRequest(f"{name} has {type(value).__name__} in its list, expected LocalShard: wrap each box")
        if isinstance(value.tensor, (list, tuple, LocalShard)):
            raise InvalidRequest(f"{name} has a LocalShard in a LocalShard; expected a tensor in it: unwrap it")
        shape, offsets = tuple(value.global_shape), tuple(value.offsets)
        inner, shards = _of_tensor(name, value.tensor)
        if not len(shape) == len(offsets) == len(inner):
            raise InvalidRequest(
                f"{name} is declared with global_shape {shape}, offsets {offsets} and a tensor of shape {inner}; "
                "expected as many dims in each"
            )
        if any(o < 0 or o + n > g for o, n, g in zip(offsets, inner, shape, strict=True)):
            raise InvalidRequest(
                f"{name} is declared as a box of shape {inner} at offsets {offsets}, which leaves the global shape "
                f"{shape}: give offsets in elements of the whole tensor"
            )
        for shard in shards:
            if shard.tensor.numel() or 0 in shape:
                at = tuple(a + b for a, b in zip(offsets, shard.offsets, strict=True))
                found.append(LocalShard(shard.tensor, shape, at))
    for one, two in itertools.combinations(found, 2):
        if one.global_shape != two.global_shape or one.tensor.dtype != two.tensor.dtype:
            raise InvalidRequest(
                f"{name} is declared as {one.tensor.dtype}{list(one.global_shape)} and as "
                f"{two.tensor.dtype}{list(two.global_shape)}; expected one dtype and global shape for all its boxes"
            )
        if _overlap(one, two):
            raise InvalidRequest(
                f"{name} is declared with boxes at {one.offsets} and {two.offsets} that overlap: give each element once"
            )
    return found


def _overlap(one: LocalShard, two: LocalShard) -> bool:
    sides = zip(one.offsets, one.tensor.shape, two.offsets, two.tensor.shape, strict=True)
    return all(max(a, b) < min(a + n, b + m) for a, n, b, m in sides)


def _of_sharded_tensor(name: str, tensor: Any) -> Iterator[LocalShard]:
    """By the metadata of its local shards; ranks without any have none."""
    shape = tuple(tensor.size())
    for shard in tensor.local_shards():
        sizes, local = tuple(shard.metadata.shard_sizes), shard.tensor
        _check(name, local)
        if tuple(local.shape) != sizes:
            raise InvalidRequest(
                f"{name} is a ShardedTensor whose local shard has shape {tuple(local.shape)}, but its metadata says "
                f"{sizes}: declare it as LocalShard"
            )
        yield LocalShard(local, shape, tuple(shard.metadata.shard_offsets))


def _of_dtensor(name: str, tensor: Any) -> Iterator[LocalShard]:
    """The runs of each dim, multiplied: boxes of the global tensor, and views of the local one."""
    import torch
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    spec, local = tensor._spec, tensor._local_tensor
    shape = tuple(tensor.shape)
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    _check(name, local)
    runs = dim_runs(name, shape, spec, tuple(spec.mesh.shape), tuple(coordinate))
    expected = tuple(sum(stop - start for start, stop in dim) for dim in runs)
    if tuple(local.shape) != expected:
        raise InvalidRequest(
            f"{name} is a DTensor{list(shape)} placed as {tuple(spec.placements)}; its local shape should be "
            f"{expected} at {tuple(coordinate)} of mesh {tuple(spec.mesh.shape)}, but is {tuple(local.shape)}: declare "
            "what the rank has as LocalShard"
        )
    with torch.no_grad():
        for box in itertools.product(*(_with_local_starts(dim) for dim in runs)):
            view = local
            for dim, (at, start, stop) in enumerate(box):
                if stop - start != local.shape[dim]:
                    view = view.narrow(dim, at, stop - start)
            yield LocalShard(view, shape, tuple(start for _, start, _ in box))


def _with_local_starts(runs: Runs) -> list[tuple[int, int, int]]:
    """Each run with where it begins in the local tensor. Without runs: one that is empty."""
    lengths = itertools.accumulate((stop - start for start, stop in runs), initial=0)
    return [(at, start, stop) for at, (start, stop) in zip(lengths, runs, strict=False)] or [(0, 0, 0)]


def dim_runs(
    name: str, shape: tuple[int, ...], spec: Any, mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> list[Runs]:
    """For each dim of a DTensor, the global indices that the rank at ``coordinate`` of the mesh has.

    ``spec``: its DTensorSpec. Mesh dims that split the same dim are applied one after the other, from left to right or
    in the order that the spec gives. Errors: InvalidRequest for placements that hold no part of the values.
    """
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    placements = spec.placements
    steps: list[list[tuple[int, int, int]]] = [[] for _ in shape]
    for mesh_dim in _order(spec):
        placement = placements[mesh_dim]
        if placement.is_partial():
            raise InvalidRequest(
                f"{name} is a DTensor with placement {placement}: its ranks hold summands, not values. Call "
                "redistribute() to Shard or Replicate before the push"
            )
        if placement.is_replicate():
            continue
        if type(placement) not in (Shard, _StridedShard):
            raise InvalidRequest(
                f"{name} is a DTensor with placement {placement}; expected Shard or Replicate: redistribute() it, or "
                "declare what the rank has as LocalShard"
            )
        groups = int(getattr(placement, "split_factor", 1))
        steps[placement.dim].append((groups, mesh_shape[mesh_dim], coordinate[mesh_dim]))
    return [_split(extent, tuple(of_dim)) for extent, of_dim in zip(shape, steps, strict=True)]


def _order(spec: Any) -> list[int]:
    """The mesh dims in the order in which they split; those that split different dims do not meet."""
    ordered = [dim for entry in getattr(spec, "shard_order", None) or () for dim in entry.mesh_dims]
    return ordered + [dim for dim in range(len(spec.placements)) if dim not in ordered]


@functools.lru_cache(maxsize=4096)
def _split(extent: int, steps: tuple[tuple[int, int, int], ...]) -> Runs:
    """What is left of ``range(extent)`` after steps (groups, chunks, index): cut into so many groups, and keep of each

    the chunk with this index. Cuts are those of ``torch.chunk``: equal lengths but for the last ones.
    """
    runs: Runs = ((0, extent),) if extent else ()
    for groups, chunks, index in steps:
        kept = [_chunk(_chunk(runs, groups, group), chunks, index) for group in range(groups)]
        runs = _joined(itertools.chain.from_iterable(kept))
    return runs


def _chunk(runs: Runs, chunks: int, index: int) -> Runs:
    total = sum(stop - start for start, stop in runs)
    size = math.ceil(total / chunks)
    first, last = index * size, min((index + 1) * size, total)
    taken, at = [], 0
    for start, stop in runs:
        low, high = max(first - at, 0), min(last - at, stop - start)
        if low < high:
            taken.append((start + low, start + high))
        at += stop - start
    return tuple(taken)


def _joined(runs: Iterable[tuple[int, int]]) -> Runs:
    """Runs that continue each other become one."""
    found: list[tuple[int, int]] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def _is_plain(tensor: Tensor) -> bool:
    import torch

    return getattr(type(tensor), "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__


def _check(name: str, tensor: Tensor) -> None:
    """A plain dense tensor with values, on a device that can be read from; else InvalidRequest."""
    import torch

    if not _is_plain(tensor):
        raise InvalidRequest(
            f"{name} is a {type(tensor).__name__}; expected a plain tensor or a DTensor of one: pass the plain or "
            "dequantized tensor inside it"
        )
    if tensor.is_quantized or hasattr(tensor, "quant_state"):
        raise InvalidRequest(
            f"{name} is quantized ({tensor.dtype}); expected plain values: dequantize it before the push"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise InvalidRequest(
            f"{name} has layout {tensor.layout}; expected a dense tensor: call to_dense() before the push"
        )
    if tensor.is_meta:
        raise InvalidRequest(f"{name} is on the meta device and has no values: load or initialise it before the push")
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidRequest(f"{name} is on {tensor.device}; expected cpu or cuda: move it before the push")
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidRequest(
            f"{name} is a lazy conjugate or negation: call resolve_conj().resolve_neg() before the push"
        )
