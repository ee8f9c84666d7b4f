"""The real fabric: NIXL with UCX, behind the seam that `fabric` describes. The only file that imports nixl.

Exceptions of nixl become `FabricError` here (`NixlAgent._call`), each with a remedy.

Interfaces. UCX takes network devices from ``UCX_NET_DEVICES``, set here while the agent is created and put back after
that (NIXL's ``device_list`` appends ":1" to each name, which fits mlx5_0 but not a TCP interface). The ways within one
host (shared memory, cuda_ipc) are not network devices and always stay available.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from vllm_nixl_plugin.errors import FabricError, RegistrationFailed
from vllm_nixl_plugin.fabric import REGISTRATION_HINT, Descriptors, Fabric, Read, Region, Write

REMEDIES: Mapping[str, str] = {
    "nixlBackendError": "see the UCX and NIXL lines on stderr, and leave UCX_TLS unset",
    "nixlCancelledError": "the write was cancelled; prepare it again",
    "nixlInvalidParamError": "an argument or backend parameter is not understood by this version of NIXL",
    "nixlMismatchError": "the metadata is damaged or of another NIXL version; run the same version on both sides",
    "nixlNoTelemetryError": "telemetry is not used by this project; report a bug",
    "nixlNotAllowedError": "another agent of this name is connected; disconnect it first",
    "nixlNotFoundError": "unknown memory, agent or plug-in: register, then publish metadata, then connect",
    "nixlNotPostedError": "post the write before asking for its state",
    "nixlNotSupportedError": "the backend cannot do this with this kind of memory",
    "nixlRemoteDisconnectError": "the other process is gone or unreachable; connect to its new incarnation",
    "nixlRepostActiveError": "the write is still in flight; wait for it first",
    "nixlUnknownError": "see the NIXL lines on stderr",
    "RuntimeError": "see the NIXL lines on stderr",
    "ValueError": "an argument is not understood by this version of NIXL",
}
"""What to do about each exception of ``nixl._bindings``, and the two that pybind11 makes of foreign C++ ones."""


class NixlAgent(Fabric):
    """The real fabric.

    Args:
        name: must differ between all agents that meet, and from restart to restart.
        backend: NIXL's plug-in. Only UCX can be bound to interfaces.
        backend_params: further parameters of the plug-in, e.g. ``{"engine_config": "..."}``.
        num_threads: extra UCX threads, for transfers of very many descriptors; 0 uses the caller's.
        progress_delay_us: how often the progress thread wakes up unasked. Messages wake it at once whatever the delay;
            0, NIXL's own default, keeps a core busy.
        interfaces: network devices that UCX may use (``("mlx5_0:1", "eth0")``, ``("all",)``); None is loopback. The
            process's UCX_NET_DEVICES does not count. The data plane has no authentication of its own.
    """

    def __init__(
        self,
        name: str,
        *,
        backend: str = "UCX",
        backend_params: Mapping[str, str] | None = None,
        num_threads: int = 0,
        progress_delay_us: int = 100_000,
        interfaces: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(name)
        if backend != "UCX" and interfaces != ("all",):
            raise self._error(f"{backend} cannot be bound to interfaces; accept that with interfaces=('all',)")
        self._bindings = load_nixl()
        self._segments = {"DRAM": self._bindings.DRAM_SEG, "VRAM": self._bindings.VRAM_SEG}
        self._errors = nixl_errors(self._bindings)
        config = self._bindings.nixlAgentConfig()
        config.useProgThread = True  # without it, a first write to a sleeping target hangs
        config.pthrDelay = progress_delay_us
        config.syncMode = self._bindings.NIXL_THREAD_SYNC_STRICT
        params = dict(backend_params or {})
        if num_threads:
            params["num_threads"] = str(num_threads)
        with _net_devices(interfaces or ("lo",)):
            self._nixl = self._bindings.nixlAgent(name, config)
            self._backends = [self._call("createBackend", backend, params)]

    def _call(self, operation: str, *arguments: Any, detail: str = "") -> Any:
        """Call a method of nixl's agent; all of its exceptions become `FabricError` here."""
        try:
            return getattr(self._nixl, operation)(*arguments)
        except self._errors as cause:
            names = [base.__name__ for base in type(cause).__mro__]
            remedy = next(REMEDIES[name] for name in names if name in REMEDIES)
            raise self._error(
                f"{operation} failed with {names[0]} ({cause}){detail}; {remedy}", operation=operation, cause=names[0]
            ) from cause

    def _register(self, regions: Sequence[Region]) -> Callable[[], None]:
        held: list[Any] = []

        def free() -> None:
            while held:
                self._call("deregisterMem", held.pop(), self._backends)

        for memory in sorted({region.memory for region in regions}):
            rows = [(region.address, region.nbytes, region.device_id) for region in regions if region.memory == memory]
            descriptors = self._bindings.nixlRegDList(self._segments[memory], np.array(rows, dtype=np.int64))
            sizes = [nbytes for _, nbytes, _ in rows]
            detail = f" for {len(rows)} {memory} regions ({sum(sizes):,} bytes, the largest {max(sizes):,})"
            try:
                self._call("registerMem", descriptors, self._backends, detail=detail)
            except FabricError as failure:
                free()
                raise RegistrationFailed(f"{failure.message}; {REGISTRATION_HINT}", **failure.details) from failure
            held.append(descriptors)
        return free

    def _export(self) -> bytes:
        return bytes(self._call("getLocalMD"))

    def _export_contact(self) -> bytes:
        none = self._bindings.nixlRegDList(self._segments["DRAM"])
        return bytes(self._call("getLocalPartialMD", none, True, self._backends))

    def _import(self, name: str, blob: bytes) -> None:
        loaded = name
        try:
            loaded = self._call("loadRemoteMD", blob).decode()
            if loaded != name:
                raise self._error(f"the metadata of {loaded!r} came under the name {name!r}")
            self._call("makeConnection", name, self._backends)  # for UCX, the first write connects
        except FabricError:
            self._call("invalidateRemoteMD", loaded)  # of what may have been loaded by half
            raise

    def _forget(self, name: str) -> None:
        self._call("invalidateRemoteMD", name)

    def _prepare(self, remote: str, source: Descriptors, destination: Descriptors) -> Write:
        handle = self._request(self._bindings.NIXL_WRITE, remote, source, destination, b"unposted")
        return _NixlWrite(self, remote, source, destination, handle)

    def _prepare_read(self, remote: str, source: Descriptors, destination: Descriptors) -> Read:
        handle = self._request(self._bindings.NIXL_READ, remote, destination, source, b"")
        return _NixlRead(self, remote, source, destination, handle)

    def _request(self, kind: Any, remote: str, local: Descriptors, other: Descriptors, message: bytes) -> int:
        sides = []
        for side in (local, other):
            rows = np.empty((len(side.addresses), 3), dtype=np.int64)
            rows[:, 0], rows[:, 1], rows[:, 2] = side.addresses, side.nbytes, side.device_id
            sides.append(self._bindings.nixlXferDList(self._segments[side.memory], rows))
        detail = f" for {len(local.addresses)} ranges with {remote!r} ({local.memory} here, {other.memory} there)"
        return int(self._call("createXferReq", kind, *sides, remote, message, self._backends, detail=detail))

    def _send(self, remote: str, message: bytes) -> None:
        self._call("genNotif", remote, message, self._backends)

    def _drain(self) -> list[tuple[str, bytes]]:
        arrived = self._call("getNotifs", {}, self._backends)
        return [(sender, bytes(message)) for sender, messages in arrived.items() for message in messages]

    def _destroy(self) -> None:
        settled = [write for write in self._writes if write.state != "in_flight"]  # the others end with the agent
        for free in [write._free for write in settled] + [held._free for held in self._registrations]:
            with suppress(FabricError):
                free()
        self._nixl = None


class _NixlHandle(Write):
    """What writes and reads have in common."""

    def __init__(self, agent: NixlAgent, remote: str, source: Descriptors, destination: Descriptors, handle: int):
        super().__init__(agent, remote, source, destination)
        self._nixl, self._handle = agent, handle

    def _start(self, message: bytes) -> bool:
        return self._settled(self._nixl._call("postXferReq", self._handle, message, detail=f" for {self}"))

    def _check(self) -> bool:
        return self._settled(self._nixl._call("getXferStatus", self._handle, detail=f" for {self}"))

    def _settled(self, status: Any) -> bool:
        bindings = self._nixl._bindings
        if status in (bindings.NIXL_SUCCESS, bindings.NIXL_IN_PROG):
            return bool(status == bindings.NIXL_SUCCESS)
        raise self._nixl._error(f"{self} failed with {status.name}; {REMEDIES['nixlUnknownError']}", cause=status.name)

    def _free(self) -> None:
        self._nixl._call("releaseXferReq", self._handle)


class _NixlWrite(_NixlHandle):
    pass


class _NixlRead(_NixlHandle, Read):
    pass


def load_nixl() -> Any:
    """The module ``nixl._bindings``."""
    raise_exceptions = logging.raiseExceptions  # nixl turns this off for the whole process
    try:
        import nixl._bindings as bindings
    except ImportError as cause:
        raise FabricError(f"NIXL cannot be imported ({cause}); pip install nixl") from cause
    finally:
        logging.raiseExceptions = raise_exceptions
    return bindings


def nixl_errors(bindings: Any) -> tuple[type[Exception], ...]:
    """The exceptions that a call into nixl may raise: its own, and what pybind11 makes of C++ ones."""
    own = [kind for kind in vars(bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return (*own, RuntimeError, ValueError)


_environment = threading.Lock()


@contextmanager
def _net_devices(interfaces: Sequence[str]) -> Iterator[None]:
    """UCX_NET_DEVICES for the duration; UCX reads it once, when a backend is created. So it does UCX_LOG_FILE: it would
    write on standard output otherwise, where results are."""
    ports = [f"{port.parts[-3]}:{port.name}" for port in Path("/sys/class/infiniband").glob("*/ports/*")]
    present = [name for _, name in socket.if_nameindex()] + ports
    for wanted in interfaces:
        if wanted != "all" and not any(fnmatchcase(name, wanted) for name in present):
            raise FabricError(f"no network device {wanted!r} here, only {', '.join(present)}", interface=wanted)
    with _environment:
        given = {"UCX_NET_DEVICES": ",".join(interfaces), "UCX_LOG_FILE": os.environ.get("UCX_LOG_FILE", "stderr")}
        before = {name: os.environ.get(name) for name in given}
        os.environ.update(given)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
