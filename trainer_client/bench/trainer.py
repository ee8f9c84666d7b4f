"""The ranks of a trainer, each a process that does what it is asked, and the pipes to them.

    with Trainer(shape, ["cpu"], token, log) as trainer:
        trainer.all("push", servers=[...], mode="shadow")

A request is a line of JSON with the name of a method of `Rank` and its arguments, and so is its answer. Each rank holds
random weights, with several ranks its rows of each. Started by `parts` and `growth`.
"""

from __future__ import annotations

import gc
import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from trainer_client.bench.servers import Served
from trainer_client.bench.shapes import Shape, random_weights
from trainer_client.bench.ways import Broadcast, RawWrite, save_and_reload
from trainer_client.fresh import free_port
from vllm_nixl_plugin.errors import RankLost

START_S = 180.0
ANSWER_S = 600.0


class Rank:
    """What one rank has and can do. Every method returns JSON; times are those of `time.perf_counter`."""

    def __init__(self, rank: int, world: int, device: str) -> None:
        self._rank, self._world, self._device = rank, world, device
        self._weights: dict[str, Any] = {}
        self._clients: dict[tuple[str, ...], Any] = {}
        self._broadcast: Broadcast | None = None
        self._raw: RawWrite | None = None

    def make(self, shape: str, layers: int, values: dict[str, Any]) -> None:
        """Random weights of a shape."""
        self._weights = random_weights(Shape(shape, layers, values), self._device, self._rank, self._world)

    def push(self, servers: list[dict[str, Any]], mode: Any) -> dict[str, Any]:
        """Push once: the report, when it began and ended."""
        from trainer_client.client import WeightClient

        given = [Served(**server) for server in servers]
        key = tuple(server.url for server in given)
        if key not in self._clients:
            self._clients[key] = WeightClient(key, token=given[0].token, progress=False, timeout_s=ANSWER_S)
        gc.collect()
        begin = time.perf_counter()
        report = self._clients[key].push_weights(self._weights, mode=mode)
        return {"begin": begin, "end": time.perf_counter(), "report": report.to_dict()}

    def save(self, folder: str) -> None:
        """Write the weights as a checkpoint."""
        from safetensors.torch import save_file

        save_file(self._weights, Path(folder) / "model.safetensors", {"format": "pt"})

    def disk(self, servers: list[dict[str, Any]], folder: str) -> dict[str, Any]:
        """Save and reload once."""
        begin = time.perf_counter()
        seconds = save_and_reload(self._weights, [Served(**server) for server in servers], Path(folder))
        return {"begin": begin, "end": time.perf_counter(), "seconds": seconds}

    def broadcast(self, servers: list[dict[str, Any]]) -> dict[str, Any]:
        """Broadcast and reload once; the group is made at the first time, before the clock runs."""
        if self._broadcast is None:
            self._broadcast = Broadcast([Served(**server) for server in servers])
        begin = time.perf_counter()
        seconds = self._broadcast.send(self._weights)
        return {"begin": begin, "end": time.perf_counter(), "seconds": seconds}

    def raw_open(self, server: dict[str, Any], nbytes: int) -> None:
        """Make ready a raw write, and a copy."""
        self._raw = RawWrite(Served(**server), nbytes, self._device)
        self._raw.write_s()
        self._raw.copy_s()

    def raw_write(self) -> dict[str, float]:
        """Seconds of both."""
        assert self._raw is not None
        return {"write": self._raw.write_s(), "copy": self._raw.copy_s()}

    def raw_close(self) -> None:
        """Give the memory back."""
        assert self._raw is not None
        self._raw.close()
        self._raw = None
        gc.collect()

    def close(self) -> None:
        """Let go of servers and weights."""
        for client in self._clients.values():
            client.close()
        self._clients, self._weights = {}, {}


class Trainer:
    """All ranks of a trainer, one per device; they end with the context. Errors: RankLost, with what a rank said."""

    def __init__(self, shape: Shape, devices: Sequence[str], token: str, log: Path) -> None:
        self.shape = shape
        self.pids: list[int] = []
        self._devices, self._token, self._log = list(devices), token, log
        self._processes: list[subprocess.Popen[bytes]] = []
        self._requests: list[IO[str]] = []
        self._answers: list[IO[str]] = []

    def all(self, do: str, **arguments: Any) -> list[Any]:
        """What each rank answers; servers may be given as they are."""
        for name, value in arguments.items():
            if isinstance(value, Served):
                arguments[name] = asdict(value)
            elif name == "servers":
                arguments[name] = [asdict(server) for server in value]
        for rank, requests in enumerate(self._requests):
            try:
                print(json.dumps({"do": do, "arguments": arguments}), file=requests, flush=True)
            except BrokenPipeError:
                raise self._lost(rank, "has ended") from None
        return self._take(ANSWER_S)

    def first(self, do: str, **arguments: Any) -> Any:
        """What rank 0 answers; all are asked."""
        return self.all(do, **arguments)[0]

    def __enter__(self) -> Self:
        port = free_port()
        environment = os.environ | {
            "PUSH_WEIGHTS_TOKEN": self._token, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        with self._log.open("ab") as log:
            for rank, device in enumerate(self._devices):
                theirs_in, ours_out = os.pipe()
                ours_in, theirs_out = os.pipe()
                numbers = map(str, (rank, len(self._devices), port, theirs_in, theirs_out))
                process = subprocess.Popen(
                    [sys.executable, "-m", "trainer_client.bench.trainer", *numbers, device], env=environment,
                    pass_fds=[theirs_in, theirs_out], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )  # fmt: skip
                os.close(theirs_in)
                os.close(theirs_out)
                self._processes.append(process)
                self._requests.append(os.fdopen(ours_out, "w"))
                self._answers.append(os.fdopen(ours_in))
        try:
            self.pids = self._take(START_S)
            self.all("make", shape=self.shape.name, layers=self.shape.layers, values=self.shape.values)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all ranks."""
        for requests in self._requests:
            with suppress(BrokenPipeError):
                requests.close()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)
        for answers in self._answers:
            answers.close()

    def _take(self, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        found = []
        for rank, answers in enumerate(self._answers):
            if not select.select([answers], [], [], max(0.1, deadline - time.monotonic()))[0]:
                raise self._lost(rank, f"did not answer within {timeout_s:.0f} s")
            line = answers.readline()
            if not line:
                raise self._lost(rank, "has ended")
            found.append(json.loads(line))
        for rank, answer in enumerate(found):
            if "error" in answer:
                raise self._lost(rank, answer["error"])
        return [answer["result"] for answer in found]

    def _lost(self, rank: int, what: str) -> RankLost:
        tail = "\n".join(self._log.read_text("utf-8", errors="replace").splitlines()[-12:])
        return RankLost(f"rank {rank} of the trainer {what}; the end of its output:\n{tail}", rank=rank)


def main() -> None:
    """A rank: answer requests until the pipe is closed."""
    import torch

    rank, world, port, requests, answers = map(int, sys.argv[1:6])
    device = sys.argv[6]
    torch.set_num_threads(1)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    if world > 1:
        torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    made = Rank(rank, world, device)
    with os.fdopen(requests) as lines, os.fdopen(answers, "w") as out:
        print(json.dumps({"result": os.getpid()}), file=out, flush=True)
        for line in lines:
            request = json.loads(line)
            try:
                answer = {"result": getattr(made, request["do"])(**request["arguments"])}
            except Exception as error:  # noqa: BLE001 - whoever asked has to learn it
                answer = {"error": f"failed: {error}"}
                traceback.print_exc()
            print(json.dumps(answer), file=out, flush=True)
    made.close()
    os._exit(0)  # process groups may be broken by now, and their end would wait


if __name__ == "__main__":
    main()
