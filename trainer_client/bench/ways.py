"""Three ways to bring the weights of a trainer into servers, and one raw NIXL WRITE of as many bytes.

All run in the trainer's process (`trainer` calls them) and end when the servers serve the new weights:

    push        `WeightClient.push_weights`
    disk        a safetensors checkpoint is saved; each server pauses and reads it by vLLM's ``reload_weights``
    broadcast   each server pauses; every tensor is broadcast in a gloo group and loaded by vLLM's reload as it comes
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer_client.bench.servers import Served
from trainer_client.fresh import free_port

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_NBYTES = 256 << 20
WAIT_S = 120.0


def save_and_reload(weights: dict[str, Tensor], servers: Sequence[Served], folder: Path) -> dict[str, float]:
    """Seconds of ``save`` and ``reload``. The folder has a configuration already; as with most trainers, nothing waits
    for the disk itself: what is read comes from the page cache."""
    from safetensors.torch import save_file

    begin = time.perf_counter()
    save_file({name: tensor.detach().cpu() for name, tensor in weights.items()}, folder / "model.safetensors")
    saved = time.perf_counter()
    with _all_paused(servers):
        _each(servers, lambda server: server.call("reload_weights", weights_path=str(folder)))
    return {"save": saved - begin, "reload": time.perf_counter() - saved}


class Broadcast:
    """The gloo group of this process and all workers of the servers."""

    def __init__(self, servers: Sequence[Served]) -> None:
        from trainer_client.bench.extension import join_group

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        port = free_port()
        self._servers = tuple(servers)
        world = 1 + sum(server.n_workers for server in servers)
        firsts = [1 + sum(s.n_workers for s in servers[:i]) for i in range(len(servers))]
        with ThreadPoolExecutor(len(servers)) as pool:
            joined = [
                pool.submit(server.call, "bench_join", port=str(port), first=str(first), world=str(world))
                for server, first in zip(servers, firsts, strict=True)
            ]
            self._group = join_group(port, 0, world)
            for job in joined:
                job.result()

    def send(self, weights: dict[str, Tensor]) -> dict[str, float]:
        """Seconds of ``transfer``, with the loading that it waits for."""
        wanted = json.dumps([(name, list(tensor.shape)) for name, tensor in weights.items()])
        with _all_paused(self._servers), ThreadPoolExecutor(len(self._servers)) as pool:
            begin = time.perf_counter()
            jobs = [pool.submit(server.call, "bench_receive", weights=wanted) for server in self._servers]
            for tensor in weights.values():
                self._group.broadcast(tensor.detach(), 0).wait()
            for job in jobs:
                job.result()
            return {"transfer": time.perf_counter() - begin}


class RawWrite:
    """One NIXL WRITE of so many bytes from memory of this process to memory of the first worker of a server.

    ``copy_s`` is what a copy of the same bytes takes within this process, or on its device.
    """

    def __init__(self, server: Served, nbytes: int, device: str) -> None:
        import torch

        from vllm_nixl_plugin.agent import NixlAgent
        from vllm_nixl_plugin.fabric import Descriptors, Region

        self._server = server
        self._source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._target = torch.zeros(min(nbytes, CHUNK_NBYTES), dtype=torch.uint8, device=device)
        lent = server.call("bench_lend", nbytes=str(nbytes))[0]
        target = torch.device(lent["device"])
        starts = np.arange(0, nbytes, CHUNK_NBYTES, dtype=np.int64)
        sizes = np.minimum(CHUNK_NBYTES, nbytes - starts)
        self._agent = NixlAgent(f"bench-source-{os.getpid()}")
        self._agent.register([Region.of(self._source)])
        remote = self._agent.connect(base64.b64decode(lent["metadata"]))
        here, there = ("VRAM" if kind == "cuda" else "DRAM" for kind in (self._source.device.type, target.type))
        self._write = self._agent.prepare_write(
            remote,
            Descriptors(self._source.data_ptr() + starts, sizes, here, self._source.device.index or 0),  # type: ignore[arg-type]
            Descriptors(lent["address"] + starts, sizes, there, target.index or 0),  # type: ignore[arg-type]
        )

    def write_s(self) -> float:
        """Seconds from the post to the completion."""
        begin = time.perf_counter()
        self._write.post(b"bench")
        self._write.wait(WAIT_S)
        return time.perf_counter() - begin

    def copy_s(self) -> float:
        """Seconds of the copy."""
        begin = time.perf_counter()
        for part in self._source.split(CHUNK_NBYTES):
            self._target[: len(part)].copy_(part)
        synchronize(str(self._source.device))
        return time.perf_counter() - begin

    def close(self) -> None:
        """Give back the memory of both sides."""
        self._write.release()
        self._agent.close()
        self._server.call("bench_take_back")


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)


@contextmanager
def _all_paused(servers: Sequence[Served]) -> Iterator[None]:
    with ExitStack() as stack:
        for server in servers:
            stack.enter_context(server.paused())
        yield


def _each(servers: Sequence[Served], do: Callable[[Served], Any]) -> None:
    with ThreadPoolExecutor(len(servers)) as pool:
        list(pool.map(do, servers))
