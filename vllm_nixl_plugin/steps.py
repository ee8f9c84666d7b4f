"""The steps of one update in the hands of one API process: how a commit goes, and every way out of it.

    prepare (waiting) -> [pausing] pause -> install (installing, installed) -> [resuming] resume -> [finish] finish

In mode ``streamed`` a commit is asked for before anything is written: `stream`, again and again, installs group after
group as they land, until `prepare` finds everything in place.

What stands without brackets is one call of the engines each, the names in parentheses are the steps that the workers
record by themselves in it, and those in brackets are told to the judge alone, past the engine's loop: of the end the
others hear when their engines, which generate again, come to it. Where generation stands still from begin on, there is
nothing to pause, and what the policy clears is cleared together with prepare.

Every step is recorded before it happens, and every step may be repeated, so whoever holds the claim goes on from where
it finds an update. A step of an older claim is refused with StaleUpdate, which ends these `Steps`.

The judge's step can be behind the other workers' by one call that has not reached all: who takes over tells all workers
his claim first (`take_over`), after which nothing of the dead process gets through, and looks at all their steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from vllm_nixl_plugin import errors
from vllm_nixl_plugin.engine import Engine, error_of, in_order
from vllm_nixl_plugin.opened import INSTALLING_STEPS, PAUSED_STEPS
from vllm_nixl_plugin.wire import CommitRequest, KvCachePolicy, PauseMode

logger = logging.getLogger("vllm.nixl_plugin")

FIRST_POLL_S = 0.002
ARRIVAL_POLL_S = 0.0002
"""The trainer has seen its writes complete: what is still missing is on its way."""
SLOWEST_POLL_S = 0.05
RESUME_RETRY_S = 0.5
SILENCE_S = 2.0
"""How long a trainer has to be silent while we listen: who stood still himself has renewals yet to hear."""


class Steps:
    """``claim``: 0 for the process that begins the update, else what the judge has given. See session.py."""

    def __init__(self, engine: Engine, update_id: str, claim: int, heartbeat_s: float) -> None:
        self._engine = engine
        self._update_id = update_id
        self._mine = {"update_id": update_id, "claim": claim}
        self._heartbeat_s = heartbeat_s
        self._paused = False
        self._by_others = False  # somebody else had paused before we did

    async def go_on(self, step: str | None, options: dict[str, Any], mode: str | None = None) -> dict[str, Any] | None:
        """Bring a claimed update to its end, from the step at which it was claimed. Does not raise.

        ``mode``: the update's, if it is known. Returns the record of an update that is done.
        """
        purpose = options.get("purpose")
        try:
            async with self._heartbeat():
                if purpose == "commit" and step in PAUSED_STEPS:
                    step = await self._take_over(step)
                if step == "opening":
                    self._paused = True
                    await self.retract()
                elif purpose != "commit":
                    await self._call("abort")
                elif step == "undoing":
                    await self._undo(errors.WorkerFailed("the API process that undid this commit died on the way"))
                else:
                    wanted = {k: v for k, v in options.items() if k != "purpose"}
                    stands = mode not in (None, "shadow")
                    return await self._commit(step, CommitRequest.model_validate(wanted), stands=stands)
        except errors.StaleUpdate as error:
            logger.warning("update %s is left to another process: %s", self._update_id, error)
            await self._resume_if_idle()
        except Exception:
            logger.exception("update %s: commit broke off; the watchdog goes on from its step", self._update_id)
        return None

    async def begin(
        self, args: dict[str, Any], pause: PauseMode | None
    ) -> tuple[list[dict[str, Any]], bool | None, asyncio.Task[None] | None]:
        """All workers give memory: their answers, whether generation was paused, and the pause that is under way.

        ``pause``: how generation is to stand still from now on, if it is. To keep requests does no harm if begin fails,
        so it is asked for right behind, and both wait once for the step that runs. Errors: those of ``begin``.
        """
        opening = self._engine.call_all("begin", args)
        if pause is None:
            return await opening, None, None
        work = [opening, self._engine.is_paused()]
        if pause == "keep":
            self._paused = True
            work.append(self._engine.pause("keep", "keep"))
        begun, asked, *pausing = await in_order(*work)
        for task in pausing:
            task.add_done_callback(_heard)
        await asyncio.wait({begun, asked})
        paused = asked.result()
        self._by_others = paused is True
        return begun.result(), paused, pausing[0] if pausing else None

    async def stand_still(
        self, pause: PauseMode, timeout_s: float, state: dict[str, Any], paused: bool | None,
        pausing: asyncio.Task[None] | None,
    ) -> None:  # fmt: skip
        """Pause for an update in place or streamed, before anybody gets its addresses. ``state``: the judge's;
        ``paused``: now.

        Errors: DeadlineExceeded, WorkerFailed.
        """
        held = state["held"] if state["torn"] else paused is True
        async with self._heartbeat():
            if held != state["held"]:
                await self._record("opening", held=held)
            if pausing is not None:
                await self._stand(pausing, pause, time.monotonic() + timeout_s)
            elif not (state["torn"] and paused):
                mode: PauseMode = "keep" if held and pause == "wait" else pause
                await self._pause_until(mode, "keep", time.monotonic() + timeout_s)
            await self._record("open")

    async def retract(self) -> None:
        """End an update whose begin failed: nobody has its addresses, so nothing can have landed."""
        if self._paused and not self._by_others:
            state = await self._state()
            ours = state["lease"] is not None and state["lease"]["update_id"] == self._update_id
            if ours and not (state["torn"] or state["held"]):
                await self._resume()
        await self._call("abort", check=False, drained=True, untouched=True)

    # A commit, in order.

    async def _commit(self, step: str | None, request: CommitRequest, *, stands: bool) -> dict[str, Any] | None:
        timings: dict[str, float] = {}
        with _timed(timings, "total_s"):
            if step not in INSTALLING_STEPS and not await self._get_ready(step, request, timings, stands=stands):
                return None
            with _timed(timings, "install_s"):
                judge = await self._install(timings)
            if judge is None:
                return None
            with _timed(timings, "resume_s"):
                await self._serve(judge)
        return await self._finish(timings)

    async def _get_ready(
        self, step: str | None, request: CommitRequest, timings: dict[str, float], *, stands: bool
    ) -> bool:
        """All bytes are there and generation stands still. Otherwise the update is over, and nothing has changed."""
        deadline = time.monotonic() + request.timeout_s
        try:
            with _timed(timings, "wait_s"):
                clear = stands and request.kv_cache == "recompute"
                judge, paused = await self._prepare(deadline, whole=step is not None, clear=clear)
            with _timed(timings, "pause_s"):
                await self._pause(step, request, deadline, judge, paused, cleared=clear)
        except errors.StaleUpdate:
            raise
        except Exception as error:  # noqa: BLE001 - every failure before the install is undone
            await self._undo(error)
            return False
        return True

    async def _prepare(self, deadline: float, *, whole: bool, clear: bool) -> tuple[dict[str, Any], bool | None]:
        """All workers have all bytes and are ready to install: the judge's answer, and whether generation is paused.

        They get ready in slices; ``whole`` in one piece, since who takes over does not know who has done how many.
        ``clear``: caches, by the way, of an engine that stands still. Errors: also those of clearing.
        """
        wait_s = ARRIVAL_POLL_S
        while True:
            preparing, asked, *clearing = await in_order(
                self._engine.call_all("prepare", self._mine | {"whole": whole}), self._engine.is_paused(),
                *([self._engine.clear_caches()] if clear else []),
            )  # fmt: skip
            cleared = await asyncio.gather(*clearing, return_exceptions=True)
            answers, paused = await preparing, await asked
            if answers[0]["result"]["mode"] == "streamed" and not all(a["result"]["ready"] for a in answers):
                await self._stream(deadline)
                continue
            short = [a for a in answers if a["result"]["arrived_nbytes"] != a["result"]["expected_nbytes"]]
            if not short:
                if all(a["result"]["ready"] for a in answers):
                    for failure in cleared:
                        if isinstance(failure, BaseException):
                            raise failure
                    return answers[0], paused
                if time.monotonic() >= deadline:
                    raise errors.DeadlineExceeded("the install was not made ready in time: the update is undone")
                continue
            if time.monotonic() >= deadline:
                worker, got = short[0]["worker"], short[0]["result"]
                found = f"{got['arrived_nbytes']} of {got['expected_nbytes']} bytes"
                counts = {key: got[key] for key in ("arrived_nbytes", "expected_nbytes", "foreign")}
                raise errors.Incomplete(f"worker {worker} has {found}", worker=worker, **counts)
            await asyncio.sleep(min(wait_s, max(deadline - time.monotonic(), 0.0)))
            wait_s = min(wait_s * 2, SLOWEST_POLL_S)

    async def _stream(self, deadline: float) -> None:
        """All groups are in place on all workers. Each is installed when it has landed on all: some processing talks to
        other ranks. Errors: Incomplete, when the trainer fell silent or time ran out."""
        install, silent_since = 0, None
        while True:
            got = [a["result"] for a in await self._call("stream", install=install)]
            waiting = [one for one in got if one["installed"] < one["groups"]]
            if not waiting:
                return
            now = time.monotonic()
            late = now >= deadline
            silent_since = (silent_since or now) if got[0]["silent"] else None
            if late or (silent_since is not None and now - silent_since >= SILENCE_S):
                first, update_id = waiting[0], self._update_id
                why = "in time" if late else "before its trainer fell silent (nobody renews its lease)"
                raise errors.Incomplete(
                    f"{first['installed']} of {first['groups']} groups of update {update_id} were installed {why}",
                    installed_groups=first["installed"], groups=first["groups"],
                )  # fmt: skip
            install = min(one["landed"] for one in waiting)

    async def _pause(
        self, step: str | None, request: CommitRequest, deadline: float, judge: dict[str, Any], paused: bool | None, *,
        cleared: bool,
    ) -> None:  # fmt: skip
        """Generation stands still, the caches are as the policy says. A torn or in-place engine is paused already."""
        state = judge["state"]
        stands = state["torn"] or judge["result"]["mode"] != "shadow"
        if stands and paused and (cleared or request.kv_cache == "keep"):
            return
        held = state["held"] if stands or step in PAUSED_STEPS else paused is True
        await self._record("pausing", held=held)
        if not (stands and paused):
            mode: PauseMode = "keep" if stands or (held and request.pause == "wait") else request.pause
            await self._pause_until(mode, request.kv_cache, deadline)
        elif request.kv_cache == "recompute":
            await self._engine.clear_caches()

    async def _install(self, timings: dict[str, float]) -> dict[str, Any] | None:
        """The judge's answer, when all workers have installed. Otherwise the update is over: undone when no worker
        changed a byte.
        """
        try:
            answers = await self._call("install", check=False)
        except errors.WorkerFailed as error:
            await self._tear(error)
            return None
        failures = [error_of(a) for a in answers if not a["ok"]]
        for failure in failures:
            if failure.details.get("superseded"):
                raise failure
        if any(isinstance(failure, errors.StaleUpdate) for failure in failures):
            await self._open_state()
        for answer in answers:
            for stage, seconds in ((answer.get("result") or {}).get("stages") or {}).items():
                timings[f"install.{stage}"] = max(seconds, timings.get(f"install.{stage}", 0.0))
        versions = {a["result"]["version"] for a in answers if a["ok"]}
        if len(versions) > 1:
            failures.append(errors.WorkerFailed(f"the workers installed different versions: {sorted(versions)}"))
        if not failures:
            return answers[0]
        if len(failures) == len(answers) and all(f.details.get("untouched") for f in failures):
            await self._undo(failures[0])
        else:
            await self._tear(failures[0])
        return None

    async def _serve(self, judge: dict[str, Any]) -> None:
        await asyncio.gather(self._label(judge["result"]["version"]), self._record("resuming"))
        if not judge["state"]["held"]:
            await self._resume()

    async def _finish(self, timings: dict[str, float]) -> dict[str, Any]:
        """The update is over; its record. It is over when the judge knows; the others learn it by the next begin."""
        args = self._mine | {"timings": timings}
        record: dict[str, Any] = (await self._engine.ask_judge("finish", args))["record"]
        if others := list(self._engine.workers[1:]):
            telling = asyncio.create_task(self._engine.call_all("finish", args, only=others))
            _telling.add(telling)
            telling.add_done_callback(_told)
        return record

    async def _label(self, version: str) -> None:
        try:
            await self._engine.set_weight_version(version)
        except Exception as error:  # noqa: BLE001 - the weights serve; only vLLM's own label is missing
            logger.warning("vLLM did not take the weight version of update %s: %s", self._update_id, error)

    async def _take_over(self, step: str | None) -> str | None:
        """The step to go on from: the judge's, or ``installing`` when an install has reached any worker."""
        answers = await self._call("take_over")
        reached = [a["state"]["step"] for a in answers if a["state"]["step"] in INSTALLING_STEPS]
        return "installing" if reached and step != "undoing" else step

    # Ways out.

    async def _undo(self, error: Exception) -> None:
        """The install has changed no byte: the old weights serve on. In place they cannot: torn."""
        logger.warning("update %s fails before its install: %s", self._update_id, error)
        state = await self._open_state()
        shadow = state["update"]["mode"] == "shadow"
        if shadow and state["step"] in PAUSED_STEPS:
            await self._record("undoing")
            if not (state["torn"] or state["held"]):
                await self._resume()
        await self._fail(error, torn=not shadow)

    async def _tear(self, error: errors.PushWeightsError) -> None:
        logger.error("update %s broke off half-way, the engine stays paused: %s", self._update_id, error)
        await self._fail(error, torn=True)

    async def _fail(self, error: Exception, *, torn: bool) -> None:
        if not isinstance(error, errors.PushWeightsError):
            error = errors.WorkerFailed(f"unexpected {type(error).__name__}: see the server's log")
        await self._call("abort", torn=torn, outcome="failed", error=error.to_wire()["error"])

    async def _resume(self) -> None:
        """A pause that is still under way cannot be withdrawn under data parallelism: try until it can."""
        while True:
            try:
                return await self._engine.resume()
            except Exception as error:  # noqa: BLE001 - vLLM raises plain exceptions
                logger.warning("generation cannot be resumed yet: %s", error)
                await asyncio.sleep(RESUME_RETRY_S)

    async def _resume_if_idle(self) -> None:
        """Undo a pause of ours that came after another process had ended the update."""
        state = await self._state()
        if self._paused and state["update"] is None and not (state["torn"] or state["held"]):
            await self._resume()

    # Inside.

    async def _pause_until(self, mode: PauseMode, kv_cache: KvCachePolicy, deadline: float) -> None:
        self._paused = True
        await self._stand(asyncio.ensure_future(self._engine.pause(mode, kv_cache)), mode, deadline)

    async def _stand(self, pausing: asyncio.Task[None], mode: PauseMode, deadline: float) -> None:
        done, _ = await asyncio.wait({pausing}, timeout=max(deadline - time.monotonic(), 0.0))
        if not done:
            pausing.add_done_callback(_heard)
            raise errors.DeadlineExceeded(f"generation did not pause in time (mode {mode!r}): the update is undone")
        try:
            pausing.result()
        except Exception as error:
            raise errors.WorkerFailed(f"vLLM did not pause generation with its caches cleared: {error}") from error

    async def _call(self, action: str, *, check: bool = True, **args: Any) -> list[dict[str, Any]]:
        return await self._engine.call_all(action, args | self._mine, check=check)

    async def _record(self, step: str, *, held: bool | None = None) -> None:
        await self._engine.ask_judge("record_step", {"step": step, "held": held} | self._mine)

    async def _state(self) -> dict[str, Any]:
        return dict(await self._engine.ask_judge("status"))

    async def _open_state(self) -> dict[str, Any]:
        """The judge's status while this update is open. Errors: StaleUpdate."""
        state = await self._state()
        if state["update_id"] != self._update_id:
            raise errors.StaleUpdate(f"update {self._update_id} is over", update_id=self._update_id)
        return state

    @contextlib.asynccontextmanager
    async def _heartbeat(self) -> AsyncIterator[None]:
        async def beat() -> None:
            while True:
                await asyncio.sleep(self._heartbeat_s)
                with contextlib.suppress(errors.PushWeightsError):
                    await self._engine.ask_judge("heartbeat", self._mine)

        task = asyncio.create_task(beat())
        try:
            yield
        finally:
            task.cancel()


_telling: set[asyncio.Task[Any]] = set()


def _told(task: asyncio.Task[Any]) -> None:
    _telling.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("not all workers have heard of the end of an update, the next begin tells them: %s", error)


def _heard(task: asyncio.Task[None]) -> None:
    """Its failure is told by somebody else."""
    if not task.cancelled():
        task.exception()


@contextlib.contextmanager
def _timed(timings: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        timings[name] = time.perf_counter() - start
