"""Updates as one API process drives them: begin, commit, abort, and the watchdog that takes over from a dead process.

    begin   grant (judge) -> begin (all: memory) -> [all but shadow: pause -> open (judge)] -> addresses
    commit  claim (judge) -> the steps of steps.py, in a task of its own
    abort   claim (judge) -> abort (all)

No state of an update is kept here besides running tasks: any API process answers for any update. What is said to the
judge goes through its socket, past the engine's loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine
from typing import Any

from vllm_nixl_plugin import __version__, errors, publish, settings
from vllm_nixl_plugin.catch_up import CatchUp
from vllm_nixl_plugin.engine import Engine
from vllm_nixl_plugin.opened import PAUSED_STEPS
from vllm_nixl_plugin.session import FIRST_VERSION
from vllm_nixl_plugin.steps import FIRST_POLL_S, RESUME_RETRY_S, SLOWEST_POLL_S, Steps
from vllm_nixl_plugin.wire import (
    BeginRequest,
    Binding,
    BoundWorker,
    CommitRequest,
    KvCachePolicy,
    LeaseStatus,
    PauseMode,
    ServerStatus,
    SumsRequest,
    UpdateOpened,
    UpdateStatus,
)

logger = logging.getLogger("vllm.nixl_plugin")


class Updates:
    """One per API process. `start` learns the workers and starts the watchdog; `stop` ends this process's tasks."""

    def __init__(self, engine: Engine, *, heartbeat_s: float = 2.0, watch_s: float = 2.0) -> None:
        self.engine = engine
        self.plans = publish.Blobs()
        self.reading = asyncio.Lock()  # one fingerprint at a time
        self.catch_up = CatchUp(self)
        self.claimant = uuid.uuid4().hex
        self._heartbeat_s = heartbeat_s
        self._watch_s = watch_s
        self._tasks: dict[asyncio.Task[dict[str, Any] | None], str] = {}
        self._watchdog: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Errors: WorkerFailed."""
        await self.engine.start()
        self._watchdog = asyncio.create_task(self._watch(), name="nixl-watchdog")
        self.catch_up.start()

    async def stop(self) -> None:
        """What is cut off here is finished by the watchdog of another process, or the next begin."""
        await self.catch_up.stop()
        tasks = [*self._tasks, *([self._watchdog] if self._watchdog else [])]
        for task in tasks:
            task.cancel()
        self.engine.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    # The verbs of the protocol.

    async def begin(self, request: BeginRequest) -> UpdateOpened:
        """Errors: LeaseHeld, UnknownPlan, EngineTorn, and whatever keeps a worker from giving memory."""
        workers = self.engine.workers
        if len(request.plans) != len(workers):
            raise errors.UnknownPlan(f"{len(request.plans)} plans for {len(workers)} workers: plan again, for each")
        update_id = uuid.uuid4().hex
        common = {
            "update_id": update_id, "holder": request.holder,
            "plans": {str(w): plan for w, plan in zip(workers, request.plans, strict=True)},
        }  # fmt: skip
        epoch = (await self.engine.ask_judge("grant", common | {"lease_s": request.lease_s}))["epoch"]
        details = {
            "epoch": epoch, "version": request.version, "mode": request.mode,
            "known_bindings": list(request.known_bindings), "writers": list(request.writers),
            "contacts": list(request.contacts),
        }  # fmt: skip
        steps = Steps(self.engine, update_id, 0, self._heartbeat_s)
        try:
            pause = None if request.mode == "shadow" else request.pause
            answers, paused, pausing = await steps.begin(common | details, pause)
            state = answers[0]["state"]
            if _inconsistent(answers):
                state = (await self.engine.call_all("mark_torn", {"update_id": update_id}))[0]["state"]
            bound = tuple(_bound(a["result"]) for a in answers)
            if pause is not None:
                await steps.stand_still(pause, request.lease_s, state, paused, pausing)
        except Exception as error:
            logger.warning("update %s cannot begin: %s", update_id, error)
            retracting = self._spawn(update_id, steps.retract())
            await asyncio.wait({retracting}, timeout=RESUME_RETRY_S * 4)
            raise
        return UpdateOpened(
            update_id=update_id, epoch=epoch, version=request.version, mode=request.mode,
            lease_s=request.lease_s, workers=bound,
        )  # fmt: skip

    async def renew(self, update_id: str, lease_s: float) -> dict[str, Any]:
        """Errors: StaleUpdate."""
        return dict(await self.engine.ask_judge("renew", {"update_id": update_id, "lease_s": lease_s}))

    async def verify(self, update_id: str, request: SumsRequest) -> dict[str, Any]:
        """Compare what has arrived at every worker with what was sent.

        Errors: Corrupted, naming what differs; StaleUpdate, DeadlineExceeded, InvalidRequest.
        """
        deadline, workers = time.monotonic() + request.timeout_s, self.engine.workers
        if len(request.sums) != len(workers):
            raise errors.InvalidRequest(f"checksums for {len(request.sums)} of {len(workers)} workers")
        told = {str(worker): list(sums) for worker, sums in zip(workers, request.sums, strict=True)}
        answers = await self.engine.call_all("verify", {"update_id": update_id, "sums": told})
        while not all(answer["result"]["done"] for answer in answers):
            if time.monotonic() >= deadline:
                raise errors.DeadlineExceeded(f"update {update_id} was not verified in time")
            await asyncio.sleep(FIRST_POLL_S)
            answers = await self.engine.call_all("verify", {"update_id": update_id})
        differing = {str(a["worker"]): a["result"]["differing"] for a in answers if a["result"]["differing"]}
        if differing:
            names = list(dict.fromkeys(name for found in differing.values() for name in found))
            raise errors.Corrupted(
                f"{len(names)} tensors are not what was sent: {', '.join(names[:5])}{', ...' if names[5:] else ''} "
                f"(workers {', '.join(differing)})", differing=differing,
            )  # fmt: skip
        return {"verified": update_id}

    async def commit(self, update_id: str, request: CommitRequest, wait_s: float = 0.0) -> UpdateStatus:
        """Start the commit, or join it, or tell how it ended; waits for that up to ``wait_s``. Errors: StaleUpdate."""
        claimed = await self._claim(update_id, "commit", request.model_dump())
        ended = claimed.get("over", {}).get("state")
        if ended in ("aborted", "expired"):
            raise errors.StaleUpdate(f"update {update_id} is {ended}: begin again", update_id=update_id, state=ended)
        if "claim" in claimed:
            self._go_on(update_id, claimed)
        return await self.update_status(update_id, wait_s)

    async def abort(self, update_id: str, *, drained: bool) -> UpdateStatus:
        """End an update that is not being installed. ``drained``: all handles of the caller are done.

        Errors: StaleUpdate, when it is done, being installed, or unknown.
        """
        claimed = await self._claim(update_id, "abort", {})
        if claimed.get("over", {}).get("state") == "done":
            raise errors.StaleUpdate(f"update {update_id} has been installed and cannot be aborted")
        args = {"update_id": update_id, "claim": claimed.get("claim", 0), "drained": drained}
        await self.engine.call_all("abort", args)
        return await self.update_status(update_id)

    async def update_status(self, update_id: str, wait_s: float = 0.0) -> UpdateStatus:
        """How an update stands; waits up to ``wait_s`` while it is being committed. Errors: StaleUpdate."""
        deadline, pause_s = time.monotonic() + wait_s, FIRST_POLL_S
        here = [task for task, of in self._tasks.items() if of == update_id]
        if here and wait_s > 0:
            ended, _ = await asyncio.wait(here, timeout=wait_s)
            for task in ended:
                if not task.cancelled() and not task.exception() and (record := task.result()):
                    return _update_status(record)
        while True:
            status = await self.engine.ask_judge("status")
            records = [*status["history"], *([status["update"]] if status["update"] else [])]
            found = [r for r in records if r["update_id"] == update_id]
            if not found:
                raise errors.StaleUpdate(f"update {update_id} is long over, or never was", update_id=update_id)
            if found[0]["state"] != "committing" or time.monotonic() >= deadline:
                return _update_status(found[0])
            await asyncio.sleep(min(pause_s, max(deadline - time.monotonic(), 0.0)))
            pause_s = min(pause_s * 2, SLOWEST_POLL_S)

    async def status(self) -> ServerStatus:
        """How the server stands, as its judge sees it."""
        status = await self.engine.ask_judge("status")
        reason = _not_ready(status) or self.catch_up.not_ready(status["weight_version"])
        lease, update, history = status["lease"], status["update"], status["history"]
        return ServerStatus(
            plugin=__version__, ready=not reason, reason=reason, workers=self.engine.workers,
            lease=lease and LeaseStatus(**{k: lease[k] for k in LeaseStatus.model_fields}),
            update=_update_status(update) if update else None,
            last=_update_status(history[-1]) if history else None,
            **{k: status[k] for k in ("state", "torn", "held", "weight_version", "epoch", "incarnation", "server")},
        )  # fmt: skip

    async def history(self) -> list[dict[str, Any]]:
        """The last updates that have ended since the judge was started, with their times."""
        kept = {*UpdateStatus.model_fields, "holder", "begun_at", "at"}
        status = await self.engine.ask_judge("status")
        return [{key: value for key, value in record.items() if key in kept} for record in status["history"]]

    async def pause(self, mode: PauseMode, kv_cache: KvCachePolicy) -> None:
        """Pause generation by hand; commits leave it paused from now on. Errors: LeaseHeld."""
        await self.engine.ask_judge("hold", {"held": True})
        try:
            await self.engine.pause(mode, kv_cache)
        except Exception as error:
            await self.resume()
            raise errors.WorkerFailed("vLLM did not pause generation: it goes on") from error

    async def resume(self) -> None:
        """Errors: EngineTorn, LeaseHeld."""
        await self.engine.ask_judge("hold", {"held": False})
        await self.engine.resume()

    # Claims, heartbeats, watchdog.

    async def _claim(self, update_id: str, purpose: str, options: dict[str, Any]) -> dict[str, Any]:
        args = {
            "update_id": update_id, "purpose": purpose, "claimant": self.claimant, "request": uuid.uuid4().hex,
            "options": options,
        }  # fmt: skip
        return dict(await self.engine.ask_judge("claim", args))

    def _go_on(self, update_id: str, claimed: dict[str, Any]) -> None:
        steps = Steps(self.engine, update_id, claimed["claim"], self._heartbeat_s)
        self._spawn(update_id, steps.go_on(claimed["step"], claimed["options"], claimed.get("mode")))

    def _spawn(
        self, update_id: str, work: Coroutine[Any, Any, dict[str, Any] | None]
    ) -> asyncio.Task[dict[str, Any] | None]:
        task = asyncio.create_task(work, name=f"nixl-update-{update_id}")
        self._tasks[task] = update_id
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[dict[str, Any] | None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s ended with %s: %s", task.get_name(), type(error).__name__, error)

    async def _watch(self) -> None:
        """Finish or undo what a dead API process left behind (R16)."""
        while True:
            await asyncio.sleep(self._watch_s)
            try:
                status = await self.engine.ask_judge("status")
                lease = status["lease"]
                working = lease and (lease["claim"] or status["step"] == "opening")
                if not working or lease["alive"]:
                    continue
                claimed = await self._claim(lease["update_id"], "recover", {})
                if "claim" in claimed:
                    logger.warning("taking over update %s at step %r", lease["update_id"], claimed["step"])
                    self._go_on(lease["update_id"], claimed)
            except Exception as error:  # noqa: BLE001 - the watchdog outlives whatever it meets
                logger.warning("the watchdog of weight updates: %s: %s", type(error).__name__, error)


def _inconsistent(answers: list[dict[str, Any]]) -> bool:
    """Some worker is torn, or they have different weights: all count as torn, and only a full push leads out."""
    states = [a["state"] for a in answers]
    return any(s["torn"] or s["weight_version"] != states[0]["weight_version"] for s in states)


def _bound(result: dict[str, Any]) -> BoundWorker:
    binding = result["binding"]
    return BoundWorker(**result | {"binding": Binding.model_validate(binding) if binding else None})


def _update_status(record: dict[str, Any]) -> UpdateStatus:
    return UpdateStatus(**{k: v for k, v in record.items() if k in UpdateStatus.model_fields})


def _not_ready(status: dict[str, Any]) -> str:
    update = status["update"]
    if status["torn"]:
        return "an update broke off half-way: push all weights"
    if update and (update["mode"] != "shadow" or update["step"] in PAUSED_STEPS):
        lease = status["lease"]
        if update["mode"] != "shadow" and lease and lease["expires_in_s"] < 0 and not lease["claim"]:
            return f"the trainer of {update['mode']} update {update['update_id']} fell silent: push all weights"
        return f"update {update['update_id']} has paused generation"
    if status["held"]:
        return "generation was paused by hand"
    if settings.ready_after_push() and status["weight_version"] == FIRST_VERSION:
        return "no weights have been pushed yet (PUSH_WEIGHTS_READY_AFTER_PUSH=1)"
    return ""
