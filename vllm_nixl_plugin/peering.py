"""A worker's part in a catch-up from server to server; `session` has one.

    on the peer       offer: where what serves may be read, and marks that change when it does
    on the reader     fetch: read into the memory of the open update, which is then installed like any other

A peer is not locked: who has read asks for the offer again, and has read one version if the marks are the same. An
offer is made only while nothing that serves is being changed. No vLLM, no device here; the plane does the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_nixl_plugin.errors import EngineTorn, PeerRefused, StaleUpdate
from vllm_nixl_plugin.opened import PAUSED_STEPS, Update
from vllm_nixl_plugin.plan_cache import CachedPlan
from vllm_nixl_plugin.wire import Binding

if TYPE_CHECKING:
    from vllm_nixl_plugin.offering import Fetch
    from vllm_nixl_plugin.session import WorkerSession


class Peering:
    """See the module. Called from the worker's main thread."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._serving: CachedPlan | None = None
        self._fetch: tuple[str, Fetch] | None = None

    def installed(self, update: Update) -> None:
        """The weights of this update serve now. What peers read is laid out by the last plan that was full."""
        if update.cached.full:
            self._serving = update.cached

    def offer(self, judge: int) -> dict[str, Any]:
        """Where to read, and ``marks``; ``weights`` of the plan, told by the judge alone.

        Errors: PeerRefused (with ``retry`` while an update changes the weights), EngineTorn, EngineAsleep.
        """
        session, serving = self._session, self._serving
        update = session.update
        if session.torn:
            raise EngineTorn("the engine holds half of an update: catch up from another server")
        if update is not None and (
            update.stands or update.step in PAUSED_STEPS or update.stages is not None
        ):
            raise PeerRefused(f"update {update.id} is changing the weights: ask again when it is over", retry=True)
        if serving is None:
            raise PeerRefused("this server has got no weights since its start: catch up from another one")
        last = [[record["update_id"], record["state"]] for record in list(session.history)[-1:]]
        weights = [[w.name, list(w.shape), w.dtype] for w in serving.plan.weights] if judge == session.worker else None
        return {
            "plan": serving.digest, "server": session.description, "weights": weights,
            "binding": session.plane.offer(serving.plan).model_dump(),
            "marks": [session.epoch, session.weight_version, last],
        }  # fmt: skip

    def fetch(self, update_id: str, sources: dict[str, Any] | None = None) -> dict[str, Any]:
        """Begin to read with ``sources`` (the binding of a worker of the peer, by index of ours); say how far it is.

        Errors: StaleUpdate, PeerRefused, and whatever ended the reading.
        """
        session = self._session
        update = session.update
        if update is None or update.id != update_id:
            raise StaleUpdate(f"update {update_id} is over on worker {session.worker}", update_id=update_id)
        if sources is not None and self._fetch is None:
            source = Binding.model_validate(sources[str(session.worker)])
            self._fetch = update_id, session.plane.fetch(update.plan, update.mode, source)
        if self._fetch is None:
            raise StaleUpdate(f"worker {session.worker} reads nothing for update {update_id}", update_id=update_id)
        reading = self._fetch[1]
        done = reading.poll()
        if done:
            update.arrived_nbytes = update.cached.nbytes
            update.drained = True
        return {"done": done, "nbytes": reading.nbytes}

    def ended(self, update: Update) -> None:
        """The update is over: nothing of ours writes to its memory any more."""
        if self._fetch is not None and self._fetch[0] == update.id:
            self._fetch[1].stop()
            self._fetch = None
            update.drained = True
