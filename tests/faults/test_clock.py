"""The clock of the day jumps in the middle of an update, in the trainer and in the server: nothing depends on it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from faults.cells import Cell
from faults.runner import LIMITS, World, seen, status_of

ROOT = Path(__file__).parent.parent.parent
DAY_S = 86_400.0
FOR_PEOPLE = {
    ("vllm_nixl_plugin/session.py", "_close"),  # when an update ended, in the history
    ("vllm_nixl_plugin/channel.py", "_sweep"),  # how old a file is
    ("trainer_client/telemetry.py", "_trace"),  # when a span ended
}


@pytest.mark.server
@pytest.mark.parametrize("jump_s", [DAY_S, pytest.param(-DAY_S, marks=pytest.mark.thorough)])
def test_a_clock_that_jumps_neither_ends_a_lease_nor_a_push(world: World, jump_s: float) -> None:
    fleet = world.fleet(Cell("trainer", "kill", "begun", "shadow"))
    fleet.gate.clear()
    new = next(seed for seed in (1, 2, 3) if seed != fleet.seed)
    version, place = world.version(new), f"trainer.0.writing@{fleet.victim.port}"
    fleet.gate.set(place)
    [trainer] = world.trainers.push(
        fleet.urls, world.checkpoints[new], gate=fleet.gate.folder, version=version, mode="shadow",
        **LIMITS | {"lease_s": 30.0},
    )  # fmt: skip
    fleet.gate.wait(place, 60)
    fleet.gate.jump(jump_s)
    assert fleet.push(fleet.seed, world.version(fleet.seed)) == "lease_held"
    assert 0 < status_of(fleet.victim)["lease"]["expires_in_s"] <= 30
    fleet.gate.release(place)
    assert trainer.outcome(60) == "ok"
    fleet.seed = new
    assert status_of(fleet.victim)["weight_version"] == version
    assert seen(fleet.victim) == world.fresh(new, fleet.victim.options)
    fleet.gate.clear()


def test_only_what_is_meant_for_people_reads_the_clock_of_the_day() -> None:
    found = set()
    for package in ("vllm_nixl_plugin", "trainer_client"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    calls = {ast.unparse(c.func) for c in ast.walk(node) if isinstance(c, ast.Call)}
                    if calls & {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now"}:
                        found.add((str(file.relative_to(ROOT)), node.name))
    assert found <= FOR_PEOPLE, found - FOR_PEOPLE
