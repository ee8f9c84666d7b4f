"""One rank of a sharded trainer, as a process that does what `gpu_sharded` asks of it, and the pipes to it.

    with Trainer(["cuda:0", "cuda:1"], log) as trainer:
        trainer.wait()
        trainer.all("load", checkpoint=path)
        pushes = trainer.all("push", servers=[url], mode="shadow", times=3)[0]

A request names a method of `Rank` and its arguments (`trainer_client.bench.ranks`). The model is an FSDP2 module of
transformers, sharded layer by layer over all ranks.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist

import gpu_measure as measure
from gpu_servers import TOKEN, python_path
from trainer_client import WeightClient
from trainer_client.bench.ranks import Place, Ranks


class Rank:
    """What one rank has and can do."""

    def __init__(self, rank: int, device: str) -> None:
        self.rank, self.device = rank, device
        self._model: Any = None
        self._clients: dict[tuple[str, ...], WeightClient] = {}
        self._own: measure.OwnEngine | None = None

    def load(self, checkpoint: str) -> dict[str, Any]:
        """Shard the model of a checkpoint."""
        import transformers as tf

        model = tf.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        if self._model is None or type(self._model).__name__ != f"FSDP{type(model).__name__}":
            self.drop()
            self._model = self._sharded(model)
        else:  # the same memory with other values, as after a training step
            with torch.no_grad():
                for mine, given in zip(self._model.parameters(), model.parameters(), strict=True):
                    chunk = given.detach().chunk(mine.device_mesh.size(), 0)
                    part = chunk[self.rank] if self.rank < len(chunk) else given[:0]
                    mine.to_local().copy_(part)
        return self._held()

    def random(self, config: str) -> dict[str, Any]:
        """Shard a model of this configuration with random weights, made where they lie."""
        import transformers as tf

        self.drop()
        with torch.device("meta"):
            model = tf.AutoModelForCausalLM.from_config(tf.AutoConfig.from_pretrained(config), dtype=torch.bfloat16)
        model = self._sharded(model)
        model.to_empty(device=self.device)
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().normal_(0, 0.02)
        self._model = model
        return self._held()

    def push(
        self, servers: list[str], mode: Any, times: int = 1, every_s: float = 0.0, versions: str = ""
    ) -> list[dict[str, Any]]:
        """Push as often; of each push the report, and when it began and ended (`time.perf_counter`).

        ``every_s``: at least so long from one's beginning to the next; ``versions``: what their names begin with.
        """
        key = tuple(servers)
        if key not in self._clients:
            self._clients[key] = WeightClient(servers, token=TOKEN, progress=False, timeout_s=180)
        found = []
        for number in range(times):
            dist.barrier()
            begin = time.perf_counter()
            version = f"{versions}{number}" if versions else None
            report = self._clients[key].push_weights(self._model, mode=mode, version=version)
            end = time.perf_counter()
            found.append(report.to_dict() | {"begin": begin, "end": end})
            time.sleep(max(0.0, begin + every_s - time.perf_counter()))
        return found

    def copies(self, targets: list[str], nbytes: int) -> float:
        """Seconds of copies of so many bytes of this rank to each of the devices, at the same time as other ranks'."""
        source = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        seconds = measure.copies_s([(source, target) for target in targets], before=dist.barrier)
        del source
        self._empty()
        return seconds

    def own_engine(self, servers: list[str], n_workers: int, times: int) -> list[float]:
        """Seconds of pushes through vLLM's own ``nccl`` engine: gathered tensor by tensor, sent by rank 0."""
        state = self._model.state_dict()
        weights = measure.Weights({name: list(t.shape) for name, t in state.items()}, "bfloat16", self._whole)
        if self.rank == 0 and self._own is None:
            self._own = measure.OwnEngine(servers, "nccl", n_workers)
        seconds = []
        for _ in range(times):
            dist.barrier()
            if self._own is not None:
                seconds.append(self._own.push_s(weights))
            else:
                for _ in self._whole():
                    pass
        return seconds

    def drop(self) -> None:
        """Let go of the model, its memory, and the clients that hold it."""
        for client in self._clients.values():
            client.close()
        self._clients, self._model = {}, None
        self._empty()

    def _whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._model.state_dict().items():
            yield name, tensor.full_tensor()

    def _sharded(self, model: Any) -> Any:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(torch.device(self.device).type, (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def _held(self) -> dict[str, Any]:
        local = sum(param.to_local().nbytes for param in self._model.parameters())
        return {"nbytes": local, "whole_nbytes": sum(param.nbytes for param in self._model.parameters())}

    def _empty(self) -> None:
        import gc

        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()


def main() -> None:
    """Answer requests until the pipe is closed."""
    place = Place.of_arguments()
    torch.set_num_threads(1)
    if place.device != "cpu":
        torch.cuda.set_device(place.device)
        torch.zeros(1, device=place.device)  # or a device mesh takes the device of the rank's number
    backend = "gloo" if place.device == "cpu" else "cpu:gloo,cuda:nccl"
    meeting = f"tcp://127.0.0.1:{place.port}"
    dist.init_process_group(backend, init_method=meeting, rank=place.rank, world_size=place.world)
    made = Rank(place.rank, place.device)
    place.serve(made)
    made.drop()
    os._exit(0)  # process groups may be broken by now, and their end would wait


class Trainer(Ranks):
    """All ranks of one trainer, one per device; they end with the context. Errors: RankLost."""

    def __init__(self, devices: list[str], log: Path, *, own_first: bool = False) -> None:
        """``own_first``: each rank sees its own GPU as number 0, and the others behind it."""
        self.devices = devices
        self._own_first = own_first
        seen = [self.seen_by(rank, device) for rank, device in enumerate(devices)]
        super().__init__([str(Path(__file__))], seen, log, self._environment)

    def seen_by(self, rank: int, device: str) -> str:
        """What a rank calls a device."""
        if not self._own_first or device == "cpu":
            return device
        return f"cuda:{self._order(rank).index(device)}"

    def _environment(self, rank: int) -> dict[str, str]:
        found = {"PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "1"}
        if self._own_first and self.devices[rank] != "cpu":
            found["CUDA_VISIBLE_DEVICES"] = ",".join(one[5:] for one in self._order(rank))
        return found

    def _order(self, rank: int) -> list[str]:
        every = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        return [self.devices[rank], *(device for device in every if device != self.devices[rank])]


def median_of(pushes: list[dict[str, Any]], stage: str) -> float:
    """The median over pushes of the longest time that a stage took on any server; "whole": of the call."""
    if stage == "whole":
        return statistics.median(push["end"] - push["begin"] for push in pushes)
    return statistics.median(max(server["seconds"].get(stage, 0.0) for server in push["servers"]) for push in pushes)


if __name__ == "__main__":
    main()
