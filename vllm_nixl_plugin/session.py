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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_nixl_plugin import errors
from vllm_nixl_plugin.encoding import decode_landed
from vllm_nixl_plugin.plan_cache import CachedPlan, PlanCache
from vllm_nixl_plugin.readings import Readings
from vllm_nixl_plugin.wire import Binding, Landed, Manifest, Mode, WeightSpec, WorkerPlan

logger = logging.getLogger("vllm.nixl_plugin")

HISTORY = 20
STALE_HEARTBEAT_S = 10.0
FIRST_VERSION = "default"

PAUSED_STEPS = ("pausing", "installing", "installed", "resuming", "undoing")
INSTALLING_STEPS = ("installing", "installed", "resuming")


class Plane(Protocol):
    """What a worker can do with weights and memory. `vllm_nixl_plugin.plane` has the real one."""

    def describe(self) -> dict[str, Any]:
        """Plain values: ``worker`` (data_parallel_index * world_size + rank), ranks and sizes, model, dtype, device."""

    def make_plan(self, manifest: Manifest) -> WorkerPlan:
        """Takes seconds and runs in a thread. Errors: PlanRefused."""

    def bind(self, plan: WorkerPlan, mode: Mode) -> Binding:
        """Allocate and register. Errors: InsufficientMemory, RegistrationFailed, EngineAsleep; then nothing is left."""

    def notifications(self) -> list[tuple[str, bytes]]:
        """Agent name and message of every notification since the last call."""

    def install(self, plan: WorkerPlan, mode: Mode) -> dict[str, float]:
        """Put the weights in place, the engine being paused; seconds by stage. Errors: InstallFailed, NeedsRestart,
        with ``untouched=True`` among the details when nothing was changed yet."""

    def discard(self, plan: WorkerPlan, mode: Mode) -> None:
        """The update is over without an install. Memory that an undrained writer may reach waits for `fence`."""

    def fence(self) -> None:
        """Destroy the NIXL agent and take a new name: no earlier writer reaches memory any more."""

    def may_write(self, writer: str) -> bool:
        """Whether this process (`processes.this_process`) could write to memory of this worker in spite of a fence."""

    def incarnation(self) -> str:
        """Changes at worker start and at each fence."""

    def summary(self, plan: WorkerPlan) -> dict[str, Any]:
        """The plan for people."""

    def checkpoint(self) -> Sequence[WeightSpec]:
        """Weights of the checkpoint that vLLM loaded the model from, in its order; none where there was none."""

    def fingerprint(self) -> Iterator[list[tuple[str, str]]]:
        """Path and checksum of everything that the engine can read, in slices of a fraction of a second each.

        Errors: EngineAsleep, at each slice.
        """


@dataclass
class Lease:
    """Held by the judge. ``claimant`` is the API process whose task commits; its heartbeat shows that it lives.

    ``request`` names the request that got the last claim: asked again, because the answer was lost, it gets the same.
    """

    update_id: str
    holder: str
    until: float
    heartbeat: float
    epoch: int
    claim: int = 0
    claimant: str = ""
    request: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Update:
    """The open update of this worker.

    ``step`` is recorded before it happens; the judge's is the one that counts. ``drained``: no writer is under way;
    ``prepared``: the plane has made the install ready.
    """

    id: str
    epoch: int
    version: str
    mode: Mode
    holder: str
    cached: CachedPlan
    incarnation: str
    writers: tuple[str, ...] = ()
    claim: int = 0
    step: str | None = None
    drained: bool = False
    prepared: bool = False
    landed: set[tuple[str, int]] = field(default_factory=set)
    arrived_nbytes: int = 0
    foreign: int = 0
    stages: dict[str, float] | None = None
    install_error: errors.PushWeightsError | None = None

    @property
    def plan(self) -> WorkerPlan:
        """What has to arrive."""
        return self.cached.plan


class WorkerSession:
    """State of one worker and the transitions on it. Methods answer with plain values and raise PushWeightsError."""

    def __init__(self, plane: Plane, clock: Callable[[], float] = time.monotonic) -> None:
        self.plane = plane
        self.plans = PlanCache(plane.make_plan)
        self._readings = Readings(plane.fingerprint)
        self.description = plane.describe()
        self.worker: int = self.description["worker"]
        self.incarnation = plane.incarnation()
        self.weight_version = FIRST_VERSION
        self.epoch = 0
        self.torn = False
        self.held = False
        self.update: Update | None = None
        self.lease: Lease | None = None
        self.undrained: str | None = None
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._writers: tuple[str, ...] = ()  # processes that the undrained update left with addresses of live memory
        self._granted = 0
        self._nbytes: dict[str, int] = {}
        self._clock = clock
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
            now, lease, update = self._clock(), self.lease, self.update
            return self.state() | {
                "incarnation": self.incarnation,
                "server": self.description,
                "undrained": self.undrained,
                "lease": lease and {
                    "update_id": lease.update_id, "holder": lease.holder, "expires_in_s": lease.until - now,
                    "claim": lease.claim, "claimant": lease.claimant, "options": lease.options,
                    "heartbeat_age_s": now - lease.heartbeat,
                },
                "update": update and self._record(update, "committing" if lease and lease.claim else "open"),
                "history": list(self.history),
            }

    def describe(self) -> dict[str, Any]:
        """`status`, with a fresh description by the plane."""
        self.description = self.plane.describe()
        return self.status()

    def renew(self, update_id: str, lease_s: float) -> dict[str, Any]:
        """Judge. Errors: StaleUpdate."""
        with self._lock:
            lease = self._leased(update_id)
            lease.until = self._clock() + lease_s
        return {"lease_s": lease_s}

    def heartbeat(self, update_id: str, claim: int) -> dict[str, Any]:
        """Judge: the process with this claim still works at the commit. Errors: StaleUpdate."""
        with self._lock:
            lease = self._leased(update_id)
            if claim != lease.claim:
                raise _superseded(update_id, claim, lease.claim)
            lease.heartbeat = self._clock()
        return {}

    # What the judge alone decides.

    def grant(self, update_id: str, holder: str, lease_s: float, plan: str) -> dict[str, Any]:
        """Judge: let an update begin and number it; asked again, the same.

        Errors: LeaseHeld, EngineTorn, UnknownPlan.
        """
        with self._lock:
            now, lease = self._clock(), self.lease
            if lease is not None and lease.update_id == update_id:
                return {"epoch": lease.epoch}
            if lease is not None and (lease.until > now or self._working(lease)):
                wait = max(lease.until - now, 0.0) or STALE_HEARTBEAT_S
                who = lease.holder or "an unnamed holder"
                raise errors.LeaseHeld(
                    f"update {lease.update_id} of {who} is open for another {wait:.1f} s",
                    holder=lease.holder, expires_in_s=wait, update_id=lease.update_id,
                )
            self._check_heals(self.plans.get(plan))
            self._granted = max(self._granted, self.epoch) + 1
            self.lease = Lease(update_id, holder, now + lease_s, now, self._granted)
            return {"epoch": self._granted}

    def claim(
        self, update_id: str, purpose: str, claimant: str, request: str, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Judge: put the end of an update into the hands of one API process; number it.

        ``purpose``: ``commit`` (joins a living commit, takes over a dead one), ``abort`` (also takes over a commit
        that still waits for bytes), ``recover`` (takes over only what is dead). The answer has ``claim`` and the
        ``step`` and ``options`` to go on with, or ``joined``, or ``over``: the record of an update that has ended.
        Errors: StaleUpdate.
        """
        with self._lock:
            for record in self.history:
                if record["update_id"] == update_id:
                    return {"over": record}
            lease = self._leased(update_id)
            update = self.update if self.update and self.update.id == update_id else None
            step = update.step if update else None
            alive = self._clock() - lease.heartbeat <= STALE_HEARTBEAT_S
            if lease.request == request:
                return {"claim": lease.claim, "step": step, "options": lease.options}
            if (purpose == "commit" and update is None) or (purpose != "recover" and step == "opening"):
                raise errors.StaleUpdate(f"update {update_id} has not been opened yet: wait for the answer of begin")
            if purpose == "abort" and step in PAUSED_STEPS:
                raise errors.StaleUpdate(f"update {update_id} is at step {step!r}: too late to abort", step=step)
            if alive and (purpose == "recover" or (purpose == "commit" and lease.claim)):
                return {"joined": lease.claimant}
            if purpose == "abort" or not lease.options:
                lease.options = options | {"purpose": purpose}
            lease.claim, lease.claimant, lease.request = lease.claim + 1, claimant, request
            lease.heartbeat = self._clock()
            return {"claim": lease.claim, "step": step, "options": lease.options}

    # What is said to all workers.

    def begin(
        self, update_id: str, epoch: int, version: str, mode: Mode, holder: str, plan: str,
        known_bindings: list[str], writers: Sequence[str] = (),
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
            self._close("expired", torn=self.update.mode == "in_place")
        self._check_heals(cached)
        if mode == "in_place":
            self._readings.clear()
        if self.undrained is not None:
            self._check_writers(writers)
            logger.warning("update %s ended with writes under way: fencing", self.undrained)
            self.plane.fence()
            self.undrained, self._writers = None, ()
        self.plane.notifications()
        try:
            binding = self.plane.bind(cached.plan, mode)
        except errors.UnknownPlan:
            self.plans.drop(plan)
            raise
        digest = binding.digest()
        update = Update(update_id, epoch, version, mode, holder, cached, self.plane.incarnation(), tuple(writers))
        update.step = "opening" if mode == "in_place" else None
        self._expected(update)
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

    def prepare(self, update_id: str, claim: int) -> dict[str, Any]:
        """Step ``waiting``, which implies that the update is drained: count what has landed, and once that is all of
        it, make the install ready. Changes nothing that serves; asked again, it counts again and prepares once.

        Errors: StaleUpdate, IncarnationChanged, InvalidRequest when more arrived than the plan has, and those of
        ``prepare_install``, which a plane may have.
        """
        with self._lock:
            update = self._claimed(update_id, claim)
            update.drained = True
            if update.step not in PAUSED_STEPS:
                update.step = "waiting"
        got = self._collect(update)
        if got["arrived_nbytes"] == got["expected_nbytes"] and not update.prepared and update.stages is None:
            make_ready = getattr(self.plane, "prepare_install", None)
            if make_ready is not None:
                make_ready(update.plan, update.mode)
            update.prepared = True
        return got | {"mode": update.mode}

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
            if self.lease is not None and self.lease.update_id == update_id and claim == self.lease.claim:
                self.lease.heartbeat = self._clock()
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
                if self.lease is not None:
                    self.lease.heartbeat = self._clock()
        return {"stages": update.stages, "version": update.version}

    def finish(self, update_id: str, claim: int, timings: dict[str, float]) -> dict[str, Any]:
        """The new weights serve. Errors: StaleUpdate; InstallFailed when they are not installed."""
        with self._lock:
            if self._done(update_id) is not None:
                return {}
            self._serves(self._claimed(update_id, claim))
            return self._close("done", timings=timings)

    def abort(
        self, update_id: str, claim: int, *, drained: bool = False, untouched: bool = False, torn: bool = False,
        outcome: str = "aborted", error: dict[str, Any] | None = None, timings: dict[str, float] | None = None,
    ) -> dict[str, Any]:
        """End an update without new weights. ``untouched``: no address of live memory was given out.

        An update that never began here, or is over already, is no error: begin can fail on some workers only. For the
        update that ended undrained, ``drained`` lifts the need for a fence.
        """
        with self._lock:
            if self.lease is not None and self.lease.update_id == update_id and self.lease.claim <= claim:
                self.lease = None
            if drained and self.undrained == update_id:
                self.undrained = None
            if self.update is None or self.update.id != update_id:
                return {}
            update = self._claimed(update_id, claim)
            update.drained |= drained
            torn |= update.mode == "in_place" and not untouched
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
                update.mode == "in_place" or update.stages is not None or update.step in INSTALLING_STEPS
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
            if update is not None and (update.step in PAUSED_STEPS or update.mode == "in_place" or self.torn):
                raise errors.LeaseHeld(
                    f"update {update.id} keeps the engine paused and resumes it when it is over",
                    holder=update.holder, expires_in_s=STALE_HEARTBEAT_S, update_id=update.id,
                )
            self.held = held
        return {}

    # Inside.

    def _leased(self, update_id: str) -> Lease:
        if self.lease is None or self.lease.update_id != update_id:
            raise errors.StaleUpdate(f"update {update_id} is over, or never was", update_id=update_id)
        return self.lease

    def _working(self, lease: Lease) -> bool:
        return lease.claim > 0 or bool(
            self.update and self.update.id == lease.update_id and self.update.step == "opening"
        )

    def _opened(self, update_id: str) -> Update:
        if self.update is None or self.update.id != update_id:
            raise errors.StaleUpdate(
                f"update {update_id} is over, or never was, on worker {self.worker}", update_id=update_id
            )
        return self.update

    def _claimed(self, update_id: str, claim: int) -> Update:
        """The open update, for who has the last claim: the judge knows it at once, the others by their next RPC."""
        update = self._opened(update_id)
        last = self.lease.claim if self.lease is not None and self.lease.update_id == update_id else 0
        if claim < max(update.claim, last):
            raise _superseded(update_id, claim, max(update.claim, last))
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

    def _collect(self, update: Update) -> dict[str, Any]:
        """Count what has landed. Each (agent, sequence) counts once; messages of other updates do not count.

        Errors: IncarnationChanged, InvalidRequest when more arrived than the plan has.
        """
        if update.incarnation != self.plane.incarnation():
            raise errors.IncarnationChanged(f"worker {self.worker} changed its incarnation during update {update.id}")
        for agent, data in self.plane.notifications():
            self._count(update, agent, data)
        expected = self._expected(update)
        if update.arrived_nbytes > expected:
            raise errors.InvalidRequest(
                f"worker {self.worker} got {update.arrived_nbytes} bytes, its plan has {expected}: two writers overlap",
                expected_nbytes=expected, arrived_nbytes=update.arrived_nbytes,
            )  # fmt: skip
        return {"arrived_nbytes": update.arrived_nbytes, "expected_nbytes": expected, "foreign": update.foreign}

    def _check_complete(self, update: Update) -> None:
        got = self._collect(update)
        if got["arrived_nbytes"] != got["expected_nbytes"]:
            raise errors.Incomplete(
                f"worker {self.worker} has {got['arrived_nbytes']} of {got['expected_nbytes']} bytes",
                untouched=True, **got,
            )  # fmt: skip

    def _expected(self, update: Update) -> int:
        if update.cached.digest not in self._nbytes:
            self._nbytes = {update.cached.digest: update.plan.nbytes}
        return self._nbytes[update.cached.digest]

    def _count(self, update: Update, agent: str, data: bytes) -> None:
        try:
            message: Landed | None = decode_landed(data)
        except errors.InvalidRequest:
            message = None
        if message is None or message.update_id != update.id or not update.cached.digest.startswith(message.plan):
            update.foreign += 1
            logger.warning("worker %d: a notification of %s is not of update %s", self.worker, agent, update.id)
        elif (agent, message.sequence) not in update.landed:
            update.landed.add((agent, message.sequence))
            update.arrived_nbytes += message.nbytes

    def _failed_install(self, update: Update, error: Exception) -> errors.PushWeightsError:
        if not isinstance(error, errors.PushWeightsError):
            logger.error("install of update %s failed on worker %d", update.id, self.worker, exc_info=error)
            error = errors.InstallFailed(f"worker {self.worker}: {errors.said(error)}; see its log")
        with self._lock:
            update.install_error = error
            self.torn |= update.mode == "in_place" or not error.details.get("untouched", False)
        return error

    def _close(
        self, outcome: str, *, torn: bool = False, error: dict[str, Any] | None = None,
        timings: dict[str, float] | None = None,
    ) -> dict[str, Any]:
        with self._lock:
            update = self.update
            assert update is not None
            self.torn |= torn
            if outcome != "done" and not update.drained:
                self.undrained = update.id
                self._writers = update.writers if update.mode == "in_place" else ()
            record = self._record(update, "torn" if self.torn and outcome == "failed" else outcome)
            self.history.append(record | {"error": error, "timings": timings or {}, "at": time.time()})
            self.update = None
            if self.lease is not None and self.lease.update_id == update.id:
                self.lease = None
        if outcome != "done":
            self.plane.discard(update.plan, update.mode)
        return {}

    def _record(self, update: Update, state: str) -> dict[str, Any]:
        return {
            "update_id": update.id, "version": update.version, "mode": update.mode, "state": state, "step": update.step,
            "holder": update.holder, "nbytes": self._expected(update), "arrived_nbytes": update.arrived_nbytes,
        }


def _superseded(update_id: str, claim: int, now: int) -> errors.StaleUpdate:
    return errors.StaleUpdate(
        f"claim {claim} on update {update_id} was taken over by claim {now}", update_id=update_id, superseded=True
    )
