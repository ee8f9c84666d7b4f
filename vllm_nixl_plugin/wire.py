"""What travels between trainer and servers: the schema, its caps, and the compact binary form of a plan.

Shared by both packages; pydantic and the standard library only. Everything is frozen, versioned and checked on entry;
nothing is ever pickled. docs/protocol.md describes the same in prose.

The *layout* half of a plan (`WorkerPlan`) has no address in it, is the same for all replicas, and has a digest. The
*binding* half (`Binding`) says where the destinations of one worker lie now.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm_nixl_plugin.errors import InvalidRequest
from vllm_nixl_plugin.layout import Copy

PROTOCOL_VERSION = 1
PREFIX = "/nixl/v1"
MAX_WEIGHTS = 1_000_000
MAX_COPIES = 8_000_000
MAX_DIMS = 16
MAX_NAME = 1024
MAX_WRITERS = 4096
MAX_BODY_BYTES = 1 << 30

Mode = Literal["shadow", "in_place"]
PauseMode = Literal["keep", "wait", "abort"]
KvCachePolicy = Literal["recompute", "keep"]
Home = Literal["live", "shadow", "source"]

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
NBytes = Annotated[int, Field(ge=0, lt=1 << 63)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Record(BaseModel):
    """A frozen record that refuses fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class WeightSpec(Record):
    """One tensor as the trainer offers it: checkpoint name, global shape, torch dtype name (``"bfloat16"``)."""

    name: Name
    shape: tuple[Annotated[int, Field(ge=0)], ...] = Field(max_length=MAX_DIMS)
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

    def digest(self) -> str:
        """Names the plan: the hash of its encoded form."""
        return hashlib.sha256(encode_plan(self)).hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes that have to arrive at the worker in one push."""
        return sum(c.copy_.dst_nbytes for c in self.copies)


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

    def digest(self) -> str:
        """Names the binding: another one after every restart, fence or move of memory."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


class BeginRequest(Record):
    """Open an update. ``plans``: the digest of the plan of each worker, by worker index."""

    plans: tuple[str, ...] = Field(min_length=1, max_length=100_000)
    version: Annotated[str, Field(min_length=1, max_length=256)]
    mode: Mode = "shadow"
    lease_s: Seconds = 60.0
    holder: Annotated[str, Field(max_length=256)] = ""
    known_bindings: tuple[str, ...] = ()
    """Digests of bindings the caller still holds: a worker whose binding is among them does not send it again."""
    pause: PauseMode = "keep"
    """How generation stops in mode ``in_place``, which stops it here and not at the commit; within ``lease_s``."""
    writers: tuple[Annotated[str, Field(max_length=256)], ...] = Field(default=(), max_length=MAX_WRITERS)
    """All processes that will write (`processes.this_process`): an ``in_place`` update that they leave undrained keeps
    others out until it has been called drained, or all of them are gone."""


class CommitRequest(Record):
    """Install what has arrived. The caller states by this that all its handles are done (the update is drained).

    ``timeout_s`` bounds the wait for the last notifications and for the pause. ``pause`` has no meaning in mode
    ``in_place``, nor for a torn engine: generation stands still already.
    """

    kv_cache: KvCachePolicy = "recompute"
    pause: PauseMode = "keep"
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


class Landed(Record):
    """A notification: so many bytes of update ``update_id`` have been written by this agent, as its ``sequence``-th."""

    update_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    sequence: Annotated[int, Field(ge=0, lt=1 << 32)]
    nbytes: NBytes
    plan: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    """The first 16 hexadecimal digits of the plan's digest."""


_LANDED = struct.Struct("<4sB16sIQ8s")


def encode_landed(message: Landed) -> bytes:
    """The bytes of a NIXL notification."""
    return _LANDED.pack(
        b"NXLD", PROTOCOL_VERSION, bytes.fromhex(message.update_id), message.sequence, message.nbytes,
        bytes.fromhex(message.plan),
    )


def decode_landed(data: bytes) -> Landed:
    """Errors: InvalidRequest when the bytes are not a notification of this version."""
    if len(data) != _LANDED.size:
        raise InvalidRequest(f"a notification of {len(data)} bytes; expected {_LANDED.size}")
    magic, version, update, sequence, nbytes, plan = _LANDED.unpack(data)
    if magic != b"NXLD" or version != PROTOCOL_VERSION:
        raise InvalidRequest(f"a notification of kind {magic!r} version {version}; expected {PROTOCOL_VERSION}")
    return Landed(update_id=update.hex(), sequence=sequence, nbytes=nbytes, plan=plan.hex())


# The binary form of a plan: magic, version, lengths, a zlib-compressed JSON head (names, shapes, programs), then every
# copy as little-endian signed 64-bit numbers: weight, destination, program, source itemsize, destination itemsize,
# number of dims, source offset, destination offset, shape…, source strides…, destination strides….

_PLAN_HEAD = struct.Struct("<4sBIQ")
_COPY_FIXED = 8


def encode_plan(plan: WorkerPlan) -> bytes:
    """The canonical bytes of a plan: equal plans give equal bytes."""
    programs: dict[tuple[Step, ...], int] = {}
    numbers: list[int] = []
    for c in plan.copies:
        g = c.copy_
        numbers += (c.weight, c.destination, programs.setdefault(c.program, len(programs)), g.src_itemsize,
                    g.dst_itemsize, len(g.shape), g.src_offset, g.dst_offset, *g.shape, *g.src_strides, *g.dst_strides)
    head: dict[str, Any] = {
        "weights": [w.model_dump(mode="json") for w in plan.weights],
        "destinations": [d.model_dump(mode="json") for d in plan.destinations],
        "programs": [[s.model_dump(mode="json") for s in program] for program in programs],
        "unused": list(plan.unused),
        "fallback": list(plan.fallback),
    }
    if plan.stale:
        head["stale"] = list(plan.stale)
    packed = zlib.compress(json.dumps(head, separators=(",", ":"), sort_keys=True).encode(), 1)
    body = struct.pack(f"<{len(numbers)}q", *numbers)
    return _PLAN_HEAD.pack(b"NXPL", PROTOCOL_VERSION, len(packed), len(plan.copies)) + packed + body


def decode_plan(data: bytes) -> WorkerPlan:
    """Errors: InvalidRequest when bytes are cut, of another version, over a cap, or name things that are not there."""
    if len(data) < _PLAN_HEAD.size:
        raise InvalidRequest(f"a plan of {len(data)} bytes is cut short")
    magic, version, head_nbytes, n_copies = _PLAN_HEAD.unpack_from(data)
    if magic != b"NXPL" or version != PROTOCOL_VERSION:
        raise InvalidRequest(f"a plan of kind {magic!r} version {version}; expected version {PROTOCOL_VERSION}")
    start = _PLAN_HEAD.size + head_nbytes
    if n_copies > MAX_COPIES or start > len(data) or (len(data) - start) % 8:
        raise InvalidRequest(f"a plan of {n_copies} copies in {len(data)} bytes: over the cap, or cut short")
    inflate = zlib.decompressobj()
    try:
        text = inflate.decompress(data[_PLAN_HEAD.size : start], MAX_BODY_BYTES)
        head = json.loads(text)
        programs = [tuple(Step.model_validate(s) for s in program) for program in head.pop("programs")]
        shell = WorkerPlan.model_validate(head | {"copies": ()})
    except (zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"the head of a plan cannot be read: {error}") from None
    n = struct.unpack_from(f"<{(len(data) - start) // 8}q", data, start)
    copies: list[PlannedCopy] = []
    at = 0
    for _ in range(n_copies):
        if at + _COPY_FIXED > len(n):
            raise InvalidRequest("the copies of a plan are cut short")
        weight, destination, program, src_size, dst_size, dims, src, dst = n[at : at + _COPY_FIXED]
        at += _COPY_FIXED
        if not (0 <= weight < len(shell.weights) and 0 <= destination < len(shell.destinations)
                and 0 <= program < len(programs) and 0 <= dims <= MAX_DIMS and at + 3 * dims <= len(n)
                and 0 < src_size <= 16 and 0 < dst_size <= 16):
            raise InvalidRequest(f"copy {len(copies)} of a plan names something that is not there")
        shape, src_strides, dst_strides = (n[at + i * dims : at + (i + 1) * dims] for i in range(3))
        at += 3 * dims
        geometry = Copy(shape, src, src_strides, src_size, dst, dst_strides, dst_size)
        limit = shell.destinations[destination].nbytes
        if min(geometry.shape, default=1) < 0 or not _inside(geometry, limit):
            raise InvalidRequest(f"copy {len(copies)} of a plan leaves destination {destination} of {limit} bytes")
        copies.append(PlannedCopy(weight=weight, destination=destination, copy_=geometry, program=programs[program]))
    if at != len(n):
        raise InvalidRequest("a plan has bytes behind its last copy")
    return shell.model_copy(update={"copies": tuple(copies)})


def _inside(copy: Copy, nbytes: int) -> bool:
    low = high = copy.dst_offset
    for extent, stride in zip(copy.shape, copy.dst_strides, strict=True):
        if stride < 0:
            return False
        high += max(extent - 1, 0) * stride
    return low >= 0 and (not copy.numel or high + copy.dst_itemsize <= nbytes)


# Several plans in one answer: magic, version, length of a JSON head, the head, the plans one after another. The head
# lists the plan of each worker and, in the order of the plans, [digest, number of bytes].

_PLANS_HEAD = struct.Struct("<4sBI")


def encode_plans(workers: tuple[PlannedWorker, ...], plans: dict[str, bytes]) -> bytes:
    """``plans``: the encoded plan of each digest. Plans that several workers share travel once."""
    sizes = [[digest, len(plans[digest])] for digest in plans]
    head = {"workers": [w.model_dump(mode="json") for w in workers], "plans": sizes}
    packed = json.dumps(head, separators=(",", ":"), sort_keys=True).encode()
    return _PLANS_HEAD.pack(b"NXPS", PROTOCOL_VERSION, len(packed)) + packed + b"".join(plans.values())


def decode_plans(data: bytes) -> tuple[tuple[PlannedWorker, ...], dict[str, WorkerPlan]]:
    """The plan of each worker by digest. Errors: InvalidRequest when bytes are cut, altered, or of another version."""
    if len(data) < _PLANS_HEAD.size:
        raise InvalidRequest(f"an answer of {len(data)} bytes with plans is cut short")
    magic, version, head_nbytes = _PLANS_HEAD.unpack_from(data)
    if magic != b"NXPS" or version != PROTOCOL_VERSION:
        raise InvalidRequest(f"plans of kind {magic!r} version {version}; expected version {PROTOCOL_VERSION}")
    at = _PLANS_HEAD.size + head_nbytes
    try:
        head = json.loads(data[_PLANS_HEAD.size : at])
        workers = tuple(PlannedWorker.model_validate(w) for w in head["workers"])
        sizes = [(str(digest), int(nbytes)) for digest, nbytes in head["plans"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"the head of an answer with plans cannot be read: {error}") from None
    plans: dict[str, WorkerPlan] = {}
    for digest, nbytes in sizes:
        blob = data[at : at + nbytes]
        if nbytes < 0 or len(blob) != nbytes or hashlib.sha256(blob).hexdigest() != digest:
            raise InvalidRequest(f"plan {digest} is cut short or altered")
        plans[digest] = decode_plan(blob)
        at += nbytes
    if at != len(data) or any(w.plan not in plans for w in workers):
        raise InvalidRequest("an answer with plans has bytes left over, or lacks the plan of a worker")
    return workers, plans
