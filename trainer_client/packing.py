"""Fills send buffers: strided copies, casts and element-wise programs, as prepared torch views.

`transfer` makes one `PreparedBatch` for each batch of a route and the buffer it goes through, once, and calls `fill` on
every push. A program is run exactly as the loader would have run it: the same aten ops in the same order, each giving
the dtype that its step names, so the bytes that arrive are the bytes that the loader would have produced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainer_client.batching import Batch, PackItem
from vllm_nixl_plugin.errors import PlanRefused
from vllm_nixl_plugin.layout import Copy
from vllm_nixl_plugin.wire import Step

if TYPE_CHECKING:
    import torch
    from torch import Tensor

OPERATIONS: Mapping[str, int] = {"to": 0, "neg": 0, "abs": 0, "mul": 1, "add": 1, "sub": 1, "div": 1}
"""The ops a program may have, and how many numbers each takes. All are correctly rounded on every device."""

Operation = Callable[["Tensor"], "Tensor"]
Maker = Callable[[PackItem, "Tensor"], Iterable[Callable[[], None]]]
"""What fills the place of an item in a send buffer, for storages that have no memory of their own."""

_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
"""Element types that carry bytes of each size unchanged."""


class PreparedBatch:
    """One batch of a route, bound to the storages it reads and the send buffer it fills."""

    def __init__(
        self,
        batch: Batch,
        storages: Sequence[torch.UntypedStorage],
        buffer: Tensor,
        makers: Mapping[int, Maker] | None = None,
    ) -> None:
        """``buffer``: a one-dimensional uint8 tensor on the batch's device with at least ``batch.nbytes``.

        Errors: PlanRefused when a program has an op or dtype that is not known here.
        """
        self._moves: list[tuple[Tensor, Tensor, tuple[Operation, ...]]] = []
        self._makes: list[Callable[[], None]] = []
        for item in batch.items:
            if makers and item.storage in makers:
                self._makes += makers[item.storage](item, buffer)
                continue
            operations = tuple(operation_of(step) for step in item.program)
            if item.program and item.program[-1].op == "to":
                operations = operations[:-1]  # the copy into the buffer casts, with no memory in between
            copy, read_as, write_as = _types(item)
            source = view(storages[item.storage], buffer.device, read_as, copy.shape, copy.src_offset, copy.src_strides)
            target = view(buffer.untyped_storage(), buffer.device, write_as, copy.shape,
                          copy.dst_offset + int(buffer.storage_offset()), copy.dst_strides)  # fmt: skip
            self._moves.append((target, source, operations))

    def fill(self) -> None:
        """Copy the present values into the buffer. On a GPU this is queued on the current stream."""
        import torch

        with torch.no_grad():
            for target, source, operations in self._moves:
                for operation in operations:
                    source = operation(source)
                target.copy_(source)
            for make in self._makes:
                make()


def view(
    storage: torch.UntypedStorage,
    device: Any,
    dtype: str,
    shape: Sequence[int],
    offset_bytes: int,
    strides_bytes: Sequence[int],
) -> Tensor:
    """A tensor over ``storage``; offset and strides are multiples of the size of ``dtype``."""
    import torch

    empty = torch.empty(0, dtype=getattr(torch, dtype), device=device)
    size = empty.element_size()
    strides = [stride // size for stride in strides_bytes]
    return empty.set_(storage, offset_bytes // size, tuple(shape), strides)


def _types(item: PackItem) -> tuple[Copy, str, str]:
    """The copy in elements that its offsets and strides are multiples of, and the dtypes to read and write it as."""
    copy = item.copy
    if not item.program:
        if copy.src_itemsize != copy.dst_itemsize:
            raise PlanRefused(f"a copy of {item.dtype} changes the itemsize without a program: {copy}")
        copy = _aligned(copy)
        carrier = _CARRIERS[copy.src_itemsize]
        return copy, carrier, carrier
    return copy, item.dtype, item.program[-1].dtype


def _aligned(copy: Copy) -> Copy:
    """A pure copy in the widest elements, not wider than its own, that its offsets and strides are multiples of."""
    size = math.gcd(copy.src_itemsize, copy.src_offset, copy.dst_offset, *copy.src_strides, *copy.dst_strides)
    if size == copy.src_itemsize and size in _CARRIERS:
        return copy
    size = math.gcd(size, max(_CARRIERS))
    return replace(
        copy, shape=(*copy.shape, copy.src_itemsize // size), src_strides=(*copy.src_strides, size),
        dst_strides=(*copy.dst_strides, size), src_itemsize=size, dst_itemsize=size,
    )  # fmt: skip


def operation_of(step: Step) -> Operation:
    """The step as a function. Errors: PlanRefused when it is none of `OPERATIONS`."""
    import torch

    dtype = getattr(torch, step.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanRefused(
            f"a program of the plan gives {step.dtype}, which this torch ({torch.__version__}) does not know"
        )
    if OPERATIONS.get(step.op) != len(step.args) or not all(isinstance(arg, int | float) for arg in step.args):
        raise PlanRefused(
            f"a program of the plan has the step {step.op}{step.args}; known are {', '.join(OPERATIONS)}, with "
            "a number where they take one: use the same version of vllm-nixl-plugin on both sides"
        )
    if step.op == "to":
        return lambda tensor: tensor.to(dtype)
    function: Callable[..., Tensor] = _divided if step.op == "div" else getattr(torch, step.op)

    def run(tensor: Tensor) -> Tensor:
        result = function(tensor, *step.args)
        return result if result.dtype == dtype else result.to(dtype)

    return run


def _divided(tensor: Tensor, number: float) -> Tensor:
    """A quotient that is the same on every device: a GPU multiplies with the inverse of a number, not of a tensor."""
    import torch

    if not tensor.is_floating_point():
        return torch.div(tensor, number)
    wide = tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)
    return torch.div(wide, wide.new_full((1,), number)).to(tensor.dtype).view(tensor.shape)
