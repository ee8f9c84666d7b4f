"""Trainers that stop, die or race in the middle of a push, and servers that restart: real processes, real WRITEs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from harness import TOKEN, Server, completions, reference
from harness.checkpoints import read_weights, write_checkpoint
from trainer_client import PushFailed, WeightClient

pytestmark = pytest.mark.server

LEASE_S = 1.0
Served = tuple[Server, Path, Path, Path]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server on Qwen3 of seed 1, and the checkpoints of seeds 1 to 3."""
    root = tmp_path_factory.mktemp("served")
    a, b, c = (write_checkpoint(root / f"qwen3-{seed}", "qwen3", seed) for seed in (1, 2, 3))
    with Server(a) as server:
        yield server, a, b, c


@pytest.fixture
def client(served: Served) -> Iterator[WeightClient]:
    with WeightClient([served[0].url], token=TOKEN, timeout_s=60, lease_s=5) as made:
        yield made


def ask(server: Server, path: str, method: str = "GET") -> httpx.Response:
    return httpx.request(
        method, f"{server.url}/nixl/v1{path}", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30
    )


# Before the WRITE of the given number the trainer sends itself the given signal. Everything is written directly.
TRAINER = """
    import os, sys
    from safetensors.torch import load_file
    from trainer_client import PushFailed, WeightClient, delivery, transfer
    url, token, path, mode, lease_s, number = sys.argv[1:]
    post, posts = transfer.Transfer._post, 0

    def signalled(self, *arguments):
        global posts
        posts += 1
        if posts == 1:
            print("in the middle", flush=True)
            os.kill(os.getpid(), int(number))
        post(self, *arguments)

    transfer.Transfer._post = signalled
    delivery.DRAIN_S = 0.5
    limits = {"direct_run_bytes": 1, "progress": False, "timeout_s": 60, "lease_s": float(lease_s)}
    with WeightClient([url], token=token, **limits) as client:
        try:
            client.push_weights(load_file(path), version="first", mode=mode)
        except PushFailed:
            print("failed", flush=True)
"""


def start_trainer(server: Server, weights: Path, mode: str, number: int) -> subprocess.Popen[str]:
    arguments = [server.url, TOKEN, str(weights / "model.safetensors"), mode, str(LEASE_S), str(int(number))]
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TRAINER), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout
    assert process.stdout.readline() == "in the middle\n"
    if number == signal.SIGSTOP:
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
    else:
        process.communicate(timeout=30)
    time.sleep(LEASE_S * 1.5)
    return process


def go_on(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=60)
    assert out == "failed\n"


def test_a_stopped_trainer_that_goes_on_later_does_not_touch_the_next_weights(served, client):
    server, a, b, c = served
    client.push_weights(read_weights(a))
    first = start_trainer(server, b, "shadow", signal.SIGSTOP)
    try:
        client.push_weights(read_weights(c), version="second")
        assert completions(server.url) == reference(c)
    finally:
        go_on(first)
    assert completions(server.url) == reference(c)
    assert ask(server, "/status").json()["weight_version"] == "second"


def test_nobody_pushes_while_a_stopped_in_place_trainer_may_still_write_to_what_serves(served, client):
    server, a, b, c = served
    client.push_weights(read_weights(a))
    first = start_trainer(server, b, "in_place", signal.SIGSTOP)
    try:
        for mode in ("shadow", "in_place"):
            with pytest.raises(PushFailed, match="lease_held") as refused:
                client.push_weights(read_weights(c), mode=mode)
            assert f"PID {first.pid}" in str(refused.value)
            assert ask(server, "/ready").status_code == 503
    finally:
        go_on(first)
    client.push_weights(read_weights(c), version="second")
    assert completions(server.url) == reference(c)


def test_a_trainer_killed_in_the_middle_of_a_shadow_push_changes_nothing(served, client):
    server, a, b, c = served
    client.push_weights(read_weights(a), version="before")
    start_trainer(server, b, "shadow", signal.SIGKILL)
    assert completions(server.url) == reference(a)
    assert ask(server, "/ready?version=before").status_code == 200
    client.push_weights(read_weights(c))
    assert completions(server.url) == reference(c)


def test_a_trainer_killed_in_the_middle_of_an_in_place_push_leaves_a_torn_server_that_a_full_push_heals(served, client):
    server, a, b, c = served
    client.push_weights(read_weights(a))
    start_trainer(server, b, "in_place", signal.SIGKILL)
    assert ask(server, "/ready").status_code == 503
    assert ask(server, "/resume", "POST").json()["error"]["code"] == "lease_held"
    update_id = ask(server, "/status").json()["lease"]["update_id"]
    assert ask(server, f"/updates/{update_id}", "DELETE").status_code == 200
    assert ask(server, "/ready").json()["state"] == "torn"
    assert ask(server, "/resume", "POST").json()["error"]["code"] == "torn"
    with pytest.raises(PushFailed):
        client.push_weights({"model.norm.weight": dict(read_weights(b))["model.norm.weight"]}, partial=True)
    assert ask(server, "/ready").status_code == 503
    client.push_weights(read_weights(c))
    assert ask(server, "/ready").status_code == 200
    assert completions(server.url) == reference(c)


RIVAL = """
    import json, sys
    from safetensors.torch import load_file
    from trainer_client import PushFailed, WeightClient
    url, token, path, name = sys.argv[1:]
    weights, outcomes = load_file(path), []
    with WeightClient([url], token=token, timeout_s=60, progress=False) as client:
        print("ready", flush=True)
        sys.stdin.readline()
        for number in range(10):
            try:
                client.push_weights(weights, version=f"{name}-{number}")
                outcomes.append("ok")
            except PushFailed as error:
                outcomes.append(error.report.servers[0].error_code)
    print(json.dumps(outcomes))
"""


def test_of_two_trainers_at_once_one_gets_in_and_the_last_winner_serves(served):
    server, _, b, c = served
    rivals = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RIVAL), server.url, TOKEN, str(path / "model.safetensors"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for path, name in ((b, "b"), (c, "c"))
    ]
    for rival in rivals:
        assert rival.stdout
        assert rival.stdout.readline() == "ready\n"
    for rival in rivals:
        assert rival.stdin
        rival.stdin.write("\n")
        rival.stdin.flush()
    outcomes = [json.loads(rival.communicate(timeout=120)[0]) for rival in rivals]
    assert all(set(of) <= {"ok", "lease_held"} for of in outcomes)
    assert any("ok" in of for of in outcomes)
    status = ask(server, "/status").json()
    assert (status["state"], status["ready"], status["lease"]) == ("serving", True, None)
    assert completions(server.url) == reference(b if status["weight_version"].startswith("b") else c)


def test_a_client_goes_on_with_a_server_that_was_killed_and_started_again_between_its_pushes(served, client):
    server, a, b, c = served
    client.push_weights(read_weights(a))
    server.kill()
    with pytest.raises(PushFailed, match="unreachable"):
        client.push_weights(read_weights(b))
    server.start()
    for weights in (b, c):
        client.push_weights(read_weights(weights))
        assert completions(server.url) == reference(weights)
