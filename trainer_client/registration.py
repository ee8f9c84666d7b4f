"""Memory of the trainer that NIXL may read: parameters, and the send buffers that the rest is packed into.

`WeightClient` makes one `SourceMemory` for the tensors of a push and keeps it while they stay in place; each `Link`
has `SendBuffers`. Both are filled by `Transfer`, and released after the transfers that use them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trainer_client.sources import Sources
from vllm_nixl_plugin.fabric import Fabric, Memory, Region, Registration

if TYPE_CHECKING:
    from torch import Tensor

BUFFERS = 2
"""Send buffers of each device: one is filled while the other is on the wire."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which memory a device is to the fabric."""

    memory: Memory
    device_id: int

    @classmethod
    def of(cls, device: str) -> Place:
        """``"cpu"``, ``"cuda"`` or ``"cuda:1"``."""
        kind, _, index = device.partition(":")
        return cls("VRAM", int(index or 0)) if kind == "cuda" else cls("DRAM", 0)


class SourceMemory:
    """The storages of one `Sources`, registered one by one when a route first reads from them.

    Shared by all servers.
    """

    def __init__(self, fabric: Fabric, sources: Sources) -> None:
        self.sources = sources
        self.addresses = np.array([storage.address for storage in sources.storages], dtype=np.int64)
        self.places = tuple(Place.of(storage.device) for storage in sources.storages)
        self._fabric = fabric
        self._registered: dict[int, Registration] = {}
        self._lock = threading.Lock()

    def holds(self, sources: Sources) -> bool:
        """Whether these are the very storages that begin ours."""
        places = sources.places()
        return self.sources is sources or self.sources.places()[: len(places)] == places

    def require(self, storages: Iterable[int]) -> None:
        """Register these storages, those that are not yet. Errors: RegistrationFailed."""
        with self._lock:
            new = [index for index in dict.fromkeys(storages) if index not in self._registered]
            if new:
                regions = [self._region(index) for index in new]
                registration = self._fabric.register(regions)
                self._registered.update(dict.fromkeys(new, registration))

    def release(self) -> None:
        """Deregister. The transfers that read from here are released first."""
        for registration in set(self._registered.values()):
            registration.release()
        self._registered.clear()

    def _region(self, index: int) -> Region:
        storage, place = self.sources.storages[index], self.places[index]
        return Region(storage.address, storage.nbytes, place.memory, place.device_id)


class SendBuffers:
    """Registered memory to pack into, `BUFFERS` to a device, of at most ``limit`` bytes each; grows when asked to."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._held: dict[tuple[str, int], tuple[Tensor, Registration]] = {}

    def get(self, device: str, slot: int, nbytes: int) -> Tensor:
        """Buffer ``slot`` of ``device``, with at least ``nbytes``.

        A smaller one is replaced: nothing may be prepared on it.
        """
        import torch

        held = self._held.get((device, slot))
        if held is not None:
            if held[0].numel() >= nbytes:
                return held[0]
            held[1].release()
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._held[device, slot] = buffer, self._fabric.register([Region.of(buffer)])
        return buffer

    def release(self) -> None:
        """Deregister and free. The transfers that use them are released first."""
        for _, registration in self._held.values():
            registration.release()
        self._held.clear()
