"""Shadow memory and the regions that are registered with NIXL; owns their lifetime (the stage: register).

An `Arena` hands out one aligned slice per destination from as few blocks as possible and keeps them for the worker's
life, so that they are registered once. Called by `plane` when an update begins.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from pathlib import Path

import torch

from vllm_nixl_plugin.errors import InsufficientMemory

ALIGNMENT = 256
_RESERVE_NBYTES = 256 << 20


def available_nbytes(device: torch.device) -> int:
    """Bytes that an allocation on the device may take now; the caching allocator's free memory counted in."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    with Path("/proc/meminfo").open() as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


class Arena:
    """Slices of uint8 memory by key. Blocks are added when new keys come and are never moved."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.blocks: list[torch.Tensor] = []
        self._slices: dict[Hashable, torch.Tensor] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._slices

    def __getitem__(self, key: Hashable) -> torch.Tensor:
        return self._slices[key]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.numel() for block in self.blocks)

    def reserve(self, wanted: Iterable[tuple[Hashable, int]]) -> torch.Tensor | None:
        """Make room for the keys that have none yet. Returns the new block, to be registered, or None.

        Errors: InsufficientMemory with the bytes that lack; nothing has been allocated then.
        """
        offsets: dict[Hashable, tuple[int, int]] = {}
        total = 0
        for key, nbytes in wanted:
            if key not in self._slices and key not in offsets:
                offsets[key] = (total, nbytes)
                total += -(-nbytes // ALIGNMENT) * ALIGNMENT
        if not total:
            for key in offsets:
                self._slices[key] = torch.empty(0, dtype=torch.uint8, device=self.device)
            return None
        free = available_nbytes(self.device) - _RESERVE_NBYTES
        if total > free:
            raise InsufficientMemory(
                f"shadow memory of {total} bytes does not fit: {max(free, 0)} bytes are free on {self.device}; "
                f"{total - max(free, 0)} are lacking. Lower vLLM's memory share, or push with mode='in_place'.",
                needed_nbytes=total,
                free_nbytes=max(free, 0),
            )
        block = torch.empty(total, dtype=torch.uint8, device=self.device)
        self.blocks.append(block)
        for key, (offset, nbytes) in offsets.items():
            self._slices[key] = block[offset : offset + nbytes]
        return block

    def replace(self) -> None:
        """Forget all blocks: memory that an undrained update may still write is left alone, and new memory is used."""
        self.blocks = []
        self._slices = {}
