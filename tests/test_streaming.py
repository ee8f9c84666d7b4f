"""Groups on a worker, without vLLM: when they are installed, who is told, and what a failure between them does."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from fake_plane import MANIFEST, FakePlane, plan_of
from trainer_client.credits import Credits
from vllm_nixl_plugin.encoding import decode_credit, encode_credit, encode_landed
from vllm_nixl_plugin.errors import EngineTorn, InstallFailed, InvalidRequest
from vllm_nixl_plugin.grouping import lay_out
from vllm_nixl_plugin.layout import Copy
from vllm_nixl_plugin.memory_fabric import MemoryFabric, MemoryNetwork
from vllm_nixl_plugin.session import WorkerSession
from vllm_nixl_plugin.wire import Binding, Credit, Destination, Group, Landed, Manifest, PlannedCopy, WorkerPlan

UPDATE = "0" * 32
SIZES = (16, 32, 16)


class GroupedPlane(FakePlane):
    """A worker with three groups, and a window for the largest alone."""

    def __init__(self) -> None:
        super().__init__(0)
        self.credits: list[int | None] = []

    def make_plan(self, manifest: Manifest) -> WorkerPlan:
        starts = [sum(SIZES[:i]) for i in range(len(SIZES))]
        copies = tuple(
            PlannedCopy(weight=0, destination=i, copy_=Copy((n // 4,), start, (4,), 4, 0, (4,), 4))
            for i, (n, start) in enumerate(zip(SIZES, starts, strict=True))
        )
        return plan_of(manifest, 0).model_copy(update={
            "destinations": tuple(Destination(names=(f"w{i}",), nbytes=n, home="shadow") for i, n in enumerate(SIZES)),
            "copies": copies,
            "groups": tuple(Group(destinations=(i,), window_nbytes=n, working_nbytes=0) for i, n in enumerate(SIZES)),
        })  # fmt: skip

    def bind(self, plan: WorkerPlan, mode: str, contacts: Sequence[bytes] = ()) -> Binding:
        self.contacts = tuple(contacts)
        return super().bind(plan, mode).model_copy(update={"window": lay_out(plan.groups, max(SIZES))[0]})

    def install_group(self, plan: WorkerPlan, number: int, credit: bytes | None) -> None:
        self._call(f"group {number}")
        self.credits.append(None if credit is None else decode_credit(credit).group)

    def prepare_install(self, plan: WorkerPlan, mode: str, *, whole: bool) -> bool:
        return self.log.count("group 2") == 1


@pytest.fixture
def plane() -> GroupedPlane:
    return GroupedPlane()


@pytest.fixture
def session(plane: GroupedPlane, monkeypatch: pytest.MonkeyPatch) -> WorkerSession:
    monkeypatch.setattr("vllm_nixl_plugin.session.LISTEN_S", 0.001)
    made = WorkerSession(plane)
    made.plans.start("m", MANIFEST.model_dump_json().encode())
    while made.plans.poll("m") is None:
        time.sleep(0.001)
    plan = made.plans.latest().digest
    made.grant(UPDATE, "t", 60, plan)
    made.begin(UPDATE, 1, "v", "streamed", "t", plan, [], contacts=[b"a"])
    made.record_step(UPDATE, 0, "open")
    made.claim(UPDATE, "commit", "api", "r", {})
    return made


def land(session: WorkerSession, group: int, nbytes: int | None = None, sequence: int | None = None) -> None:
    digest = session.plans.latest().digest[:16]
    nbytes = SIZES[group] if nbytes is None else nbytes
    message = Landed(update_id=UPDATE, sequence=sequence or group, nbytes=nbytes, plan=digest, group=group)
    session.plane.inbox.append(("t", encode_landed(message)))  # type: ignore[attr-defined]


def numbers(answer: dict[str, Any]) -> tuple[int, int]:
    return answer["landed"], answer["installed"]


def test_a_group_is_installed_when_all_workers_have_it_and_not_before(session: WorkerSession, plane: GroupedPlane):
    assert plane.contacts == (b"a",)
    assert numbers(session.stream(UPDATE, 1, 0)) == (0, 0)
    land(session, 0)
    assert numbers(session.stream(UPDATE, 1, 0)) == (1, 0)
    assert numbers(session.stream(UPDATE, 1, 2)) == (1, 1)
    assert not session.prepare(UPDATE, 1)["ready"]
    land(session, 1, 8)
    assert numbers(session.stream(UPDATE, 1, 2)) == (1, 1)
    land(session, 1, 24, sequence=7)
    land(session, 2)
    assert numbers(session.stream(UPDATE, 1, 3)) == (3, 3)
    assert plane.log[-3:] == ["group 0", "group 1", "group 2"]
    assert plane.credits == [0, 1, None]  # nobody waits for the last
    assert session.prepare(UPDATE, 1)["ready"]
    assert session.update is not None
    assert session.update.drained
    session.install(UPDATE, 1)
    session.finish(UPDATE, 1, {})
    assert (session.weight_version, session.torn) == ("v", False)


def test_a_group_that_cannot_be_installed_tears_the_engine(session: WorkerSession, plane: GroupedPlane):
    plane.fail["group 1"] = InstallFailed("no", untouched=False)
    for group in range(3):
        land(session, group)
    for _ in range(2):
        with pytest.raises(InstallFailed):
            session.stream(UPDATE, 1, 3)
    assert plane.log.count("group 1") == 1
    assert session.torn
    assert session.phase == "torn"
    session.abort(UPDATE, 1, torn=True, outcome="failed")
    with pytest.raises(EngineTorn):
        session.hold(False)


def test_more_bytes_for_a_group_than_its_plan_has_are_refused(session: WorkerSession):
    land(session, 1, 40)
    with pytest.raises(InvalidRequest, match="group 1"):
        session.stream(UPDATE, 1, 0)
    assert session.torn


def test_a_trainer_that_fell_silent_is_told_while_bytes_are_lacking(session: WorkerSession):
    assert not session.stream(UPDATE, 1, 0)["silent"]
    session.renew(UPDATE, 1e-9)
    assert session.stream(UPDATE, 1, 0)["silent"]
    for group in range(3):
        land(session, group)
    assert not session.stream(UPDATE, 1, 3)["silent"]


def test_credits_are_heard_by_the_update_that_they_are_of():
    network = MemoryNetwork()
    worker, trainer = MemoryFabric("worker", network), MemoryFabric("trainer", network)
    worker.connect(trainer.contact())
    credits = Credits(trainer)
    with credits.expect("1" * 32, [("worker", "ab" * 32)]):
        assert credits.look("1" * 32, "worker") == -1
        for update, group, plan in (("1", 2, "ab"), ("1", 1, "ab"), ("2", 9, "ab"), ("1", 9, "cd")):
            worker.notify("trainer", encode_credit(Credit(update_id=update * 32, group=group, plan=plan * 8)))
        worker.notify("trainer", b"something else")
        assert credits.look("1" * 32, "worker") == 2
    assert credits.foreign == 3
