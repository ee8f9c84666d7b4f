"""Trainers of several ranks for the tests: real processes that meet through gloo.

    with World(2) as world:
        answers = world.all("push", layout="fsdp2", model="qwen3", seed=2, servers=[server.url])

Each rank is a process (`rank`), which lives as long as its world, so that many cases need one start.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

START_S = 120.0
ANSWER_S = 180.0


class Rank:
    """One process and the pipes to it."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        root = Path(__file__).parent
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(root.parent.parent), str(root.parent)]),
            "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        self.rank = rank
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainers.rank", *map(str, (rank, size, port, theirs_in, theirs_out))],
            pass_fds=[theirs_in, theirs_out], env=environment, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._requests: IO[str] = os.fdopen(ours_out, "w")
        self._answers: IO[str] = os.fdopen(ours_in)

    def ask(self, do: str, **arguments: Any) -> None:
        """Have it do something; `answer` waits for it."""
        print(json.dumps({"do": do, "arguments": arguments}), file=self._requests, flush=True)

    def answer(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Its next answer: ``result``, or ``error`` as on the wire; ``gone`` when it has died."""
        if not select.select([self._answers], [], [], timeout_s)[0]:
            raise TimeoutError(f"rank {self.rank} did not answer within {timeout_s} s")
        line = self._answers.readline()
        return dict(json.loads(line)) if line else {"gone": self.process.wait(10)}

    def close(self) -> None:
        """End it, in good order if it is willing."""
        self._requests.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self._answers.close()


class World:
    """All ranks of one trainer."""

    def __init__(self, size: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = int(listener.getsockname()[1])
        self.ranks = [Rank(rank, size, port) for rank in range(size)]
        deadline = time.monotonic() + START_S
        for rank in self.ranks:
            rank.answer(deadline - time.monotonic())

    def all(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Have all ranks do the same at once. Errors: AssertionError with what went wrong on any of them."""
        for rank in self.ranks:
            rank.ask(do, **arguments)
        answers = [rank.answer() for rank in self.ranks]
        assert all("result" in answer for answer in answers), json.dumps(answers, indent=1)
        return [answer["result"] for answer in answers]

    def close(self) -> None:
        """End all of them."""
        for rank in self.ranks:
            rank.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
