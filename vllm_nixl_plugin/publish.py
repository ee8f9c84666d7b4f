"""Plans on their way from the workers to the trainer: started everywhere, polled, read in pieces, each plan once."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from vllm_nixl_plugin import errors
from vllm_nixl_plugin.engine import Engine
from vllm_nixl_plugin.wire import PlannedWorker

FIRST_POLL_S = 0.005
SLOWEST_POLL_S = 0.2


async def make_plans(
    engine: Engine, digest: str, manifest: bytes, timeout_s: float
) -> tuple[tuple[PlannedWorker, ...], dict[str, bytes]]:
    """The plan of every worker for a manifest (JSON) with this digest: encoded, by digest.

    Errors: PlanRefused of the first worker that refuses, DeadlineExceeded.
    """
    deadline, pause_s = time.monotonic() + timeout_s, FIRST_POLL_S
    await engine.call_all("plan_start", {"digest": digest, "manifest": manifest})
    while True:
        answers = await engine.call_all("plan_poll", {"digest": digest})
        if all(a["result"] is not None for a in answers):
            break
        if time.monotonic() > deadline:
            raise errors.DeadlineExceeded(f"planning took more than {timeout_s:.0f} s; it goes on: ask again")
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, SLOWEST_POLL_S)
    workers = tuple(
        PlannedWorker(worker=a["worker"], plan=a["result"]["plan"], incarnation=a["incarnation"]) for a in answers
    )
    return workers, await _read(engine, {a["result"]["plan"]: a["result"]["nbytes"] for a in answers}, workers)


async def summaries(engine: Engine, plan: str | None) -> list[dict[str, Any]]:
    """The plan with this digest, or that used last, of every worker that holds it, for people. Errors: UnknownPlan."""
    answers = await engine.call_all("plan_summary", {"plan": plan}, check=False)
    found = [a["result"] | {"worker": a["worker"]} for a in answers if a["ok"]]
    if not found:
        await engine.call_all("plan_summary", {"plan": plan})
    return found


async def metadata(engine: Engine) -> list[dict[str, Any]]:
    """What every worker says of itself. No address, no key."""
    answers = await engine.call_all("describe")
    return [
        {"worker": a["worker"], "incarnation": a["incarnation"], "state": a["state"], **a["result"]["server"]}
        for a in answers
    ]


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
