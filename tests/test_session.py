"""The state machine of one worker: every arrow, and what late, doubled and foreign messages do to it."""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from typing import Any

import pytest

from fake_plane import MANIFEST, NBYTES, PARTIAL, FakePlane
from vllm_nixl_plugin import errors
from vllm_nixl_plugin.encoding import decode_plan, plan_digest
from vllm_nixl_plugin.lease import STALE_HEARTBEAT_S
from vllm_nixl_plugin.session import WorkerSession
from vllm_nixl_plugin.wire import Manifest
from vllm_nixl_plugin.worker import NixlWorkerExtension, answer, plain


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A session as an API process would drive it."""

    def __init__(self) -> None:
        self.plane, self.clock = FakePlane(3), Clock()
        self.session = WorkerSession(self.plane, self.clock)
        self.plan = self.make_plan(MANIFEST)

    def make_plan(self, manifest: Manifest) -> str:
        self.session.plans.start(manifest.digest(), manifest.model_dump_json().encode())
        deadline = time.monotonic() + 10
        while (made := self.session.plans.poll(manifest.digest())) is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return made.digest

    def grant(self, lease_s: float = 60.0, plan: str | None = None, holder: str = "t") -> tuple[str, int]:
        update_id = uuid.uuid4().hex
        return update_id, self.session.grant(update_id, holder, lease_s, plan or self.plan)["epoch"]

    def begin(
        self, mode: str = "shadow", lease_s: float = 60.0, plan: str | None = None, known: list[str] | None = None,
        writers: tuple[str, ...] = (),
    ) -> str:
        update_id, epoch = self.grant(lease_s, plan)
        plan = plan or self.plan
        self.begun = self.session.begin(update_id, epoch, f"v{epoch}", mode, "t", plan, known or [], writers)
        if mode == "in_place":
            self.session.record_step(update_id, 0, "open")
        return update_id

    def claim(self, update_id: str, purpose: str = "commit", claimant: str = "api-0") -> dict[str, Any]:
        return self.session.claim(update_id, purpose, claimant, uuid.uuid4().hex, {"pause": "keep"})

    def commit(self, update_id: str) -> None:
        claim = self.claim(update_id)["claim"]
        self.session.prepare(update_id, claim)
        self.session.record_step(update_id, claim, "pausing")
        self.session.install(update_id, claim)
        self.session.record_step(update_id, claim, "resuming")
        self.session.finish(update_id, claim, {"total_s": 1.0})

    def push(self) -> None:
        update_id = self.begin()
        self.plane.land(update_id, self.plan)
        self.commit(update_id)

    @property
    def phase(self) -> str:
        return str(self.session.state()["state"])


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_push_goes_from_serving_to_serving_with_the_new_version(bench: Bench) -> None:
    assert (bench.phase, bench.session.weight_version) == ("serving", "default")
    update_id = bench.begin()
    assert bench.phase == "receiving"
    bench.plane.land(update_id, bench.plan)
    claim = bench.claim(update_id)["claim"]
    bench.session.prepare(update_id, claim)
    assert (bench.phase, bench.session.state()["step"]) == ("receiving", "waiting")
    bench.session.record_step(update_id, claim, "pausing")
    assert bench.session.install(update_id, claim) == {"stages": {"copy": 0.25}, "version": "v1"}
    assert (bench.phase, bench.session.state()["step"]) == ("installing", "installed")
    assert bench.session.weight_version == "default"
    bench.session.record_step(update_id, claim, "resuming")
    assert bench.session.weight_version == "v1"
    bench.session.finish(update_id, claim, {"total_s": 1.0})
    assert (bench.phase, bench.session.weight_version) == ("serving", "v1")
    assert bench.session.status()["history"][-1]["timings"] == {"total_s": 1.0}
    assert "fence" not in bench.plane.log
    assert "discard" not in bench.plane.log


def test_a_worker_that_is_not_told_the_steps_serves_from_the_finish_on(bench: Bench) -> None:
    update_id = bench.begin("in_place")
    bench.plane.land(update_id, bench.plan)
    bench.session.torn = True
    bench.session.prepare(update_id, 1)
    bench.session.install(update_id, 1)
    assert (bench.session.weight_version, bench.session.torn) == ("default", True)
    bench.session.finish(update_id, 1, {})
    assert (bench.session.weight_version, bench.session.torn) == ("v1", False)


def test_an_install_is_a_step_before_it_starts(bench: Bench) -> None:
    update_id = bench.begin()
    bench.plane.land(update_id, bench.plan)
    bench.plane.block.clear()
    installing = threading.Thread(target=bench.session.install, args=(update_id, 1))
    installing.start()
    deadline = time.monotonic() + 10
    while bench.session.state()["step"] != "installing":
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert bench.phase == "installing"
    bench.plane.block.set()
    installing.join()


def test_an_update_that_is_not_installed_does_not_finish(bench: Bench) -> None:
    update_id = bench.begin()
    with pytest.raises(errors.InstallFailed):
        bench.session.finish(update_id, 1, {})
    assert bench.session.weight_version == "default"


def test_an_install_is_prepared_once_and_only_when_all_bytes_are_there(bench: Bench) -> None:
    update_id = bench.begin()
    bench.plane.land(update_id, bench.plan, nbytes=NBYTES - 1)
    assert bench.session.prepare(update_id, 1)["arrived_nbytes"] == NBYTES - 1
    assert "prepare" not in bench.plane.log
    bench.plane.land(update_id, bench.plan, nbytes=1, sequence=1)
    bench.plane.fail["prepare"] = errors.NeedsRestart("w")
    with pytest.raises(errors.NeedsRestart):
        bench.session.prepare(update_id, 1)
    bench.plane.fail.clear()
    for _ in range(3):
        assert bench.session.prepare(update_id, 2)["arrived_nbytes"] == NBYTES
    assert bench.plane.log.count("prepare") == 2


def test_preparing_again_takes_back_no_later_step(bench: Bench) -> None:
    update_id = bench.begin()
    bench.plane.land(update_id, bench.plan)
    claim = bench.claim(update_id)["claim"]
    bench.session.prepare(update_id, claim)
    for step in ("pausing", "undoing"):
        bench.session.record_step(update_id, claim, step)
        bench.session.prepare(update_id, claim)
        assert bench.session.state()["step"] == step
    bench.session.install(update_id, claim)
    bench.session.prepare(update_id, claim)
    assert bench.session.state()["step"] == "installed"


def test_the_judge_refuses_an_older_claim_from_the_moment_it_gives_the_next(bench: Bench) -> None:
    update_id = bench.begin()
    claim = bench.claim(update_id)["claim"]
    bench.session.prepare(update_id, claim)
    bench.claim(update_id, "abort")
    with pytest.raises(errors.StaleUpdate) as late:
        bench.session.record_step(update_id, claim, "pausing")
    assert late.value.details["superseded"]


def test_a_worker_told_of_a_later_claim_refuses_an_install_of_an_earlier_one(bench: Bench) -> None:
    update_id = bench.begin()
    bench.plane.land(update_id, bench.plan)
    bench.session.take_over(update_id, 2)
    with pytest.raises(errors.StaleUpdate):
        bench.session.install(update_id, 1)
    assert "install" not in bench.plane.log
    bench.session.take_over(uuid.uuid4().hex, 1)


def test_what_is_done_may_be_done_again(bench: Bench) -> None:
    bench.push()
    update_id = bench.session.status()["history"][-1]["update_id"]
    bench.session.take_over(update_id, 2)
    assert bench.session.install(update_id, 2) == {"stages": {}, "version": "v1"}
    assert bench.session.finish(update_id, 2, {})["record"]["state"] == "done"
    assert len(bench.session.history) == 1
    assert bench.plane.log.count("install") == 1


def test_a_begin_ends_an_installed_update_whose_finish_was_lost_as_done(bench: Bench) -> None:
    first, epoch = uuid.uuid4().hex, 1
    bench.session.begin(first, epoch, "v1", "in_place", "t", bench.plan, [])
    bench.plane.land(first, bench.plan)
    bench.session.prepare(first, 1)
    bench.session.install(first, 1)
    bench.session.begin(uuid.uuid4().hex, 2, "v2", "shadow", "t", bench.plan, [])
    assert (bench.session.weight_version, bench.session.torn) == ("v1", False)
    assert bench.session.history[-1]["state"] == "done"
    assert "discard" not in bench.plane.log
    assert "fence" not in bench.plane.log


def test_a_plan_is_made_once_per_manifest_and_read_in_pieces(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_nixl_plugin.plan_cache.CHUNK_NBYTES", 50)
    assert bench.make_plan(MANIFEST) == bench.plan
    assert bench.plane.log.count("make_plan") == 1
    data = b""
    while len(data) < (piece := bench.session.plans.read(bench.plan, len(data)))["nbytes"]:
        data += piece["data"]
    assert plan_digest(decode_plan(data)) == bench.plan


def test_a_refused_plan_is_an_error_and_is_tried_again(bench: Bench) -> None:
    other = Manifest(weights=())
    bench.plane.fail["make_plan"] = errors.PlanRefused("missing", missing=["w"])
    with pytest.raises(errors.PlanRefused):
        bench.make_plan(other)
    bench.plane.fail.clear()
    assert bench.make_plan(other)


def test_only_the_eight_plans_used_last_are_kept(bench: Bench) -> None:
    for i in range(8):
        bench.make_plan(Manifest(weights=(MANIFEST.weights[0].model_copy(update={"name": f"n{i}"}),)))
    with pytest.raises(errors.UnknownPlan):
        bench.grant()


def test_a_second_begin_is_refused_while_the_lease_lives_and_told_by_whom(bench: Bench) -> None:
    update_id = bench.begin(lease_s=60)
    bench.clock.now += 59
    with pytest.raises(errors.LeaseHeld) as refused:
        bench.grant(holder="other")
    assert refused.value.details["holder"] == "t"
    assert refused.value.details["expires_in_s"] == pytest.approx(1.0)
    bench.session.renew(update_id, 60)
    bench.clock.now += 59
    with pytest.raises(errors.LeaseHeld):
        bench.grant()


def test_after_the_lease_another_begin_gets_in_and_the_undrained_update_is_fenced_off(bench: Bench) -> None:
    first = bench.begin(lease_s=60, writers=("host/1@1", "host/2@2"))
    before = bench.begun
    bench.clock.now += 61
    bench.begin()
    assert bench.plane.log[-3:] == ["discard", "fence", "bind"]
    assert bench.plane.fenced == ("host/1@1", "host/2@2")
    assert bench.begun["incarnation"] != before["incarnation"]
    assert bench.claim(first)["over"]["state"] == "expired"
    with pytest.raises(errors.StaleUpdate):
        bench.session.renew(first, 1)
    with pytest.raises(errors.StaleUpdate):
        bench.session.prepare(first, 1)
    assert bench.session.status()["history"][-1]["state"] == "expired"
    assert not bench.session.torn


def test_a_commit_after_the_lease_is_good_when_nobody_else_began(bench: Bench) -> None:
    update_id = bench.begin(lease_s=1)
    bench.clock.now += 1000
    bench.plane.land(update_id, bench.plan)
    bench.commit(update_id)
    assert bench.session.weight_version == "v1"


def test_no_begin_gets_in_while_a_commit_is_running_even_after_its_lease(bench: Bench) -> None:
    update_id = bench.begin(lease_s=1)
    bench.claim(update_id)
    bench.clock.now += 1000
    with pytest.raises(errors.LeaseHeld):
        bench.grant()


def test_of_two_begins_in_different_order_the_later_epoch_wins_everywhere(bench: Bench) -> None:
    first, epoch_1 = bench.grant(lease_s=1)
    bench.clock.now += 2
    second, epoch_2 = bench.grant()
    bench.session.begin(second, epoch_2, "b", "shadow", "t", bench.plan, [])
    with pytest.raises(errors.StaleUpdate):
        bench.session.begin(first, epoch_1, "a", "shadow", "t", bench.plan, [])
    assert bench.session.state()["update_id"] == second
    with pytest.raises(errors.StaleUpdate):
        bench.session.begin(second, epoch_2, "b", "shadow", "t", bench.plan, [])


def test_racing_grants_let_one_in(bench: Bench) -> None:
    granted: list[int] = []
    refused: list[Exception] = []

    def race() -> None:
        try:
            granted.append(bench.grant()[1])
        except errors.LeaseHeld as error:
            refused.append(error)

    threads = [threading.Thread(target=race) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(granted), len(refused)) == (1, 15)


def test_a_binding_that_the_caller_knows_is_not_sent_again(bench: Bench) -> None:
    bench.session.abort(bench.begin(), 0, drained=True)
    digest = bench.begun["digest"]
    assert bench.begun["binding"] is not None
    bench.begin(known=[digest])
    assert (bench.begun["digest"], bench.begun["binding"]) == (digest, None)


def test_an_aborted_update_leaves_the_old_weights_serving(bench: Bench) -> None:
    update_id = bench.begin()
    bench.session.abort(update_id, bench.claim(update_id, "abort")["claim"])
    assert (bench.phase, bench.session.weight_version) == ("serving", "default")
    assert bench.plane.log[-1] == "discard"
    bench.begin()
    assert "fence" in bench.plane.log


@pytest.mark.parametrize("how", ["with the abort", "later", "by a commit"])
def test_a_drained_update_needs_no_fence(bench: Bench, how: str) -> None:
    update_id = bench.begin()
    if how == "by a commit":
        bench.session.prepare(update_id, bench.claim(update_id)["claim"])
    bench.session.abort(update_id, bench.claim(update_id, "abort")["claim"], drained=how == "with the abort")
    if how == "later":
        assert "over" in bench.claim(update_id, "abort")
        bench.session.abort(update_id, 0, drained=True)
    bench.begin()
    assert "fence" not in bench.plane.log


TRAINER, OTHER = ("host/10@1", "host/11@1", "host/12@1"), ("host/20@9",)


def refused_begin(bench: Bench, writers: tuple[str, ...] = OTHER) -> errors.LeaseHeld:
    with pytest.raises(errors.LeaseHeld) as refused:
        bench.begin(writers=writers)
    bench.session.abort(bench.session.status()["lease"]["update_id"], 0, drained=True, untouched=True)
    return refused.value


def test_an_undrained_in_place_update_keeps_others_out_until_all_its_writers_are_gone(bench: Bench) -> None:
    bench.plane.running = {*TRAINER, *OTHER}
    stopped = bench.begin("in_place", writers=TRAINER)
    bench.session.abort(stopped, bench.claim(stopped, "abort")["claim"])
    refused = refused_begin(bench)
    assert refused.details["holder"] == TRAINER[0]
    assert refused.details["update_id"] == stopped
    assert "PID 10, 11, 12" in refused.message
    bench.plane.running -= {TRAINER[0], TRAINER[2]}
    assert "PID 11)" in refused_begin(bench).message
    assert "fence" not in bench.plane.log
    assert bench.phase == "torn"
    bench.plane.running -= {TRAINER[1]}
    bench.begin(writers=OTHER)
    assert bench.plane.log[-2:] == ["fence", "bind"]


def test_an_in_place_update_taken_over_keeps_others_out_while_its_writer_may_write(bench: Bench) -> None:
    bench.plane.running = {*TRAINER}
    bench.begin("in_place", lease_s=1, writers=TRAINER)
    bench.clock.now += 2
    refused_begin(bench)
    refused_begin(bench)
    bench.plane.running.clear()
    bench.begin(writers=OTHER)


@pytest.mark.parametrize("how", ["drained with the abort", "drained later", "the same trainer", "shadow"])
def test_no_writer_keeps_others_out_when(bench: Bench, how: str) -> None:
    bench.plane.running = {*TRAINER, *OTHER}
    update_id = bench.begin("shadow" if how == "shadow" else "in_place", writers=TRAINER)
    bench.session.abort(update_id, bench.claim(update_id, "abort")["claim"], drained=how == "drained with the abort")
    if how == "drained later":
        bench.session.abort(update_id, 0, drained=True)
    bench.begin(writers=(*OTHER, *TRAINER) if how == "the same trainer" else OTHER)
    assert ("fence" in bench.plane.log) == (how in ("the same trainer", "shadow"))


def test_the_bytes_of_several_agents_are_counted_each_by_its_own_sequence(bench: Bench) -> None:
    update_id = bench.begin()
    for agent in ("t0", "t1", "t2"):
        for sequence in (0, 1, 0):
            bench.plane.land(update_id, bench.plan, nbytes=10, sequence=sequence, agent=agent)
    assert bench.session.prepare(update_id, 1)["arrived_nbytes"] == 60
    with pytest.raises(errors.Incomplete):
        bench.session.install(update_id, 1)
    for agent in ("t2", "t0"):
        bench.plane.land(update_id, bench.plan, nbytes=10, sequence=1, agent=agent)
    assert bench.session.prepare(update_id, 1)["arrived_nbytes"] == 60
    bench.plane.land(update_id, bench.plan, nbytes=4, sequence=2, agent="t1")
    bench.plane.land(update_id, bench.plan, nbytes=0, sequence=3, agent="t1")
    bench.commit(update_id)
    assert bench.session.weight_version == "v1"


def test_each_notification_counts_once_and_foreign_ones_not_at_all(bench: Bench) -> None:
    update_id = bench.begin()
    for agent, sequence in (("t0", 0), ("t0", 0), ("t1", 0), ("t0", 1)):
        bench.plane.land(update_id, bench.plan, nbytes=16, sequence=sequence, agent=agent)
    bench.plane.land(uuid.uuid4().hex, bench.plan, nbytes=16)
    bench.plane.land(update_id, "ab" * 32, nbytes=16, sequence=9)
    bench.plane.inbox.append(("t0", b"hello"))
    got = bench.session.prepare(update_id, 1)
    assert got == {"arrived_nbytes": 48, "expected_nbytes": NBYTES, "foreign": 3, "mode": "shadow", "ready": False}


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_an_install_is_made_ready_in_slices_where_generation_goes_on(bench: Bench, mode: str) -> None:
    bench.plane.slices = 3
    update_id = bench.begin(mode)
    claim = bench.claim(update_id)["claim"]
    assert not bench.session.prepare(update_id, claim, whole=False)["ready"]
    assert "prepare" not in bench.plane.log
    bench.plane.land(update_id, bench.plan)
    ready = [bench.session.prepare(update_id, claim, whole=False)["ready"] for _ in range(4)]
    assert ready == ([False, False, True, True] if mode == "shadow" else [True] * 4)
    assert bench.plane.log.count("prepare") == (3 if mode == "shadow" else 1)


def test_who_takes_over_has_the_rest_made_ready_at_once(bench: Bench) -> None:
    bench.plane.slices = 9
    update_id = bench.begin()
    bench.plane.land(update_id, bench.plan)
    assert not bench.session.prepare(update_id, 1, whole=False)["ready"]
    assert bench.session.prepare(update_id, 2, whole=True)["ready"]
    assert bench.plane.log.count("prepare") == 2


def test_more_bytes_than_planned_are_refused(bench: Bench) -> None:
    update_id = bench.begin()
    bench.plane.land(update_id, bench.plan)
    bench.plane.land(update_id, bench.plan, sequence=1)
    with pytest.raises(errors.InvalidRequest, match="overlap"):
        bench.session.prepare(update_id, 1)


def test_notifications_of_an_earlier_update_do_not_count_for_the_next(bench: Bench) -> None:
    first = bench.begin()
    bench.session.abort(first, 1, drained=True)
    bench.plane.land(first, bench.plan)
    assert bench.session.prepare(bench.begin(), 1)["arrived_nbytes"] == 0


def test_an_incomplete_update_is_not_installed(bench: Bench) -> None:
    update_id = bench.begin()
    bench.plane.land(update_id, bench.plan, nbytes=NBYTES - 1)
    with pytest.raises(errors.Incomplete) as caught:
        bench.session.install(update_id, 1)
    assert caught.value.details["arrived_nbytes"] == NBYTES - 1
    assert bench.session.state()["step"] is None
    assert "install" not in bench.plane.log
    assert not bench.session.torn


def test_an_install_asked_for_again_answers_the_same_and_installs_once(bench: Bench) -> None:
    update_id = bench.begin()
    bench.plane.land(update_id, bench.plan)
    assert bench.session.install(update_id, 1) == bench.session.install(update_id, 2)
    assert bench.plane.log.count("install") == 1


@pytest.mark.parametrize(
    ("mode", "error", "torn"),
    [
        ("shadow", errors.NeedsRestart("a path changed", untouched=True), False),
        ("shadow", errors.InstallFailed("half-way"), True),
        ("shadow", ValueError("surprise"), True),
        ("in_place", errors.NeedsRestart("a path changed", untouched=True), True),
    ],
)
def test_a_failed_install_tears_the_worker_unless_nothing_was_touched(
    bench: Bench, mode: str, error: Exception, torn: bool
) -> None:
    update_id = bench.begin(mode)
    bench.plane.land(update_id, bench.plan)
    bench.plane.fail["install"] = error
    with pytest.raises(errors.PushWeightsError) as first:
        bench.session.install(update_id, 1)
    assert bench.session.torn is torn
    with pytest.raises(type(first.value)):
        bench.session.install(update_id, 2)
    with pytest.raises(errors.InstallFailed):
        bench.session.record_step(update_id, 2, "resuming")
    if isinstance(error, ValueError):
        assert first.value.message == "worker 3: ValueError: surprise; see its log"


def test_a_torn_worker_takes_only_a_full_push_and_serves_after_it(bench: Bench) -> None:
    partial = bench.make_plan(PARTIAL.model_copy(update={"weights": (*MANIFEST.weights, *MANIFEST.weights)}))
    bench.session.abort(bench.begin("in_place"), 1)
    assert bench.phase == "torn"
    with pytest.raises(errors.EngineTorn):
        bench.grant(plan=partial)
    with pytest.raises(errors.EngineTorn):
        bench.session.hold(False)
    update_id = bench.begin()
    bench.session.abort(update_id, 1, drained=True)
    assert bench.phase == "torn"
    bench.push()
    assert (bench.phase, bench.session.torn) == ("serving", False)


def test_a_full_plan_heals_even_when_a_partial_manifest_gave_the_same_bytes(bench: Bench) -> None:
    assert bench.make_plan(PARTIAL) == bench.plan
    bench.session.abort(bench.begin("in_place"), 1)
    bench.push()
    assert bench.phase == "serving"


def test_an_in_place_update_taken_over_leaves_the_worker_torn_until_the_next_is_done(bench: Bench) -> None:
    bench.begin("in_place", lease_s=1)
    bench.clock.now += 2
    update_id = bench.begin()
    assert bench.session.torn
    assert bench.phase == "receiving"
    bench.plane.land(update_id, bench.plan)
    bench.commit(update_id)
    assert bench.phase == "serving"


def test_an_in_place_update_that_nobody_got_the_addresses_of_does_not_tear(bench: Bench) -> None:
    bench.session.abort(bench.begin("in_place"), 0, untouched=True, drained=True)
    assert bench.phase == "serving"


def test_a_worker_counts_as_torn_when_the_workers_differ_and_then_only_a_full_update_goes_on(bench: Bench) -> None:
    bench.session.mark_torn(bench.begin())
    assert bench.session.torn
    bench = Bench()
    partial = bench.make_plan(PARTIAL.model_copy(update={"weights": MANIFEST.weights * 2}))
    with pytest.raises(errors.EngineTorn):
        bench.session.mark_torn(bench.begin(plan=partial))


def test_a_begin_without_memory_leaves_everything_as_it_was(bench: Bench) -> None:
    bench.plane.fail["bind"] = errors.InsufficientMemory("lacks 7 bytes")
    with pytest.raises(errors.InsufficientMemory):
        bench.begin()
    update_id = bench.session.status()["lease"]["update_id"]
    bench.session.abort(update_id, 0, drained=True, untouched=True)
    bench.plane.fail.clear()
    bench.push()
    assert bench.session.weight_version == "v2"


def test_a_second_commit_joins_the_first_and_takes_over_when_its_heart_stops(bench: Bench) -> None:
    update_id = bench.begin()
    assert bench.claim(update_id)["claim"] == 1
    assert bench.claim(update_id, claimant="api-1") == {"joined": "api-0"}
    assert bench.claim(update_id, "recover", "api-1") == {"joined": "api-0"}
    bench.session.record_step(update_id, 1, "pausing")
    bench.clock.now += STALE_HEARTBEAT_S - 1
    bench.session.heartbeat(update_id, 1)
    bench.clock.now += STALE_HEARTBEAT_S - 1
    assert "joined" in bench.claim(update_id, "recover")
    bench.clock.now += 2
    taken = bench.claim(update_id, "recover", "api-1")
    assert (taken["claim"], taken["step"], taken["options"]["pause"]) == (2, "pausing", "keep")
    bench.session.record_step(update_id, 2, "pausing")
    with pytest.raises(errors.StaleUpdate) as late:
        bench.session.record_step(update_id, 1, "undoing")
    assert late.value.details["superseded"]
    with pytest.raises(errors.StaleUpdate):
        bench.session.install(update_id, 1)
    with pytest.raises(errors.StaleUpdate):
        bench.session.heartbeat(update_id, 1)


def test_an_abort_takes_over_a_waiting_commit_but_not_one_that_pauses(bench: Bench) -> None:
    update_id = bench.begin()
    bench.session.prepare(update_id, bench.claim(update_id)["claim"])
    assert bench.claim(update_id, "abort")["claim"] == 2
    bench.session.record_step(update_id, 2, "pausing")
    with pytest.raises(errors.StaleUpdate, match="too late"):
        bench.claim(update_id, "abort")


def test_a_grant_or_claim_whose_answer_was_lost_is_given_again(bench: Bench) -> None:
    update_id, epoch = bench.grant()
    assert bench.session.grant(update_id, "t", 60.0, bench.plan) == {"epoch": epoch}
    bench.session.begin(update_id, epoch, "v", "shadow", "t", bench.plan, [])
    first = bench.session.claim(update_id, "commit", "api-0", "request-1", {})
    assert bench.session.claim(update_id, "commit", "api-0", "request-1", {}) == first
    assert bench.session.claim(update_id, "commit", "api-0", "request-2", {}) == {"joined": "api-0"}


def test_an_update_that_is_over_says_how_it_ended(bench: Bench) -> None:
    bench.push()
    update_id = bench.session.status()["history"][-1]["update_id"]
    assert bench.claim(update_id)["over"]["state"] == "done"
    with pytest.raises(errors.StaleUpdate):
        bench.claim(uuid.uuid4().hex)


def test_generation_cannot_be_resumed_by_hand_during_an_in_place_update(bench: Bench) -> None:
    bench.session.hold(True)
    bench.session.hold(False)
    bench.begin("in_place")
    with pytest.raises(errors.LeaseHeld):
        bench.session.hold(False)


def test_the_history_keeps_twenty_updates(bench: Bench) -> None:
    for _ in range(23):
        bench.push()
    assert len(bench.session.status()["history"]) == 20


def read(bench: Bench, ticket: str, *, paths: bool = True, slices: int = 99) -> tuple[dict[str, str], Any]:
    """Lines and digest of a fingerprint, from its start."""
    lines: dict[str, str] = {}
    for number in range(slices):
        got = bench.session.fingerprint(ticket, number == 0, paths)
        lines |= dict(got["lines"])
        if got["digest"]:
            assert got["n_paths"] == 3
            return lines, got["digest"]
    return lines, None


def test_a_fingerprint_is_read_in_slices_and_its_digest_is_that_of_the_sorted_lines(bench: Bench) -> None:
    lines, digest = read(bench, "t")
    assert lines == {"a": "0 of a", "b": "0 of b", "c": "0 of c"}
    assert digest == hashlib.sha256(b"a\t0 of a\nb\t0 of b\nc\t0 of c\n").hexdigest()
    assert read(bench, "t", paths=False) == ({}, digest)
    bench.push()
    assert read(bench, "t")[1] != digest


@pytest.mark.parametrize("how", ["an install", "an in-place begin", "four other readers", "its end"])
def test_a_fingerprint_never_goes_on_after(bench: Bench, how: str) -> None:
    read(bench, "t", slices=2)
    bench.begin()
    bench.session.abort(bench.session.status()["lease"]["update_id"], 1, drained=True)
    bench.session.fingerprint("t", False, True)
    if how == "an install":
        bench.push()
    elif how == "an in-place begin":
        bench.session.abort(bench.begin("in_place"), 0, drained=True, untouched=True)
    elif how == "four other readers":
        for other in range(4):
            read(bench, f"{other}", slices=1)
    else:
        assert bench.session.fingerprint("t", False, True)["digest"]
    with pytest.raises(errors.StaleUpdate):
        bench.session.fingerprint("t", False, True)


def test_a_fingerprint_is_refused_while_weights_change(bench: Bench) -> None:
    update_id = bench.begin()
    bench.plane.land(update_id, bench.plan)
    claim = bench.claim(update_id)["claim"]
    bench.session.prepare(update_id, claim)
    assert read(bench, "t")[1]
    bench.session.install(update_id, claim)
    for step in (None, "resuming"):
        if step:
            bench.session.record_step(update_id, claim, step)
        with pytest.raises(errors.LeaseHeld) as refused:
            read(bench, "t")
        assert refused.value.details["update_id"] == update_id
    bench.session.finish(update_id, claim, {})
    assert read(bench, "t")[1]
    in_place = bench.begin("in_place")
    with pytest.raises(errors.LeaseHeld):
        read(bench, "t")
    bench.session.abort(in_place, 1)
    with pytest.raises(errors.EngineTorn):
        read(bench, "t")


def test_a_fingerprint_whose_slice_fails_is_over(bench: Bench) -> None:
    read(bench, "t", slices=1)
    bench.plane.fail["fingerprint"] = errors.EngineAsleep("asleep")
    with pytest.raises(errors.EngineAsleep):
        bench.session.fingerprint("t", False, True)
    bench.plane.fail.clear()
    with pytest.raises(errors.StaleUpdate):
        bench.session.fingerprint("t", False, True)


def test_the_extension_has_one_attribute_and_it_never_raises(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> None:
    assert [name for name in vars(NixlWorkerExtension) if not name.startswith("__")] == ["nixl_push_rpc"]
    monkeypatch.setitem(__import__("sys").modules, "vllm_nixl_plugin.plane", None)
    got = NixlWorkerExtension().nixl_push_rpc({"nonce": "n"})
    assert (got["ok"], got["nonce"], got["worker"]) == (False, "n", -1)
    unknown = {"nonce": 1, "action": "__init__"}
    monkeypatch.setattr(bench.session, "renew", lambda: {}["secret\nTraceback"])
    got = answer(bench.session, {"action": "renew", "judge": 3})
    assert got["error"]["code"] == "worker_failed"
    assert "KeyError: 'secret" in got["error"]["message"]
    assert "\n" not in got["error"]["message"]
    for bad in ({}, unknown, {"action": "install", "args": {"x": 1}}, None, [], {"action": []}):
        got = answer(bench.session, bad)  # type: ignore[arg-type]
        assert not got["ok"]
        assert got["worker"] == 3
        assert plain(got) == got


def test_actions_of_the_judge_are_done_by_the_judge_alone(bench: Bench) -> None:
    ask = {"nonce": "n", "action": "grant", "args": {"update_id": "0" * 32, "holder": "", "lease_s": 1.0}}
    assert answer(bench.session, ask | {"judge": 0})["result"] is None
    assert bench.session.judge.lease is None
    ask["args"]["plans"] = {"3": bench.plan}  # type: ignore[index]
    assert answer(bench.session, ask | {"judge": 3})["result"] == {"epoch": 1}
