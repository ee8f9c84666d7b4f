"""The fabric: registered memory, one-sided WRITEs and notifications. The only file that imports nixl.

Target (a vLLM worker):      `register`, publish `metadata()`, read `notifications()`.
Initiator (a trainer rank):  `register`, `connect(metadata)`, `prepare_write` once, then per update `post(message)` and
                             `wait_all`; at the end `release` the writes, `disconnect`, `close`.

`NixlAgent` is the real fabric and `MemoryFabric` a fake that copies bytes within one process. What both keep:

* Every post carries a message; NIXL would send the previous one again. The target sees it once, after the bytes. NIXL
  sends it from `Write.done`, so a write that nobody waits for lands in silence.
* A write in flight cannot be released, nor can the memory and the connection under a prepared write: giving up does not
  stop the bytes. The way out is `close`, which destroys the agent.
* The target needs nothing from the initiator: its notifications arrive without `connect`.
* A handle (`Registration`, `Write`) belongs to this process; descriptors and metadata may be published.
* Methods may be called from several threads; one write belongs to one thread at a time.

Interfaces. UCX takes network devices from ``UCX_NET_DEVICES``, set here while the agent is created and put back after
that (NIXL's ``device_list`` appends ":1" to each name, which fits mlx5_0 but not a TCP interface). The ways within one
host (shared memory, cuda_ipc) are not network devices and always stay available.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import socket
import threading
import time
import uuid
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from vllm_nixl_plugin.errors import DeadlineExceeded, FabricError, RegistrationFailed

Memory = Literal["DRAM", "VRAM"]

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

REGISTRATION_HINT = (
    "memory must be mapped now and stay so (sleep mode unmaps it), GPU memory must come from cudaMalloc (not from "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True), and an RDMA device needs `ulimit -l unlimited`"
)


@dataclass(frozen=True)
class Region:
    """A contiguous range of memory of this process. ``device_id`` is the CUDA index, 0 for host memory."""

    address: int
    nbytes: int
    memory: Memory = "DRAM"
    device_id: int = 0

    @classmethod
    def of(cls, tensor: Any) -> Region:
        """The whole storage under a torch tensor (not just the part that a view shows)."""
        storage, device = tensor.untyped_storage(), tensor.device
        if device.type not in ("cpu", "cuda"):
            raise RegistrationFailed(f"a tensor on device {device} has no memory that NIXL can reach; use cpu or cuda")
        if device.type == "cpu":
            return cls(storage.data_ptr(), storage.nbytes())
        return cls(storage.data_ptr(), storage.nbytes(), "VRAM", device.index or 0)


@dataclass(frozen=True, eq=False)
class Descriptors:
    """Ranges of registered memory on one device of one side: addresses and sizes in bytes, int64 of shape [n]."""

    addresses: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    memory: Memory = "DRAM"
    device_id: int = 0

    def overlaps(self, region: Region) -> bool:
        """Whether any range touches the region."""
        if (self.memory, self.device_id) != (region.memory, region.device_id):
            return False
        ends = self.addresses + self.nbytes
        return bool(np.any((self.addresses < region.address + region.nbytes) & (ends > region.address)))


class Registration:
    """Memory that may be read or written by the fabric until `release`."""

    def __init__(self, agent: Fabric, regions: Sequence[Region], free: Callable[[], None]) -> None:
        self.regions = tuple(regions)
        self._agent = agent
        self._free = free

    def release(self) -> None:
        """Deregister. Refused while an unreleased write reads from it; doing it twice is fine."""
        if self not in self._agent._registrations:
            return
        for write in tuple(self._agent._writes):
            if any(write.source.overlaps(region) for region in self.regions):
                raise self._agent._error(f"memory cannot be deregistered under {write}; release the write first")
        self._free()
        self._agent._registrations.discard(self)


class Write(ABC):
    """One prepared WRITE, posted any number of times: prepared -> in_flight -> done | failed, at the end released."""

    def __init__(self, agent: Fabric, remote: str, source: Descriptors, destination: Descriptors) -> None:
        self.remote = remote
        self.source, self.destination = source, destination
        self.nbytes = int(source.nbytes.sum())
        self.state: Literal["prepared", "in_flight", "done", "failed", "released"] = "prepared"
        self._agent = agent
        self._failure: FabricError | None = None

    def __str__(self) -> str:
        return f"the {self.state} write of {self.nbytes:,} bytes from {self._agent.name!r} to {self.remote!r}"

    def post(self, message: bytes) -> None:
        """Start the transfer; the target gets ``message`` when the bytes are there. Keep the source until then.

        Between processes of one host that share no GPU, UCX copies the bytes before this returns (without the GIL).
        """
        if not message:
            raise FabricError(f"{self}: every post carries a message, or the target gets the previous one again")
        if self.state not in ("prepared", "done"):
            raise FabricError(f"{self} cannot be posted; wait for it, or prepare it again if it failed or was released")
        self.state = "in_flight"
        self._advance(lambda: self._start(message))

    def done(self) -> bool:
        """Whether the last post has completed; drives it on. Raises `FabricError` when it failed."""
        if self.state == "in_flight":
            self._advance(self._check)
        if self._failure:
            raise self._failure
        if self.state not in ("in_flight", "done"):
            raise FabricError(f"{self} is not posted")
        return self.state == "done"

    def wait(self, timeout_s: float) -> None:
        """Wait until `done`. `DeadlineExceeded` leaves the write in flight: its memory must still not be touched."""
        wait_all([self], timeout_s)

    def release(self) -> None:
        """Free the handle. Refused while in flight (that would not stop the bytes); doing it twice is fine."""
        if self.state == "in_flight":
            raise self._agent._error(f"{self} cannot be released; wait for it, or close the agent")
        if self.state != "released":
            self._free()
            self.state = "released"
            self._agent._writes.discard(self)

    def _advance(self, step: Callable[[], bool]) -> None:
        try:
            finished = step()
        except FabricError as failure:
            self.state, self._failure = "failed", failure
            raise
        self.state = "done" if finished else "in_flight"

    @abstractmethod
    def _start(self, message: bytes) -> bool: ...

    @abstractmethod
    def _check(self) -> bool: ...

    @abstractmethod
    def _free(self) -> None: ...


def wait_all(writes: Sequence[Write], timeout_s: float) -> None:
    """Wait until every posted write is settled, then raise the first failure, if there was one.

    A failed write does not end the wait for the others, so that afterwards nothing reads the source memory. When time
    runs out, `DeadlineExceeded` says how many are still in flight (``write.state``); those keep their memory until they
    are done or the agent is closed.
    """
    deadline = time.monotonic() + timeout_s
    pending, failure, pause_s = list(writes), None, 0.0
    spin_until = time.monotonic() + 0.0005
    while True:
        unsettled = []
        for write in pending:
            try:
                if not write.done():
                    unsettled.append(write)
            except FabricError as error:
                failure = failure or error
        pending = unsettled
        now = time.monotonic()
        if not pending or now >= deadline:
            break
        if now >= spin_until:
            pause_s = min(max(pause_s * 1.5, 2e-5), 1e-3)
            time.sleep(min(pause_s, deadline - now))
    if pending:
        remotes = sorted({write.remote for write in pending})
        names = ", ".join(map(repr, remotes))
        raise DeadlineExceeded(
            f"{len(pending)} of {len(writes)} writes, to {names}, still in flight after {timeout_s:g} s; "
            "the source memory must stay untouched until they are done or the agent is closed",
            remotes=remotes,
            nbytes=sum(write.nbytes for write in pending),
            failure=failure.message if failure else None,
        )
    if failure:
        raise failure


class Fabric(ABC):
    """An agent: its own memory, the other agents that it knows, and the writes prepared to them.

    Every method may raise `FabricError`. A context manager closes the agent.
    """

    def __init__(self, name: str) -> None:
        if not name:
            raise FabricError("an agent needs a name; let it carry the incarnation of its process")
        self.name = name
        self._open = True
        self._remotes: dict[str, bytes] = {}
        self._writes: set[Write] = set()
        self._registrations: set[Registration] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def register(self, regions: Sequence[Region]) -> Registration:
        """Make memory readable and writable by the fabric, or raise `RegistrationFailed` and register none of it."""
        self._require_open()
        for region in regions:
            if region.address <= 0 or region.nbytes <= 0:
                raise RegistrationFailed(f"agent {self.name!r}: {region} is no memory; {REGISTRATION_HINT}")
        registration = Registration(self, regions, self._register(regions))
        self._registrations.add(registration)
        return registration

    def metadata(self) -> bytes:
        """The right to write into all memory registered so far: a secret. Publish it again after registering more."""
        self._require_open()
        name = self.name.encode()
        body = len(name).to_bytes(2, "big") + name + self._export()
        return zlib.crc32(body).to_bytes(4, "big") + body

    def connect(self, metadata: bytes) -> str:
        """Learn about another agent and return its name. A known one whose metadata differ is disconnected first."""
        self._require_open()
        body = metadata[4:]
        if not body or zlib.crc32(body) != int.from_bytes(metadata[:4], "big"):  # NIXL can crash on damaged ones
            raise self._error(f"{len(metadata)} bytes are not the whole metadata of an agent; fetch them again")
        length = 2 + int.from_bytes(body[:2], "big")
        name = body[2:length].decode()
        if name == self.name:
            raise self._error("the other side has the same name; let names carry the incarnation")
        if self._remotes.get(name) != metadata:
            self.disconnect(name)
            self._import(name, body[length:])
            self._remotes[name] = metadata
        return name

    def disconnect(self, name: str) -> None:
        """Forget an agent. Refused while a write to it is not released; an unknown name is fine."""
        self._require_open()
        if blocking := next((write for write in tuple(self._writes) if write.remote == name), None):
            raise self._error(f"cannot disconnect {name!r} under {blocking}; release it first")
        if self._remotes.pop(name, None) is not None:
            self._forget(name)

    def prepare_write(self, remote: str, source: Descriptors, destination: Descriptors) -> Write:
        """Pair range by range the memory to read here with the memory to write at ``remote``."""
        self._require_open(remote)
        shapes = {array.shape for side in (source, destination) for array in (side.addresses, side.nbytes)}
        if len(shapes) != 1 or source.nbytes.ndim != 1 or not source.nbytes.size:
            raise self._error(f"a write needs four arrays of one length above 0, not {sorted(shapes)}")
        if not np.array_equal(source.nbytes, destination.nbytes) or source.nbytes.min() <= 0:
            raise self._error(f"the sizes of a write to {remote!r} must be the same on both sides, and above 0")
        write = self._prepare(remote, source, destination)
        self._writes.add(write)
        return write

    def notify(self, remote: str, message: bytes) -> None:
        """Send a message that belongs to no write."""
        self._require_open(remote)
        self._send(remote, message)

    def notifications(self) -> list[tuple[str, bytes]]:
        """The messages (sender, message) that came since the last call, in order for each sender."""
        self._require_open()
        return self._drain()

    def close(self) -> None:
        """Destroy the agent with all its handles, in flight or not. Doing it twice is fine."""
        if self._open:
            self._open = False
            self._destroy()
            for write in self._writes:
                write.state = "released"
            self._writes.clear()
            self._registrations.clear()
            self._remotes.clear()

    def _error(self, what: str, **details: Any) -> FabricError:
        return FabricError(f"agent {self.name!r}: {what}", agent=self.name, **details)

    def _require_open(self, remote: str | None = None) -> None:
        if not self._open:
            raise self._error("it is closed")
        if remote is not None and remote not in self._remotes:
            raise self._error(f"not connected to {remote!r}; connect(metadata) first")

    @abstractmethod
    def _register(self, regions: Sequence[Region]) -> Callable[[], None]: ...

    @abstractmethod
    def _export(self) -> bytes: ...

    @abstractmethod
    def _import(self, name: str, blob: bytes) -> None: ...

    @abstractmethod
    def _forget(self, name: str) -> None: ...

    @abstractmethod
    def _prepare(self, remote: str, source: Descriptors, destination: Descriptors) -> Write: ...

    @abstractmethod
    def _send(self, remote: str, message: bytes) -> None: ...

    @abstractmethod
    def _drain(self) -> list[tuple[str, bytes]]: ...

    @abstractmethod
    def _destroy(self) -> None: ...


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
        sides = []
        for side in (source, destination):
            rows = np.empty((len(side.addresses), 3), dtype=np.int64)
            rows[:, 0], rows[:, 1], rows[:, 2] = side.addresses, side.nbytes, side.device_id
            sides.append(self._bindings.nixlXferDList(self._segments[side.memory], rows))
        detail = f" for {len(source.addresses)} ranges to {remote!r} ({source.memory} to {destination.memory})"
        handle = self._call(
            "createXferReq", self._bindings.NIXL_WRITE, *sides, remote, b"unposted", self._backends, detail=detail
        )
        return _NixlWrite(self, remote, source, destination, handle)

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


class _NixlWrite(Write):
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
    """UCX_NET_DEVICES for the duration; UCX reads it once, when a backend is created."""
    ports = [f"{port.parts[-3]}:{port.name}" for port in Path("/sys/class/infiniband").glob("*/ports/*")]
    present = [name for _, name in socket.if_nameindex()] + ports
    for wanted in interfaces:
        if wanted != "all" and not any(fnmatchcase(name, wanted) for name in present):
            raise FabricError(f"no network device {wanted!r} here, only {', '.join(present)}", interface=wanted)
    with _environment:
        before = os.environ.get("UCX_NET_DEVICES")
        os.environ["UCX_NET_DEVICES"] = ",".join(interfaces)
        try:
            yield
        finally:
            if before is None:
                del os.environ["UCX_NET_DEVICES"]
            else:
                os.environ["UCX_NET_DEVICES"] = before


@dataclass
class _Fault:
    operation: str
    agent: str | None
    error: FabricError | None
    times: int


class MemoryNetwork:
    """The agents of one process that may meet, and the faults that befall them.

    Operations that can fail: ``register``, ``connect``, ``prepare``, ``post``, ``done``, ``notify`` (raise the error),
    ``copy``, ``deliver`` (without an error: the bytes, or the message, are lost in silence).
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._agents: dict[str, MemoryFabric] = {}
        self._frozen: set[str] = set()
        self._faults: list[_Fault] = []

    def inject(
        self, operation: str, error: FabricError | None = None, *, agent: str | None = None, times: int = 1
    ) -> None:
        """Let the next ``times`` calls of the operation, by that agent or by any, fail."""
        self._faults.append(_Fault(operation, agent, error, times))

    def freeze(self, agent: str) -> None:
        """Stop an agent, as SIGSTOP does: writes posted by it or to it stay in flight."""
        self._frozen.add(agent)

    def thaw(self, agent: str) -> None:
        """Let it go on: the bytes of all writes in flight land, even of those that everybody has given up."""
        with self._lock:
            self._frozen.discard(agent)
            for member in self._agents.values():
                for write in tuple(member._writes):
                    if isinstance(write, _MemoryWrite) and write.state == "in_flight":
                        write._land()

    def _fails(self, operation: str, agent: str) -> bool:
        """Whether a fault is due now; raises its error if it has one."""
        with self._lock:
            for fault in self._faults:
                if fault.operation == operation and fault.agent in (None, agent) and fault.times > 0:
                    fault.times -= 1
                    if fault.error:
                        raise fault.error
                    return True
        return False


class MemoryFabric(Fabric):
    """A fabric within one process, for tests and dry runs: checks what NIXL checks, and copies host memory."""

    def __init__(self, name: str, network: MemoryNetwork) -> None:
        super().__init__(name)
        self._network = network
        self._token = uuid.uuid4().hex
        self._inbox: list[tuple[str, bytes]] = []
        self._peers: dict[str, tuple[str, list[Region]]] = {}
        network._agents[self._token] = self

    def _register(self, regions: Sequence[Region]) -> Callable[[], None]:
        self._network._fails("register", self.name)
        if foreign := [region for region in regions if region.memory != "DRAM"]:
            raise RegistrationFailed(f"agent {self.name!r}: {foreign[0]} is not host memory; {REGISTRATION_HINT}")
        return lambda: None

    def _export(self) -> bytes:
        regions = [(region.address, region.nbytes) for region in self._own()]
        return json.dumps({"token": self._token, "regions": regions}).encode()

    def _import(self, name: str, blob: bytes) -> None:
        self._network._fails("connect", self.name)
        known = json.loads(blob)
        self._peers[name] = (known["token"], [Region(*pair) for pair in known["regions"]])

    def _forget(self, name: str) -> None:
        del self._peers[name]

    def _prepare(self, remote: str, source: Descriptors, destination: Descriptors) -> Write:
        self._network._fails("prepare", self.name)
        for side, regions in ((source, self._own()), (destination, self._peers[remote][1])):
            inside = np.zeros(len(side.addresses), dtype=bool)
            for region in regions:
                ends = side.addresses + side.nbytes
                inside |= (side.addresses >= region.address) & (ends <= region.address + region.nbytes)
            if side.memory != "DRAM" or not inside.all():
                raise self._error(REMEDIES["nixlNotFoundError"], cause="nixlNotFoundError")
        return _MemoryWrite(self, remote, source, destination)

    def _send(self, remote: str, message: bytes) -> None:
        self._network._fails("notify", self.name)
        target = self._peer(remote)
        if not self._network._fails("deliver", self.name):
            target._inbox.append((self.name, message))

    def _drain(self) -> list[tuple[str, bytes]]:
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


class _MemoryWrite(Write):
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
        """Nothing is held."""
