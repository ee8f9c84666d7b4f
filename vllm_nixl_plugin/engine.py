"""vLLM's engine client, as far as an update needs it. The only file that knows how versions of the client differ.

The calls here that reach into ``engine_core`` exist in vLLM 0.26 and 0.32: `AsyncLLM.collective_rpc` returns the
workers of the first engine only, and `pause_generation` ends in a sleep of 20 ms.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import time
import uuid
from collections import deque
from collections.abc import Coroutine
from typing import Any

from vllm_nixl_plugin import channel, errors
from vllm_nixl_plugin.wire import KvCachePolicy, PauseMode

logger = logging.getLogger("vllm.nixl_plugin")

RPC = "nixl_push_rpc"
DYING_S = 2.0
"""How long a process that ends waits for its engine's end, to clear up behind it."""
KEPT_VERSIONS = 256

TURNS = 6
"""After so many turns of the event loop a request is on its way: vLLM's client hands it on through two tasks."""

Answer = dict[str, Any]


async def in_order(*work: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """Send requests right behind each other, without waiting for answers: they wait for the engine's step once."""
    tasks = []
    for each in work:
        tasks.append(asyncio.ensure_future(each))
        for _ in range(TURNS):
            await asyncio.sleep(0)
    return tasks


class Engine:
    """All workers of all data-parallel engines that one API process reaches. Call `start` before anything else.

    ``workers`` are their indices in order; the first is the judge (see session.py). ``alone``: no other API process
    can have an update installed.
    """

    def __init__(self, client: Any, *, alone: bool = False) -> None:
        self._client = client
        self._alone = alone
        self._served: deque[tuple[float, str]] = deque(maxlen=KEPT_VERSIONS)
        self._core = getattr(client, "engine_core", None)
        self._channel: channel.Door | None = None
        self.workers: tuple[int, ...] = ()

    async def start(self) -> list[Answer]:
        """Learn who the workers are and where the judge listens. Errors: WorkerFailed."""
        answers = await self.call_all("describe")
        self.workers = tuple(a["worker"] for a in answers)
        self._served.append((time.monotonic(), answers[0]["state"]["weight_version"]))
        await self._learn_channel()
        return answers

    def close(self) -> None:
        """Hang up; who is asked again answers again."""
        if self._channel is not None:
            self._channel.close()

    async def call_all(
        self, action: str, args: dict[str, Any] | None = None, *, only: list[int] | None = None,
        check: bool = True,
    ) -> list[Answer]:
        """Send one request to every worker; the answers in order of the workers.

        With ``check`` the first error that a worker reports is raised.
        Errors: WorkerFailed when an answer is missing, foreign or doubled; those of the action.
        """
        nonce = uuid.uuid4().hex
        judge = self.workers[0] if self.workers else None
        request = {"nonce": nonce, "action": action, "args": args or {}, "judge": judge, "only": only}
        answers = self._checked(await self._rpc(request), nonce, action)
        for answer in answers:
            if check and not answer["ok"]:
                raise error_of(answer)
        return answers

    async def ask_judge(self, action: str, args: dict[str, Any] | None = None) -> Any:
        """The judge's result of one of its `CHANNEL_ACTIONS`, past the engine's loop where it listens on this host.

        Errors: those of the action; WorkerFailed.
        """
        nonce = uuid.uuid4().hex
        request = {"nonce": nonce, "action": action, "args": args or {}, "judge": self.workers[0]}
        for attempt in range(2):
            if self._channel is None:
                break
            try:
                answer = await self._channel.ask(request)
            except channel.ChannelClosed as error:
                logger.warning("the judge's channel does not answer: %s", error)
                self._channel = None
                if attempt == 0:
                    await self._learn_channel()
                continue
            return self._result(self._checked([answer], nonce, action, whole=False)[0])
        return self._result((await self.call_all(action, args, only=[self.workers[0]]))[0])

    async def pause(self, mode: PauseMode, kv_cache: KvCachePolicy) -> None:
        """Stop generation. ``recompute``: running requests are preempted and prefix, multi-modal, encoder and connector
        caches go with their KV, in the engine and in one step (R15); an error means that they may still be there.
        """
        clear = kv_cache == "recompute"
        direct = getattr(self._core, "pause_scheduler_async", None)
        if direct is None:
            await self._client.pause_generation(mode=mode, clear_cache=clear)
            return
        forget = getattr(getattr(self._client, "renderer", None), "clear_mm_cache_async", None)
        if clear and forget is not None:
            await forget()
        await direct(mode=mode, clear_cache=clear)

    async def clear_caches(self) -> None:
        """What ``pause`` with ``recompute`` clears, in an engine that is paused already. Errors: WorkerFailed."""
        got = await asyncio.gather(
            self._in_engines("reset_prefix_cache", True, True),
            self._client.reset_mm_cache(),
            self._client.reset_encoder_cache(),
            return_exceptions=True,
        )
        for each in got:
            if isinstance(each, BaseException):
                raise each
        if not all(got[0]):
            raise errors.WorkerFailed("vLLM did not reset its prefix cache: KV of old weights would be used")

    async def resume(self) -> None:
        """Let generation go on. Under data parallelism vLLM raises while a pause is still under way."""
        await self._client.resume_generation()

    async def is_paused(self) -> bool | None:
        """None when the engines differ, or cannot say."""
        try:
            return bool(await self._client.is_paused())
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises, the answer is "unknown"
            logger.warning("cannot tell whether generation is paused: %s", error)
            return None

    async def served(self, since: float = 0.0) -> tuple[float, list[str]]:
        """The versions of the weights that have served after a time, in order, the one that serves now last; and the
        time from which to ask on. Errors: WorkerFailed.
        """
        if self._alone and self._served[-1][0] <= since:  # asked for each piece of each stream
            return since, [self._served[-1][1]]
        served = list(self._served)
        if not self._alone:
            status = await self.ask_judge("status")
            done = [(r["clock"], r["version"]) for r in status["history"] if r["state"] == "done"]
            served = [*(done or [(0.0, "")]), (0.0, status["weight_version"])]
        last = max(at for at, _ in served)
        return last, [version for at, version in served[:-1] if at > since] + [served[-1][1]]

    async def set_weight_version(self, version: str) -> None:
        """For versions.py, and the spans in vLLM's own outputs (0.32); the workers know it already."""
        self._served.append((time.monotonic(), version))
        update = getattr(self._client, "update_weight_version", None)
        if update is not None:
            await update(version)

    async def _learn_channel(self) -> None:
        found = (await self.call_all("channel"))[0]["result"]
        if found:
            self._channel = channel.Door(found["path"])
            atexit.register(channel.remove_dead, found["path"], DYING_S)  # vLLM kills its engines: no exit handlers

    async def _in_engines(self, method: str, *args: Any) -> list[Any]:
        """The answer of every engine; by the client's own method, which asks the first, where there is no other way."""
        engines = getattr(self._core, "core_engines", None)
        call = getattr(self._core, "_call_utility_async", None)
        if call is None or not engines:
            return [await getattr(self._client, method)(*args)]
        got = await asyncio.gather(*(call(method, *args, engine=e) for e in engines), return_exceptions=True)
        for each in got:
            if isinstance(each, BaseException):
                raise each
        return got

    async def _rpc(self, request: dict[str, Any]) -> list[Any]:
        try:
            got = await self._in_engines("collective_rpc", RPC, None, (request,), None)
            return [answer for per_engine in got for answer in per_engine]
        except Exception as error:
            raise errors.WorkerFailed(f"{request['action']!r} did not reach all workers: {error}") from error

    def _checked(self, answers: list[Any], nonce: str, action: str, whole: bool = True) -> list[Answer]:
        for answer in answers:
            if not isinstance(answer, dict) or answer.get("nonce") != nonce or "ok" not in answer:
                raise errors.WorkerFailed(
                    f"a worker answered {action!r} with something else than was asked, so its answers cannot be told "
                    "apart any more: restart the server",
                )
        if any(a["worker"] < 0 for a in answers):
            raise error_of(next(a for a in answers if a["worker"] < 0))
        answers = sorted(answers, key=lambda a: a["worker"])
        indices = tuple(a["worker"] for a in answers)
        expected = self.workers if whole else self.workers[:1]
        if not indices or len(set(indices)) != len(indices) or (self.workers and indices != expected):
            raise errors.WorkerFailed(f"{action!r} was answered by workers {indices}; expected {expected}")
        return answers

    @staticmethod
    def _result(answer: Answer) -> Any:
        if not answer["ok"]:
            raise error_of(answer)
        return answer["result"]


def error_of(answer: Answer) -> errors.PushWeightsError:
    """The error in a worker's answer, with the index of the worker among its details."""
    error = errors.from_wire(answer)
    error.details["worker"] = answer["worker"]
    return error
