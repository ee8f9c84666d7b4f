"""Random weights that cost little: every tensor is cut from one pool of random bytes. Used by `selfcheck`."""

from __future__ import annotations

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

    def bytes(self, nbytes: int, number: int) -> torch.Tensor:
        """Random bytes, the same ones for one number. A view of the pool where that is long enough."""
        pool = self._pool
        start = number * 15485863 * 16 % max(16, pool.numel() - nbytes)
        start -= start % 16
        if start + nbytes <= pool.numel():
            return pool[start : start + nbytes]
        period = pool[: pool.numel() - 16 * 7]  # a length that no tensor is made of
        return period.repeat(-(-(start + nbytes) // period.numel()))[start : start + nbytes]

    def tensor(self, spec: WeightSpec, number: int, *, quiet: bool) -> torch.Tensor:
        """A contiguous tensor of its own: any integers, or zeros when ``quiet``; floats are finite."""
        dtype = dtype_of(spec.dtype)
        shape = tuple(spec.shape)
        floating = dtype.is_floating_point or dtype.is_complex
        if quiet and not floating:
            return torch.zeros(shape, dtype=dtype)
        out = torch.empty(shape, dtype=dtype)
        if not out.numel():
            return out
        raw = out.view(-1).view(torch.uint8)
        noise = self.bytes(raw.numel(), number)
        if dtype is torch.bool:
            torch.bitwise_and(noise, 1, out=raw)
        elif floating:
            # Without the highest bit of the exponent a float is finite and below 2.
            part = dtype.itemsize // (2 if dtype.is_complex else 1)
            words, mask = {1: (torch.uint8, 0xBF), 2: (torch.int16, -0x4001), 4: (torch.int32, -0x40000001),
                           8: (torch.int64, -0x4000000000000001)}[part]  # fmt: skip
            torch.bitwise_and(noise.view(words), mask, out=raw.view(words))
        else:
            raw.copy_(noise)
        return out
