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
    """Slices of uint8 memory by key. Blocks are added when new keys or sizes come and are never moved.

    A key has the size that was last asked for: a checkpoint tensor that a loader reads whole may come in another dtype.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.blocks: list[torch.Tensor] = []
        self._slices: dict[Hashable, torch.Tensor] = {}
        self._sized: dict[tuple[Hashable, int], torch.Tensor] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._slices

    def __getitem__(self, key: Hashable) -> torch.Tensor:
        return self._slices[key]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.numel() for block in self.blocks)

    def reserve(self, wanted: Iterable[tuple[Hashable, int]]) -> torch.Tensor | None:
        """Make room for the keys that have none of that size yet. Returns the new block, to be registered, or None.

        Errors: InsufficientMemory with the bytes that lack; nothing has been allocated then.
        """
        asked = dict(wanted)
        offsets: dict[tuple[Hashable, int], int] = {}
        total = 0
        for key, nbytes in asked.items():
            if (key, nbytes) not in self._sized:
                offsets[key, nbytes] = total
                total += -(-nbytes // ALIGNMENT) * ALIGNMENT
        block = self._block(total)
        for sized, offset in offsets.items():
            self._sized[sized] = block[offset : offset + sized[1]]
        self._slices.update((key, self._sized[key, nbytes]) for key, nbytes in asked.items())
        if not total:
            return None
        self.blocks.append(block)
        return block

    def _block(self, total: int) -> torch.Tensor:
        if not total:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        free = available_nbytes(self.device) - _RESERVE_NBYTES
        if total > free:
            raise InsufficientMemory(
                f"shadow memory of {total} bytes does not fit: {max(free, 0)} bytes are free on {self.device}; "
                f"{total - max(free, 0)} are lacking. Lower vLLM's memory share, or push with mode='in_place'.",
                needed_nbytes=total,
                free_nbytes=max(free, 0),
            )
        return torch.empty(total, dtype=torch.uint8, device=self.device)

    def replace(self) -> None:
        """Forget all blocks: memory that an undrained update may still write is left alone, and new memory is used."""
        self.blocks = []
        self._slices, self._sized = {}, {}
