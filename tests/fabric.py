"""Two ends of a fabric for the tests: an initiator here, and a target in another process (or, faked, in this one)."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from vllm_nixl_plugin.agent import NixlAgent
from vllm_nixl_plugin.fabric import Descriptors, Fabric, Region
from vllm_nixl_plugin.memory_fabric import MemoryFabric, MemoryNetwork


def region_of(array: np.ndarray[Any, Any]) -> Region:
    return Region(array.ctypes.data, array.nbytes)


def ranges(base: int, offsets: Any, nbytes: Any) -> Descriptors:
    """Descriptors at ``base + offsets``; one size for all, or one each."""
    at = np.asarray(offsets, dtype=np.int64)
    return Descriptors(base + at, np.broadcast_to(np.asarray(nbytes, dtype=np.int64), at.shape))


def cpu_share(seconds: float) -> float:
    """Cores that this process uses while its main thread sleeps."""
    before, started = os.times(), time.monotonic()
    time.sleep(seconds)
    after = os.times()
    used = after.user + after.system - before.user - before.system
    return used / (time.monotonic() - started)


def listening_addresses() -> set[str]:
    """Local addresses (hexadecimal, as in /proc/net/tcp) on which this process accepts TCP connections."""
    links = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    inodes = {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes:
                found.add(local.partition(":")[0])
    return found


def serve(pipe: Connection, name: str, nbytes: int, environment: Mapping[str, str], options: Mapping[str, Any]) -> None:
    """The process of a `ProcessTarget`: one agent, one buffer, and answers to what the pipe asks."""
    os.environ.update(environment)
    buffer = np.zeros(nbytes, dtype=np.uint8)
    with NixlAgent(name, **options) as agent:
        agent.register([region_of(buffer)])
        pipe.send((agent.metadata(), buffer.ctypes.data))
        answers: dict[str, Callable[[], Any]] = {
            "notifications": agent.notifications,
            "read": buffer.tobytes,
            "cpu_share": lambda: cpu_share(3),
            "listening": listening_addresses,
            "environment": lambda: dict(os.environ),
            "witness": lambda: _witness(agent, buffer),
        }
        while (question := pipe.recv()) != "stop":
            pipe.send(answers[question]())


def _witness(agent: Fabric, buffer: np.ndarray[Any, Any]) -> tuple[list[tuple[str, bytes]], set[int]]:
    """The next notifications, and the values that the buffer holds at the moment of their arrival."""
    deadline = time.monotonic() + 10
    while not (arrived := agent.notifications()) and time.monotonic() < deadline:
        pass
    return arrived, set(np.unique(buffer).tolist())


class ProcessTarget:
    """A real agent in a process of its own."""

    def __init__(self, name: str, nbytes: int, **options: Any) -> None:
        self.name = name
        context = multiprocessing.get_context("forkserver")  # imports nixl once for all targets, and starts no agent
        context.set_forkserver_preload(["fabric", "nixl._bindings"])
        self._pipe, theirs = context.Pipe()
        ucx = {key: value for key, value in os.environ.items() if key.startswith("UCX_")}
        self._process = context.Process(target=serve, args=(theirs, name, nbytes, ucx, options), daemon=True)
        self._process.start()
        theirs.close()
        self.metadata, self.address = self._receive()

    def ask(self, question: str) -> Any:
        self._pipe.send(question)
        return self._receive()

    def expect_witness(self) -> None:
        """From now on, look for a notification; `witness` gives what was seen."""
        self._pipe.send("witness")

    def witness(self) -> Any:
        return self._receive()

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        if self._process.is_alive():
            self.thaw()
            self._pipe.send("stop")
            self._process.join(5)
        self.kill()
        self._pipe.close()

    @property
    def pid(self) -> int:
        assert self._process.pid
        return self._process.pid

    def _receive(self) -> Any:
        assert self._pipe.poll(20), f"target {self.name!r} does not answer"
        return self._pipe.recv()


class MemoryTarget:
    """A fake agent in this process."""

    def __init__(self, name: str, nbytes: int, network: MemoryNetwork) -> None:
        self.name = name
        self._network = network
        self._buffer = np.zeros(nbytes, dtype=np.uint8)
        self._agent = MemoryFabric(name, network)
        self._agent.register([region_of(self._buffer)])
        self.metadata, self.address = self._agent.metadata(), self._buffer.ctypes.data

    def ask(self, question: str) -> Any:
        answers: dict[str, Callable[[], Any]] = {
            "notifications": self._agent.notifications,
            "read": self._buffer.tobytes,
        }
        return answers[question]()

    def expect_witness(self) -> None:
        """Nothing runs beside the test."""

    def witness(self) -> Any:
        return _witness(self._agent, self._buffer)

    def freeze(self) -> None:
        self._network.freeze(self.name)

    def thaw(self) -> None:
        self._network.thaw(self.name)

    def kill(self) -> None:
        self._agent.close()

    close = kill


class Pair:
    """An initiator and a way to make targets that it can reach, for either kind of fabric."""

    def __init__(self, kind: str) -> None:
        self.network = MemoryNetwork()
        self.kind = kind
        self.initiator: Fabric = self.agent("initiator-1")
        self._opened: list[Any] = [self.initiator]

    def agent(self, name: str) -> Fabric:
        return NixlAgent(name) if self.kind == "nixl" else MemoryFabric(name, self.network)

    def target(self, name: str, nbytes: int) -> ProcessTarget | MemoryTarget:
        real = self.kind == "nixl"
        target = ProcessTarget(name, nbytes) if real else MemoryTarget(name, nbytes, self.network)
        self._opened.append(target)
        return target

    def buffer(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Registered memory of the initiator, filled with random bytes."""
        array = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
        self.initiator.register([region_of(array)])
        return array

    def close(self) -> None:
        for opened in self._opened:
            opened.close()


def collect(target: ProcessTarget | MemoryTarget, count: int, timeout_s: float = 10) -> list[tuple[str, bytes]]:
    """At least ``count`` notifications, or what came in time."""
    arrived: list[tuple[str, bytes]] = []
    deadline = time.monotonic() + timeout_s
    while len(arrived) < count and time.monotonic() < deadline:
        arrived += target.ask("notifications")
        time.sleep(0.001)
    return arrived
