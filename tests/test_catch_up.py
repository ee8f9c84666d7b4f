"""Servers that join late, or come back, get the weights of their fleet from a peer, while the trainer is gone.

Two real servers are shared: a peer that trainers push to, and one that joined it late. ``-s`` prints how long reading
the weights took, beside vLLM's own time for loading them from the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from fake_server import TOKEN as FAKE_TOKEN
from fake_server import Servers, listening
from harness import TOKEN, EngineOptions, Server, completions, reference
from harness.checkpoints import read_weights
from trainer_client import WeightClient
from trainer_client.cli import app
from trainer_client.control import Control
from trainer_client.verification import compare
from vllm_nixl_plugin import errors, peers
from vllm_nixl_plugin.catch_up import refuse_others
from vllm_nixl_plugin.wire import BeginRequest, Binding, OfferedWorker

HEADERS = {"Authorization": f"Bearer {TOKEN}"}
MODEL = "qwen3-wide"  # linears above 1 MiB: a CPU engine keeps them in handles that no tensor shows
Joining = tuple[Server, Path]


@pytest.fixture(scope="module")
def peer(checkpoint: Callable[..., Path]) -> Iterator[Server]:
    """A server that was started on the checkpoint of seed 1 and got the weights of seed 2 from a trainer."""
    with Server(checkpoint(MODEL, seed=1)) as server:
        push(server, checkpoint(MODEL, seed=2), "7")
        yield server


@pytest.fixture(scope="module")
def joining(
    peer: Server, checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Joining]:
    """A server that joins late, from seed 1, and a file that keeps it from the end of its reading."""
    hold = tmp_path_factory.mktemp("joining") / "hold"
    with Server(
        checkpoint(MODEL, seed=1), args=["--worker-extension-cls", "holding.HoldingWorkerExtension"],
        env={"PUSH_WEIGHTS_PEERS": peer.url, "HOLD_FILE": str(hold)},
    ) as server:  # fmt: skip
        yield server, hold


def push(server: Server, weights: Path, version: str, **options: Any) -> None:
    with WeightClient([server.url], token=TOKEN, progress=False) as client:
        client.push_weights(read_weights(weights), version=version, **options)


def ready(server: Server) -> dict[str, Any]:
    return dict(httpx.get(f"{server.url}/nixl/v1/ready", headers=HEADERS, timeout=30).json())


def wait_until(server: Server, asked: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while not asked(found := ready(server)):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


def catch_up(server: Server, url: str, wait_s: float = 60) -> dict[str, Any]:
    answer = httpx.post(
        f"{server.url}/nixl/v1/catch-up", params={"wait_s": wait_s}, json={"peer": url}, headers=HEADERS, timeout=90
    )
    assert answer.status_code == 202, answer.text
    return dict(answer.json())


def differing(one: Server, other: Server) -> list[str]:
    with Control(one.url, token=TOKEN) as first, Control(other.url, token=TOKEN) as second:
        found = compare(first, second)
    assert found.outputs.equal, found.outputs.reason
    assert found.versions[0] == found.versions[1]
    return [line for worker in found.workers for line in worker.differences]


@contextlib.contextmanager
def held(hold: Path, server: Server, url: str) -> Iterator[None]:
    """While entered, the server is in the middle of reading from there."""
    hold.touch()
    try:
        assert catch_up(server, url, wait_s=0)["state"] == "running"
        deadline = time.monotonic() + 30
        while catch_up(server, url, wait_s=0.2)["step"] != "fetch":
            assert time.monotonic() < deadline
        yield
    finally:
        hold.unlink()


# A late joiner


@pytest.mark.server
def test_a_server_that_joins_late_serves_the_fleets_version_without_the_trainer(peer, joining, checkpoint):
    joined, _ = joining
    assert wait_until(joined, lambda now: now["ready"])["weight_version"] == "7"
    assert completions(joined.url) == reference(checkpoint(MODEL, seed=2), options=joined.options)
    assert differing(joined, peer) == []
    log = joined.log.read_text()
    took = re.search(r"caught up with .*", log)
    loaded = re.search(r"Loading weights took [\d.]+ seconds", log)
    print(f"\n{took[0] if took else log}; from the disk: {loaded[0] if loaded else 'not told'}")
    with WeightClient([peer.url, joined.url], token=TOKEN, progress=False) as client:  # a later push works on both
        client.push_weights(read_weights(checkpoint(MODEL, seed=1)), version="8")
    assert differing(joined, peer) == []


@pytest.mark.server
def test_a_server_that_comes_back_catches_up_again_and_reads_what_was_pushed_in_place_and_in_part(
    peer, joining, checkpoint
):
    joined, _ = joining
    joined.kill()
    push(peer, checkpoint(MODEL, seed=2), "9", mode="in_place")
    with WeightClient([peer.url], token=TOKEN, progress=False) as client:
        one = {k: v for k, v in read_weights(checkpoint(MODEL, seed=1)).items() if "layers.1.mlp.gate" in k}
        client.push_weights(one, version="10", partial=True)
    joined.start()
    assert wait_until(joined, lambda now: now["ready"])["weight_version"] == "10"
    assert differing(joined, peer) == []


@pytest.mark.server
def test_a_peer_that_is_pushed_to_while_it_is_read_is_read_again(peer, joining, checkpoint):
    joined, hold = joining
    push(peer, checkpoint(MODEL, seed=1), "20")
    with held(hold, joined, peer.url):
        push(peer, checkpoint(MODEL, seed=2), "21")
    found = catch_up(joined, peer.url)
    assert (found["state"], found["weight_version"], found["differences"]) == ("done", "21", [])
    assert "begins again" in joined.log.read_text()
    assert differing(joined, peer) == []


@pytest.mark.server
def test_a_trainer_goes_before_a_catch_up(peer, joining, checkpoint):
    joined, hold = joining
    push(peer, checkpoint(MODEL, seed=1), "30")
    with held(hold, joined, peer.url):
        time.sleep(0.3)  # the lease of a catch-up
        push(joined, checkpoint(MODEL, seed=2), "31")
        assert ready(joined)["weight_version"] == "31"
        assert completions(joined.url) == reference(checkpoint(MODEL, seed=2), options=joined.options)
    assert catch_up(joined, peer.url)["state"] in ("done", "failed")  # it ends
    push(joined, checkpoint(MODEL, seed=2), "32")


@pytest.mark.server
def test_a_peer_whose_shadows_are_half_written_is_refused_until_it_gets_a_push(peer, joining, checkpoint):
    joined, _ = joining
    push(peer, checkpoint(MODEL, seed=1), "40")
    with Control(peer.url, token=TOKEN) as control, WeightClient([peer.url], token=TOKEN, progress=False) as client:
        client.push_weights(read_weights(checkpoint(MODEL, seed=2)), version="41")
        [server] = client._fleet.servers
        assert server.planned is not None
        plans = server.link.plans(server.planned[1], bytes)
        opened = control.begin(BeginRequest(plans=tuple(w.plan for w in plans.workers), version="42"), 30)
        control.abort(opened.update_id, drained=False)
        found = catch_up(joined, peer.url)
        assert (found["state"], found["error"]["code"]) == ("failed", "peer_refused")
        assert "has no copy of" in found["error"]["message"]
        client.push_weights(read_weights(checkpoint(MODEL, seed=2)), version="43")
    answer = CliRunner().invoke(
        app, ["catch-up", joined.url, "--from", peer.url], env={"PUSH_WEIGHTS_TOKEN": TOKEN}, catch_exceptions=False
    )
    assert answer.exit_code == 0, answer.output
    assert f"{joined.url}: weights 43 of {peer.url}" in answer.output
    assert differing(joined, peer) == []


@pytest.mark.server
@pytest.mark.thorough
def test_requests_go_on_at_the_peer_while_it_is_read(peer, joining):
    joined, hold = joining
    counted: list[int] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            counted.append(len(completions(peer.url)))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        with held(hold, joined, peer.url):
            before = len(counted)
            while len(counted) < before + 2:
                time.sleep(0.05)
        assert catch_up(joined, peer.url)["state"] == "done"
    finally:
        stop.set()
        thread.join()


@pytest.mark.server
@pytest.mark.thorough
def test_without_a_peer_that_answers_a_server_is_not_ready_until_it_is_pushed_to(joining, checkpoint):
    joined, _ = joining
    joined.kill()
    joined.env["PUSH_WEIGHTS_PEERS"] = "http://127.0.0.1:9"
    joined.start()
    reason = wait_until(joined, lambda now: "no peer has weights" in now["reason"])
    assert not reason["ready"]
    assert "http://127.0.0.1:9: unreachable" in reason["reason"]
    push(joined, checkpoint(MODEL, seed=2), "50")
    assert ready(joined)["ready"]


@pytest.mark.server
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param("qwen3-moe", EngineOptions(tensor_parallel=2), id="moe-tp2"),
        pytest.param("deepseek-v2", EngineOptions(), id="mla"),
        pytest.param("qwen3-tied", EngineOptions(data_parallel=2, api_servers=2), id="dp2-two-api-servers"),
    ],
)
def test_layouts_catch_up_worker_by_worker(checkpoint, model, options):
    first, second = (checkpoint(model, seed=seed) for seed in (1, 2))
    with Server(first, options) as peer:
        push(peer, second, "1")
        with Server(first, options, env={"PUSH_WEIGHTS_PEERS": peer.url}) as joined:
            assert wait_until(joined, lambda now: now["ready"])["weight_version"] == "1"
            assert differing(joined, peer) == []


@pytest.mark.server
@pytest.mark.thorough
def test_a_server_of_another_model_is_refused(peer, checkpoint):
    with Server(checkpoint("qwen3", seed=1)) as other:
        found = catch_up(other, peer.url)
        assert found["state"] == "failed"
        assert found["error"]["code"] in ("peer_refused", "plan_refused")
        assert ready(other) == {"ready": True, "reason": "", "weight_version": "default", "state": "serving"}


# Which peer


SAID = {
    "vllm": "0.32", "dtype": "bfloat16", "quantization": None, "tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 1,
    "ep_rank": 0, "ep_size": 1, "vocab_size": 512, "device": "cuda:3",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vllm": "0.31"}, "vllm '0.31', here '0.32'"), ({"tp_size": 4}, "tp_size 4, here 2"),
        ({"quantization": "fp8"}, "quantization 'fp8', here None"), ({"device": "cpu"}, "device 'cpu'"),
    ],
)  # fmt: skip
def test_what_two_servers_do_not_have_in_common_is_named(change, named) -> None:
    binding = Binding(
        worker=0, incarnation="i", agent="a", agent_metadata=b"m", memory="VRAM", device_id=0, addresses=()
    )  # fmt: skip
    alike = OfferedWorker(worker=0, plan="p", server=SAID | {"device": "cuda:0"}, binding=binding)
    refuse_others("http://peer", [SAID], [alike])
    with pytest.raises(errors.PeerRefused, match=re.escape(named)):
        refuse_others("http://peer", [SAID], [alike.model_copy(update={"server": SAID | change})])
    with pytest.raises(errors.PeerRefused, match="has 2 workers and this server 1"):
        refuse_others("http://peer", [SAID], [alike, alike])


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Servers, list[str]]]:
    """Three servers that answer for their status, over HTTP, and their URLs."""
    monkeypatch.setenv("PUSH_WEIGHTS_TOKEN", FAKE_TOKEN)
    servers = Servers(3)
    with contextlib.ExitStack() as stack:
        yield servers, [stack.enter_context(listening(server)) for server in servers.all]


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        (("default", "9", "10"), 2), (("a", "b", "b"), 1), (("5", "5", "default"), 0), (("default", "x", "default"), 1),
    ],
)  # fmt: skip
def test_the_peer_with_the_newest_weights_is_read(fleet, versions, chosen) -> None:
    servers, urls = fleet
    for server, version in zip(servers.all, versions, strict=True):
        server.version = version
    assert asyncio.run(peers.survey(urls, "ours", "default")) == urls[chosen]


def test_nothing_is_newer_only_if_all_peers_say_so(fleet) -> None:
    servers, urls = fleet
    with pytest.raises(peers.NothingNewer):
        asyncio.run(peers.survey(urls, "ours", "default"))
    servers.all[1].fail[("GET", "/status")] = [errors.WorkerFailed("not now")]
    with pytest.raises(errors.PeerRefused, match="worker_failed: not now"):
        asyncio.run(peers.survey(urls, "ours", "default"))
    with pytest.raises(errors.PeerRefused, match="none is listed"):
        asyncio.run(peers.survey([], "ours", "default"))
    servers.all[0].version = "3"
    with pytest.raises(peers.NothingNewer):  # it is among its own peers
        asyncio.run(peers.survey(urls[:1], "i", "default"))
