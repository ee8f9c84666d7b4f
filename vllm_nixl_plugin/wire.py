"""What travels between trainer and servers: the schema and its caps. The binary forms of it are in `encoding`.

Shared by both packages; pydantic and the standard library only. Everything is frozen, versioned and checked on entry;
nothing is ever pickled. docs/protocol.md describes the same in prose.

The *layout* half of a plan (`WorkerPlan`) has no address in it, is the same for all replicas, and has a digest. The
*binding* half (`Binding`) says where the destinations of one worker lie now.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm_nixl_plugin.layout import Copy

PROTOCOL_VERSION = 1
PREFIX = "/nixl/v1"
MAX_WEIGHTS = 1_000_000
MAX_COPIES = 8_000_000
MAX_DIMS = 16
MAX_NAME = 1024
MAX_WRITERS = 4096
MAX_BODY_BYTES = 1 << 30
MAX_MANIFEST_BYTES = 256 << 20
MAX_HEAD_BYTES = 512 << 20
MAX_WORKERS = 100_000
CATCH_UP = "a catch-up from "
"""How the holder of an update begins by which a server reads the weights of another; trainers wait for its end."""
MAX_GROUPS = 1_000_000
MAX_CONTACT_BYTES = 64 << 10

Mode = Literal["shadow", "in_place", "streamed"]
PauseMode = Literal["keep", "wait", "abort"]
KvCachePolicy = Literal["recompute", "keep"]
Home = Literal["live", "shadow", "source"]

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
NBytes = Annotated[int, Field(ge=0, lt=1 << 63)]
Digest = Annotated[str, Field(max_length=64)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Record(BaseModel):
    """A frozen record that refuses fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class WeightSpec(Record):
    """One tensor as the trainer offers it: checkpoint name, global shape, torch dtype name (``"bfloat16"``)."""

    name: Name
    shape: tuple[Annotated[int, Field(ge=0, lt=1 << 48)], ...] = Field(max_length=MAX_DIMS)
    dtype: Annotated[str, Field(pattern=r"^[a-z0-9_]{3,32}$")]


class Manifest(Record):
    """All tensors that a push will offer. ``partial``: weights that are absent keep their present values."""

    weights: tuple[WeightSpec, ...] = Field(max_length=MAX_WEIGHTS)
    partial: bool = False

    def digest(self) -> str:
        """Names the manifest among those that a worker has planned for."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


class Step(Record):
    """One element-wise operation of a program: an aten op name, its scalar arguments, the dtype of its result."""

    op: Annotated[str, Field(pattern=r"^[a-z_]{2,32}$")]
    args: tuple[int | float | str, ...] = Field(default=(), max_length=8)
    dtype: Annotated[str, Field(pattern=r"^[a-z0-9_]{3,32}$")]


class Destination(Record):
    """One storage of a worker, in load layout. ``names``: every parameter or buffer path that lies in it.

    ``home``: ``live`` (kernels read these very bytes), ``shadow`` (vLLM's own processing runs from it), or ``source``
    (a whole checkpoint tensor that vLLM's loader reads at install).
    """

    names: tuple[Name, ...] = Field(min_length=1, max_length=100_000)
    nbytes: NBytes
    home: Home


class Group(Record):
    """Destinations that are installed together in mode ``streamed``; the first group first.

    ``window_nbytes``: what they take of the window, ``working_nbytes``: what it takes beside it to process them.
    """

    destinations: tuple[int, ...]
    window_nbytes: NBytes
    working_nbytes: NBytes


class PlannedCopy(Record):
    """Elements of one weight that go to one destination: indices into the lists of the plan, geometry, program.

    ``copy.src`` addresses the weight as a contiguous row-major tensor of its global shape and the manifest's dtype,
    ``copy.dst`` the destination's storage; both in bytes. ``program`` is applied to each element on the way.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    weight: int
    destination: int
    copy_: Copy
    program: tuple[Step, ...] = ()


class WorkerPlan(Record):
    """What one worker needs for one manifest. No address, module or handle in it."""

    weights: tuple[WeightSpec, ...]
    destinations: tuple[Destination, ...]
    copies: tuple[PlannedCopy, ...]
    unused: tuple[Name, ...] = ()
    fallback: tuple[Name, ...] = ()
    stale: tuple[Name, ...] = ()
    """Models of the worker that the manifest has no weights for, and that keep theirs: ``draft``."""
    groups: tuple[Group, ...] = ()
    """For mode ``streamed``: each destination is in one. None in the plan of a partial push."""

    @property
    def nbytes(self) -> int:
        """Bytes that have to arrive at the worker in one push."""
        return sum(c.copy_.dst_nbytes for c in self.copies)

    def group_nbytes(self) -> list[int]:
        """Bytes that have to arrive for each group."""
        found = [0] * len(self.groups)
        number = {i: of for of, group in enumerate(self.groups) for i in group.destinations}
        for c in self.copies if self.groups else ():
            found[number[c.destination]] += c.copy_.dst_nbytes
        return found


class Window(Record):
    """The memory that the groups of a plan pass through in mode ``streamed``.

    ``after``: for each group, the last one whose place it takes: it may be written when that has been handed back
    (`Credit`), or at once (-1). ``budget_nbytes``: what the server allows, None where it does not say.
    """

    nbytes: NBytes
    working_nbytes: NBytes
    budget_nbytes: NBytes | None
    after: tuple[Annotated[int, Field(ge=-1)], ...] = Field(max_length=MAX_GROUPS)


class Binding(Record):
    """Where the destinations of one worker lie for one mode: absolute addresses, in the order of the plan."""

    worker: int
    incarnation: str
    agent: Name
    agent_metadata: bytes
    memory: Literal["DRAM", "VRAM"]
    device_id: int
    addresses: tuple[int, ...]
    memories: tuple[int, ...] = ()
    """Indices of destinations whose memory is of the other kind than ``memory`` (host shadows of a GPU worker)."""
    window: Window | None = None
    """In mode ``streamed``: several destinations have the same address then, one after the other."""

    def digest(self) -> str:
        """Names the binding: another one after every restart, fence or move of memory."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


class BeginRequest(Record):
    """Open an update. ``plans``: the digest of the plan of each worker, by worker index."""

    plans: tuple[Digest, ...] = Field(min_length=1, max_length=MAX_WORKERS)
    version: Annotated[str, Field(min_length=1, max_length=256)]
    mode: Mode = "shadow"
    lease_s: Seconds = 60.0
    holder: Annotated[str, Field(max_length=256)] = ""
    known_bindings: tuple[Digest, ...] = Field(default=(), max_length=MAX_WORKERS)
    """Digests of bindings the caller still holds: a worker whose binding is among them does not send it again."""
    pause: PauseMode = "keep"
    """How generation stops in modes ``in_place`` and ``streamed``, which stop it here and not at the commit; within
    ``lease_s``."""
    writers: tuple[Annotated[str, Field(max_length=256)], ...] = Field(default=(), max_length=MAX_WRITERS)
    """All processes that will write (`processes.this_process`): an ``in_place`` update that they leave undrained keeps
    others out until it has been called drained, or all of them are gone."""
    contacts: tuple[Annotated[bytes, Field(max_length=MAX_CONTACT_BYTES)], ...] = Field(
        default=(), max_length=MAX_WRITERS
    )
    """In mode ``streamed``: how the agent of each writer is reached (`Fabric.contact`), for the credits."""


class CommitRequest(Record):
    """Install what has arrived. The caller states by this that all its handles are done (the update is drained); in
    mode ``streamed`` it says it before its first write, and the server installs what lands group by group.

    ``timeout_s`` bounds the wait for the last notifications and for the pause. ``pause`` has no meaning in mode
    ``in_place``, nor for a torn engine: generation stands still already.
    """

    kv_cache: KvCachePolicy = "recompute"
    pause: PauseMode = "keep"
    timeout_s: Seconds = 600.0


class SumsRequest(Record):
    """What was sent: the checksum (`checksums`) of each destination of each worker, in order, by all writers together.

    ``timeout_s`` bounds the wait for the last notifications.
    """

    sums: tuple[tuple[Annotated[int, Field(ge=0, lt=1 << 64)], ...], ...] = Field(max_length=MAX_WORKERS)
    timeout_s: Seconds = 600.0


class PlannedWorker(Record):
    """Which of the plans in an answer is the one of this worker. Their order is the order of ``BeginRequest.plans``."""

    worker: int
    plan: str
    incarnation: str


class BoundWorker(Record):
    """``binding`` is None when its ``digest`` was among the ``known_bindings`` of the request."""

    worker: int
    incarnation: str
    digest: str
    binding: Binding | None = None


class UpdateOpened(Record):
    """The answer to begin. The caller may write to the bindings from now on, until it commits or aborts."""

    update_id: str
    epoch: int
    version: str
    mode: Mode
    lease_s: float
    workers: tuple[BoundWorker, ...]


UpdateState = Literal["open", "committing", "done", "aborted", "expired", "failed", "torn"]


class UpdateStatus(Record):
    """How an update stands. ``nbytes`` and ``arrived_nbytes`` are those of the first worker.

    ``open`` and ``committing`` are on their way, the others final: ``done`` (serves), ``aborted`` (by the caller),
    ``expired`` (another update took over), ``failed`` (the old weights serve on; see ``error``), ``torn`` (see there).
    """

    update_id: str
    version: str
    mode: Mode
    state: UpdateState
    step: str | None = None
    nbytes: int = 0
    arrived_nbytes: int = 0
    error: dict[str, Any] | None = None
    """The inner object of an error on the wire: ``code``, ``message``, ``details``."""
    timings: dict[str, float] = Field(default_factory=dict)
    """Seconds: ``wait_s``, ``pause_s``, ``install_s``, ``resume_s``, ``total_s``, and each ``install.<stage>``."""


class LeaseStatus(Record):
    """Who may write to the server until when."""

    update_id: str
    holder: str
    expires_in_s: float
    """Negative when the lease is over; the update stays good until another begins."""


class ServerStatus(Record):
    """How a server stands, as its first worker sees it."""

    protocol: int = PROTOCOL_VERSION
    plugin: str
    state: Literal["serving", "receiving", "installing", "torn"]
    ready: bool
    reason: str
    """Why the server is not ready; empty when it is."""
    torn: bool
    held: bool
    """Generation was paused by somebody else than an update: a commit does not resume it."""
    weight_version: str
    epoch: int
    incarnation: str
    server: dict[str, Any] = Field(default_factory=dict)
    """What the first worker says of itself: model, dtype, ranks, sizes, versions."""
    workers: tuple[int, ...] = ()
    lease: LeaseStatus | None = None
    update: UpdateStatus | None = None
    last: UpdateStatus | None = None


class WorkerFingerprint(Record):
    """What one worker's engine can read: ``digest`` over the sorted lines ``path<tab>checksum<newline>``.

    ``paths``: those lines by path, where they were asked for; shapes, dtypes and checksums, no weight.
    """

    worker: int
    incarnation: str
    weight_version: str
    n_paths: int
    digest: str
    paths: dict[str, str] | None = None


class Checkpoint(Record):
    """The weights of the checkpoint that a server started from, as its loader saw them; empty where it had none."""

    weights: tuple[WeightSpec, ...]


class Fingerprint(Record):
    """What the workers that were asked can read. ``digest``: of their digests, in order."""

    weight_version: str
    digest: str
    workers: tuple[WorkerFingerprint, ...]


class OfferedWorker(Record):
    """What one worker of a server lets its peers read: where what serves lies, in the layout that ``plan`` describes.

    ``server``: what the worker says of itself; a peer has to say the same of what decides about its weights.
    """

    worker: int
    plan: str
    server: dict[str, Any]
    binding: Binding


class Offer(Record):
    """What a server lets its peers read. ``token``: another one after anything that could have changed a byte of it."""

    weight_version: str
    token: Digest
    manifest: Manifest
    workers: tuple[OfferedWorker, ...] = Field(max_length=MAX_WORKERS)


class CatchUpRequest(Record):
    """Bring this server to the weights of the server at ``peer``, a base URL."""

    peer: Annotated[str, Field(pattern=r"^https?://", max_length=2048)]
    timeout_s: Seconds = 600.0


class CatchUpStatus(Record):
    """How a catch-up stands; ``failed`` has an ``error`` (its inner object), ``done`` what was read, in which seconds.

    ``differences``: paths on which the fingerprints of the two servers differ, with both checksums; the first of them.
    """

    state: Literal["running", "done", "failed"]
    peer: str
    weight_version: str = ""
    step: str = ""
    nbytes: int = 0
    timings: dict[str, float] = Field(default_factory=dict)
    differences: tuple[str, ...] = ()
    error: dict[str, Any] | None = None


class Landed(Record):
    """A notification: so many bytes of update ``update_id`` have been written by this agent, as its ``sequence``-th."""

    update_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    sequence: Annotated[int, Field(ge=0, lt=1 << 32)]
    nbytes: NBytes
    plan: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    """The first 16 hexadecimal digits of the plan's digest."""
    group: Annotated[int, Field(ge=0, lt=MAX_GROUPS)] | None = None
    """In mode ``streamed``: the group of the plan that the bytes belong to."""


class Credit(Record):
    """A notification of a worker to every writer: the window has room again where ``group`` and all before it lay."""

    update_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    group: Annotated[int, Field(ge=0, lt=MAX_GROUPS)]
    plan: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
