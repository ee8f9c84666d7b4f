"""One side of a measured write: ``python -m trainer_client.diagnosis.probe ROLE MEMORY NBYTES``, a process of its own.

    target   registers memory, prints where it is, waits for a line, says whether the bytes came
    source   reads a line with the target's words, writes to it `ROUNDS` times, prints seconds, and those of a memcpy

Memory is ``host``, or the number of a GPU. Lines are JSON. `transports` starts both.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from typing import Any

import numpy as np

from vllm_nixl_plugin.agent import NixlAgent
from vllm_nixl_plugin.fabric import Descriptors, Region

ROUNDS = 4
TIMEOUT_S = 60.0
VALUE = 0xA5
MARK = "probe: "


class Memory:
    """A buffer on the host or on a GPU: filled, copied, looked at."""

    def __init__(self, where: str, nbytes: int, value: int) -> None:
        self._torch: Any = None
        self.nbytes = nbytes
        if where == "host":
            self.buffer: Any = np.full(nbytes, value, dtype=np.uint8)
            self.region = Region(self.buffer.ctypes.data, nbytes)
        else:
            import torch

            self._torch = torch
            self.buffer = torch.full((nbytes,), value, dtype=torch.uint8, device=f"cuda:{where}")
            torch.cuda.synchronize(self.buffer.device)
            self.region = Region(self.buffer.data_ptr(), nbytes, "VRAM", int(where))

    def descriptors(self, address: int | None = None, device_id: int | None = None) -> Descriptors:
        """The whole, here or at another address and device of the same kind."""
        at = np.array([self.region.address if address is None else address], dtype=np.int64)
        device_id = self.region.device_id if device_id is None else device_id
        return Descriptors(at, np.array([self.nbytes], dtype=np.int64), self.region.memory, device_id)

    def holds(self, value: int) -> bool:
        """Whether every byte is this one."""
        return bool((self.buffer == value).all())

    def copy_s(self) -> float:
        """Seconds of the best of some copies of the buffer within this process."""
        other = np.empty_like(self.buffer) if self._torch is None else self._torch.empty_like(self.buffer)
        best = float("inf")
        for _ in range(ROUNDS):
            start = time.perf_counter()
            if self._torch is None:
                np.copyto(other, self.buffer)
            else:
                other.copy_(self.buffer)
                self._torch.cuda.synchronize(self.buffer.device)
            best = min(best, time.perf_counter() - start)
        return best


def say(**words: Any) -> None:
    """A line of JSON, marked: UCX and NIXL write to standard output, too."""
    sys.stdout.write(f"{MARK}{json.dumps(words)}\n")
    sys.stdout.flush()


def main() -> None:
    """See the module."""
    role, where, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    memory = Memory(where, nbytes, 0 if role == "target" else VALUE)
    interfaces = tuple(name for name in os.environ.get("PROBE_INTERFACES", "").split(",") if name) or None
    agent = NixlAgent(f"probe-{role}-{os.getpid()}", interfaces=interfaces)
    agent.register([memory.region])
    if role == "target":
        region = memory.region
        say(metadata=base64.b64encode(agent.metadata()).decode(), address=region.address, device_id=region.device_id)
        sys.stdin.readline()
        say(equal=memory.holds(VALUE))
    else:
        told = json.loads(sys.stdin.readline().removeprefix(MARK))
        remote = agent.connect(base64.b64decode(told["metadata"]))
        there = memory.descriptors(told["address"], told["device_id"])
        write = agent.prepare_write(remote, memory.descriptors(), there)
        best = float("inf")
        for number in range(ROUNDS):  # the first connects
            start = time.perf_counter()
            write.post(b"%d" % number)
            write.wait(TIMEOUT_S)
            best = min(best, time.perf_counter() - start)
        say(seconds=best, copy_s=memory.copy_s())
    agent.close()


if __name__ == "__main__":
    main()
