"""One push to one server, from its plan to its new weights; `WeightClient` runs one for each server, in parallel.

    plan -> route -> begin -> transfer (pack and WRITE) -> commit -> wait for the install

`deliver` does this in order and always returns a `ServerReport`, never raises: one server's failure is not the others'.
What it prepares (plans, bindings, writes) its `Link` keeps for the next push for as long as nothing changes.

Until the commit, a failure aborts the update, and the old weights serve on (mode ``shadow``). The abort says
``drained`` only when every handle is done; if some are not, the server fences itself off, and `WeightClient` closes the
agent before ``push_weights`` returns (rules R1 and R2). After the commit the server finishes by itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from trainer_client.control import Control
from trainer_client.link import Link, Offering, Plans
from trainer_client.progress import Progress
from trainer_client.registration import SourceMemory
from trainer_client.report import SERVER_STAGES, ServerReport
from trainer_client.transfer import Transfer
from vllm_nixl_plugin.errors import (
    DeadlineExceeded,
    IncarnationChanged,
    LeaseHeld,
    PushWeightsError,
    StaleUpdate,
    UnknownPlan,
    from_wire,
)
from vllm_nixl_plugin.fabric import Fabric
from vllm_nixl_plugin.processes import this_process
from vllm_nixl_plugin.wire import (
    BeginRequest,
    CommitRequest,
    KvCachePolicy,
    Mode,
    PauseMode,
    UpdateOpened,
    UpdateStatus,
)

POLL_S = 5.0
DRAIN_S = 30.0
GRACE_S = 5.0
"""How much longer than its own limit a commit may take to say so."""


@dataclass(frozen=True)
class Options:
    """What a push wants of every server; see `WeightClient.push_weights`."""

    version: str
    mode: Mode
    kv_cache: KvCachePolicy
    pause: PauseMode
    lease_s: float
    timeout_s: float
    holder: str


def deliver(
    link: Link,
    offering: Offering,
    memory: SourceMemory,
    fabric: Fabric,
    options: Options,
    progress: Progress,
    cancel: threading.Event,
) -> ServerReport:
    """Bring the server to the offered weights. Plans again, once, when the server has restarted."""
    push = _Push(link, offering, memory, fabric, options, progress, cancel)
    begin = time.monotonic()
    error: PushWeightsError | None = None
    try:
        try:
            push.run()
        except (IncarnationChanged, UnknownPlan):
            link.forget_plans()
            push.run()
    except PushWeightsError as failure:
        error = failure
    except Exception as failure:  # noqa: BLE001 - a bug on the way to one server must not keep the others from theirs
        error = PushWeightsError(f"unexpected {type(failure).__name__}: {failure}")
        error.__cause__ = failure
    push.seconds["total"] = time.monotonic() - begin
    progress.stage(link.control.server, "failed" if error else "done")
    return ServerReport(
        server=link.control.server, version=options.version if error is None else _served(link.control, error),
        nbytes=push.nbytes, packed_nbytes=push.packed_nbytes, seconds=dict(push.seconds),
        error=None if error is None else error.message, error_code=None if error is None else error.code,
    )  # fmt: skip


class _Push:
    """One push over one link: the stages in order, their seconds, and the ways out."""

    def __init__(
        self,
        link: Link,
        offering: Offering,
        memory: SourceMemory,
        fabric: Fabric,
        options: Options,
        progress: Progress,
        cancel: threading.Event,
    ) -> None:
        self._link, self._offering, self._memory, self._fabric = link, offering, memory, fabric
        self._options, self._progress, self._cancel = options, progress, cancel
        self._control = link.control
        self._deadline = time.monotonic() + options.timeout_s
        self._lost: PushWeightsError | None = None
        self.seconds: dict[str, float] = {}
        self.nbytes = self.packed_nbytes = 0

    def run(self) -> None:
        """All stages. Errors: those of the server and of the fabric."""
        self._lost = None
        with self._stage("plan"):
            plans = self._link.plans(self._offering, self._left())
        with self._stage("route"):
            routes = [self._offering.route(worker.plan, plans.plans[worker.plan]) for worker in plans.workers]
        with self._stage("begin"):
            opened = self._begin(plans)
        with self._aborting(opened), self._renewing(opened):
            with self._stage("begin"):
                transfer = self._link.transfer(self._offering, self._memory, self._fabric, plans, opened)
            self._send(opened, transfer, sum(route.nbytes for route in routes))
            self._check()
            commit = CommitRequest(kv_cache=self._options.kv_cache, pause=self._options.pause, timeout_s=self._left())
            status = self._control.commit(opened.update_id, commit)
        self._finish(status)

    def _begin(self, plans: Plans) -> UpdateOpened:
        """Open the update. One that this client left behind, because an answer was lost, is ended first."""
        options = self._options
        request = BeginRequest(
            plans=tuple(worker.plan for worker in plans.workers), version=options.version, mode=options.mode,
            lease_s=options.lease_s, holder=options.holder, pause=options.pause,
            known_bindings=self._link.known_bindings(), writers=(this_process(),),
        )  # fmt: skip
        try:
            return self._control.begin(request, options.lease_s)
        except LeaseHeld as held:
            if held.details.get("holder") != options.holder or "update_id" not in held.details:
                raise
            self._control.abort(str(held.details["update_id"]), drained=False)
            return self._control.begin(request, options.lease_s)

    def _send(self, opened: UpdateOpened, transfer: Transfer, nbytes: int) -> None:
        server = self._control.server
        self._progress.stage(server, "send", total_nbytes=nbytes)
        sent = transfer.run(
            opened.update_id, self._deadline, check=self._check, progress=lambda n: self._progress.add(server, n)
        )
        self.nbytes, self.packed_nbytes = sent.nbytes, sent.packed_nbytes
        self.seconds |= {"pack": sent.pack_s, "wire": sent.wire_s}

    def _finish(self, status: UpdateStatus) -> None:
        """Wait until the server has installed the update, or raise what kept it from it."""
        self._progress.stage(self._control.server, "install")
        while status.state in ("open", "committing"):
            self._check()
            left = self._deadline + GRACE_S - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(
                    f"update {status.update_id} is still at step {status.step!r} after {self._options.timeout_s:g} s; "
                    "the server goes on by itself, ask for its status"
                )
            status = self._control.update(status.update_id, min(left, POLL_S))
        for stage, timing in SERVER_STAGES.items():
            if timing in status.timings:
                self.seconds[stage] = status.timings[timing]
        if status.state != "done":
            if status.error:
                raise from_wire({"error": status.error})
            raise StaleUpdate(f"update {status.update_id} is {status.state}: another update took over")

    def _check(self) -> None:
        if self._cancel.is_set():
            raise PushWeightsError("the push was interrupted in the trainer")
        if self._lost is not None:
            raise self._lost

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"the push took more than timeout_s={self._options.timeout_s:g} seconds")
        return left

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        self._progress.stage(self._control.server, name)
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begin

    @contextmanager
    def _aborting(self, opened: UpdateOpened) -> Iterator[None]:
        """Whatever goes wrong inside ends the update; ``drained`` tells the truth about the writes."""
        try:
            yield
        except BaseException:
            drained = self._link.drain(DRAIN_S)
            with suppress(PushWeightsError):
                self._control.abort(opened.update_id, drained=drained)
            raise

    @contextmanager
    def _renewing(self, opened: UpdateOpened) -> Iterator[None]:
        """Hold the lease from a thread. A lost lease ends the transfer at its next check."""
        stop = threading.Event()

        def renew() -> None:
            while not stop.wait(opened.lease_s / 3):
                try:
                    self._control.renew(opened.update_id, self._options.lease_s)
                except StaleUpdate as error:
                    self._lost = error
                    return
                except PushWeightsError:
                    continue

        thread = threading.Thread(target=renew, name="nixl-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()


def _served(control: Control, error: PushWeightsError) -> str | None:
    """What a server serves after a failure, if it says so."""
    if error.code in ("unreachable", "unauthorized"):
        return None
    with suppress(PushWeightsError):
        return control.status().weight_version
    return None


def gather(tasks: Sequence[Callable[[], ServerReport]], cancel: threading.Event) -> list[ServerReport]:
    """Run the tasks in threads of their own and wait for all, also when interrupted."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=len(tasks), thread_name_prefix="nixl-push") as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            return [future.result() for future in futures]
        except BaseException:
            cancel.set()
            raise
