"""No space is left where files are made: a server does without its socket, commands say so in a line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fake_plane import FakePlane
from faults.cells import Cell
from faults.runner import World, hooked, seen
from harness import TOKEN, Server
from trainer_client import WeightClient
from vllm_nixl_plugin import channel
from vllm_nixl_plugin.session import WorkerSession
from vllm_nixl_plugin.worker import answer


def test_a_worker_that_can_make_no_socket_says_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(channel.tempfile, "mkdtemp", full)
    session = WorkerSession(FakePlane())
    for _ in range(2):
        got = answer(session, {"nonce": "n", "action": "channel", "judge": 0})
        assert (got["ok"], got["result"]) == (True, None)


@pytest.mark.server
@pytest.mark.thorough
def test_a_server_without_room_for_temporary_files_takes_weights(world: World, tmp_path: Path) -> None:
    with (
        Server(world.checkpoints[1], env=hooked(tmp_path / "gate") | {"FAULTS_DISK_FULL": "1"}) as server,
        WeightClient([server.url], token=TOKEN, progress=False, timeout_s=60) as client,
    ):
        assert "asked by RPC instead" in server.log.read_text()
        for mode in ("shadow", "in_place"):
            assert client.push_weights(world.weights(2), mode=mode).ok
        assert seen(server) == world.fresh(2, server.options)


@pytest.mark.server
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("command", [["status", "--json"], ["fingerprint"]])
def test_a_command_whose_output_finds_no_room_ends_in_a_line_with_status_1(world: World, command: list[str]) -> None:
    fleet = world.fleet(Cell("trainer", "kill", "begun", "shadow"))
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "trainer_client.cli", command[0], *fleet.urls, *command[1:]], stdout=full,
            stderr=subprocess.PIPE, env=os.environ | {"PUSH_WEIGHTS_TOKEN": TOKEN}, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.strip() == "error: [Errno 28] No space left on device"
