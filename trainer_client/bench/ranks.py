"""The ranks of a benchmark's trainer as processes, and the pipes to them.

    with Ranks(["-m", "trainer_client.bench.trainer"], ["cpu", "cpu"], log) as ranks:
        ranks.wait()
        ranks.all("push", mode="shadow")

`Ranks` starts a process per device and gives it its rank, the number of ranks, a port to meet on, two pipes and the
device. There, `Place.of_arguments` reads them and `Place.serve` answers requests: lines of JSON with the name of a
method and its arguments, answered by a line of JSON each. Used by `trainer` and by the trainer of the GPU benchmarks.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from trainer_client.fresh import free_port
from vllm_nixl_plugin.errors import RankLost

START_S = 180.0
ANSWER_S = 600.0


class Ranks:
    """All ranks, one per device; they end with the context. Errors: RankLost, with what a rank said."""

    def __init__(
        self, program: Sequence[str], devices: Sequence[str], log: Path,
        environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
    ) -> None:  # fmt: skip
        """``program``: what Python runs; ``devices``: as each rank calls its own; ``environment``: what a rank has
        beside this process's, which is one thread and the loopback interface."""
        self.pids: list[int] = []
        self._log = log
        self._processes: list[subprocess.Popen[bytes]] = []
        self._requests: list[IO[str]] = []
        self._answers: list[IO[str]] = []
        port, usual = free_port(), {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with log.open("ab") as out:
            for rank, device in enumerate(devices):
                theirs_in, ours_out = os.pipe()
                ours_in, theirs_out = os.pipe()
                numbers = map(str, (rank, len(devices), port, theirs_in, theirs_out))
                self._processes.append(subprocess.Popen(
                    [sys.executable, *program, *numbers, device], env=os.environ | usual | dict(environment(rank)),
                    pass_fds=[theirs_in, theirs_out], stdin=subprocess.DEVNULL, stdout=out, stderr=out))  # fmt: skip
                os.close(theirs_in)
                os.close(theirs_out)
                self._requests.append(os.fdopen(ours_out, "w"))
                self._answers.append(os.fdopen(ours_in))

    def wait(self) -> None:
        """Until all ranks are there; ``pids`` are theirs."""
        self.pids = self._take(START_S)

    def all(self, do: str, timeout_s: float = ANSWER_S, **arguments: Any) -> list[Any]:
        """What each rank answers."""
        return self.each(do, [arguments] * len(self._processes), timeout_s)

    def each(self, do: str, arguments: Sequence[Mapping[str, Any]], timeout_s: float = ANSWER_S) -> list[Any]:
        """The same with arguments of its own for each rank."""
        for rank, (requests, given) in enumerate(zip(self._requests, arguments, strict=True)):
            try:
                print(json.dumps({"do": do, "arguments": given}), file=requests, flush=True)
            except BrokenPipeError:
                raise self._lost(rank, "has ended") from None
        return self._take(timeout_s)

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

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


@dataclass(frozen=True)
class Place:
    """What the process of a rank has been told by `Ranks`."""

    rank: int
    world: int
    port: int
    requests: int
    answers: int
    device: str

    @classmethod
    def of_arguments(cls) -> Place:
        """Of ``sys.argv``."""
        rank, world, port, requests, answers = map(int, sys.argv[1:6])
        return cls(rank, world, port, requests, answers, sys.argv[6])

    def serve(self, made: Any) -> None:
        """Call the methods of ``made`` that are asked for until the pipe is closed."""
        with os.fdopen(self.requests) as lines, os.fdopen(self.answers, "w") as out:
            print(json.dumps({"result": os.getpid()}), file=out, flush=True)
            for line in lines:
                request = json.loads(line)
                try:
                    answer = {"result": getattr(made, request["do"])(**request["arguments"])}
                except Exception as error:  # noqa: BLE001 - whoever asked has to learn it
                    answer = {"error": f"failed: {str(error)[:1500]}"}
                    traceback.print_exc()
                print(json.dumps(answer), file=out, flush=True)
