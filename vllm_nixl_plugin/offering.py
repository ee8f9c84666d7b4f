"""Weights from worker to worker: what a worker lets its peers read, and how a worker that joins reads it.

    offered   where what serves lies in the layout of the loader: live homes as they serve, the others in their shadows
    Fetch     READs from there into the memory of an update, in a thread and with an agent of its own

The reader installs what it has read as any other update, so that what its engine holds in the end is what vLLM's own
processing makes of it. The owner of the memory does nothing meanwhile. Called by `plane`, for `peering`.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Hashable, Sequence

import numpy as np
import torch

from vllm_nixl_plugin.agent import NixlAgent
from vllm_nixl_plugin.binding import Binder
from vllm_nixl_plugin.composition import Held, Place
from vllm_nixl_plugin.errors import DeadlineExceeded, FabricError, PeerRefused, PushWeightsError, said
from vllm_nixl_plugin.fabric import Descriptors, Fabric, Memory, Read, Region, wait_all
from vllm_nixl_plugin.memory import Arena
from vllm_nixl_plugin.settings import WorkerSettings
from vllm_nixl_plugin.wire import Binding

logger = logging.getLogger("vllm.nixl_plugin")

READ_NBYTES = 256 << 20
READ_RANGES = 1 << 14
"""One read has at most this many bytes or ranges, so that giving up does not take long."""
TICK_S = 0.05


def offered(binder: Binder, held: Held) -> Binding:
    """The homes of what serves, for READs. Errors: PeerRefused, naming what lies nowhere as it was loaded."""
    arena = binder.arena = binder.arena or Arena(binder.device(), binder.settings.shadow)
    lacking = [place for place in held.places if not place.live and not _is_whole(binder, arena, place)]
    if lacking:
        names = [name for place in lacking for name in place.destination.names[:1]]
        raise PeerRefused(
            f"worker {binder.worker} has no copy of {', '.join(names[:5]) or 'its weights'} as they were pushed (an "
            "update was given up since, or there was none): catch up from another server, or push once more",
            layers=names[:1000],
        )
    homes = binder.homes(held, "in_place")
    served: dict[Hashable, torch.Tensor] = {
        place.key: home for place, home in zip(held.places, homes, strict=True) if place.live and home.numel()
    }
    return binder.expose(homes, served)


def _is_whole(binder: Binder, arena: Arena, place: Place) -> bool:
    """The shadow holds what serves, in the size of this plan."""
    key = place.key
    return binder.remainder.is_whole(key) and key in arena and arena[key].numel() == place.destination.nbytes


def fetch(binder: Binder, homes: Sequence[torch.Tensor], source: Binding) -> Fetch:
    """Begin to read what a peer offers into these homes. Errors: PeerRefused."""
    if len(source.addresses) != len(homes) or any(i >= len(homes) for i in source.memories):
        raise PeerRefused(f"the peer of worker {binder.worker} offers {len(source.addresses)} of {len(homes)} tensors")
    return Fetch(f"vllm-{binder.worker}-reader-{uuid.uuid4().hex}", binder.settings, homes, source)


class Fetch:
    """READs that are under way since it was made. ``homes``: where to, in the order of the addresses of ``source``."""

    def __init__(self, name: str, settings: WorkerSettings, homes: Sequence[torch.Tensor], source: Binding) -> None:
        self.nbytes = sum(home.numel() for home in homes)
        self.done = False
        self._name, self._settings = name, settings
        self._homes, self._source = tuple(homes), source
        self._error: PushWeightsError | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nixl-fetch", daemon=True)
        self._thread.start()

    def poll(self) -> bool:
        """Whether all bytes are here. Errors: whatever ended it otherwise."""
        if self._error is not None:
            raise self._error
        return self.done

    def stop(self) -> None:
        """Give up, if it is not done; nothing writes to the homes any more when this returns."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            s, devices = self._settings, {home.device for home in self._homes if home.device.type == "cuda"}
            for device in devices:
                torch.cuda.set_device(device)  # of this thread
            with NixlAgent(
                self._name, backend=s.backend, backend_params=s.backend_params, num_threads=s.num_threads,
                interfaces=s.interfaces,
            ) as agent:  # fmt: skip
                self._read(agent)
            self.done = not self._stopped.is_set()
        except PushWeightsError as error:
            self._error = error
        except Exception as error:
            logger.exception("reading from %r failed", self._source.agent)
            self._error = FabricError(f"reading from {self._source.agent!r} failed: {said(error)}")

    def _read(self, agent: Fabric) -> None:
        if not any(home.numel() for home in self._homes):
            return
        agent.register(list(dict.fromkeys(Region.of(home) for home in self._homes if home.numel())))
        remote = agent.connect(self._source.agent_metadata)
        for read in self._reads(agent, remote):
            read.post()
            while not self._stopped.is_set():
                try:
                    wait_all([read], TICK_S)
                    break
                except DeadlineExceeded as error:
                    if failure := error.details.get("failure"):
                        raise FabricError(str(failure)) from error
            if self._stopped.is_set():
                return
            read.release()

    def _reads(self, agent: Fabric, remote: str) -> list[Read]:
        """One after the other: the wire is full with one, and giving up has to wait for no more than that."""
        source, reads = self._source, []
        other: Memory = "DRAM" if source.memory == "VRAM" else "VRAM"
        kinds: dict[tuple[Memory, Memory, int], list[int]] = {}
        for index, home in enumerate(self._homes):
            if home.numel():
                there: Memory = other if index in set(source.memories) else source.memory
                here: Memory = "VRAM" if home.device.type == "cuda" else "DRAM"
                kinds.setdefault((there, here, home.device.index or 0), []).append(index)
        for (there, here, device), indices in kinds.items():
            at = np.array([source.addresses[i] for i in indices], dtype=np.int64)
            to = np.array([self._homes[i].data_ptr() for i in indices], dtype=np.int64)
            sizes = np.array([self._homes[i].numel() for i in indices], dtype=np.int64)
            at, to, sizes = _cut(at, to, sizes)
            part = (np.cumsum(sizes) - 1) // READ_NBYTES + np.arange(len(sizes)) // READ_RANGES
            for number in np.unique(part):
                chosen = part == number
                there_id = source.device_id if there == "VRAM" else 0
                reads.append(agent.prepare_read(
                    remote, Descriptors(at[chosen], sizes[chosen], there, there_id),
                    Descriptors(to[chosen], sizes[chosen], here, device if here == "VRAM" else 0),
                ))  # fmt: skip
        return reads


def _cut(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ranges of more than `READ_NBYTES` in pieces of that size. The last column has the sizes."""
    *places, sizes = columns
    pieces = -(-sizes // READ_NBYTES)
    row = np.repeat(np.arange(len(sizes)), pieces)
    number = np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = number * READ_NBYTES
    at, to = (place[row] + offset for place in places)
    return at, to, np.minimum(sizes[row] - offset, READ_NBYTES)
