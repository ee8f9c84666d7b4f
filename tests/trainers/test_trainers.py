"""Trainers of several ranks push to real servers: every byte once, fairly shared, without gathering anything.

A small form of ``make trainers``, and what that does not show: memory, other models' servers at once, lost ranks.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import Server, completions, reference
from harness.checkpoints import write_checkpoint
from trainers.runner import HEAD, run
from trainers.world import World

pytestmark = pytest.mark.server


Served = tuple[Server, dict[int, Path]]

LEASE_S, RANK_TIMEOUT_S = 2.0, 4.0
OPTIONS = {"timeout_s": 60.0, "lease_s": LEASE_S, "rank_timeout_s": RANK_TIMEOUT_S}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server on a wide Qwen3 of seed 1, and checkpoints of seeds 1 to 3."""
    root = tmp_path_factory.mktemp("served")
    checkpoints = {seed: write_checkpoint(root / str(seed), "qwen3-wide", seed) for seed in (1, 2, 3)}
    with Server(checkpoints[1]) as server:
        yield server, checkpoints


@pytest.fixture(scope="module")
def trainer() -> Iterator[World]:
    """Two ranks that nothing happens to."""
    with World(2) as world:
        yield world


def test_layouts_of_two_ranks_reach_what_a_fresh_server_has(tmp_path: Path, trainer: World) -> None:
    rows = list(run(tmp_path, [trainer], {2: ("fsdp2", "tp", "ep")}, ["MoE"], (2,)))
    print(HEAD, *rows, sep="\n")
    assert all(row.good for row in rows)


def test_a_push_makes_its_send_buffers_and_nothing_else(served: Served, trainer: World) -> None:
    server, checkpoints = served
    arguments = {"layout": "fsdp2-fp32", "model": "qwen3-wide", "seed": 2, "servers": [server.url]}
    trainer.all("push_in_memory", send_buffer_bytes=4 << 20, **arguments)  # imports, and the first of everything
    for answer in trainer.all("push_in_memory", send_buffer_bytes=4 << 20, **arguments):
        print(answer)
        for push in ("first", "again"):
            assert answer[push]["tensors"] <= 1.05 * answer["buffers"]
            assert answer[push]["process"] < answer["shards"]
    assert completions(server.url) == reference(checkpoints[2])


def test_some_of_the_ranks_push_through_a_process_group_of_their_own(served: Served) -> None:
    server, checkpoints = served
    weights = str(checkpoints[3] / "model.safetensors")
    with World(3) as world:
        answers = world.all("push_in_group", checkpoint=weights, servers=[server.url], ranks=[1, 2])
    assert answers[0] is None
    assert answers[1] == answers[2]
    assert len(answers[1]["ranks"]) == 2
    assert completions(server.url) == reference(checkpoints[3])


@pytest.mark.parametrize(
    ("lost", "how"),
    [
        (0, signal.SIGKILL), (0, signal.SIGSTOP),
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.thorough),
    ],
)  # fmt: skip
def test_a_rank_that_is_lost_in_the_middle_ends_the_push_on_the_others(
    served: Served, trainer: World, lost: int, how: signal.Signals
) -> None:
    server, checkpoints = served
    arguments = {"servers": [server.url], "options": OPTIONS}

    def weights(seed: int) -> str:
        return str(checkpoints[seed] / "model.safetensors")

    trainer.all("push_rows", checkpoint=weights(3), **arguments)
    with World(2) as world:
        survivor = world.ranks[1 - lost]
        world.ranks[lost].ask("push_rows", checkpoint=weights(2), signal=int(how), **arguments)
        survivor.ask("push_rows", checkpoint=weights(2), **arguments)
        error = survivor.answer().get("error", {})
        print(error)
        assert error.get("code") == "rank_lost", error
        assert completions(server.url) == reference(checkpoints[3])
        world.ranks[lost].process.kill()
    time.sleep(LEASE_S)
    for report in trainer.all("push_rows", checkpoint=weights(2), **arguments):
        assert report["ok"]
    assert completions(server.url) == reference(checkpoints[2])
