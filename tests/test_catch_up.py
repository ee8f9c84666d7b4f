"""Servers that join late, or come back, get the weights of their fleet from a peer, while the trainer is gone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness import TOKEN, Server
from harness.checkpoints import read_weights, write_checkpoint
from trainer_client import WeightClient
from trainer_client.control import Control
from trainer_client.verification import compare

pytestmark = pytest.mark.server

HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Linears above 1 MiB: a CPU engine keeps them in handles that no tensor shows."""
    root = tmp_path_factory.mktemp("fleet")
    first, second = (write_checkpoint(root / f"wide-{seed}", "qwen3-wide", seed) for seed in (1, 2))
    return first, second


@pytest.fixture(scope="module")
def peer(checkpoints: tuple[Path, Path]) -> Iterator[Server]:
    """A server that was started on the first checkpoint and got the weights of the second from a trainer."""
    with Server(checkpoints[0]) as server:
        with WeightClient([server.url], token=TOKEN) as client:
            client.push_weights(read_weights(checkpoints[1]), version="7")
        yield server


def get(server: Server, path: str) -> tuple[int, dict[str, Any]]:
    answer = httpx.get(f"{server.url}/nixl/v1{path}", headers=HEADERS, timeout=30)
    return answer.status_code, dict(answer.json())


def wait_until_ready(server: Server, timeout_s: float = 60) -> dict[str, Any]:
    deadline = time.monotonic() + timeout_s
    while True:
        status, body = get(server, "/ready")
        if status == 200 or time.monotonic() > deadline:
            assert status == 200, body
            return body
        time.sleep(0.1)


def catch_up(server: Server, peer: str) -> tuple[int, dict[str, Any]]:
    answer = httpx.post(
        f"{server.url}/nixl/v1/catch-up", params={"wait_s": 60}, json={"peer": peer}, headers=HEADERS, timeout=90
    )
    return answer.status_code, dict(answer.json())


def differing(one: Server, other: Server) -> list[str]:
    with Control(one.url, token=TOKEN) as first, Control(other.url, token=TOKEN) as second:
        found = compare(first, second)
    assert found.outputs.equal, found.outputs.reason
    return [line for worker in found.workers for line in worker.differences]


def test_a_server_that_joins_late_serves_the_fleets_version_without_the_trainer(peer, checkpoints):
    with Server(checkpoints[0], env={"PUSH_WEIGHTS_PEERS": peer.url}) as joined:
        assert wait_until_ready(joined)["weight_version"] == "7"
        assert differing(joined, peer) == []
        assert get(joined, "/status")[1]["weight_version"] == "7"
        assert "caught up with" in joined.log.read_text()
        # The next push of a trainer works on both.
        with WeightClient([peer.url, joined.url], token=TOKEN) as client:
            client.push_weights(read_weights(checkpoints[1]), version="8")
        assert differing(joined, peer) == []
