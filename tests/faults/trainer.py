"""Trainers of one or more ranks as processes of their own, with places at which they can be stopped.

    trainer.RANK.before.begin@PORT   trainer.RANK.after.begin@PORT    rank 0, for the server on that port
    trainer.RANK.writing@PORT                                         half of the writes to it are done, and one by half
    trainer.RANK.before.commit@PORT
    trainer.RANK.after                                                the push is over and reported

`Trainers` starts one process that imports everything once (as a script, this module), and forks each rank from it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

HALF_WRITE = Path(__file__).parent / "half_write.c"
START_S = 180.0
RESULT_S = 0.01


def state_of(pid: int) -> str:
    """The letter that /proc has for a process: R, S, T (stopped), Z (dead); X when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def stop(pid: int) -> None:
    """SIGSTOP, and wait until it stands."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while state_of(pid) != "T":
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.005)


class Rank:
    """One process of a trainer."""

    def __init__(self, pid: int, result: Path) -> None:
        self.pid, self._result = pid, result

    def outcome(self, timeout_s: float) -> str:
        """``ok``, the code of its error (the first that a server has), or ``killed``. Errors: TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not self.is_over:
            if state_of(self.pid) in "ZX":
                return "killed"
            if time.monotonic() > deadline:
                raise TimeoutError(f"the trainer (PID {self.pid}) is still at it after {timeout_s:g} s")
            time.sleep(RESULT_S)
        return str(self.said["outcome"])

    @property
    def is_over(self) -> bool:
        """Whether its push has ended, well or badly."""
        return self._result.exists()

    @property
    def said(self) -> dict[str, Any]:
        """``outcome``, ``message`` and ``servers`` (codes by port) of the last push, ``outcomes`` of all."""
        return dict(json.loads(self._result.read_text()))

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if state_of(self.pid) not in "ZX":
            os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while state_of(self.pid) not in "ZX":
            assert time.monotonic() < deadline, f"process {self.pid} does not die"
            time.sleep(0.005)


class Trainers:
    """The process from which trainers are forked; a context manager, at whose end all of them are gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._count = 0
        self._ranks: list[Rank] = []
        tests = Path(__file__).parent.parent
        library = folder / "half_write.so"
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, HALF_WRITE], check=True)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PUSH_WEIGHTS_")} | {
            "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)]),
            "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "LD_PRELOAD": str(library),
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "faults.trainer"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def push(
        self, urls: Sequence[str], checkpoint: Path, *, gate: Path, version: str, mode: str, ranks: int = 1,
        times: int = 1, **options: Any,
    ) -> list[Rank]:  # fmt: skip
        """Start a trainer that pushes a checkpoint, each of ``ranks`` a part of it, so many ``times``. ``options``: of
        `WeightClient`."""
        self._count += 1
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        found = []
        for rank in range(ranks):
            result = self._folder / f"{self._count}.{rank}.json"
            pid = self._ask({
                "urls": list(urls), "checkpoint": str(checkpoint), "version": version, "mode": mode, "rank": rank,
                "size": ranks, "port": port, "result": str(result), "options": options, "times": times,
                "env": {"FAULTS_GATE": str(gate)},
            })  # fmt: skip
            found.append(Rank(pid, result))
        self._ranks += found
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for rank in self._ranks:
            rank.kill()
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps(request), file=self._process.stdin, flush=True)
        if not select.select([self._process.stdout], [], [], START_S)[0]:
            raise TimeoutError(f"no trainer was started within {START_S} s")
        return int(self._process.stdout.readline())


def hook() -> None:
    """Put the places around the functions of `trainer_client`. Many small writes, all from where the weights lie."""
    import ctypes
    import threading

    from faults.gate import arrive, claim, hold, shift_clock
    from trainer_client import control, delivery, team, transfer

    here, shim = threading.local(), ctypes.CDLL(None)
    rank = os.environ["FAULTS_RANK"]
    shift_clock()
    transfer.WRITE_RUNS = 4
    delivery.DRAIN_S = team.DRAIN_S = 2.0
    begin, commit, post = control.Control.begin, control.Control.commit, transfer.Transfer._post
    send, part_send = delivery._Push._send, team._Part._send

    def port_of(url: str) -> str:
        return url.rpartition(":")[2]

    def begun(self: Any, *args: Any) -> Any:
        arrive(f"trainer.{rank}.before.begin@{port_of(self.server)}")
        opened = begin(self, *args)
        arrive(f"trainer.{rank}.after.begin@{port_of(self.server)}")
        return opened

    def committed(self: Any, *args: Any) -> Any:
        if args[-1] != 0:  # mode streamed asks for the commit before it writes, too, without waiting for it
            arrive(f"trainer.{rank}.before.commit@{port_of(self.server)}")
        return commit(self, *args)

    def sent(self: Any, opened: Any, prepared: Any) -> Any:
        here.port, here.posts = port_of(self._control.server), 0
        return send(self, opened, prepared)

    def part_sent(self: Any, entry: Any) -> Any:
        here.port, here.posts = port_of(self._link.server), 0
        return part_send(self, entry)

    def posted(self: Any, lane: Any, write: Any, *rest: Any) -> None:
        total = sum(len(of.direct) for of in self._lanes) + sum(len(packed.writes) for packed in self._packed)
        files = claim(f"trainer.{rank}.writing@{here.port}") if here.posts == total // 2 else None
        here.posts += 1
        if files is not None:
            shim.half_write_arm(*(str(path).encode() for path in files))
        post(self, lane, write, *rest)
        if files is not None and shim.half_write_disarm():  # UCX copies in another way: stop behind the write
            hold(*files)

    control.Control.begin, control.Control.commit = begun, committed
    transfer.Transfer._post = posted
    delivery._Push._send, team._Part._send = sent, part_sent


def run(request: dict[str, Any]) -> dict[str, Any]:
    """One rank: push, and tell how that ended."""
    import torch.distributed as dist
    from safetensors.torch import load_file

    from faults.gate import arrive
    from trainer_client import PushFailed, WeightClient
    from trainers.rows import rows_of
    from vllm_nixl_plugin.errors import PushWeightsError

    hook()
    rank, size = request["rank"], request["size"]
    weights: Any = load_file(f"{request['checkpoint']}/model.safetensors")
    if size > 1:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{request['port']}", rank=rank, world_size=size)
        weights = rows_of(weights)
    limits = {"token": "a-token-for-tests", "progress": False, "direct_run_bytes": 1}
    client = WeightClient(request["urls"], **limits | request["options"])
    outcomes: list[str] = []
    said: dict[str, Any] = {"outcomes": outcomes}
    for _ in range(request["times"]):
        said |= {"outcome": "ok", "message": "", "servers": {}}
        try:
            client.push_weights(weights, version=request["version"], mode=request["mode"])
        except PushFailed as error:
            codes = {s.server.rpartition(":")[2]: s.error_code for s in error.report.servers}
            said |= {"outcome": next(filter(None, codes.values())), "servers": codes, "message": error.message}
        except PushWeightsError as error:
            said |= {"outcome": error.code, "message": error.message}
        outcomes.append(said["outcome"])
    partial = Path(request["result"] + ".part")
    partial.write_text(json.dumps(said))
    partial.rename(request["result"])
    arrive(f"trainer.{rank}.after")
    client.close()
    return said


def main() -> None:
    """Fork a trainer for each line of stdin and answer its PID; dead ones are reaped at once."""
    import torch
    import torch.distributed
    from safetensors.torch import load_file  # noqa: F401

    import trainer_client.delivery  # noqa: F401
    import trainers.rows  # noqa: F401
    from vllm_nixl_plugin.agent import load_nixl

    torch.set_num_threads(1)
    load_nixl()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # UCX tells its errors there
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                os.environ.update(request["env"] | {"FAULTS_RANK": str(request["rank"])})
                run(request)
            except BaseException:  # noqa: BLE001 - pytest shows standard error when a test fails
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        print(pid, file=answers, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
