"""CPU memory that is used again and again: the kernel zeroes every page of new memory. Used by `selfcheck`."""

from __future__ import annotations

import numpy as np
import torch

_ALIGNMENT = 64
_MOST = 6 << 30


class Scratch:
    """Hands out pieces of one block; pages that nobody touches cost nothing."""

    def __init__(self) -> None:
        self.reserve(0)

    def reserve(self, nbytes: int) -> None:
        """A block of so many bytes (0: none) in the place of the present one, which lives on in what was handed out."""
        self._block = np.empty(min(nbytes, _MOST), dtype=np.uint8)
        self._used = 0

    def reset(self) -> None:
        """Everything may be handed out again, whoever still looks at it."""
        self._used = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Bytes in a storage of their own, with whatever is in them; new memory where the block is too small."""
        start = self._used
        if not nbytes or start + nbytes > self._block.nbytes:
            return torch.empty(nbytes, dtype=torch.uint8)
        self._used = start + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return torch.from_numpy(self._block[start : start + nbytes])
