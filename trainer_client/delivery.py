"""One push to one server, from its plan to its new weights; rank 0 runs one for each server, in parallel.

    plan -> route -> begin -> transfer (pack and WRITE) -> commit -> wait for the install

In mode ``streamed`` the commit is asked for before the transfer: the server installs what lands, group by group.

`deliver` does this in order and always returns a `ServerReport`, never raises: one server's failure is not the others'.
At ``route`` and ``transfer`` all ranks of the trainer work, by the orders that its `Team` gives them. What a push
prepares (plans, bindings, writes) is kept for the next one for as long as nothing changes.

Until the commit, a failure aborts the update, and the old weights serve on (mode ``shadow``). The abort says
``drained`` only when every handle of every rank is done; if some are not, the server fences itself off, and
`WeightClient` closes the agent before ``push_weights`` returns (rules R1 and R2). After the commit the server finishes
by itself.
"""

from __future__ import annotations

import hashlib
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from trainer_client.control import Control
from trainer_client.exchange import Entry
from trainer_client.group import RankGroup
from trainer_client.link import Link, Offering, Plans, Stock, Target, refuse_unused
from trainer_client.progress import Progress
from trainer_client.report import SERVER_STAGES, RankReport, ServerReport, Span
from trainer_client.sums import Sums, added
from trainer_client.team import DRAIN_S, Team, pack_bindings
from trainer_client.transfer import Transfer
from vllm_nixl_plugin.errors import (
    DeadlineExceeded,
    FabricError,
    IncarnationChanged,
    LeaseHeld,
    PushWeightsError,
    RankLost,
    ServerUnreachable,
    StaleUpdate,
    UnknownPlan,
    from_wire,
)
from vllm_nixl_plugin.wire import (
    CATCH_UP,
    BeginRequest,
    Binding,
    CommitRequest,
    KvCachePolicy,
    Mode,
    PauseMode,
    UpdateOpened,
    UpdateStatus,
    WorkerPlan,
)

POLL_S = 5.0
WATCH_S = 1.0
RETRY_S = 0.2
GRACE_S = 5.0
"""How much longer than its own limit a commit may take to say so."""


@dataclass(frozen=True)
class Options:
    """What a push wants of every server; see `WeightClient.push_weights`. ``writers``: the processes of all ranks."""

    version: str
    mode: Mode
    kv_cache: KvCachePolicy
    pause: PauseMode
    lease_s: float
    timeout_s: float
    holder: str
    writers: tuple[str, ...]
    contacts: tuple[bytes, ...] = ()
    verify: bool = False


@dataclass
class Server:
    """A server as rank 0 knows it.

    ``planned``: the digest of a manifest and of the plans for it; ``routed``: the offering and plans for which all
    ranks have worked out their routes; ``told``: bindings that all ranks can fetch, and the digest to fetch them by;
    ``opened``: the last update whose addresses have come.
    """

    control: Control
    link: Link
    planned: tuple[str, str] | None = None
    routed: tuple[Offering, str] | None = None
    told: tuple[tuple[Target, ...], str] | None = None
    opened: str | None = None

    def forget_plans(self) -> None:
        """The server does not know them any more."""
        self.planned = self.routed = None


def deliver(
    server: Server,
    group: RankGroup,
    team: Team,
    stock: Stock,
    options: Options,
    progress: Progress,
    cancel: threading.Event,
    before: Mapping[str, float],
) -> ServerReport:
    """Bring the server to the offered weights. Plans again, once, when the server has restarted.

    ``before``: what the push has taken so far, by stage.
    """
    begin = time.monotonic()
    push = _Push(server, group, team, stock, options, progress, cancel, begin - sum(before.values()))
    for stage, seconds in before.items():
        push.note(stage, begin - sum(before.values()) + sum(push.seconds.values()), seconds)
    server.control.until = begin + options.timeout_s + GRACE_S
    error: PushWeightsError | None = None
    try:
        try:
            push.run()
        except (IncarnationChanged, UnknownPlan):
            server.forget_plans()
            push.run()
    except PushWeightsError as failure:
        error = failure
    except Exception as failure:  # noqa: BLE001 - a bug on the way to one server must not keep the others from theirs
        error = PushWeightsError(f"unexpected {type(failure).__name__}: {failure}")
        error.__cause__ = failure
    push.seconds["total"] = time.monotonic() - begin + sum(before.values())
    progress.stage(server.control.server, "failed" if error else "done")
    version = options.version if error is None else _served(server.control, error)
    server.control.until = float("inf")
    return ServerReport(
        server=server.control.server, version=version,
        nbytes=sum(rank.nbytes for rank in push.ranks), packed_nbytes=sum(rank.packed_nbytes for rank in push.ranks),
        seconds=dict(push.seconds), ranks=push.ranks, spans=tuple(push.spans),
        error=None if error is None else error.message, error_code=None if error is None else error.code,
        stale=push.stale, window=push.window,
    )  # fmt: skip


class _Push:
    """One push to one server: the stages in order, their seconds, and the ways out."""

    def __init__(
        self,
        server: Server,
        group: RankGroup,
        team: Team,
        stock: Stock,
        options: Options,
        progress: Progress,
        cancel: threading.Event,
        called: float,
    ) -> None:
        """``called``: when the push was, on time.monotonic."""
        self._server, self._group, self._team, self._stock = server, group, team, stock
        self._options, self._progress, self._cancel = options, progress, cancel
        self._control, self._link = server.control, server.link
        self._deadline = time.monotonic() + options.timeout_s
        self._lost: PushWeightsError | None = None
        self._called = called
        self.seconds: dict[str, float] = {}
        self.spans: list[Span] = []
        self._sums: tuple[Sums, ...] = ()
        self.ranks: tuple[RankReport, ...] = ()
        self.stale: tuple[str, ...] = ()
        self.window: Mapping[str, int | None] | None = None

    def run(self) -> None:
        """All stages. Errors: those of the server, of the fabric, and of other ranks."""
        self._lost = None
        with self._stage("plan"):
            digest, plans = self._plan()
        self.stale = tuple(sorted({name for plan in plans.plans.values() for name in plan.stale}))
        with self._stage("route"):
            self._route(digest, plans)
        with self._stage("begin"):
            opened = self._begin(plans)
        with self._aborting(opened), self._renewing(opened):
            with self._stage("begin"):
                transfer = self._share_out(digest, plans, opened)
            asked = time.monotonic()
            if self._options.mode == "streamed":
                self._commit(opened, 0.0)
                with self._watching(opened):
                    self._send(opened, transfer)
                    self._check()
            else:
                self._send(opened, transfer)
                self._check()
                if self._options.verify:
                    with self._stage("verify"):
                        self._verify(opened, plans)
                asked = time.monotonic()
            sent = time.monotonic()
            self._progress.stage(self._control.server, "install")
            status = self._commit(opened, min(self._left(), POLL_S))
        self._finish(status, sent, sent - asked)

    def _commit(self, opened: UpdateOpened, wait_s: float) -> UpdateStatus:
        """Ask for the install; asked again, join it."""
        commit = CommitRequest(kv_cache=self._options.kv_cache, pause=self._options.pause, timeout_s=self._left())
        return self._control.commit(opened.update_id, commit, wait_s)

    def _plan(self) -> tuple[str, Plans]:
        """The plans for the offered manifest, asked for when they are not known, and their digest."""
        server, offering = self._server, self._stock.offering
        data = b""
        if server.planned is None or server.planned[0] != offering.digest:
            data = self._control.plan(offering.manifest, self._left())
            digest = hashlib.sha256(data).hexdigest()
            if self._group.size > 1:
                digest = self._group.keep(f"{self._control.server} plans", zlib.compress(data, 1))
            plans = self._link.plans(digest, lambda: data)
            refuse_unused(plans.plans)
            server.planned = offering.digest, digest
        digest = server.planned[1]
        return digest, self._link.plans(digest, lambda: data)

    def _route(self, digest: str, plans: Plans) -> None:
        """Every rank works out what it sends. Errors: those of any rank; bytes that no rank has."""
        offering = self._stock.offering
        if self._server.routed == (offering, digest):
            return
        self._team.order("route", plans=digest)
        try:
            routed = [plans.routed_nbytes(offering), *self._team.answers(self._check)]
        except BaseException as error:
            self._team.call_off(error)
            raise
        for name, plan in plans.plans.items():
            found = sum(answer[name] for answer in routed)
            if found != plan.nbytes:
                workers = [worker.worker for worker in plans.workers if worker.plan == name]
                raise PushWeightsError(
                    f"all ranks together send {found} bytes to each of workers {workers} of {self._control.server}, "
                    f"whose plan needs {plan.nbytes}: run the same version of vllm-nixl-plugin on all ranks and servers"
                )
        self._server.routed = offering, digest

    def _begin(self, plans: Plans) -> UpdateOpened:
        """Open the update. One that this client left behind, because an answer was lost, is ended first.

        Nobody has written for it if that was the answer with its addresses.
        """
        options = self._options
        request = BeginRequest(
            plans=tuple(worker.plan for worker in plans.workers), version=options.version, mode=options.mode,
            lease_s=options.lease_s, holder=options.holder, pause=options.pause,
            known_bindings=self._link.known_bindings(), writers=options.writers, contacts=options.contacts,
        )  # fmt: skip
        try:
            opened = self._control.begin(request, options.lease_s)
        except LeaseHeld as held:
            if str(held.details.get("holder")).startswith(CATCH_UP):  # it gives way, but for the time of its install
                self._check()
                time.sleep(min(RETRY_S, self._left()))
                return self._begin(plans)
            if held.details.get("holder") != options.holder or "update_id" not in held.details:
                raise
            left = str(held.details["update_id"])
            self._control.abort(left, drained=left != self._server.opened)
            opened = self._control.begin(request, options.lease_s)
        self._server.opened = opened.update_id
        return opened

    def _share_out(self, digest: str, plans: Plans, opened: UpdateOpened) -> Transfer:
        """Order the other ranks to write, and prepare the writes of this one."""
        workers = zip(plans.workers, opened.workers, strict=True)
        targets = tuple((planned.plan, bound.digest) for planned, bound in workers)
        self._link.learn({w.digest: w.binding for w in opened.workers if w.binding is not None})
        bindings = self._link.bindings(targets)
        self.window = _window_of(bindings, [plans.plans[plan] for plan, _ in targets])
        if self._group.size > 1:
            if self._server.told is None or self._server.told[0] != targets:
                slot = f"{self._control.server} bindings"
                self._server.told = targets, self._group.keep(slot, pack_bindings(bindings))
            self._team.order(
                "send", update_id=opened.update_id, plans=digest, targets=targets, bindings=self._server.told[1],
                left_s=self._left(), verify=self._options.verify,
            )  # fmt: skip
        return self._link.transfer(self._stock, plans, targets)

    def _send(self, opened: UpdateOpened, transfer: Transfer) -> None:
        server, begin = self._control.server, time.monotonic()
        self._progress.stage(server, "send", total_nbytes=transfer.nbytes)
        sent = transfer.run(
            opened.update_id, self._deadline, check=self._check, progress=lambda n: self._progress.add(server, n),
            verify=self._options.verify,
        )
        took = time.monotonic() - begin
        own = RankReport(0, sent.nbytes, sent.packed_nbytes, took, self._since(begin, sent.spans))
        answers = self._team.answers(self._check)
        self.ranks = (own, *(self._rank(rank, a, begin) for rank, a in enumerate(answers, 1)))
        self._sums = (sent.sums, *(answer["sums"] for answer in answers))
        pack_s, wire_s = max([(sent.pack_s, sent.wire_s), *((a["pack_s"], a["wire_s"]) for a in answers)], key=sum)
        self.seconds |= {"pack": pack_s, "wire": wire_s}
        joined = time.monotonic()
        self.seconds["join"] = max(joined - begin - pack_s - wire_s, 0.0)
        self.spans.append(self._span("join", joined - self.seconds["join"], self.seconds["join"]))

    def _verify(self, opened: UpdateOpened, plans: Plans) -> None:
        """The server has got what all ranks sent. Errors: Corrupted, naming what differs."""
        counts = [(worker.worker, len(plans.plans[worker.plan].destinations)) for worker in plans.workers]
        self._control.verify(opened.update_id, added(self._sums, counts), self._left())

    def _rank(self, rank: int, answer: Entry, begin: float) -> RankReport:
        """What another rank says of itself. Its clock may be another: it began when it was told to, about ``begin``."""
        spans = self._since(begin, [Span(**span) for span in answer["spans"]])
        return RankReport(rank, answer["nbytes"], answer["packed_nbytes"], answer["seconds"], spans)

    def _since(self, begin: float, spans: Iterable[Span]) -> tuple[Span, ...]:
        return tuple(replace(span, start=begin - self._called + span.start) for span in spans)

    def _span(self, stage: str, begin: float, seconds: float) -> Span:
        return Span(stage, begin - self._called, seconds)

    def note(self, stage: str, begin: float, seconds: float) -> None:
        """``stage`` ran from ``begin``, on time.monotonic."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self.spans.append(self._span(stage, begin, seconds))

    def _finish(self, status: UpdateStatus, sent: float, ahead_s: float) -> None:
        """Wait until the server has installed the update, or raise what kept it from it. ``sent``: when all was,
        ``ahead_s``: how long before that the install was asked for, which the server counts as its own wait."""
        while status.state in ("open", "committing"):
            self._check()
            left = self._deadline + GRACE_S - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(
                    f"update {status.update_id} is still at step {status.step!r} after {self._options.timeout_s:g} s; "
                    "the server goes on by itself, ask for its status"
                )
            status = self._control.update(status.update_id, min(left, POLL_S))
        at = sent
        for stage, timing in SERVER_STAGES.items():
            if timing in status.timings:
                took = max(status.timings[timing] - (ahead_s if stage == "prepare" else 0.0), 0.0)
                self.note(stage, at, took)
                at += took
        self.note("commit", at, max(time.monotonic() - at, 0.0))
        if status.state != "done":
            if status.error:
                raise from_wire({"error": status.error})
            raise StaleUpdate(f"update {status.update_id} is {status.state}: another update took over")

    def _check(self) -> None:
        if self._cancel.is_set():
            raise PushWeightsError("the push was interrupted in the trainer")
        if self._lost is not None:
            raise self._lost
        self._team.check()

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
            self.note(name, begin, time.monotonic() - begin)

    @contextmanager
    def _aborting(self, opened: UpdateOpened) -> Iterator[None]:
        """Whatever goes wrong inside ends the update; ``drained`` tells the truth about the writes of all ranks."""
        try:
            yield
        except BaseException as error:
            others = False
            with suppress(RankLost):
                self._team.call_off(error)
            drained = self._link.drain(DRAIN_S)
            with suppress(RankLost):
                others = self._team.drained()
            ended: UpdateStatus | None = None
            with suppress(PushWeightsError):
                ended = self._control.abort(opened.update_id, drained=drained and others)
            if isinstance(error, FabricError) and ended is not None and ended.state == "expired":
                raise StaleUpdate(
                    f"update {opened.update_id} was taken over by another push, and its memory with it: this trainer "
                    f"stood still for longer than lease_s={self._options.lease_s:g}", update_id=opened.update_id,
                ) from error  # fmt: skip
            raise

    @contextmanager
    def _watching(self, opened: UpdateOpened) -> Iterator[None]:
        """Hear from a thread that a server which installs meanwhile has failed, or is gone; that ends the transfer.

        It would wait for room in a window until the time of the push is over.
        """
        stop = threading.Event()

        def watch() -> None:
            while not stop.is_set():
                try:
                    status = self._control.update(opened.update_id, WATCH_S)
                except ServerUnreachable as error:
                    self._lost = error
                    return
                except PushWeightsError:
                    stop.wait(WATCH_S)
                    continue
                if status.state == "done" or stop.is_set():
                    return
                if status.state not in ("open", "committing"):
                    self._lost = from_wire({"error": status.error}) if status.error else StaleUpdate(
                        f"update {opened.update_id} is {status.state}")  # fmt: skip
                    return

        threading.Thread(target=watch, name="nixl-watch", daemon=True).start()
        try:
            yield
        finally:
            stop.set()

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


def _window_of(bindings: Sequence[Binding], plans: Sequence[WorkerPlan]) -> Mapping[str, int | None] | None:
    """For the report: the window of the worker that takes most, in mode ``streamed``."""
    found = [(b.window, len(plan.groups)) for b, plan in zip(bindings, plans, strict=True) if b.window is not None]
    if not found:
        return None
    window, groups = max(found, key=lambda one: one[0].nbytes + one[0].working_nbytes)
    return {
        "groups": groups, "window_nbytes": window.nbytes, "working_nbytes": window.working_nbytes,
        "budget_nbytes": window.budget_nbytes,
    }  # fmt: skip


def _served(control: Control, error: PushWeightsError) -> str | None:
    """What a server serves after a failure, if it says so."""
    if error.code in ("unreachable", "unauthorized"):
        return None
    with suppress(PushWeightsError):
        return control.status().weight_version
    return None


def gather(tasks: Sequence[Callable[[], ServerReport]], cancel: threading.Event) -> list[ServerReport]:
    """Run the tasks in threads of their own and wait for all, also when interrupted."""
    with ThreadPoolExecutor(max_workers=len(tasks), thread_name_prefix="nixl-push") as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            return [future.result() for future in futures]
        except BaseException:
            cancel.set()
            raise
