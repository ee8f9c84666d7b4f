"""The binary forms of what travels: notifications, a plan, several plans in one answer. See also docs/protocol.md.

Shared by both packages. Little-endian, versioned, canonical (equal plans give equal bytes, so that their hash names
them); every decoder refuses bytes that are cut, altered, over a cap, or name what is not there, and nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import zlib
from collections.abc import Iterator
from operator import mul
from typing import Any

from vllm_nixl_plugin.errors import InvalidRequest
from vllm_nixl_plugin.layout import Copy
from vllm_nixl_plugin.wire import (
    MAX_COPIES,
    MAX_DIMS,
    MAX_GROUPS,
    MAX_HEAD_BYTES,
    PROTOCOL_VERSION,
    Credit,
    Group,
    Landed,
    PlannedCopy,
    PlannedWorker,
    Step,
    WorkerPlan,
)

_UNREADABLE = (zlib.error, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What foreign bytes make of JSON, zlib and pydantic."""

_LANDED = struct.Struct("<4sB16sIQ8s")
_LANDED_GROUP = struct.Struct("<4sB16sIQ8sI")
_CREDIT = struct.Struct("<4sB16sI8s")


def encode_landed(message: Landed) -> bytes:
    """The bytes of a NIXL notification; four more in mode ``streamed``."""
    fields = (
        PROTOCOL_VERSION, bytes.fromhex(message.update_id), message.sequence, message.nbytes,
        bytes.fromhex(message.plan),
    )  # fmt: skip
    if message.group is None:
        return _LANDED.pack(b"NXLD", *fields)
    return _LANDED_GROUP.pack(b"NXLG", *fields, message.group)


def decode_landed(data: bytes) -> Landed:
    """Errors: InvalidRequest when the bytes are not a notification of this version."""
    form = {_LANDED.size: _LANDED, _LANDED_GROUP.size: _LANDED_GROUP}.get(len(data))
    if form is None:
        raise InvalidRequest(f"a notification of {len(data)} bytes; expected {_LANDED.size} or {_LANDED_GROUP.size}")
    magic, version, update, sequence, nbytes, plan, *group = form.unpack(data)
    if magic != (b"NXLG" if group else b"NXLD") or version != PROTOCOL_VERSION:
        raise InvalidRequest(f"a notification of kind {magic!r} version {version}; expected {PROTOCOL_VERSION}")
    if nbytes >= 1 << 63:
        raise InvalidRequest("a notification of more bytes than there can be")
    if group and group[0] >= MAX_GROUPS:
        raise InvalidRequest("a notification for a group that no plan can have")
    return Landed(
        update_id=update.hex(), sequence=sequence, nbytes=nbytes, plan=plan.hex(), group=group[0] if group else None
    )


def encode_credit(message: Credit) -> bytes:
    """The bytes of the notification with which a worker hands back a part of its window."""
    return _CREDIT.pack(
        b"NXCR", PROTOCOL_VERSION, bytes.fromhex(message.update_id), message.group, bytes.fromhex(message.plan)
    )


def decode_credit(data: bytes) -> Credit:
    """Errors: InvalidRequest when the bytes are not a credit of this version."""
    if len(data) != _CREDIT.size:
        raise InvalidRequest(f"a credit of {len(data)} bytes; expected {_CREDIT.size}")
    magic, version, update, group, plan = _CREDIT.unpack(data)
    if magic != b"NXCR" or version != PROTOCOL_VERSION or group >= MAX_GROUPS:
        raise InvalidRequest(f"a credit of kind {magic!r} version {version}; expected {PROTOCOL_VERSION}")
    return Credit(update_id=update.hex(), group=group, plan=plan.hex())


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
    if plan.groups:
        head["groups"] = [[list(g.destinations), g.window_nbytes, g.working_nbytes] for g in plan.groups]
    packed = zlib.compress(json.dumps(head, separators=(",", ":"), sort_keys=True).encode(), 1)
    body = struct.pack(f"<{len(numbers)}q", *numbers)
    return _PLAN_HEAD.pack(b"NXPL", PROTOCOL_VERSION, len(packed), len(plan.copies)) + packed + body


def plan_digest(plan: WorkerPlan) -> str:
    """Names the plan: the hash of its encoded form."""
    return hashlib.sha256(encode_plan(plan)).hexdigest()


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
    try:
        head = json.loads(_inflated(data[_PLAN_HEAD.size : start]))
        programs = [tuple(Step.model_validate(s) for s in program) for program in head.pop("programs")]
        groups = [
            Group(destinations=tuple(of), window_nbytes=window, working_nbytes=working)
            for of, window, working in head.pop("groups", ())
        ]
        shell = WorkerPlan.model_validate(head | {"copies": (), "groups": groups})
    except _UNREADABLE as error:
        raise InvalidRequest(f"the head of a plan cannot be read: {type(error).__name__}") from None
    if groups and sorted(i for g in groups for i in g.destinations) != list(range(len(shell.destinations))):
        raise InvalidRequest("the groups of a plan do not have each of its destinations once")
    numbers = struct.unpack_from(f"<{(len(data) - start) // 8}q", data, start)
    copies = tuple(_copies(shell, programs, n_copies, numbers))
    return shell.model_copy(update={"copies": copies})


def _inflated(packed: bytes) -> bytes:
    inflate = zlib.decompressobj()
    text = inflate.decompress(packed, MAX_HEAD_BYTES)
    if not inflate.eof or inflate.unused_data:
        raise ValueError("cut short, over the cap, or with bytes behind")
    return text


def _copies(
    shell: WorkerPlan, programs: list[tuple[Step, ...]], n_copies: int, numbers: tuple[int, ...]
) -> Iterator[PlannedCopy]:
    """Every copy reads inside its weight and writes inside its destination."""
    sizes = [math.prod(weight.shape) * _itemsize(weight.dtype) for weight in shell.weights]
    at = 0
    for number in range(n_copies):
        if at + _COPY_FIXED > len(numbers):
            raise InvalidRequest("the copies of a plan are cut short")
        weight, destination, program, src_size, dst_size, dims, src, dst = numbers[at : at + _COPY_FIXED]
        at += _COPY_FIXED
        if not (0 <= weight < len(shell.weights) and 0 <= destination < len(shell.destinations)
                and 0 <= program < len(programs) and 0 <= dims <= MAX_DIMS and at + 3 * dims <= len(numbers)
                and 0 < src_size <= 16 and 0 < dst_size <= 16):
            raise InvalidRequest(f"copy {number} of a plan names something that is not there")
        box = numbers[at : at + 3 * dims]
        at += 3 * dims
        shape, src_strides = box[:dims], box[dims : 2 * dims]
        dst_strides = box[2 * dims :]
        if (dims and min(box) < 0) or src < 0 or dst < 0 or (
            0 not in shape
            and (_end(shape, src, src_strides, src_size) > sizes[weight]
                 or _end(shape, dst, dst_strides, dst_size) > shell.destinations[destination].nbytes)
        ):  # fmt: skip
            raise InvalidRequest(f"copy {number} of a plan leaves weight {weight} or destination {destination}")
        geometry = Copy(shape, src, src_strides, src_size, dst, dst_strides, dst_size)
        yield PlannedCopy(weight=weight, destination=destination, copy_=geometry, program=programs[program])
    if at != len(numbers):
        raise InvalidRequest("a plan has bytes behind its last copy")


def _end(shape: tuple[int, ...], offset: int, strides: tuple[int, ...], itemsize: int) -> int:
    """Where the last byte of the elements ends."""
    reach: int = sum(map(mul, shape, strides))
    return offset + reach - sum(strides) + itemsize


def _itemsize(dtype: str) -> int:
    """Bytes of an element, by the first number in its name: ``bfloat16``, ``float8_e4m3fn``, ``int64``, ``bool``."""
    bits = re.search(r"\d+", dtype)
    return max(int(bits.group()) // 8, 1) if bits else 1


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
    except _UNREADABLE as error:
        raise InvalidRequest(f"the head of an answer with plans cannot be read: {type(error).__name__}") from None
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
