"""One rank of a trainer, as a process: makes layouts and pushes them, as `world` tells it through a pipe.

    python -m trainers.rank RANK SIZE PORT REQUESTS_FD ANSWERS_FD

Each request is a line of JSON with the name of a function here and its arguments, and so is each answer.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer_client import BlockFP8, WeightClient, delivery, team, transfer
from trainer_client.link import Plans
from trainer_client.routing import Offer, compute_route
from trainer_client.sources import collect
from trainers.rows import rows_of
from vllm_nixl_plugin.errors import PushWeightsError

clients: dict[str, WeightClient] = {}
TOKEN = "a-token-for-tests"


def client_of(servers: list[str], **options: Any) -> WeightClient:
    """The client for these servers, kept from push to push."""
    key = json.dumps([servers, options])
    if key not in clients:
        clients[key] = WeightClient(servers, token=TOKEN, progress=False, **options)
    return clients[key]


def push(
    layout: str,
    model: str,
    seed: int,
    servers: list[str],
    options: dict[str, Any] | None = None,
    quantize: BlockFP8 | None = None,
    mode: Any = "shadow",
) -> dict[str, Any]:
    """Push a layout; what was sent, what would have been fair, and how many collectives it took."""
    from trainers.layouts import build

    what = build(layout, model, seed)
    client = client_of(servers, **(options or {}))
    before = collectives()
    report = client.push_weights(what, quantize=quantize, mode=mode)
    mine = next(rank for rank in report.ranks if rank.rank == dist.get_rank())
    return {
        "report": report.to_dict(), "table": str(report), "nbytes": mine.nbytes, "fair": fair_nbytes(client),
        "planned": planned_nbytes(client), "collectives": collectives() - before,
    }  # fmt: skip


def push_quantized(**arguments: Any) -> dict[str, Any]:
    """Push a layout as block FP8."""
    return push(**arguments, quantize=BlockFP8())


def collectives() -> int:
    """How many collectives the process groups of this rank have run so far, by their own count."""
    groups = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def plans_of(client: WeightClient) -> list[Plans]:
    return [plans for link in client._links.values() for plans in link._plans.values()]


def planned_nbytes(client: WeightClient) -> int:
    """What all workers of all servers need."""
    return sum(plans.plans[worker.plan].nbytes for plans in plans_of(client) for worker in plans.workers)


def fair_nbytes(client: WeightClient) -> float:
    """What only this rank has, and its equal share of what several have."""
    assert client._offered
    offer = client._offered.offering._offer
    shards = [shard for held in offer._shards.values() for shard in held]
    total = 0.0
    for count in sorted({shard.replica_count for shard in shards}):
        alone = [replace(shard, replica_index=0, replica_count=1) for shard in shards if shard.replica_count == count]
        part = Offer(alone, offer.devices, offer._conversion)
        for plans in plans_of(client):
            for worker in plans.workers:
                route = compute_route(part, plans.plans[worker.plan], direct_run_bytes=1 << 14, buffer_bytes=64 << 20)
                total += route.nbytes / count
    return total


def push_in_memory(layout: str, model: str, seed: int, servers: list[str], send_buffer_bytes: int) -> dict[str, Any]:
    """Push with a client of its own, first and again: the peak of tensors made for it, and of the whole process above
    what it had before, in bytes."""
    from trainers.layouts import build

    what = build(layout, model, seed)
    allocations, found = Allocations(collect(what).owners), []
    allocations.also_in(delivery, team)
    try:
        with WeightClient(servers, token=TOKEN, progress=False, send_buffer_bytes=send_buffer_bytes) as client:
            for _ in range(2):
                held = _resident("VmRSS")
                Path("/proc/self/clear_refs").write_text("5")
                with allocations:
                    client.push_weights(what)
                found.append({"tensors": allocations.peak_nbytes, "process": _resident("VmHWM") - held})
            (buffers,) = (link._buffers._held for link in client._links.values())
            assert client._stockroom.memory
            return {
                "first": found[0], "again": found[1], "shards": client._stockroom.memory.sources.nbytes,
                "buffers": sum(buffer.numel() for buffer, _ in buffers.values()),
            }  # fmt: skip
    finally:
        delivery.ThreadPoolExecutor = team.ThreadPoolExecutor = ThreadPoolExecutor


def push_rows(checkpoint: str, servers: list[str], options: dict[str, Any], signal: int = 0) -> dict[str, Any]:
    """Push rows of the weights in a file. ``signal``: what this process sends itself before its first write."""
    if signal:
        transfer.Transfer._post = lambda *_: os.kill(os.getpid(), signal)
    return client_of(servers, **options).push_weights(rows_of(load_file(checkpoint))).to_dict()


def push_in_group(checkpoint: str, servers: list[str], ranks: list[int]) -> dict[str, Any] | None:
    """The ranks of a process group push rows among themselves, through a client of their own; the others do nothing."""
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return None
    with WeightClient(servers, token=TOKEN, progress=False, group=group) as client:
        return client.push_weights(rows_of(load_file(checkpoint), group)).to_dict()


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that are made while it is entered, in any number of threads; not of ``known``."""

    def __init__(self, known: Iterable[torch.UntypedStorage]) -> None:
        super().__init__()
        self._known = {storage._cdata for storage in known}
        self.peak_nbytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._lock = threading.Lock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        with self._lock:
            self._live = {key: held for key, held in self._live.items() if not held[0].expired()}
            storages = [leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            for storage in storages:
                if storage.device.type != "meta" and storage._cdata not in given | self._known:
                    self._live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
            self.peak_nbytes = max(self.peak_nbytes, sum(nbytes for _, nbytes in self._live.values()))
        return result

    def also_in(self, *modules: Any) -> None:
        """Count in the threads of the pools that these modules make."""

        def counted(task: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self:
                return task(*args, **kwargs)

        class Pool(ThreadPoolExecutor):
            def submit(self, task: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
                return super().submit(counted, task, *args, **kwargs)

        for module in modules:
            module.ThreadPoolExecutor = Pool


def _resident(line: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{line}:")[1].split()[0])


def main() -> None:
    """Answer requests until the pipe is closed."""
    rank, size, port, requests, answers = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    with os.fdopen(requests) as lines, os.fdopen(answers, "w") as out:
        print(json.dumps({"ready": os.getpid()}), file=out, flush=True)
        for line in lines:
            request = json.loads(line)
            try:
                answer = {"result": globals()[request["do"]](**request["arguments"])}
            except PushWeightsError as error:
                answer = error.to_wire()
            except Exception as error:  # noqa: BLE001 - the test has to learn it
                answer = {"error": {"code": "test", "message": f"{error}\n{traceback.format_exc()}", "details": {}}}
            print(json.dumps(answer), file=out, flush=True)
    for client in clients.values():
        client.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
