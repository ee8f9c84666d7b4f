"""Carry out parts of a plan with plain torch operations: planned copies with their programs, and fills.

What a trainer's packing and a worker's prefill do, on memory at hand. Called by `selfcheck` on random data; all memory
is given as one-dimensional uint8 tensors, all offsets are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from vllm_nixl_plugin.copies import Copy
from vllm_nixl_plugin.errors import PlanRefused
from vllm_nixl_plugin.planning import Fill, dtype_of
from vllm_nixl_plugin.wire import Step

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Element types that carry bytes of each size unchanged."""


def carry_out(
    source: torch.Tensor, dtype: torch.dtype, target: torch.Tensor, copy: Copy, program: Sequence[Step]
) -> None:
    """Write the elements that ``copy`` takes from a weight's bytes, of the given dtype, to where they belong."""
    if not copy.numel:
        return
    if not program:
        _move(source, target, copy)
        return
    value = strided(source, dtype, copy.shape, copy.src_strides, copy.src_offset)
    for step in program:
        if step.op != "to":
            value = getattr(torch, step.op)(value, *step.args)
        value = value.to(dtype_of(step.dtype))
    strided(target, value.dtype, copy.shape, copy.dst_strides, copy.dst_offset).copy_(value)


def fill(target: torch.Tensor, of: Fill, creation: Any, dtype: torch.dtype | None) -> None:
    """Write bytes of a destination that no weight writes.

    ``creation``: what the destination held when it was made (its bytes, a number, or None: anything); ``dtype``: that
    of the destination, in which numbers are written. Errors: PlanRefused for a cast of a loader's own tensor.
    """
    value, copy = (creation, _onto_itself(of.copy)) if of.value is None else (of.value, of.copy)
    if value is None or not copy.numel:
        return
    if isinstance(value, torch.Tensor):
        if copy.src_itemsize != copy.dst_itemsize:
            raise PlanRefused("a loader casts a tensor of its own into a parameter; this is not supported")
        _move(value, target, copy)
        return
    assert dtype is not None
    if dtype.itemsize == copy.dst_itemsize:
        strided(target, dtype, copy.shape, copy.dst_strides, copy.dst_offset).fill_(value)
    else:  # bytes of elements: of an element's worth of them, as often as it takes
        whole = torch.full((-(-target.numel() // dtype.itemsize),), value, dtype=dtype, device=target.device)
        _move(whole.view(torch.uint8), target, _onto_itself(copy))


def _onto_itself(copy: Copy) -> Copy:
    size = copy.dst_itemsize
    return Copy(copy.shape, copy.dst_offset, copy.dst_strides, size, copy.dst_offset, copy.dst_strides, size)


def _move(source: torch.Tensor, target: torch.Tensor, copy: Copy) -> None:
    """The bytes as they are, in the widest elements that all offsets and strides are multiples of."""
    if copy.src_itemsize != copy.dst_itemsize:
        raise PlanRefused(f"a copy changes the size of elements without a program: {copy}")
    size = math.gcd(8, copy.src_itemsize, copy.src_offset, copy.dst_offset, *copy.src_strides, *copy.dst_strides,
                    int(source.storage_offset()), int(target.storage_offset()))  # fmt: skip
    shape, more = copy.shape, copy.src_itemsize // size
    src, dst = copy.src_strides, copy.dst_strides
    if more > 1:
        shape, src, dst = (*shape, more), (*src, size), (*dst, size)
    strided(target, _CARRIERS[size], shape, dst, copy.dst_offset).copy_(
        strided(source, _CARRIERS[size], shape, src, copy.src_offset)
    )


def strided(
    raw: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int
) -> torch.Tensor:
    """A view of bytes as elements; offset and strides in bytes."""
    size = dtype.itemsize
    view = torch.empty(0, dtype=dtype, device=raw.device)
    start = int(raw.storage_offset()) + offset
    return view.set_(raw.untyped_storage(), start // size, tuple(shape), tuple(s // size for s in strides))
