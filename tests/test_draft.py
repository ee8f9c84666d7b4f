"""Speculative decoding: the target and its draft model are updated together, or the draft model is said to be stale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from harness import TOKEN, Server, completions, servers
from harness.checkpoints import read_weights
from harness.drafters import random_like, write_eagle, write_eagle3, write_mtp, write_target
from trainer_client import PushFailed, WeightClient
from vllm_nixl_plugin.errors import PlanRefused

pytestmark = pytest.mark.server

HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def speculating(target: Path, method: str, drafter: Path | None = None) -> Server:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 1 if drafter is None else 3}
    if drafter is not None:
        config["model"] = str(drafter)
    return Server(target, args=["--speculative-config", json.dumps(config)])


def fingerprint(server: Server) -> dict[str, str]:
    answer = httpx.get(f"{server.url}/nixl/v1/fingerprint", headers=HEADERS, timeout=60)
    assert answer.status_code == 200, answer.text
    [worker] = answer.json()["workers"]
    return dict(worker["paths"])


def draft_of(server: Server) -> dict[str, Any]:
    answer = httpx.get(f"{server.url}/nixl/v1/status", headers=HEADERS, timeout=30)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["server"]["draft"])


def equal(pushed: Server, fresh: Server) -> None:
    """Two servers read the same tensors and generate the same, drafters and all."""
    a, b = fingerprint(pushed), fingerprint(fresh)
    assert any(path.startswith("draft/") for path in b)
    assert {path: (a.get(path), b.get(path)) for path in a.keys() | b.keys() if a.get(path) != b.get(path)} == {}
    assert guessed(pushed) == guessed(fresh)


def guessed(server: Server) -> tuple[Any, ...]:
    """What the server generates, how many tokens its drafter guessed for it, and how many of them rightly."""
    before = counts(server)
    found = completions(server.url)
    return found, *(after - before[name] for name, after in counts(server).items())


def counts(server: Server) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
    names = [f"vllm:spec_decode_num_{name}_tokens_total" for name in ("draft", "accepted")]
    return {name: sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for name in names}


def drafted(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"draft:{name}": tensor for name, tensor in weights.items()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafters")
    out = {}
    for seed in (1, 2):
        out[f"target-{seed}"] = write_target(root / f"target-{seed}", seed)
        out[f"small-{seed}"] = write_target(root / f"small-{seed}", seed)  # so that it guesses right
        own = random_like(read_weights(out[f"target-{seed}"])["model.embed_tokens.weight"], seed + 40)
        out[f"eagle-{seed}"] = write_eagle(root / f"eagle-{seed}", seed + 20, own)
        out[f"eagle-without-{seed}"] = write_eagle(root / f"eagle-without-{seed}", seed + 20)
        out[f"eagle3-{seed}"] = write_eagle3(root / f"eagle3-{seed}", seed + 50)
        out[f"mtp-{seed}"] = write_mtp(root / f"mtp-{seed}", seed + 30)
    return out


@pytest.mark.parametrize(
    ("method", "drafter"),
    [
        ("draft_model", "small"),
        pytest.param("eagle", "eagle", marks=pytest.mark.thorough),
        pytest.param("eagle", "eagle-without", marks=pytest.mark.thorough),
        ("eagle3", "eagle3"),
    ],
)
def test_target_and_drafter_are_pushed_together(checkpoints: dict[str, Path], method: str, drafter: str):
    a = speculating(checkpoints["target-1"], method, checkpoints[f"{drafter}-1"])
    b = speculating(checkpoints["target-2"], method, checkpoints[f"{drafter}-2"])
    old, new = (
        read_weights(checkpoints[f"target-{seed}"]) | drafted(read_weights(checkpoints[f"{drafter}-{seed}"]))
        for seed in (1, 2)
    )
    with servers(a, b) as (server, fresh), WeightClient([server.url], token=TOKEN) as client:
        before = fingerprint(server)
        assert method != "draft_model" or guessed(server)[2] > 20
        report = client.push_weights(new)
        assert report.servers[0].stale == ()
        assert not draft_of(server)["stale"]
        equal(server, fresh)
        client.push_weights(old, mode="in_place")
        assert fingerprint(server) == before
        client.push_weights(new, mode="in_place")
        equal(server, fresh)
        assert method != "draft_model" or guessed(server)[2] > 20


def test_a_drafter_of_the_same_checkpoint_takes_its_weights_by_the_same_names(checkpoints: dict[str, Path]):
    a, b = (speculating(checkpoints[f"mtp-{seed}"], "mtp") for seed in (1, 2))
    weights = {seed: read_weights(checkpoints[f"mtp-{seed}"]) for seed in (1, 2)}
    with servers(a, b) as (server, fresh), WeightClient([server.url], token=TOKEN) as client:
        report = client.push_weights(weights[2])
        assert report.servers[0].stale == ()
        equal(server, fresh)
        client.push_weights(weights[1])
        client.push_weights(weights[2], mode="in_place")
        assert fingerprint(server) == fingerprint(fresh)


def test_a_push_without_drafter_weights_is_accepted_and_says_stale(checkpoints: dict[str, Path]):
    a = speculating(checkpoints["target-1"], "eagle", checkpoints["eagle-without-1"])
    b = speculating(checkpoints["target-2"], "eagle", checkpoints["eagle-without-1"])
    with servers(a, b) as (server, fresh), WeightClient([server.url], token=TOKEN) as client:
        assert not draft_of(server)["stale"]
        report = client.push_weights(read_weights(checkpoints["target-2"]))
        assert report.servers[0].stale == ("draft",)
        assert "stale: draft" in str(report)
        assert "stale: draft" in server.log.read_text()
        assert draft_of(server)["stale"]
        equal(server, fresh)
        client.push_weights(
            read_weights(checkpoints["target-2"]) | drafted(read_weights(checkpoints["eagle-without-2"]))
        )
        assert not draft_of(server)["stale"]


@pytest.mark.thorough
def test_a_target_push_leaves_a_drafter_of_the_same_checkpoint_alone_and_the_tensors_it_shares_right(
    checkpoints: dict[str, Path], tmp_path: Path
):
    old, new = (read_weights(checkpoints[f"mtp-{seed}"]) for seed in (1, 2))
    only = {name: tensor for name, tensor in new.items() if not name.startswith("model.layers.2.")}
    with speculating(checkpoints["mtp-1"], "mtp") as server, WeightClient([server.url], token=TOKEN) as client:
        before = fingerprint(server)
        report = client.push_weights(only)
        assert report.servers[0].stale == ("draft",)
        after = fingerprint(server)
        moved = {path for path in before if path.startswith("draft/") and before[path] != after[path]}
        assert moved
        assert all("embed_tokens" in path or "head" in path for path in moved)
        assert after["draft/model.embed_tokens.weight"].endswith("shares model.embed_tokens.weight")
    assert old.keys() == new.keys()


def test_half_a_drafter_and_what_it_shares_with_the_target_are_refused_by_name(checkpoints: dict[str, Path]):
    target = read_weights(checkpoints["target-2"])
    half = drafted(read_weights(checkpoints["eagle-without-2"]))
    half.pop("draft:fc.weight")
    own = drafted({"embed_tokens.weight": target["model.embed_tokens.weight"]})
    a = speculating(checkpoints["target-1"], "eagle", checkpoints["eagle-without-1"])
    with a as server, WeightClient([server.url], token=TOKEN) as client:
        for weights, name in ((half, "fc.weight"), (half | own, "draft:embed_tokens.weight")):
            with pytest.raises((PlanRefused, PushFailed), match=name):
                client.push_weights(target | weights)


def test_draft_weights_for_a_server_without_a_drafter_are_refused(checkpoints: dict[str, Path]):
    with Server(checkpoints["target-1"]) as server, WeightClient([server.url], token=TOKEN) as client:
        weights = read_weights(checkpoints["target-2"]) | drafted(read_weights(checkpoints["small-2"]))
        with pytest.raises((PlanRefused, PushFailed), match=r"draft:lm_head\.weight"):
            client.push_weights(weights)


@pytest.mark.thorough
def test_a_torn_drafter_is_healed_by_its_own_weights_only(checkpoints: dict[str, Path]):
    target = read_weights(checkpoints["target-2"])
    both = target | drafted(read_weights(checkpoints["eagle-without-2"]))
    manifest = {
        "weights": [
            {"name": name, "shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch.")}
            for name, t in both.items()
        ]
    }
    a = speculating(checkpoints["target-1"], "eagle", checkpoints["eagle-without-1"])
    b = speculating(checkpoints["target-2"], "eagle", checkpoints["eagle-without-2"])
    with servers(a, b) as (server, fresh), WeightClient([server.url], token=TOKEN) as client:
        with httpx.Client(base_url=f"{server.url}/nixl/v1", headers=HEADERS, timeout=60) as http:
            planned = http.post("/plan", json=manifest, headers={"Accept": "application/json"}).json()
            plans = [worker["plan"] for worker in planned["workers"]]
            opened = http.post("/updates", json={"plans": plans, "version": "half", "mode": "in_place"})
            assert opened.status_code in (200, 201), opened.text
            http.delete(f"/updates/{opened.json()['update_id']}?drained=true")
            assert http.get("/status").json()["torn"]
        with pytest.raises(PushFailed, match="draft model holds half of an update"):
            client.push_weights(target)
        client.push_weights(both)
        equal(server, fresh)


@pytest.mark.thorough
def test_a_partial_push_may_be_of_the_drafter_alone(checkpoints: dict[str, Path]):
    a, b = (speculating(checkpoints["target-1"], "eagle", checkpoints[f"eagle-without-{seed}"]) for seed in (1, 2))
    with servers(a, b) as (server, fresh), WeightClient([server.url], token=TOKEN) as client:
        client.push_weights(drafted(read_weights(checkpoints["eagle-without-2"])), partial=True)
        equal(server, fresh)
        one = {"draft:fc.weight": read_weights(checkpoints["eagle-without-1"])["fc.weight"]}
        before = fingerprint(server)
        client.push_weights(one, partial=True)
        after = fingerprint(server)
        assert {path for path in after if after[path] != before.get(path)} <= {p for p in after if ".fc" in p}
        assert after != before
