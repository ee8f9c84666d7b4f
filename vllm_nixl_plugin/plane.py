"""A worker's weights, memory and NIXL agent under one roof: each method is one stage of the path.

    make_plan      trace -> plan      (a thread of the worker; a lock keeps it apart from an install)
    bind           register           (begin)
    notifications  what has landed
    install        install            (the engine is paused)
    discard/fence  an update that ended otherwise

`session` calls it; `create_plane` makes it for a vLLM worker. The work is in `loaded` and `composition` (plan),
`binding` (register) and `install`.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_nixl_plugin import offering
from vllm_nixl_plugin.binding import Binder
from vllm_nixl_plugin.checksums import checksums, written
from vllm_nixl_plugin.composition import DRAFT_PREFIX, Held, plan_models
from vllm_nixl_plugin.errors import EngineAsleep, EngineTorn, PlanRefused, PushWeightsError, UnknownPlan
from vllm_nixl_plugin.findings import summed
from vllm_nixl_plugin.fingerprint import slices
from vllm_nixl_plugin.install import Installer
from vllm_nixl_plugin.layout import Copy
from vllm_nixl_plugin.loaded import LoadedModel
from vllm_nixl_plugin.model import describe_worker, draft_models, is_asleep, record_of
from vllm_nixl_plugin.processes import is_running
from vllm_nixl_plugin.settings import WorkerSettings
from vllm_nixl_plugin.wire import Binding, Manifest, Mode, WeightSpec, WorkerPlan

logger = logging.getLogger("vllm.nixl_plugin")

_MAX_PLANS = 16


def create_plane(worker: Any) -> WorkerPlane:
    """The plane of a vLLM worker that has loaded its model."""
    return WorkerPlane(worker, WorkerSettings())


def _drafters(worker: Any) -> list[LoadedModel]:
    """The worker's draft models. One from the target's own checkpoint shares the names of its weights."""
    target, found = record_of(worker.get_model()), []
    for number, model in enumerate(draft_models(worker), 1):
        record = record_of(model)
        shared = target is not None and record is not None and record.model_config.model == target.model_config.model
        found.append(LoadedModel(number, model, label="draft", prefix="" if shared else DRAFT_PREFIX))
    return found


class WorkerPlane:
    """See the module. All methods but `make_plan` are called from the worker's main thread."""

    def __init__(self, worker: Any, settings: WorkerSettings) -> None:
        self.worker = worker
        self.target = LoadedModel(0, worker.get_model())
        self.drafters = _drafters(worker)
        self._stale: tuple[str, ...] = ()
        self._torn: set[str] = set()  # drafters that hold half of an update; `session` knows it of the whole worker
        number = int(self.describe()["worker"])
        self.binder = Binder(number, settings, lambda: self.target.twin.device)
        self.installer = Installer(worker, number, self.binder)
        self._held: OrderedDict[int, Held] = OrderedDict()
        self._lock = threading.RLock()
        self._holds_twins = False

    # Identity

    def describe(self) -> dict[str, Any]:
        """Who this worker is, as plain values. ``draft``: the draft model, and whether the last push left it out."""
        draft = [
            {"model": m.origin, "names": m.prefix or "those of the target", "stale": m.label in self._stale}
            for m in self.drafters
        ]
        return describe_worker(self.worker) | {
            "pid": os.getpid(), "host": socket.gethostname(), "draft": draft[0] if draft else None,
        }  # fmt: skip

    def incarnation(self) -> str:
        """Changes at every start and fence."""
        return self.binder.incarnation

    # Trace and plan

    def make_plan(self, manifest: Manifest) -> WorkerPlan:
        """Errors: PlanRefused naming weights."""
        with self._lock:
            self.installer.tidy()
            self._refuse_asleep()
            self._refuse_what_would_go_wrong()
            held = plan_models(manifest, self.target, self.drafters)
            self._refuse_unseen(held)
            self.binder.remainder.load(held)
            self._held[id(held.plan)] = held
            while len(self._held) > _MAX_PLANS:
                self.binder.forget(self._held.popitem(last=False)[1])
            self.binder.open_agent()
            return held.plan

    def _refuse_what_would_go_wrong(self) -> None:
        if getattr(self.worker.vllm_config.parallel_config, "enable_eplb", False):
            raise PlanRefused(
                "this server balances expert load (--enable-eplb): experts move between ranks while it runs, and a "
                "push would write them where they no longer are. Start it without --enable-eplb.",
                eplb_active=True,
            )

    def _refuse_unseen(self, held: Held) -> None:
        speculative = getattr(self.worker.vllm_config, "speculative_config", None)
        if getattr(speculative, "parallel_drafting", False) and len(held.parts) > 1:
            raise PlanRefused(
                "with parallel drafting vLLM keeps a state derived from the draft model's weights outside of it, which "
                "a push would leave as it is. Leave the draft model's weights out, or serve without parallel_drafting."
            )

    def summary(self, plan: WorkerPlan) -> dict[str, Any]:
        """Bytes by home and by destination, for people."""
        arrived: dict[int, int] = {}
        for c in plan.copies:
            arrived[c.destination] = arrived.get(c.destination, 0) + c.copy_.dst_nbytes
        homes: dict[str, int] = {}
        for d in plan.destinations:
            homes[d.home] = homes.get(d.home, 0) + d.nbytes
        reasons = [
            next((why[n] for n in place.destination.names if n in why), "")
            for place in self._of(plan).places
            for why in [place.model.record.not_live]
        ]
        return {
            "nbytes": plan.nbytes,
            "nbytes_by_home": homes,
            "copies": len(plan.copies),
            "unused": list(plan.unused),
            "fallback": list(plan.fallback),
            "stale": list(plan.stale),
            "streamed": self.binder.foresee(self._of(plan)),
            "self_check": summed([part.self_check for part in self._of(plan).parts]),
            "destinations": [
                {
                    "names": list(d.names),
                    "nbytes": d.nbytes,
                    "home": d.home,
                    "reason": reasons[i],
                    "received_nbytes": arrived.get(i, 0),
                }
                for i, d in enumerate(plan.destinations)
            ],
        }

    def _of(self, plan: WorkerPlan) -> Held:
        try:
            return self._held[id(plan)]
        except KeyError:
            raise UnknownPlan("the worker no longer holds this plan; plan again") from None

    # Register and transfer

    def bind(self, plan: WorkerPlan, mode: Mode, contacts: Sequence[bytes] = ()) -> Binding:
        """Addresses of all destinations for one mode; memory is reserved and registered when it was not yet.

        ``contacts``: the agents that a window is handed back to.

        Errors: EngineAsleep, EngineTorn, InsufficientMemory, RegistrationFailed, UnknownPlan (a live home is no longer
        one).
        """
        self._refuse_asleep()
        held = self._of(plan)
        if torn := self._torn & set(plan.stale):
            raise EngineTorn(
                f"the {', '.join(sorted(torn))} model holds half of an update, and this push has no weights for it: "
                "push all weights of target and draft model"
            )
        if self.installer.untidy:
            self._tidy()
        binding = self.binder.bind(held, mode, contacts)
        if mode != "shadow":
            self._torn |= held.labels
        return binding

    def _refuse_asleep(self) -> None:
        if is_asleep(self.worker):
            raise EngineAsleep("the engine's weights are asleep; wake it up (POST /wake_up) and try again")

    def notifications(self) -> list[tuple[str, bytes]]:
        """Agent and message of what has landed since the last call."""
        return self.binder.notifications()

    def sums(self, plan: WorkerPlan, mode: Mode) -> Iterator[int]:
        """The checksum of what has arrived for each destination of an update that is open, in order."""
        copies: dict[int, list[Copy]] = {}
        for planned in plan.copies:
            copies.setdefault(planned.destination, []).append(planned.copy_)
        for index, home in enumerate(self.binder.homes(self._of(plan), mode)):
            yield checksums([(written(home, copies.get(index, [])), 0)])

    # From worker to worker

    def offer(self, plan: WorkerPlan) -> Binding:
        """Where a peer may read what serves, in the layout of this plan. Errors: PeerRefused, EngineAsleep."""
        self._refuse_asleep()
        return offering.offered(self.binder, self._of(plan))

    def fetch(self, plan: WorkerPlan, mode: Mode, source: Binding) -> offering.Fetch:
        """Begin to read what a peer offers into the memory of an update by this plan. Errors: PeerRefused."""
        held = self._of(plan)
        return offering.fetch(self.binder, self.binder.homes(held, mode), source)

    # Install

    def prepare_install(self, plan: WorkerPlan, mode: Mode, *, whole: bool) -> bool:
        """Run vLLM's processing on the twin and work out what an install will change: a slice of it, or all that is
        left. Nothing that serves is touched. Returns whether the install is ready.

        Errors: NeedsRestart, InstallFailed; always ``untouched`` in shadow mode.
        """
        self._take_twins()
        try:
            return self.installer.prepare(self._of(plan), mode, whole=whole)
        finally:
            self._leave_twins()

    def _take_twins(self) -> None:
        """From the first slice to the end of the update the twins are not traced."""
        if not self._holds_twins:
            self._lock.acquire()
            self._holds_twins = True
            self.installer.tidy()

    def _leave_twins(self) -> None:
        if self._holds_twins and self.installer.idle:
            self._holds_twins = False
            self._lock.release()
            if self.installer.untidy:  # not while generation stands still
                threading.Thread(target=self._tidy, name="nixl-tidy", daemon=True).start()

    def _tidy(self) -> None:
        with self._lock:
            self.installer.tidy()

    def install_group(self, plan: WorkerPlan, number: int, credit: bytes | None) -> None:
        """Mode ``streamed``: install a group of the plan, all of which is there; those before it are installed.

        ``credit``: what to tell the writers when its place in the window is free. Errors: NeedsRestart, InstallFailed.
        """
        self._take_twins()

        def hand_back() -> None:
            if credit is not None:
                self.binder.hand_back(credit)

        try:
            self.installer.stream(self._of(plan), number, hand_back)
        finally:
            self._leave_twins()

    def install(self, plan: WorkerPlan, mode: Mode) -> dict[str, float]:
        """Put the prepared weights in place; seconds by stage (those of `prepare_install` among them).

        Errors: those of `prepare_install`, and InstallFailed without ``untouched`` when a copy failed half-way.
        """
        self._take_twins()
        held = self._of(plan)
        try:
            seconds = self.installer.install(held, mode)
        except PushWeightsError as error:
            self._torn |= set() if error.details.get("untouched") else held.labels
            raise
        finally:
            self._leave_twins()
        self._torn -= held.labels
        self._stale = plan.stale
        if plan.stale:
            logger.warning(
                "stale: %s: the update had no weights for the draft model, which keeps its own and may guess worse",
                ", ".join(plan.stale),
            )
        return seconds

    def checkpoint(self) -> list[WeightSpec]:
        """Weights of the checkpoint that vLLM loaded the model from, in its order; none where there was none.

        Those of a draft model that has a checkpoint of its own follow, under the names that a push has for them.
        """
        found = list(self.target.record.checkpoint)
        for drafter in (m for m in self.drafters if m.prefix and m.can_plan):
            with self._lock:
                self.installer.tidy()
                used = {name for d in drafter.baseline() for name in d.weights}
            specs = (w for w in drafter.record.checkpoint if w.name in used)
            found += [w.model_copy(update={"name": drafter.prefix + w.name}) for w in specs]
        return found

    def fingerprint(self) -> Iterator[list[tuple[str, str]]]:
        """Path and checksum of everything that the engine can read, in slices of a fraction of a second each.

        Errors: EngineAsleep, at each slice.
        """
        found = slices(self.worker)
        while True:
            self._refuse_asleep()
            piece = next(found, None)
            if piece is None:
                return
            yield piece

    # Ends of updates

    def discard(self, plan: WorkerPlan, mode: Mode) -> None:
        """The update ended without an install."""
        self.installer.release()
        self._leave_twins()

    def may_write(self, writer: str) -> bool:
        """Whether a process of this host could go on writing to memory whose agent is destroyed: it runs, or stands."""
        return is_running(writer)

    def fence(self, writers: Sequence[str]) -> None:
        """Destroy the agent and take a new name; shadow memory is set aside until ``writers`` are gone."""
        self.binder.fence(writers)
