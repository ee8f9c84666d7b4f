"""The servers' part of what a push is compared with: a worker extension with four more methods.

A server started by `servers` has them beside the push itself: it joins a gloo group and loads what is broadcast in it
by vLLM's own reload, and it lends memory to a raw NIXL WRITE. Called by ``/collective_rpc`` of vLLM's development mode.
"""

from __future__ import annotations

import base64
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from vllm_nixl_plugin.worker import NixlWorkerExtension

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

TIMEOUT = timedelta(seconds=300)


def join_group(port: int, rank: int, world: int) -> Any:
    """A gloo group of processes of this machine that have no other in common; rank 0 is the trainer."""
    import torch.distributed as dist

    c10d: Any = dist  # exports more than its annotations say
    store = c10d.TCPStore("127.0.0.1", port, world, rank == 0, TIMEOUT)
    return c10d.ProcessGroupGloo(c10d.PrefixStore("bench", store), rank, world, TIMEOUT)


class BenchExtension(NixlWorkerExtension):
    """See the module. Arguments are strings, as vLLM's route hands them on."""

    def bench_join(self, port: str, first: str, world: str) -> None:
        """Enter the group of the trainer: this server's workers have the ranks from ``first`` on."""
        worker: Any = self
        self.__dict__["_bench_group"] = join_group(int(port), int(first) + int(worker.rank), int(world))

    def bench_receive(self, weights: str) -> None:
        """Load what rank 0 broadcasts, tensor by tensor. ``weights``: a JSON list of names and shapes."""
        worker: Any = self
        wanted = json.loads(weights)
        worker.model_runner.reload_weights(weights_iterator=self._bench_received(wanted))

    def _bench_received(self, wanted: list[tuple[str, list[int]]]) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        worker: Any = self
        group = self.__dict__["_bench_group"]
        for name, shape in wanted:
            tensor = torch.empty(shape, dtype=torch.bfloat16, device=worker.device)
            group.broadcast(tensor, 0).wait()
            yield name, tensor

    def bench_lend(self, nbytes: str) -> dict[str, Any]:
        """Register memory of so many bytes with a NIXL agent of its own: its address, device and metadata."""
        import torch

        from vllm_nixl_plugin.agent import NixlAgent
        from vllm_nixl_plugin.fabric import Region

        worker: Any = self
        memory = torch.zeros(int(nbytes), dtype=torch.uint8, device=worker.device)
        agent = NixlAgent(f"bench-target-{worker.rank}")
        agent.register([Region.of(memory)])
        self.__dict__["_bench_lent"] = agent, memory
        metadata = base64.b64encode(agent.metadata()).decode()
        return {"address": memory.data_ptr(), "device": str(memory.device), "metadata": metadata}

    def bench_take_back(self) -> None:
        """Free what `bench_lend` made."""
        agent, _ = self.__dict__.pop("_bench_lent")
        agent.close()
