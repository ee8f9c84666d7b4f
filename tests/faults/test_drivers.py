"""Two that push to one server at once, of whatever kind: one gets in, the other hears who was faster, until when."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from faults.cells import NEW, OLD, Cell
from faults.runner import LIMITS, Fleet, World, ask, next_push, seen, settled, status_of
from faults.trainer import stop
from harness import TOKEN
from trainer_client import PushFailed, WeightClient

pytestmark = pytest.mark.server


@pytest.fixture
def fleet(world: World) -> Fleet:
    """The one server."""
    made = world.fleet(Cell("trainer", "kill", "begun", "shadow"))
    made.gate.clear()
    return made


@pytest.mark.parametrize("rival", ["a trainer", "vllm-nixl push"])
def test_of_two_drivers_one_wins_and_the_other_hears_who_holds_the_lease_and_until_when(
    world: World, fleet: Fleet, rival: str
) -> None:
    first, second = (seed for seed in (1, 2, 3) if seed != fleet.seed)
    place = f"trainer.0.before.commit@{fleet.victim.port}"
    fleet.gate.set(place)
    [winner] = world.trainers.push(
        fleet.urls, world.checkpoints[first], gate=fleet.gate.folder, version="the first", mode="shadow",
        **LIMITS | {"lease_s": 20.0},
    )  # fmt: skip
    fleet.gate.wait(place, 60)
    try:
        if rival == "a trainer":
            with (
                WeightClient(fleet.urls, token=TOKEN, progress=False) as client,
                pytest.raises(PushFailed) as refused,
            ):
                client.push_weights(world.weights(second))
            said = str(refused.value)
        else:
            done = subprocess.run(
                [sys.executable, "-m", "trainer_client.cli", "push", str(world.checkpoints[second]), *fleet.urls],
                env=os.environ | {"PUSH_WEIGHTS_TOKEN": TOKEN}, capture_output=True, text=True, timeout=120,
                check=False,
            )  # fmt: skip
            assert done.returncode != 0
            said = " ".join((done.stdout + done.stderr).split())
        assert "lease_held" in said
        assert re.search(rf"of [^ ]*-{winner.pid}-[0-9a-f]+ is open for another [0-9.]+ s", said), said
    finally:
        fleet.gate.release(place)
    assert winner.outcome(60) == "ok"
    fleet.seed = first
    assert status_of(fleet.victim)["weight_version"] == "the first"
    assert seen(fleet.victim) == world.fresh(first, fleet.victim.options)


@pytest.mark.thorough
def test_of_two_trainers_that_push_over_and_over_the_last_winner_serves(world: World, fleet: Fleet) -> None:
    rivals = {
        seed: world.trainers.push(
            fleet.urls, world.checkpoints[seed], gate=fleet.gate.folder, version=f"of {seed}", mode="shadow",
            times=5, **LIMITS,
        )[0]
        for seed in (2, 3)
    }  # fmt: skip
    outcomes = {seed: (rival.outcome(240), rival.said["outcomes"])[1] for seed, rival in rivals.items()}
    assert all(set(of) <= {"ok", "lease_held"} for of in outcomes.values()), outcomes
    assert any("ok" in of for of in outcomes.values())
    status = status_of(fleet.victim)
    assert (status["state"], status["ready"], status["lease"]) == ("serving", True, None)
    fleet.seed = int(status["weight_version"].removeprefix("of "))
    assert seen(fleet.victim) == world.fresh(fleet.seed, fleet.victim.options)


def test_a_torn_in_place_engine_refuses_to_resume_and_takes_a_full_push_only(world: World, fleet: Fleet) -> None:
    new, third = (seed for seed in (1, 2, 3) if seed != fleet.seed)
    place = f"trainer.0.writing@{fleet.victim.port}"
    fleet.gate.set(place)
    [trainer] = world.trainers.push(
        fleet.urls, world.checkpoints[new], gate=fleet.gate.folder, version="torn", mode="in_place", **LIMITS
    )
    fleet.gate.wait(place, 60)
    assert fleet.gate.is_in_a_write(place)
    stop(trainer.pid)
    fleet.gate.release(place)
    assert ask(fleet.victim, "/resume", "POST", 409)["error"]["code"] == "lease_held"
    trainer.kill()
    update_id = status_of(fleet.victim)["lease"]["update_id"]
    assert ask(fleet.victim, f"/updates/{update_id}", "DELETE")["state"] == "aborted"
    status = status_of(fleet.victim)
    assert (status["state"], status["torn"], status["ready"]) == ("torn", True, False)
    assert ask(fleet.victim, "/ready", status=503)["state"] == "torn"
    assert ask(fleet.victim, "/resume", "POST", 409)["error"]["code"] == "torn"
    with WeightClient(fleet.urls, token=TOKEN, progress=False, timeout_s=60) as client:
        part = {"model.norm.weight": world.weights(new)["model.norm.weight"]}
        with pytest.raises(PushFailed, match="torn"):
            client.push_weights(part, partial=True)
        assert ask(fleet.victim, "/ready", status=503)["state"] == "torn"
        assert client.push_weights(world.weights(third)).ok
    fleet.seed = third
    assert ask(fleet.victim, "/ready")["ready"]
    assert seen(fleet.victim) == world.fresh(third, fleet.victim.options)


@pytest.mark.thorough
@pytest.mark.parametrize("stage", ["begin", "commit"])
def test_a_server_that_stays_stopped_ends_the_push_by_its_deadline(world: World, fleet: Fleet, stage: str) -> None:
    old = fleet.seed
    new, third = (seed for seed in (1, 2, 3) if seed != old)
    before, version = world.version(old), world.version(new)
    assert fleet.push(old, before) == "ok"
    place = f"trainer.0.before.{stage}@{fleet.victim.port}"
    fleet.gate.set(place)
    [trainer] = world.trainers.push(
        fleet.urls, world.checkpoints[new], gate=fleet.gate.folder, version=version, mode="shadow", timeout_s=10.0,
        lease_s=2.0,
    )  # fmt: skip
    fleet.gate.wait(place, 60)
    pids = fleet.victim.processes()
    for pid in pids:
        stop(pid)
    fleet.gate.release(place)
    try:
        assert trainer.outcome(90) == "deadline"
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    # What it had asked for may be done now, or not: either way the server has whole weights and takes others.
    assert settled(fleet.victim, {before: OLD, version: NEW}, OLD) in (OLD, NEW)
    assert next_push(world, fleet, third, patient=True) == "ok"
    assert seen(fleet.victim) == world.fresh(third, fleet.victim.options)
