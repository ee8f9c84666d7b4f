"""The update as a state machine, kept by every worker; the same on all of them.

    serving(v) --begin--> receiving(v -> w) --install--> installing --finish--> serving(w)
        ^                     | abort, taken over            | failure
        '---------------------'                              '--> torn (only a full push leads out)

Three numbers keep late messages out. The *epoch* grows with every begin: a begin with an old one is refused. The
*claim* grows with every API process that takes the commit of an update into its hands: steps of an older claim are
refused. The *incarnation* changes with every start and fence: memory given out under an older one is out of reach.

One worker, the *judge*, also holds the lease: it alone decides who may begin (`grant`) and who may commit (`claim`),
because two API processes may reach two engines in different order. It alone keeps the *step*, too, from which another
process goes on when one has died, and whether generation is held by hand; both are told to it past the engine's loop
(`record_step`, `hold`). What changes weights or memory is said to all workers.

No vLLM, no device, no network here; a `Plane` does the work. Calls on the plane come from one thread (the worker's RPC
loop), except `make_plan`; the lock guards the fields that the channel thread reads and writes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from vllm_nixl_plugin import errors
from vllm_nixl_plugin.checking import Checking
from vllm_nixl_plugin.encoding import encode_credit
from vllm_nixl_plugin.lease import STALE_HEARTBEAT_S, Judge, superseded
from vllm_nixl_plugin.opened import INSTALLING_STEPS, PAUSED_STEPS, Update
from vllm_nixl_plugin.peering import Peering
from vllm_nixl_plugin.plan_cache import CachedPlan, PlanCache
from vllm_nixl_plugin.readings import Readings
from vllm_nixl_plugin.stages import Plane
from vllm_nixl_plugin.wire import Credit, Mode

logger = logging.getLogger("vllm.nixl_plugin")

HISTORY = 20
LISTEN_S = 0.05
"""How long a worker listens for bytes in one call."""
FIRST_VERSION = "default"


class WorkerSession:
    """State of one worker and the transitions on it. Methods answer with plain values and raise PushWeightsError."""

    def __init__(self, plane: Plane, clock: Callable[[], float] = time.monotonic) -> None:
        self.plane = plane
        self.plans = PlanCache(plane.make_plan)
        self._readings = Readings(plane.fingerprint)
        self.peering = Peering(self)
        self.checking = Checking(self)
        self.description = plane.describe()
        self.worker: int = self.description["worker"]
        self.incarnation = plane.incarnation()
        self.weight_version = FIRST_VERSION
        self.epoch = 0
        self.torn = False
        self.held = False
        self.update: Update | None = None
        self.judge = Judge(clock)
        self.undrained: str | None = None
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._undrained_by: tuple[str, ...] = ()  # the processes that wrote for it
        self._writers: tuple[str, ...] = ()  # processes that the undrained update left with addresses of live memory
        self._lock = threading.RLock()

    # What can be asked at any time, also from the channel thread.

    @property
    def phase(self) -> str:
        """The state of the diagram."""
        update = self.update
        if self.torn and (update is None or update.install_error is not None):
            return "torn"
        if update is None:
            return "serving"
        return "installing" if update.step in INSTALLING_STEPS else "receiving"

    def state(self) -> dict[str, Any]:
        """What every answer carries. ``step`` and ``held`` are true at the judge, ``weight_version`` there first."""
        with self._lock:
            update = self.update
            return {
                "state": self.phase, "torn": self.torn, "held": self.held, "weight_version": self.weight_version,
                "epoch": self.epoch, "update_id": update and update.id, "step": update and update.step,
            }  # fmt: skip

    def status(self) -> dict[str, Any]:
        """`state`, and the lease, the open update and the history in full."""
        with self._lock:
            update, committing = self.update, self.judge.lease is not None and self.judge.lease.claim > 0
            return self.state() | {
                "incarnation": self.incarnation,
                "server": self.description,
                "undrained": self.undrained,
                "lease": self.judge.status(),
                "update": update and update.record("committing" if committing else "open"),
                "history": list(self.history),
            }

    def describe(self) -> dict[str, Any]:
        """`status`, with a fresh description by the plane."""
        self.description = self.plane.describe()
        return self.status()

    # What the judge alone decides; see lease.py.

    def renew(self, update_id: str, lease_s: float) -> dict[str, Any]:
        """Judge. Errors: StaleUpdate."""
        with self._lock:
            self.judge.renew(update_id, lease_s)
        return {"lease_s": lease_s}

    def heartbeat(self, update_id: str, claim: int) -> dict[str, Any]:
        """Judge: the process with this claim still works at the commit. Errors: StaleUpdate."""
        with self._lock:
            self.judge.beat(update_id, claim)
        return {}

    def grant(self, update_id: str, holder: str, lease_s: float, plan: str) -> dict[str, Any]:
        """Judge: let an update begin and number it; asked again, the same.

        Errors: LeaseHeld, EngineTorn, UnknownPlan.
        """
        with self._lock:
            update = self.update
            opening = update.id if update is not None and update.step == "opening" else None
            if not self.judge.holds(update_id):
                self.judge.check_free(opening)
                self._check_heals(self.plans.get(plan))
            return {"epoch": self.judge.grant(update_id, holder, lease_s, self.epoch)}

    def claim(
        self, update_id: str, purpose: str, claimant: str, request: str, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Judge: put the end of an update into the hands of one API process; see `Judge.claim`.

        The answer may also be ``over``: the record of an update that has ended. Errors: StaleUpdate.
        """
        with self._lock:
            for record in self.history:
                if record["update_id"] == update_id:
                    return {"over": record}
            update = self.update if self.update and self.update.id == update_id else None
            claimed = self.judge.claim(
                update_id, purpose, claimant, request, options,
                opened=update is not None, step=update.step if update else None,
            )  # fmt: skip
            return claimed | {"mode": update.mode} if update and "claim" in claimed else claimed

    # What is said to all workers.

    def begin(
        self, update_id: str, epoch: int, version: str, mode: Mode, holder: str, plan: str,
        known_bindings: list[str], writers: Sequence[str] = (), contacts: Sequence[bytes] = (),
    ) -> dict[str, Any]:
        """Open an update and give its memory. Ends the one that was open, fencing it off when it was not drained.

        One that is installed here is over and done: the judge has granted this begin, and only the word did not arrive.

        Errors: StaleUpdate (a later begin was first), UnknownPlan, EngineTorn, and those of `Plane.bind`.
        """
        with self._lock:
            if epoch <= self.epoch:
                raise errors.StaleUpdate(f"begin with epoch {epoch}, this worker is at epoch {self.epoch}: begin again")
            cached = self.plans.get(plan)
            self.epoch = epoch
        if self.update is not None and self.update.stages is not None:
            self._serves(self.update)
            self._close("done")
        elif self.update is not None:
            self._close("expired", torn=self.update.stands)
        self._check_heals(cached)
        if mode != "shadow":
            self._readings.clear()
        if self.undrained is not None:
            self._check_writers(writers)
            logger.warning("update %s ended with writes under way: fencing", self.undrained)
            self.plane.fence(self._undrained_by)
            self.undrained, self._undrained_by, self._writers = None, (), ()
        self.plane.notifications()
        try:
            binding = self.plane.bind(cached.plan, mode, contacts)
        except errors.UnknownPlan:
            self.plans.drop(plan)
            raise
        digest = binding.digest()
        update = Update(update_id, epoch, version, mode, holder, cached, self.plane.incarnation(), tuple(writers))
        update.after = binding.window.after if binding.window is not None else ()
        update.step = "opening" if update.stands else None
        with self._lock:
            self.incarnation = update.incarnation
            self.update = update
        return {
            "worker": self.worker, "incarnation": self.incarnation, "digest": digest,
            "binding": None if digest in known_bindings else binding.model_dump(),
        }

    def mark_torn(self, update_id: str) -> dict[str, Any]:
        """The workers differ in their weights: only a full update may go on. Errors: StaleUpdate, EngineTorn."""
        update = self._opened(update_id)
        self.torn = True
        self._check_heals(update.cached)
        return {}

    def take_over(self, update_id: str, claim: int) -> dict[str, Any]:
        """Learn a later claim, so that an install of an earlier one, still on its way, is refused from now on.

        An update that is over here is no error: its end may not have reached all. Errors: StaleUpdate.
        """
        with self._lock:
            if self.update is not None and self.update.id == update_id:
                self._claimed(update_id, claim)
        return {}

    def prepare(self, update_id: str, claim: int, whole: bool = True) -> dict[str, Any]:
        """Step ``waiting``, which implies that the update is drained: count what has landed, and once that is all of
        it, make the install ready. Changes nothing that serves; asked again, it counts again and prepares once.

        Not ``whole``: a slice of that per call, so that the engine serves in between; ``ready`` after the last. All
        workers have to be asked the same number of times, and ``whole`` where that is not known.

        Errors: StaleUpdate, IncarnationChanged, InvalidRequest when more arrived than the plan has, and those of
        `Plane.prepare_install`.
        """
        with self._lock:
            update = self._claimed(update_id, claim)
            update.drained = update.drained or update.mode != "streamed"
            if update.step not in PAUSED_STEPS:
                update.step = "waiting"
        got = self._collect(update)
        if got["arrived_nbytes"] == got["expected_nbytes"] and not update.prepared and update.stages is None:
            stands = self.torn or update.stands
            update.drained = True  # in mode `streamed` nothing but this says so: every byte has been written once
            update.prepared = self.plane.prepare_install(update.plan, update.mode, whole=whole or stands)
        return got | {"mode": update.mode, "ready": update.prepared or update.stages is not None}

    def stream(self, update_id: str, claim: int, install: int) -> dict[str, Any]:
        """Mode ``streamed``, in step ``waiting``: install the groups up to ``install``, which have landed on all
        workers, and wait a moment for further ones. All workers have to be asked for the same.

        ``landed``, ``installed``: how many of the ``groups``; ``silent``: at the judge, nobody renews the lease.
        Errors: StaleUpdate, IncarnationChanged, InvalidRequest; those of `Plane.install_group`, and then torn.
        """
        with self._lock:
            update = self._claimed(update_id, claim)
        if update.install_error is not None:
            raise update.install_error
        total = len(update.plan.groups)
        try:
            self._collect(update)
            for number in range(update.installed, min(install, update.groups_landed())):
                self.plane.install_group(update.plan, number, self._credit(update, number))
                update.installed = number + 1
        except Exception as error:
            raise self._failed_install(update, error) from error
        until = time.monotonic() + LISTEN_S
        while (landed := update.groups_landed()) == update.installed < total and time.monotonic() < until:
            time.sleep(LISTEN_S / 100)
            self._collect(update)
        with self._lock:
            self.judge.seen(update_id, claim)
            silent = self.judge.is_over(update_id) and update.arrived_nbytes < update.cached.nbytes
        return {"landed": landed, "installed": update.installed, "groups": total, "silent": silent}

    @staticmethod
    def _credit(update: Update, number: int) -> bytes | None:
        """What to tell the writers when a group has left the window. The end of the last ones is of no use to them."""
        later = update.after[number + 1 :]
        if not later or max(later) < number:
            return None
        return encode_credit(Credit(update_id=update.id, group=number, plan=update.cached.digest[:16]))

    def record_step(self, update_id: str, claim: int, step: str, held: bool | None = None) -> dict[str, Any]:
        """Judge: note what is about to happen. ``resuming`` implies that the new weights serve.

        Errors: StaleUpdate, also when a later claim has taken over; InstallFailed when ``resuming`` comes too early.
        """
        with self._lock:
            update = self._claimed(update_id, claim)
            if step == "resuming":
                self._serves(update)
            update.step = None if step == "open" else step
            if held is not None:
                self.held = held
            self.judge.seen(update_id, claim)
        return {}

    def install(self, update_id: str, claim: int) -> dict[str, Any]:
        """Steps ``installing`` and ``installed``. Installs once; asked again, answers the same.

        A failure that is not ``untouched`` makes the worker torn. ``version`` is what the worker will serve.
        Errors: StaleUpdate, Incomplete, InstallFailed, NeedsRestart.
        """
        with self._lock:
            if (done := self._done(update_id)) is not None:
                return {"stages": {}, "version": done["version"]}
            update = self._claimed(update_id, claim)
        if update.install_error is not None:
            raise update.install_error
        if update.stages is None:
            self._check_complete(update)
            with self._lock:
                update.step = "installing"
            self._readings.clear()
            try:
                stages = self.plane.install(update.plan, update.mode)
            except Exception as error:
                raise self._failed_install(update, error) from error
            with self._lock:
                self.description = self.plane.describe()
                update.stages = {str(k): float(v) for k, v in stages.items()}
                update.step = "installed"
                self.judge.seen(update_id, claim)
        return {"stages": update.stages, "version": update.version}

    def finish(self, update_id: str, claim: int, timings: dict[str, float]) -> dict[str, Any]:
        """The new weights serve; the ``record`` of the update. The judge hears it past the engine's loop.

        Errors: StaleUpdate; InstallFailed when they are not installed.
        """
        with self._lock:
            if self._done(update_id) is None:
                self._serves(self._claimed(update_id, claim))
                self._close("done", timings=timings)
            return {"record": self._done(update_id)}

    def abort(
        self, update_id: str, claim: int, *, drained: bool = False, untouched: bool = False, torn: bool = False,
        outcome: str = "aborted", error: dict[str, Any] | None = None, timings: dict[str, float] | None = None,
    ) -> dict[str, Any]:
        """End an update without new weights. ``untouched``: no address of live memory was given out.

        An update that never began here, or is over already, is no error: begin can fail on some workers only. For the
        update that ended undrained, ``drained`` lifts the need for a fence.
        """
        with self._lock:
            self.judge.end(update_id, claim)
            if drained and self.undrained == update_id:
                self.undrained = None
            if self.update is None or self.update.id != update_id:
                return {}
            update = self._claimed(update_id, claim)
            update.drained |= drained
            torn |= update.stands and not untouched
        return self._close(outcome, torn=torn, error=error, timings=timings)

    def checkpoint(self) -> list[list[Any]]:
        """Name, shape and dtype of each weight that the server started from."""
        return [[weight.name, list(weight.shape), weight.dtype] for weight in self.plane.checkpoint()]

    def fingerprint(self, ticket: str, start: bool, paths: bool) -> dict[str, Any]:
        """The next slice of the fingerprint that ``ticket`` names; see `Readings.read`. Not while weights change.

        Errors: EngineTorn, LeaseHeld, StaleUpdate, EngineAsleep.
        """
        with self._lock:
            update = self.update
            if self.torn:
                raise errors.EngineTorn("the engine holds half of an update: push all weights, then compare")
            if update is not None and (
                update.stands or update.stages is not None or update.step in INSTALLING_STEPS
            ):
                raise errors.LeaseHeld(
                    f"update {update.id} is changing the weights: ask again when it is over",
                    holder=update.holder, expires_in_s=STALE_HEARTBEAT_S, update_id=update.id,
                )  # fmt: skip
        return self._readings.read(ticket, start=start, paths=paths)

    def hold(self, held: bool) -> dict[str, Any]:
        """Judge: somebody pauses or resumes generation by hand.

        Errors: EngineTorn, LeaseHeld when that must not be now.
        """
        with self._lock:
            if self.phase == "torn" and not held:
                raise errors.EngineTorn("the engine holds half of an update: push all weights, that resumes it")
            update = self.update
            if update is not None and (update.step in PAUSED_STEPS or update.stands or self.torn):
                raise errors.LeaseHeld(
                    f"update {update.id} keeps the engine paused and resumes it when it is over",
                    holder=update.holder, expires_in_s=STALE_HEARTBEAT_S, update_id=update.id,
                )
            self.held = held
        return {}

    # Inside.

    def _opened(self, update_id: str) -> Update:
        if self.update is None or self.update.id != update_id:
            raise errors.StaleUpdate(
                f"update {update_id} is over, or never was, on worker {self.worker}", update_id=update_id
            )
        return self.update

    def _claimed(self, update_id: str, claim: int) -> Update:
        """The open update, for who has the last claim: the judge knows it at once, the others by their next RPC."""
        update = self._opened(update_id)
        last = max(update.claim, self.judge.last_claim(update_id))
        if claim < last:
            raise superseded(update_id, claim, last)
        update.claim = claim
        return update

    def _done(self, update_id: str) -> dict[str, Any] | None:
        """The record of an update that has been finished here."""
        return next((r for r in self.history if r["update_id"] == update_id and r["state"] == "done"), None)

    def _serves(self, update: Update) -> None:
        """The weights of this update are the worker's now. Errors: InstallFailed when they are not installed."""
        if update.stages is None:
            raise errors.InstallFailed(f"worker {self.worker} has not installed update {update.id}")
        with self._lock:
            self.weight_version, self.torn = update.version, False
        self.peering.installed(update)

    def _check_heals(self, cached: CachedPlan) -> None:
        if self.torn and not cached.full:
            raise errors.EngineTorn("the engine holds half of an update: a partial push cannot heal it, push all")

    def _check_writers(self, writers: Sequence[str]) -> None:
        """No fence keeps a process of this host from memory that it has mapped, and live memory cannot be set aside.

        Errors: LeaseHeld, while writers of the undrained in-place update still exist that are not among ``writers``,
        those of the next.
        """
        left = [writer for writer in self._writers if writer not in writers and self.plane.may_write(writer)]
        if not left:
            return
        pids = ", ".join(writer.rpartition("/")[2].partition("@")[0] for writer in left[:10])
        raise errors.LeaseHeld(
            f"{len(left)} processes (PID {pids}) on the host of worker {self.worker} took part in the in-place update "
            f"{self.undrained} and may still write to the weights that serve: let them go on until they have given up, "
            "or kill them, and push again",
            holder=left[0], expires_in_s=STALE_HEARTBEAT_S, update_id=self.undrained,
        )  # fmt: skip

    def collected(self, update: Update) -> dict[str, Any]:
        """How many bytes of the update have landed, of how many. Errors: IncarnationChanged, InvalidRequest."""
        return self._collect(update)

    def _collect(self, update: Update) -> dict[str, Any]:
        """Count what has landed. Each (agent, sequence) counts once; messages of other updates do not count.

        Errors: IncarnationChanged, InvalidRequest when more arrived than the plan has.
        """
        if update.incarnation != self.plane.incarnation():
            raise errors.IncarnationChanged(f"worker {self.worker} changed its incarnation during update {update.id}")
        for agent, data in self.plane.notifications():
            update.count(agent, data)
        return update.arrived(self.worker)

    def _check_complete(self, update: Update) -> None:
        got = self._collect(update)
        if got["arrived_nbytes"] != got["expected_nbytes"]:
            raise errors.Incomplete(
                f"worker {self.worker} has {got['arrived_nbytes']} of {got['expected_nbytes']} bytes",
                untouched=True, **got,
            )  # fmt: skip

    def _failed_install(self, update: Update, error: Exception) -> errors.PushWeightsError:
        if not isinstance(error, errors.PushWeightsError):
            logger.error("install of update %s failed on worker %d", update.id, self.worker, exc_info=error)
            error = errors.InstallFailed(f"worker {self.worker}: {errors.said(error)}; see its log")
        with self._lock:
            update.install_error = error
            self.torn |= update.stands or not error.details.get("untouched", False)
        return error

    def _close(
        self, outcome: str, *, torn: bool = False, error: dict[str, Any] | None = None,
        timings: dict[str, float] | None = None,
    ) -> dict[str, Any]:
        with self._lock:
            update = self.update
            assert update is not None
            self.peering.ended(update)
            self.torn |= torn
            if outcome != "done" and not update.drained:
                self.undrained = update.id
                self._undrained_by = update.writers
                self._writers = update.writers if update.stands else ()
            record = update.record("torn" if self.torn and outcome == "failed" else outcome)
            ended = {"at": time.time(), "clock": time.monotonic()}  # for people; to compare
            self.history.append(record | {"error": error, "timings": timings or {}} | ended)
            self.update = None
            self.judge.end(update.id)
        if outcome != "done":
            self.plane.discard(update.plan, update.mode)
        return {}
