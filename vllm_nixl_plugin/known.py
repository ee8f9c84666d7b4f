"""Values that are known while a function is traced: of tensors that no source has touched.

`tracing` runs operations on such tensors for real, so that a function can look at tables that were made with the model
or brought along. torch only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm_nixl_plugin.provenance import Constant, Creation, Piece

if TYPE_CHECKING:
    from vllm_nixl_plugin.tracing import Tracer

SMALL_NBYTES = 1 << 20
"""Larger tensors are not read while tracing."""


class NotKnown(Exception):
    """A tensor has no values that are known while tracing."""


class Known:
    """The known values of one tracer. ``creations``: bytes of what destinations held before, by the key of the root."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.creations: dict[str, torch.Tensor] = {}

    def arguments(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """The arguments with real tensors in the place of traced ones, if no source has touched any of them: tables
        that were made with the model (which experts are here) can be read."""
        try:
            return self.value(args), {k: self.value(v) for k, v in kwargs.items()}
        except NotKnown:
            return None

    def value(self, value: Any) -> Any:
        """A real tensor for a traced one, also inside lists. Errors: NotKnown."""
        if isinstance(value, list | tuple):
            return type(value)(self.value(v) for v in value)
        if not isinstance(value, torch.Tensor) or not self._tracer.is_traced(value):
            return value
        if value.numel() * value.element_size() > SMALL_NBYTES:
            raise NotKnown
        pieces = self._tracer.read(value)
        if not all(self._has_value(piece) for piece in pieces):
            raise NotKnown
        out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        raw = out.reshape(-1).view(torch.uint8)
        for piece in pieces:
            c, root = piece.copy, piece.root
            target = _side(raw, c.shape, c.dst_strides, c.dst_offset, c.dst_itemsize)
            if isinstance(root, Constant) and not isinstance(root.value, torch.Tensor):
                if c.dst_itemsize != value.element_size():
                    raise NotKnown
                target.copy_(torch.tensor([root.value], dtype=value.dtype).view(torch.uint8))
            else:
                origin = self.creations[root.key] if isinstance(root, Creation) else root.value  # type: ignore[union-attr]
                target.copy_(_side(origin, c.shape, c.src_strides, c.src_offset, c.src_itemsize))
        return out

    def _has_value(self, piece: Piece) -> bool:
        if isinstance(piece.root, Creation):
            return piece.root.key in self.creations and not piece.program
        if not isinstance(piece.root, Constant) or piece.program:
            return False
        return not isinstance(piece.root.value, torch.Tensor) or piece.root.value.device.type != "meta"


def _side(
    raw: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int, itemsize: int
) -> torch.Tensor:
    """One side of a pure copy, as bytes."""
    view = torch.empty(0, dtype=torch.uint8, device=raw.device)
    return view.set_(raw.untyped_storage(), offset, (*shape, itemsize), (*strides, 1))
