"""One rank of a sharded trainer, as a process that does what `gpu_sharded` asks of it, and the pipes to it.

    with Trainer(["cuda:0", "cuda:1"], log) as trainer:
        trainer.wait()
        trainer.all("load", checkpoint=path)
        pushes = trainer.all("push", servers=[url], mode="shadow", times=3)[0]

Each request is a line of JSON with the name of a function of `Rank` and its arguments, and so is each answer. The model
is an FSDP2 module of transformers, sharded layer by layer over all ranks.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist

import gpu_measure as measure
from gpu_servers import TOKEN, python_path
from trainer_client import WeightClient


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
    rank, size, port, requests, answers = map(int, sys.argv[1:6])
    device = sys.argv[6]
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # or a device mesh takes the device of the rank's number
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    made = Rank(rank, device)
    with os.fdopen(requests) as lines, os.fdopen(answers, "w") as out:
        print(json.dumps({"result": os.getpid()}), file=out, flush=True)
        for line in lines:
            request = json.loads(line)
            try:
                answer = {"result": getattr(made, request["do"])(**request["arguments"])}
            except Exception as error:  # noqa: BLE001 - whoever asked has to learn it
                answer = {"error": f"rank {rank}: {str(error)[:1500]}\n{traceback.format_exc(limit=-3)}"}
            print(json.dumps(answer), file=out, flush=True)
    made.drop()
    os._exit(0)  # process groups may be broken by now, and their end would wait


class RankFailed(Exception):
    """A rank could not do what it was asked, or died; the message says why."""


class Trainer:
    """All ranks of one trainer, one per device; they end with the context."""

    def __init__(self, devices: list[str], log: Path, *, own_first: bool = False) -> None:
        """``own_first``: each rank sees its own GPU as number 0, and the others behind it."""
        port = measure.free_port()
        self.devices = devices
        self._own_first = own_first
        self._log = log
        self._processes: list[subprocess.Popen[bytes]] = []
        self._requests: list[IO[str]] = []
        self._answers: list[IO[str]] = []
        environment = os.environ | {
            "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        with log.open("a") as out:
            for rank, device in enumerate(devices):
                theirs_in, ours_out = os.pipe()
                ours_in, theirs_out = os.pipe()
                numbers = map(str, (rank, len(devices), port, theirs_in, theirs_out))
                seen = {}
                if own_first and device != "cpu":
                    seen = {"CUDA_VISIBLE_DEVICES": ",".join(one[5:] for one in self._order(rank))}
                self._processes.append(subprocess.Popen(
                    [sys.executable, str(Path(__file__)), *numbers, self.seen_by(rank, device)],
                    pass_fds=[theirs_in, theirs_out], env=environment | seen, stdin=subprocess.DEVNULL, stdout=out,
                    stderr=out))  # fmt: skip
                os.close(theirs_in)
                os.close(theirs_out)
                self._requests.append(os.fdopen(ours_out, "w"))
                self._answers.append(os.fdopen(ours_in))

    def seen_by(self, rank: int, device: str) -> str:
        """What a rank calls a device."""
        if not self._own_first or device == "cpu":
            return device
        return f"cuda:{self._order(rank).index(device)}"

    def _order(self, rank: int) -> list[str]:
        every = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        return [self.devices[rank], *(device for device in every if device != self.devices[rank])]

    def wait(self) -> None:
        """Until all ranks are there. Errors: RankFailed."""
        self._take(180)

    def all(self, do: str, timeout_s: float = 240, **arguments: Any) -> list[Any]:
        """What each rank answers. Errors: RankFailed."""
        return self.each(do, [arguments] * len(self.devices), timeout_s)

    def each(self, do: str, arguments: list[dict[str, Any]], timeout_s: float = 240) -> list[Any]:
        """The same with arguments of its own for each rank."""
        for requests, given in zip(self._requests, arguments, strict=True):
            print(json.dumps({"do": do, "arguments": given}), file=requests, flush=True)
        return self._take(timeout_s)

    def _take(self, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        found, errors = [], []
        for rank, answers in enumerate(self._answers):
            if not select.select([answers], [], [], max(0.1, deadline - time.monotonic()))[0]:
                raise RankFailed(f"rank {rank} does not answer\n{self._end_of_log()}")
            line = answers.readline()
            if not line:
                raise RankFailed(f"rank {rank} ended with {self._processes[rank].wait(10)}\n{self._end_of_log()}")
            answer = json.loads(line)
            found.append(answer.get("result"))
            errors += [answer["error"]] if "error" in answer else []
        if errors:
            raise RankFailed(errors[0])
        return found

    def _end_of_log(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-12:])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all ranks."""
        for requests in self._requests:
            requests.close()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def median_of(pushes: list[dict[str, Any]], stage: str) -> float:
    """The median over pushes of the longest time that a stage took on any server; "whole": of the call."""
    if stage == "whole":
        return statistics.median(push["end"] - push["begin"] for push in pushes)
    return statistics.median(max(server["seconds"].get(stage, 0.0) for server in push["servers"]) for push in pushes)


if __name__ == "__main__":
    main()
