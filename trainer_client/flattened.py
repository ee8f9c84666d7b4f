"""What an FSDP1 module holds on this rank: boxes of its parameters, as views of the flat parameters that FSDP1 made.

FSDP1 lays the parameters of a unit one after the other into one flat tensor and gives each rank an equal stretch of it,
so that a rank has a range of the elements of a parameter, in row-major order: a few boxes. Its sharded state dict
gathers every unit on every rank to cut it along dim 0 instead; `flat_state` reads the same values as they lie, without
copies or communication. Called by `sources` for modules that FSDP1 wraps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer_client.sharding import LocalShard, unmarked
from vllm_nixl_plugin.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor, nn


def flat_state(module: nn.Module) -> dict[str, Any]:
    """Name to a list of boxes, or to a tensor for parameters and buffers that FSDP1 does not manage.

    Errors: InvalidRequest for parameters that FSDP1 holds in another form than their row-major values.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    found: dict[str, Any] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, FullyShardedDataParallel) and part._handle is not None:
            found.update((unmarked(f"{path}.{name}"), boxes) for name, boxes in _of_unit(part._handle))
    for path, part in module.named_modules(remove_duplicate=False):
        saved = {key: tensor for key, tensor in part._buffers.items() if key not in part._non_persistent_buffers_set}
        for key, tensor in (part._parameters | saved).items():
            if tensor is not None and not getattr(tensor, "_is_flat_param", False):
                found.setdefault(unmarked(f"{path}.{key}"), tensor)
    return found


def _of_unit(handle: Any) -> Iterator[tuple[str, list[LocalShard]]]:
    """The parameters of one flat parameter, by their names in the wrapped module."""
    flat = handle.flat_param
    local: Tensor = getattr(flat, "_local_shard", flat).detach()  # a flat parameter not used yet is its own shard
    names: dict[tuple[str, str], tuple[str, list[LocalShard]]] = {}
    for i, (name, shape, info) in enumerate(zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True)):
        if flat._param_extensions[i] is not None or not flat._contiguities[i]:
            raise InvalidRequest(
                f"{unmarked(name)} is flattened by FSDP1 from a sharded or non-contiguous parameter; expected row-"
                "major values: push torch.distributed.checkpoint.state_dict.get_model_state_dict(model) instead"
            )
        boxes = []
        if info.in_shard:
            values = local.narrow(0, info.offset_in_shard, info.numel_in_shard)
            _check_in_place(name, flat, i, values)
            at = 0
            for offsets, extents in range_boxes(tuple(shape), info.intra_param_start_idx, info.intra_param_end_idx + 1):
                numel = math.prod(extents)
                boxes.append(LocalShard(values.narrow(0, at, numel).view(extents), tuple(shape), offsets))
                at += numel
        key = flat._param_infos[i]
        names[key.module_name, key.param_name] = name, boxes
    yield from names.values()
    for shared in flat._shared_param_infos:
        prefix = f"{shared.module_name}." if shared.module_name else ""
        yield prefix + shared.param_name, names[shared.prim_module_name, shared.prim_param_name][1]


def _check_in_place(name: str, flat: Any, number: int, values: Tensor) -> None:
    """FSDP1 takes a tensor that replaced a parameter over into the flat one only in the next forward pass."""
    parameter = flat._params[number] if flat._params is not None else None
    if parameter is not None and parameter.shape == values.shape and parameter.data_ptr() != values.data_ptr():
        raise InvalidRequest(
            f"{unmarked(name)} was replaced after FSDP1 had flattened it, and its shard has other values: write into "
            "the parameter in place, or run a forward pass before the push"
        )


def range_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and extents of the boxes that are the elements ``[start, stop)`` in row-major order, ascending."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row if start < first * row else 0)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(
    shape: tuple[int, ...], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, extents in range_boxes(shape[1:], start, stop):
        yield (row, *offsets), (1, *extents)
