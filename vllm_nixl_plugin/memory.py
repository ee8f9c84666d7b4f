"""Shadow memory and the regions that are registered with NIXL; owns their lifetime (the stage: register).

An `Arena` hands out one aligned slice per destination from as few blocks as possible and keeps them for the worker's
life, so that they are registered once. `Registrations` keeps track of what is registered with an agent, and releases
what is no longer where it was. Called by `binding` when an update begins.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_nixl_plugin.errors import FabricError, InsufficientMemory
from vllm_nixl_plugin.fabric import Fabric, Region, Registration
from vllm_nixl_plugin.settings import Shadow

logger = logging.getLogger("vllm.nixl_plugin")

ALIGNMENT = 256
_RESERVE_NBYTES = 256 << 20
_CPU = torch.device("cpu")
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID


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


def allocation_of(tensor: torch.Tensor) -> int:
    """CUDA's number for the allocation under a tensor: another one after memory was unmapped and mapped again at the
    same address, as sleep mode does. 0 for host memory, or where CUDA does not tell."""
    if tensor.device.type != "cuda":
        return 0
    number = ctypes.c_ulonglong(0)
    failed = _cuda().cuPointerGetAttribute(ctypes.byref(number), _BUFFER_ID, ctypes.c_void_p(tensor.data_ptr()))
    return 0 if failed else int(number.value)


@functools.cache
def _cuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")


class Arena:
    """Slices of uint8 memory by key. Blocks are added when new keys or sizes come and are never moved.

    A key has the size that was last asked for: a checkpoint tensor that a loader reads whole may come in another dtype.
    ``shadow``: ``device``, ``host`` (pinned, for a GPU), or ``auto``: on the host what does not fit on the device.
    """

    def __init__(self, device: torch.device, shadow: Shadow = "auto") -> None:
        self.device = device
        self.shadow = shadow
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
        places = {"device": [self.device], "host": [_CPU], "auto": [self.device, _CPU]}[self.shadow]
        room = {place: max(available_nbytes(place) - _RESERVE_NBYTES, 0) for place in places}
        fitting = [place for place in places if total <= room[place]]
        if not fitting:
            free = "; ".join(f"{nbytes} bytes are free on {place}" for place, nbytes in room.items())
            most = max(room.values())
            raise InsufficientMemory(
                f"shadow memory of {total} bytes does not fit: {free}; {total - most} are lacking. Lower vLLM's memory "
                "share, allow host memory (PUSH_WEIGHTS_SHADOW=auto), or push with mode='in_place' or 'streamed'.",
                needed_nbytes=total,
                free_nbytes=most,
            )
        block = torch.empty(total, dtype=torch.uint8, device=fitting[0])
        if fitting[0] != self.device:
            logger.info("shadow memory of %d bytes is on the host: installs copy it over PCIe", total)
            _pin(block)
        return block


def _pin(block: torch.Tensor) -> None:
    """Lock the pages, so that copies to the device run at full speed. torch's own way takes up to twice the memory."""
    address = block.data_ptr()
    if int(torch.cuda.cudart().cudaHostRegister(address, block.numel(), 0)):
        logger.warning("host memory of %d bytes cannot be locked (ulimit -l): installs will be slower", block.numel())
    else:
        weakref.finalize(block, torch.cuda.cudart().cudaHostUnregister, address)


class Registrations:
    """What is registered with one agent, by who owns the memory."""

    def __init__(self, agent: Fabric) -> None:
        self._agent = agent
        self._held: dict[int, tuple[Region, int, Registration]] = {}
        self._owned: dict[Hashable, int] = {}

    def keep(self, memory: Mapping[Hashable, torch.Tensor]) -> None:
        """Register the memory of these owners, unless it is. What is no longer where it was is released.

        Errors: RegistrationFailed.
        """
        now = {owner: (Region.of(tensor), allocation_of(tensor)) for owner, tensor in memory.items()}
        before = {self._owned.pop(owner) for owner in now if owner in self._owned}
        self._owned |= {owner: region.address for owner, (region, _) in now.items()}
        for address in before - set(self._owned.values()):
            self._release(address)
        for region, allocation in now.values():
            if region.address in self._held and self._held[region.address][:2] != (region, allocation):
                self._release(region.address)
            if region.address not in self._held:
                self._held[region.address] = region, allocation, self._agent.register([region])

    def drop(self, owner: Hashable) -> None:
        """Release the memory of an owner, which is about to be freed."""
        address = self._owned.pop(owner, None)
        if address is not None and address not in self._owned.values():
            self._release(address)

    def _release(self, address: int) -> None:
        if address not in self._held:  # registering it has failed
            return
        try:
            self._held.pop(address)[2].release()
        except FabricError as error:
            logger.warning("memory that is gone could not be deregistered: %s", error)
