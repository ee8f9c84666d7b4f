"""Weights that a framework gathers tensor by tensor, kept for a push: what the adapters do that get no shards.

Such a stream is a collective: all ranks draw it, one of them keeps the tensors and pushes alone. The copies lie in
memory that is used again, so that from the second push on nothing is allocated, registered or prepared. It takes the
whole model's size on that one rank, on ``device``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Gathered:
    """Copies of full tensors. ``device``: where they lie; None: where each tensor is."""

    def __init__(self, device: str | None = None) -> None:
        self._device = device
        self._kept: dict[str, Tensor] = {}

    def take(self, pairs: Iterable[tuple[str, Tensor | None]]) -> dict[str, Tensor]:
        """All tensors of the stream, copied; those of the last call are written over. A None is left out."""
        kept: dict[str, Tensor] = {}
        for name, tensor in pairs:
            if tensor is not None:
                kept[name] = self._copied(name, tensor)
        self._kept = kept
        return kept

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        import torch

        tensor = tensor.detach()
        device = torch.device(self._device or tensor.device)
        last = self._kept.get(name)
        if last is None or (last.shape, last.dtype, last.device) != (tensor.shape, tensor.dtype, device):
            last = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return last.copy_(tensor)


def draw(pairs: Iterable[object]) -> None:
    """Take part in the gathering, and keep nothing."""
    for _ in pairs:
        pass
