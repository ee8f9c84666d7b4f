"""A server that joined late, or came back, gets the weights of its fleet from a peer, without the trainer.

    offer (peer) -> plan (ours: has to be the peer's) -> begin -> fetch (READs by our workers) -> the same offer still?
    -> commit, as of any update -> compare the fingerprints

With PUSH_WEIGHTS_PEERS, `CatchUp.keep_trying` does this when the server starts, and until it has succeeded, or a push
has come first, the server is not ready. By hand it is ``POST /catch-up``. A peer that gets new weights meanwhile makes
it begin again; a trainer that pushes to this server takes it over, since its lease is short.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm_nixl_plugin import errors, publish, settings
from vllm_nixl_plugin.addresses import listed
from vllm_nixl_plugin.engine import Engine
from vllm_nixl_plugin.peers import NothingNewer, Peer, survey
from vllm_nixl_plugin.session import FIRST_VERSION
from vllm_nixl_plugin.wire import (
    CATCH_UP,
    BeginRequest,
    CatchUpRequest,
    CatchUpStatus,
    CommitRequest,
    Manifest,
    Mode,
    Offer,
    OfferedWorker,
    WeightSpec,
)

if TYPE_CHECKING:
    from vllm_nixl_plugin.updates import Updates

logger = logging.getLogger("vllm.nixl_plugin")

SAME = (
    "vllm", "dtype", "quantization", "tp_rank", "tp_size", "pp_rank", "pp_size", "ep_rank", "ep_size", "vocab_size",
)  # fmt: skip
"""What two workers have to say alike before one reads from the other. Their plans have to be equal, too."""
LEASE_S = 0.2
ABANDONED_S = 120.0
"""Another process of this server does not take a catch-up over, unless its lease is over for so long that it must have
died."""
ATTEMPTS = 5
RETRY_S = 1.0
SLOWEST_RETRY_S = 15.0
POLL_S = 0.05
SHOWN = 20


class CatchUp:
    """Belongs to one API process. One catch-up runs at a time; the lease keeps those of other processes apart."""

    def __init__(self, updates: Updates) -> None:
        self._updates = updates
        self._task: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._settled = True
        self._waiting = ""
        self.last: CatchUpStatus | None = None

    def start(self) -> None:
        """Bring this server to the version of its fleet, in the background, if peers are set."""
        if settings.server().peers:
            self._settled, self._waiting = False, "it has not asked its peers yet"
            self._watch = asyncio.create_task(self.keep_trying(), name="nixl-catch-up")

    async def stop(self) -> None:
        """End what runs; an update that is open then is taken over by the next begin."""
        tasks = [task for task in (self._watch, self._task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def not_ready(self, weight_version: str) -> str:
        """Why the server has not caught up with its fleet yet; empty when it has, or has nothing to wait for."""
        if self._settled or weight_version != FIRST_VERSION:
            return ""
        return f"catching up with the fleet (PUSH_WEIGHTS_PEERS): {self._waiting}"

    async def keep_trying(self) -> None:
        """Until this server has the version of its fleet, from a peer or by a push."""
        pause_s = RETRY_S
        while True:
            try:
                now = await self._updates.status()
                if now.weight_version != FIRST_VERSION:
                    break
                if (lease := now.lease) is not None and lease.expires_in_s > -ABANDONED_S * _is_ours(lease.holder):
                    self._waiting = f"update {lease.update_id} of {lease.holder} is open"
                    await asyncio.sleep(RETRY_S)
                    continue
                urls = await asyncio.to_thread(listed, settings.server().peers or ())
                peer = await survey(urls, now.incarnation, FIRST_VERSION)
                self._waiting = f"reading from {peer}"
                async with self._one_at_a_time:
                    await self._run(CatchUpRequest(peer=peer))
                assert self.last is not None
                if self.last.state == "done":
                    break
                self._waiting = f"{peer}: {(self.last.error or {}).get('message', '')}"
            except NothingNewer:
                logger.info("no peer has got weights since its start: this server is as new as its fleet")
                break
            except Exception as error:  # noqa: BLE001 - whatever it is, it may pass, and readiness shows it
                self._waiting = f"{type(error).__name__}: {error}"
            logger.warning("not caught up yet, trying again in %.0f s: %s", pause_s, self._waiting)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, SLOWEST_RETRY_S)
        self._settled = True

    async def run(self, request: CatchUpRequest, wait_s: float) -> CatchUpStatus:
        """Begin to catch up, or join what runs; how it stands after ``wait_s`` at most.

        Errors: LeaseHeld, while this process catches up from another peer.
        """
        if self._task is None or self._task.done():
            self.last = CatchUpStatus(state="running", peer=request.peer, step="offer")
            self._task = asyncio.create_task(self._by_hand(request), name="nixl-catch-up-by-hand")
        elif self.last is not None and self.last.peer != request.peer:
            raise errors.LeaseHeld(
                f"this server is catching up from {self.last.peer}", holder=self.last.peer, expires_in_s=LEASE_S
            )
        await asyncio.wait({self._task}, timeout=wait_s)
        assert self.last is not None
        return self.last

    async def _by_hand(self, request: CatchUpRequest) -> None:
        async with self._one_at_a_time:
            await self._run(request)

    async def _run(self, request: CatchUpRequest) -> None:
        """One catch-up, whose outcome is `last`. Does not raise."""
        self.last = CatchUpStatus(state="running", peer=request.peer, step="offer")
        try:
            async with asyncio.timeout(request.timeout_s), Peer(request.peer) as peer:
                for left in reversed(range(ATTEMPTS)):
                    try:
                        self.last = await Reading(self._updates, peer, request, self._tell).run()
                        break
                    except errors.PushWeightsError as error:
                        if not left or not (error.details.get("retry") or isinstance(error, errors.StaleUpdate)):
                            raise
                        logger.info("catching up from %s begins again: %s", peer.url, error)
                        await asyncio.sleep(RETRY_S)
        except TimeoutError:
            self._failed(request, errors.DeadlineExceeded(f"no version of {request.peer} in {request.timeout_s:g} s"))
        except errors.PushWeightsError as error:
            self._failed(request, error)
        except Exception as error:
            logger.exception("catching up from %s failed", request.peer)
            self._failed(request, errors.PushWeightsError(f"unexpected {type(error).__name__}: see the server's log"))

    def _tell(self, step: str) -> None:
        if self.last is not None:
            self.last = self.last.model_copy(update={"step": step})

    def _failed(self, request: CatchUpRequest, error: errors.PushWeightsError) -> None:
        logger.warning("this server did not catch up from %s: %s", request.peer, error)
        step = self.last.step if self.last is not None else ""
        self.last = CatchUpStatus(state="failed", peer=request.peer, step=step, error=error.to_wire()["error"])


class Reading:
    """One attempt: the steps of the module in order. ``tell`` hears each."""

    def __init__(self, updates: Updates, peer: Peer, request: CatchUpRequest, tell: Any) -> None:
        self._updates, self._engine, self._peer, self._request = updates, updates.engine, peer, request
        self._tell = tell
        self._timings: dict[str, float] = {}
        self._began = self._at = time.monotonic()

    async def run(self) -> CatchUpStatus:
        """Errors: PeerRefused (``retry`` where the peer changed on the way), those of an update."""
        offer = await self._peer.offer()
        self._done("offer")
        plans = await self._plan(offer)
        self._done("plan")
        nbytes = await self._update(offer, plans)
        differences = await self._compare(offer)
        self._done("compare")
        self._timings["total"] = time.monotonic() - self._began
        took = ", ".join(f"{step} {seconds:.2f}" for step, seconds in self._timings.items())
        what = f"weights {offer.weight_version}, {nbytes} bytes"
        logger.info("caught up with %s: %s; seconds: %s", self._peer.url, what, took)
        return CatchUpStatus(
            state="done", peer=self._request.peer, weight_version=offer.weight_version, nbytes=nbytes,
            timings=self._timings, differences=tuple(differences[:SHOWN]),
        )  # fmt: skip

    async def _plan(self, offer: Offer) -> tuple[str, ...]:
        """Our plans for what the peer serves. Errors: PeerRefused, when they are not the peer's."""
        ours = await self._engine.call_all("describe")
        refuse_others(self._peer.url, [a["result"]["server"] for a in ours], offer.workers)
        canonical = offer.manifest.model_dump_json().encode()
        digest = hashlib.sha256(canonical).hexdigest()
        workers, _ = await publish.make_plans(
            self._engine, self._updates.plans, digest, canonical, self._request.timeout_s
        )
        for mine, theirs in zip(workers, offer.workers, strict=True):
            if mine.plan != theirs.plan:
                raise errors.PeerRefused(
                    f"worker {mine.worker} lays the weights of {self._peer.url} out in another way than its worker "
                    f"{theirs.worker}: start both with the same model, options and quantization",
                    worker=mine.worker,
                )
        return tuple(worker.plan for worker in workers)

    async def _update(self, offer: Offer, plans: tuple[str, ...]) -> int:
        """The bytes that were read, once they serve."""
        opened = await self._begin(offer, plans)
        try:
            nbytes = await self._fetch(opened, offer)
            self._done("fetch")
            if (await self._peer.offer()).token != offer.token:
                raise errors.PeerRefused(f"the weights of {self._peer.url} changed while they were read", retry=True)
        except BaseException:
            with suppress(errors.PushWeightsError):
                await self._updates.abort(opened, drained=False)
            raise
        status = await self._updates.commit(opened, CommitRequest(timeout_s=self._request.timeout_s), 1.0)
        while status.state in ("open", "committing"):
            status = await self._updates.update_status(opened, 1.0)
        self._done("install")
        if status.state != "done":
            if status.error:
                raise errors.from_wire({"error": status.error})
            raise errors.StaleUpdate(f"update {opened} is {status.state}: another update took over")
        return nbytes

    async def _begin(self, offer: Offer, plans: tuple[str, ...]) -> str:
        """In shadow memory, or in place where there is no room for it."""
        modes: tuple[Mode, ...] = ("shadow", "in_place")
        for mode in modes:
            request = BeginRequest(
                plans=plans, version=offer.weight_version, mode=mode, holder=f"{CATCH_UP}{self._peer.url}"[:256],
                lease_s=LEASE_S if mode == "shadow" else self._request.timeout_s,
            )  # fmt: skip
            try:
                return (await self._updates.begin(request)).update_id
            except errors.InsufficientMemory as error:
                if mode == "in_place":
                    raise
                logger.info("catching up in place: %s", error)
        raise AssertionError("there are two modes")

    async def _fetch(self, update_id: str, offer: Offer) -> int:
        pairs = zip(self._engine.workers, offer.workers, strict=True)
        sources = {str(worker): theirs.binding.model_dump() for worker, theirs in pairs}
        self._tell("fetch")
        answers = await self._engine.call_all("fetch", {"update_id": update_id, "sources": sources})
        while not all(answer["result"]["done"] for answer in answers):
            await asyncio.sleep(POLL_S)
            answers = await self._engine.call_all("fetch", {"update_id": update_id})
        return sum(answer["result"]["nbytes"] for answer in answers)

    async def _compare(self, offer: Offer) -> list[str]:
        """Paths on which the engines differ, if the peer still serves what was read. A difference is no failure: a
        kernel may keep scratch memory, and a first forward may derive tensors."""
        self._tell("compare")
        try:
            ours = await publish.fingerprint(self._engine, None, paths=True)
            theirs = await self._peer.fingerprint(paths=True)
        except errors.PushWeightsError as error:
            logger.info("the fingerprints were not compared: %s", error)
            return []
        if theirs.weight_version != offer.weight_version or ours.weight_version != offer.weight_version:
            return []
        found = [
            f"worker {a.worker}: {path}: {one.get(path, 'absent')} | {other.get(path, 'absent')}"
            for a, b in zip(ours.workers, theirs.workers, strict=True)
            for one, other in [(a.paths or {}, b.paths or {})]
            for path in sorted(one.keys() | other.keys()) if one.get(path) != other.get(path)
        ]  # fmt: skip
        if found:
            shown = "; ".join(found[:5])
            logger.warning("caught up with %s, but %d paths differ: %s", self._peer.url, len(found), shown)
        return found

    def _done(self, step: str) -> None:
        now = time.monotonic()
        self._timings[step] = now - self._at
        self._at = now


def refuse_others(peer: str, ours: Sequence[dict[str, Any]], theirs: Sequence[OfferedWorker]) -> None:
    """Errors: PeerRefused, naming what two servers do not have in common."""
    if len(ours) != len(theirs):
        raise errors.PeerRefused(f"{peer} has {len(theirs)} workers and this server {len(ours)}: their layouts differ")
    for mine, other in zip(ours, theirs, strict=True):
        told = other.server
        unlike = [name for name in SAME if mine.get(name) != told.get(name)]
        if _kind(mine) != _kind(told):
            unlike.append("device")
        if unlike:
            names = ", ".join(f"{name} {told.get(name)!r}, here {mine.get(name)!r}" for name in unlike)
            raise errors.PeerRefused(f"worker {other.worker} of {peer} has {names}: only servers alike can catch up")


def _is_ours(holder: str) -> bool:
    return holder.startswith(CATCH_UP)


def _kind(server: dict[str, Any]) -> str:
    return str(server.get("device", "")).partition(":")[0]


async def offer(engine: Engine) -> Offer:
    """What this server lets its peers read. Errors: PeerRefused, EngineTorn, EngineAsleep."""
    answers = await engine.call_all("offer", {"judge": engine.workers[0]})
    found = [answer["result"] for answer in answers]
    if any(result["marks"] != found[0]["marks"] for result in found):
        raise errors.PeerRefused("the workers of this server are at different updates: ask again", retry=True)
    workers = tuple(
        OfferedWorker(worker=a["worker"], plan=r["plan"], server=r["server"], binding=r["binding"])
        for a, r in zip(answers, found, strict=True)
    )
    token = hashlib.sha256(repr([found[0]["marks"], *((w.plan, w.binding.digest()) for w in workers)]).encode())
    weights = tuple(WeightSpec(name=name, shape=tuple(shape), dtype=kind) for name, shape, kind in found[0]["weights"])
    version = found[0]["marks"][1]
    return Offer(weight_version=version, token=token.hexdigest(), manifest=Manifest(weights=weights), workers=workers)
