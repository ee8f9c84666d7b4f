"""Random weights that cost little: every tensor is cut from one pool of random bytes. Used by `selfcheck`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from vllm_nixl_plugin.planning import dtype_of
from vllm_nixl_plugin.wire import WeightSpec

_POOL_NBYTES = 64 << 20


class Noise:
    """Random tensors, cut from one pool of random bytes that is made when it is needed."""

    def __init__(self) -> None:
        self._pool = torch.empty(0, dtype=torch.uint8)

    def make(self, nbytes: int) -> None:
        """Make the pool, for tensors of up to so many bytes. What is cut from it depends on its size."""
        size = max(1 << 16, min(2 * nbytes, _POOL_NBYTES)) // 16 * 16
        words = torch.empty(size // 8, dtype=torch.int64)
        words.random_(-(1 << 63), None, generator=torch.Generator().manual_seed(size))
        self._pool = words.view(torch.uint8)

    def release(self) -> None:
        """Give the pool's memory back."""
        self._pool = torch.empty(0, dtype=torch.uint8)

    def write(self, target: torch.Tensor, number: int, mask: int = -1) -> None:
        """Random integers, the same ones for one number, anded with a mask, into a one-dimensional tensor."""
        pool = self._pool[: self._pool.numel() - 16 * 7].view(target.dtype)  # a length that no tensor is made of
        start = number * 15485863 % max(1, pool.numel() // 2)
        done = 0
        while done < target.numel():
            part = pool[start : start + target.numel() - done]
            torch.bitwise_and(part, mask, out=target[done : done + part.numel()])
            done, start = done + part.numel(), 0

    def tensor(
        self, spec: WeightSpec, number: int, take: Callable[[int], torch.Tensor], *, quiet: bool
    ) -> torch.Tensor:
        """A contiguous tensor in memory from ``take`` (bytes): any integers, or zeros when ``quiet``; floats are
        finite."""
        dtype, shape = dtype_of(spec.dtype), tuple(spec.shape)
        floating = dtype.is_floating_point or dtype.is_complex
        raw = take(math.prod(shape) * dtype.itemsize)
        if quiet and not floating:
            raw.zero_()
        elif dtype is torch.bool:
            self.write(raw, number, 1)
        elif floating:
            # Without the highest bit of the exponent a float is finite and below 2.
            size = dtype.itemsize // (2 if dtype.is_complex else 1)
            words, mask = {1: (torch.uint8, 0xBF), 2: (torch.int16, -0x4001), 4: (torch.int32, -0x40000001),
                           8: (torch.int64, -0x4000000000000001)}[size]  # fmt: skip
            self.write(raw.view(words), number, mask)
        else:
            self.write(raw, number, 0xFF)
        return raw.view(dtype).view(shape)
