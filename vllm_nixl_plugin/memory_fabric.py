"""A fabric of equal rank within one process, which copies bytes: for tests and dry runs, with faults on demand.

It keeps what `fabric` promises and checks what NIXL checks, with the same remedies, so that planning, routing, transfer
and failure can be tried without NIXL.
"""

from __future__ import annotations

import ctypes
import json
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_nixl_plugin.agent import REMEDIES
from vllm_nixl_plugin.errors import FabricError, RegistrationFailed
from vllm_nixl_plugin.fabric import REGISTRATION_HINT, Descriptors, Fabric, Read, Region, Write


@dataclass
class _Fault:
    operation: str
    agent: str
    error: FabricError | None
    times: int
    after: int


class MemoryNetwork:
    """The agents of one process that may meet, and the faults that befall them.

    Operations that can fail: ``create``, ``register``, ``deregister``, ``metadata``, ``connect``, ``disconnect``,
    ``prepare``, ``release``, ``post``, ``done``, ``notify``, ``notifications`` (raise the error), ``copy``, ``deliver``
    (without an error: the bytes, or the message, are lost in silence). ``calls``: how often
    each was called, by operation and agent.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._agents: dict[str, MemoryFabric] = {}
        self._frozen: set[str] = set()
        self._faults: list[_Fault] = []
        self.calls: Counter[tuple[str, str]] = Counter()

    def inject(
        self, operation: str, error: FabricError | None = None, *, agent: str = "", times: int = 1, after: int = 0
    ) -> None:
        """Let ``times`` calls of the operation fail, ``after`` so many that do not. ``agent``: how its name begins."""
        self._faults.append(_Fault(operation, agent, error, times, after))

    def freeze(self, agent: str) -> None:
        """Stop an agent, as SIGSTOP does: writes posted by it or to it stay in flight."""
        self._frozen.add(agent)

    def thaw(self, agent: str) -> None:
        """Let it go on: the bytes of all writes in flight land, even of those that everybody has given up."""
        with self._lock:
            self._frozen.discard(agent)
            for member in self._agents.values():
                for write in tuple(member._writes):
                    if isinstance(write, _MemoryHandle) and write.state == "in_flight":
                        write._land()

    def _fails(self, operation: str, agent: str) -> bool:
        """Whether a fault is due now; raises its error if it has one."""
        with self._lock:
            self.calls[operation, agent] += 1
            for fault in self._faults:
                if fault.operation == operation and agent.startswith(fault.agent) and fault.times > 0:
                    if fault.after > 0:
                        fault.after -= 1
                        continue
                    fault.times -= 1
                    if fault.error:
                        raise fault.error
                    return True
        return False


class MemoryFabric(Fabric):
    """A fabric within one process, for tests and dry runs: checks what NIXL checks, and copies host memory."""

    def __init__(self, name: str, network: MemoryNetwork) -> None:
        super().__init__(name)
        network._fails("create", name)
        self._network = network
        self._token = uuid.uuid4().hex
        self._inbox: list[tuple[str, bytes]] = []
        self._peers: dict[str, tuple[str, list[Region]]] = {}
        network._agents[self._token] = self

    def _register(self, regions: Sequence[Region]) -> Callable[[], None]:
        self._network._fails("register", self.name)
        if foreign := [region for region in regions if region.memory != "DRAM"]:
            raise RegistrationFailed(f"agent {self.name!r}: {foreign[0]} is not host memory; {REGISTRATION_HINT}")
        return self._deregister

    def _deregister(self) -> None:
        self._network._fails("deregister", self.name)

    def _export(self) -> bytes:
        self._network._fails("metadata", self.name)
        regions = [(region.address, region.nbytes) for region in self._own()]
        return json.dumps({"token": self._token, "regions": regions}).encode()

    def _export_contact(self) -> bytes:
        return json.dumps({"token": self._token, "regions": []}).encode()

    def _import(self, name: str, blob: bytes) -> None:
        self._network._fails("connect", self.name)
        known = json.loads(blob)
        self._peers[name] = (known["token"], [Region(*pair) for pair in known["regions"]])

    def _forget(self, name: str) -> None:
        self._network._fails("disconnect", self.name)
        del self._peers[name]

    def _prepare(self, remote: str, source: Descriptors, destination: Descriptors) -> Write:
        self._check(remote, source, destination)
        return _MemoryWrite(self, remote, source, destination)

    def _prepare_read(self, remote: str, source: Descriptors, destination: Descriptors) -> Read:
        self._check(remote, destination, source)
        return _MemoryRead(self, remote, source, destination)

    def _check(self, remote: str, local: Descriptors, other: Descriptors) -> None:
        self._network._fails("prepare", self.name)
        for side, regions in ((local, self._own()), (other, self._peers[remote][1])):
            inside = np.zeros(len(side.addresses), dtype=bool)
            for region in regions:
                ends = side.addresses + side.nbytes
                inside |= (side.addresses >= region.address) & (ends <= region.address + region.nbytes)
            if side.memory != "DRAM" or not inside.all():
                raise self._error(REMEDIES["nixlNotFoundError"], cause="nixlNotFoundError")

    def _send(self, remote: str, message: bytes) -> None:
        self._network._fails("notify", self.name)
        target = self._peer(remote)
        if not self._network._fails("deliver", self.name):
            target._inbox.append((self.name, message))

    def _drain(self) -> list[tuple[str, bytes]]:
        self._network._fails("notifications", self.name)
        with self._network._lock:
            arrived, self._inbox = self._inbox, []
        return arrived

    def _destroy(self) -> None:
        self._network._agents.pop(self._token, None)

    def _own(self) -> list[Region]:
        return [region for registration in self._registrations for region in registration.regions]

    def _peer(self, remote: str) -> MemoryFabric:
        target = self._network._agents.get(self._peers[remote][0])
        if target is None:
            raise self._error(f"{remote!r}: {REMEDIES['nixlRemoteDisconnectError']}", cause="nixlRemoteDisconnectError")
        return target


class _MemoryHandle(Write):
    """What writes and reads have in common."""

    def __init__(self, agent: MemoryFabric, remote: str, source: Descriptors, destination: Descriptors) -> None:
        super().__init__(agent, remote, source, destination)
        self._fabric, self._message, self._landed = agent, b"", False

    def _start(self, message: bytes) -> bool:
        self._message, self._landed = message, False
        self._fabric._network._fails("post", self._fabric.name)
        return self._check()

    def _check(self) -> bool:
        network = self._fabric._network
        network._fails("done", self._fabric.name)
        with network._lock:
            self._fabric._peer(self.remote)
            if not self._land():
                return False
            if self._message:
                self._fabric._send(self.remote, self._message)
        return True

    def _land(self) -> bool:
        network = self._fabric._network
        alive = self._fabric._peers[self.remote][0] in network._agents
        if alive and not self._landed and not network._frozen & {self._fabric.name, self.remote}:
            self._landed = True
            if not network._fails("copy", self._fabric.name):
                sides = (self.destination.addresses, self.source.addresses, self.source.nbytes)
                for row in zip(*(column.tolist() for column in sides), strict=True):
                    ctypes.memmove(*row)
        return self._landed

    def _free(self) -> None:
        self._fabric._network._fails("release", self._fabric.name)


class _MemoryWrite(_MemoryHandle):
    pass


class _MemoryRead(_MemoryHandle, Read):
    pass
