"""Carry out traced pieces on real tensors with plain torch ops: the oracle that tracing tests compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vllm_nixl_plugin.layout import Copy
from vllm_nixl_plugin.tracing import Constant, Operation, Piece, Source


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The storage of a tensor as uint8."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def strided(raw: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int):
    size = dtype.itemsize
    assert offset % size == 0
    assert all(s % size == 0 for s in strides)
    view = torch.empty(0, dtype=dtype)
    return view.set_(raw.untyped_storage(), offset // size, tuple(shape), tuple(s // size for s in strides))


def replay(pieces: Sequence[Piece], sources: Mapping[str, torch.Tensor], target: torch.Tensor) -> None:
    """Write the pieces into the storage of ``target`` (contiguous sources by name)."""
    out = raw_bytes(target)
    for piece in pieces:
        c = piece.copy
        if isinstance(piece.root, Source):
            source = sources[piece.root.name]
            _move(raw_bytes(source.contiguous()), source.dtype, out, c, piece.program)
        elif isinstance(piece.root, Constant):
            value = piece.root.value
            if isinstance(value, torch.Tensor):
                assert not piece.program
                assert c.src_itemsize == c.dst_itemsize
                _move(value, torch.uint8, out, c, ())
            else:
                strided(out, target.dtype, c.shape, c.dst_strides, c.dst_offset).fill_(value)


def _move(raw: torch.Tensor, dtype: torch.dtype, out: torch.Tensor, c: Copy, program: Sequence[Operation]) -> None:
    if not program:
        assert c.src_itemsize == c.dst_itemsize
        dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[c.src_itemsize]
    value = strided(raw, dtype, c.shape, c.src_strides, c.src_offset)
    for operation in program:
        if operation.op == "to":
            value = value.to(operation.dtype)
        else:
            value = getattr(value, operation.op)(*operation.args)
            assert value.dtype == operation.dtype
    strided(out, value.dtype, c.shape, c.dst_strides, c.dst_offset).copy_(value)
