"""The fabric: registered memory, one-sided WRITEs and notifications. The seam that both sides see.

Target (a vLLM worker):      `register`, publish `metadata()`, read `notifications()`.
Initiator (a trainer rank):  `register`, `connect(metadata)`, `prepare_write` once, then per update `post(message)` and
                             `wait_all`; at the end `release` the writes, `disconnect`, `close`.
Reader (a worker catching up): the same with `prepare_read`; the owner of the memory need not do anything, nor hears.

`agent.NixlAgent` is the real fabric and `memory_fabric.MemoryFabric` a fake that copies bytes within one process. What
both keep:

* Every post carries a message; NIXL would send the previous one again. The target sees it once, after the bytes. NIXL
  sends it from `Write.done`, so a write that nobody waits for lands in silence.
* A write in flight cannot be released, nor can the memory and the connection under a prepared write: giving up does not
  stop the bytes. The way out is `close`, which destroys the agent.
* The target needs nothing from the initiator: its notifications arrive without `connect`.
* A handle (`Registration`, `Write`) belongs to this process; descriptors and metadata may be published.
* Methods may be called from several threads; one write belongs to one thread at a time.
"""

from __future__ import annotations

import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from vllm_nixl_plugin.errors import DeadlineExceeded, FabricError, RegistrationFailed

Memory = Literal["DRAM", "VRAM"]

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
            if any(write.local.overlaps(region) for region in self.regions):
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

    @property
    def local(self) -> Descriptors:
        """The side that is memory of this process."""
        return self.source

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


class Read(Write):
    """A prepared READ, with the life of a write: ``source`` is memory at ``remote``, ``destination`` is ours."""

    @property
    def local(self) -> Descriptors:
        """The side that is memory of this process."""
        return self.destination

    def __str__(self) -> str:
        return f"the {self.state} read of {self.nbytes:,} bytes by {self._agent.name!r} from {self.remote!r}"

    def post(self, message: bytes = b"") -> None:
        """Start the transfer; nobody is told. Leave the destination alone until `done`."""
        if message:
            raise FabricError(f"{self}: a read carries no message")
        if self.state not in ("prepared", "done"):
            raise FabricError(f"{self} cannot be posted; wait for it, or prepare it again if it failed or was released")
        self.state = "in_flight"
        self._advance(lambda: self._start(b""))


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
        return self._framed(self._export())

    def contact(self) -> bytes:
        """What another agent has to `connect` with in order to `notify` this one; it reaches no memory by that."""
        self._require_open()
        return self._framed(self._export_contact())

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
        self._require_pairs(remote, source, destination)
        write = self._prepare(remote, source, destination)
        self._writes.add(write)
        return write

    def prepare_read(self, remote: str, source: Descriptors, destination: Descriptors) -> Read:
        """Pair range by range the memory to read at ``remote`` with the memory to write here."""
        self._require_pairs(remote, source, destination)
        read = self._prepare_read(remote, source, destination)
        self._writes.add(read)
        return read

    def _require_pairs(self, remote: str, source: Descriptors, destination: Descriptors) -> None:
        self._require_open(remote)
        shapes = {array.shape for side in (source, destination) for array in (side.addresses, side.nbytes)}
        if len(shapes) != 1 or source.nbytes.ndim != 1 or not source.nbytes.size:
            raise self._error(f"a write needs four arrays of one length above 0, not {sorted(shapes)}")
        if not np.array_equal(source.nbytes, destination.nbytes) or source.nbytes.min() <= 0:
            raise self._error(f"the sizes of a write to {remote!r} must be the same on both sides, and above 0")

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

    def _framed(self, exported: bytes) -> bytes:
        name = self.name.encode()
        body = len(name).to_bytes(2, "big") + name + exported
        return zlib.crc32(body).to_bytes(4, "big") + body

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
    def _export_contact(self) -> bytes: ...

    @abstractmethod
    def _import(self, name: str, blob: bytes) -> None: ...

    @abstractmethod
    def _forget(self, name: str) -> None: ...

    @abstractmethod
    def _prepare(self, remote: str, source: Descriptors, destination: Descriptors) -> Write: ...

    @abstractmethod
    def _prepare_read(self, remote: str, source: Descriptors, destination: Descriptors) -> Read: ...

    @abstractmethod
    def _send(self, remote: str, message: bytes) -> None: ...

    @abstractmethod
    def _drain(self) -> list[tuple[str, bytes]]: ...

    @abstractmethod
    def _destroy(self) -> None: ...
