"""What workers publish: their plans (started everywhere, polled, read in pieces, each plan once) and fingerprints.

An API process keeps what it has read, by digest: a manifest that all workers have planned for costs one call of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections import OrderedDict
from typing import Any

from vllm_nixl_plugin import errors
from vllm_nixl_plugin.engine import Answer, Engine, error_of
from vllm_nixl_plugin.wire import Checkpoint, Fingerprint, Manifest, PlannedWorker, WeightSpec, WorkerFingerprint

FIRST_POLL_S = 0.005
SLOWEST_POLL_S = 0.2
CACHE_NBYTES = 256 << 20


class Blobs:
    """Encoded plans by digest, those used last, up to ``capacity_nbytes`` together."""

    def __init__(self, capacity_nbytes: int = CACHE_NBYTES) -> None:
        self._capacity_nbytes = capacity_nbytes
        self._blobs: OrderedDict[str, bytes] = OrderedDict()

    def get(self, plan: str) -> bytes | None:
        """The plan, if it is kept."""
        if plan in self._blobs:
            self._blobs.move_to_end(plan)
        return self._blobs.get(plan)

    def put(self, plan: str, blob: bytes) -> None:
        """Keep a plan, and drop those not used for longest."""
        self._blobs[plan] = blob
        while sum(map(len, self._blobs.values())) > self._capacity_nbytes:
            self._blobs.popitem(last=False)


async def make_plans(
    engine: Engine, kept: Blobs, digest: str, manifest: bytes, timeout_s: float
) -> tuple[tuple[PlannedWorker, ...], dict[str, bytes]]:
    """The plan of every worker for a manifest (JSON) with this digest: encoded, by digest.

    Errors: PlanRefused of the first worker that refuses, DeadlineExceeded.
    """
    answers = await _planned(engine, digest, manifest, timeout_s)
    workers = tuple(
        PlannedWorker(worker=a["worker"], plan=a["result"]["plan"], incarnation=a["incarnation"]) for a in answers
    )
    sizes = {a["result"]["plan"]: a["result"]["nbytes"] for a in answers}
    blobs = {plan: blob for plan in sizes if (blob := kept.get(plan)) is not None}
    read = await _read(engine, sizes, tuple(w for w in workers if w.plan not in blobs))
    for plan, blob in read.items():
        kept.put(plan, blob)
    return workers, {plan: (blobs | read)[plan] for plan in sizes}


async def summaries(engine: Engine, plan: str | None, timeout_s: float = 600.0) -> list[dict[str, Any]]:
    """The plan with this digest of every worker that holds it, for people. Without a digest, that used last; before
    the first push, that of the server's own checkpoint, planned for it now.

    Errors: UnknownPlan, PlanRefused, DeadlineExceeded.
    """
    answers = await engine.call_all("plan_summary", {"plan": plan}, check=False)
    if plan is None and not any(a["ok"] for a in answers):
        manifest = Manifest(weights=(await checkpoint(engine)).weights)
        if manifest.weights:
            await _planned(engine, manifest.digest(), manifest.model_dump_json().encode(), timeout_s)
            answers = await engine.call_all("plan_summary", {"plan": plan}, check=False)
    found = [a["result"] | {"worker": a["worker"]} for a in answers if a["ok"]]
    if not found:
        raise error_of(answers[0])
    return found


async def fingerprint(engine: Engine, worker: int | None, *, paths: bool) -> Fingerprint:
    """Read everything that the engine can read, on one worker or all, a slice at a time: requests go on in between.

    Errors: InvalidRequest (no such worker), EngineAsleep, EngineTorn, LeaseHeld while weights change, StaleUpdate when
    they changed meanwhile.
    """
    if worker is not None and worker not in engine.workers:
        raise errors.InvalidRequest(f"there is no worker {worker}, only {list(engine.workers)}")
    left = list(engine.workers) if worker is None else [worker]
    lines: dict[int, dict[str, str]] = {w: {} for w in left}
    done: dict[int, WorkerFingerprint] = {}
    request = {"ticket": uuid.uuid4().hex, "paths": paths, "start": True}
    while left:
        for answer in await engine.call_all("fingerprint", request, only=left):
            if (got := answer["result"]) is None:
                continue
            lines[answer["worker"]].update(got["lines"])
            if got["digest"] is not None:
                done[answer["worker"]] = WorkerFingerprint(
                    worker=answer["worker"], incarnation=answer["incarnation"], n_paths=got["n_paths"],
                    weight_version=answer["state"]["weight_version"], digest=got["digest"],
                    paths=lines[answer["worker"]] if paths else None,
                )  # fmt: skip
        left = [w for w in left if w not in done]
        request["start"] = False
    workers = tuple(done[w] for w in sorted(done))
    digest = hashlib.sha256("".join(w.digest for w in workers).encode()).hexdigest()
    return Fingerprint(weight_version=workers[0].weight_version, digest=digest, workers=workers)


async def checkpoint(engine: Engine) -> Checkpoint:
    """The weights that the server started from. Ranks that load some experts or layers only know theirs."""
    weights: dict[str, WeightSpec] = {}
    for answer in await engine.call_all("checkpoint"):
        for name, shape, dtype in answer["result"]:
            weights.setdefault(name, WeightSpec(name=name, shape=tuple(shape), dtype=dtype))
    return Checkpoint(weights=tuple(weights.values()))


async def metadata(engine: Engine) -> list[dict[str, Any]]:
    """What every worker says of itself. No address, no key."""
    answers = await engine.call_all("describe")
    return [
        {"worker": a["worker"], "incarnation": a["incarnation"], "state": a["state"], **a["result"]["server"]}
        for a in answers
    ]


async def _planned(engine: Engine, digest: str, manifest: bytes, timeout_s: float) -> list[Answer]:
    """Have all workers plan, each in a thread of its own; what `plan_poll` answers when they have."""
    deadline, pause_s = time.monotonic() + timeout_s, FIRST_POLL_S
    answers = await engine.call_all("plan_start", {"digest": digest, "manifest": manifest})
    while any(a["result"] is None for a in answers):
        if time.monotonic() > deadline:
            raise errors.DeadlineExceeded(f"planning took more than {timeout_s:.0f} s; it goes on: ask again")
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, SLOWEST_POLL_S)
        answers = await engine.call_all("plan_poll", {"digest": digest})
    return answers


async def _read(engine: Engine, sizes: dict[str, int], workers: tuple[PlannedWorker, ...]) -> dict[str, bytes]:
    readers = {w.plan: w.worker for w in reversed(workers)}
    blobs: dict[str, bytearray] = {w.plan: bytearray() for w in workers}
    while unread := [plan for plan, blob in blobs.items() if len(blob) < sizes[plan]]:
        reads = {str(readers[plan]): [plan, len(blobs[plan])] for plan in unread}
        answers = await engine.call_all("plan_read", {"reads": reads}, only=[readers[plan] for plan in unread])
        pieces = {str(a["worker"]): a["result"] for a in answers if a["result"]}
        for plan in unread:
            piece = pieces.get(str(readers[plan]), {}).get("data")
            if not piece:
                raise errors.WorkerFailed(f"worker {readers[plan]} did not send all of plan {plan[:16]}")
            blobs[plan] += piece
    return {plan: bytes(blob) for plan, blob in blobs.items()}
