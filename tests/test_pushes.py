"""Pushes into one real server while it is used, and pushes that must fail: nothing is lost or changed."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from harness import TOKEN, EngineOptions, Server, completions, reference
from harness.checkpoints import read_weights, write_checkpoint, write_weights
from trainer_client import PushFailed, WeightClient

pytestmark = pytest.mark.server

HEADERS = {"Authorization": f"Bearer {TOKEN}"}
SCALE_OUT = EngineOptions(args=("--enable-scale-out",))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path, Path]]:
    """A server on Qwen3 of seed 1, with vLLM's token-in/token-out routes, and the checkpoints of seeds 1 and 2."""
    root = tmp_path_factory.mktemp("served")
    a, b = (write_checkpoint(root / f"qwen3-{seed}", "qwen3", seed) for seed in (1, 2))
    with Server(a, SCALE_OUT) as server:
        yield server, a, b


@pytest.fixture
def client(served: tuple[Server, Path, Path]) -> Iterator[WeightClient]:
    with WeightClient([served[0].url], token=TOKEN, timeout_s=120, lease_s=5) as made:
        yield made


def get(server: Server, path: str) -> dict:
    answer = httpx.get(f"{server.url}/nixl/v1{path}", headers=HEADERS, timeout=30)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_requests_flow_during_pushes_and_every_token_says_its_version(served, client):
    server, a, b = served
    client.push_weights(read_weights(a), version="start")
    outputs: list[dict] = []
    failures: list[str] = []
    stop = threading.Event()

    def ask() -> None:
        body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 100, "temperature": 0, "ignore_eos": True}}
        while not stop.is_set():
            answer = httpx.post(f"{server.url}/inference/v1/generate", json=body, timeout=60)
            if answer.status_code != 200:
                failures.append(answer.text)
                return
            outputs.append(answer.json() | {"told": answer.headers["x-weight-version"].split(", ")})

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(8):
            time.sleep(0.2)
            client.push_weights(read_weights(b if number % 2 == 0 else a), version=f"v{number}")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
    spans = [o["choices"][0]["weight_versions"] for o in outputs]
    assert all(spans)
    for versions, output in zip(spans, outputs, strict=True):
        assert {v["version"] for v in versions} <= set(output["told"])
    crossing = [s for s in spans if len(s) > 1]
    assert crossing, "no request was running during an install"
    for versions in spans:
        assert versions[0]["start"] == 0
        for one, next_one in itertools.pairwise(versions):
            assert one["end"] == next_one["start"]
            assert one["version"] != next_one["version"]
    seen = {v["version"] for s in spans for v in s}
    assert len(seen) > 2
    assert seen <= {"start", *(f"v{n}" for n in range(8))}
    assert completions(server.url) == reference(a, options=server.options)


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return dict(read_weights(path))


def without(weights, name):
    del weights[name]


BAD = {
    "missing": (lambda w: without(w, "model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight"),
    "missing norm": (lambda w: without(w, "model.norm.weight"), "model.norm.weight"),
    "extra": (
        lambda w: w.update({"model.layers.0.mlp.extra.weight": torch.zeros(4)}),
        "model.layers.0.mlp.extra.weight",
    ),
    "extra layer": (
        lambda w: w.update({"model.layers.7.mlp.up_proj.weight": torch.zeros(512, 256, dtype=torch.bfloat16)}),
        "model.layers.7.mlp.up_proj.weight",
    ),
    "misshaped": (
        lambda w: w.update({"model.layers.0.self_attn.q_proj.weight": torch.zeros(256, 512, dtype=torch.bfloat16)}),
        "model.layers.0.self_attn.q_proj.weight",
    ),
    "wrongly typed": (
        lambda w: w.update({"lm_head.weight": torch.zeros(512, 256, dtype=torch.int64)}),
        "lm_head.weight",
    ),
}


@pytest.mark.parametrize(("kind", "mode"), [
    *((kind, "shadow") for kind in BAD), ("misshaped", "in_place"),
    *(pytest.param(kind, "in_place", marks=pytest.mark.thorough) for kind in BAD if kind != "misshaped"),
])  # fmt: skip
def test_a_push_that_does_not_fit_is_refused_by_name_and_changes_nothing(served, client, kind, mode):
    server, a, b = served
    client.push_weights(read_weights(a), version="good")
    spoil, name = BAD[kind]
    weights = weights_of(b)
    spoil(weights)
    with pytest.raises(PushFailed, match="plan_refused") as refused:
        client.push_weights(weights, mode=mode)
    assert name in str(refused.value)
    assert get(server, "/status")["state"] == "serving"
    assert get(server, "/status")["weight_version"] == "good"
    assert completions(server.url) == reference(a, options=server.options)
    client.push_weights(read_weights(b))
    assert completions(server.url) == reference(b, options=server.options)


TRAINER = """
    import sys, time
    from safetensors.torch import load_file
    from trainer_client.control import Control
    from trainer_client.conversion import convert_shards
    from trainer_client.sources import collect
    from vllm_nixl_plugin.encoding import decode_plans
    from vllm_nixl_plugin.wire import BeginRequest, Manifest
    url, token, path = sys.argv[1:]
    conversion = convert_shards(collect(load_file(path)).shards, None)
    control = Control(url, token=token)
    workers, _ = decode_plans(control.plan(Manifest(weights=conversion.weights), 60))
    control.begin(BeginRequest(plans=tuple(w.plan for w in workers), version="dead", lease_s=2, holder="dead"), 2)
    print("begun", flush=True)
    time.sleep(60)
"""


def test_a_trainer_killed_between_begin_and_commit_leaves_the_old_policy_and_the_next_push_works(served, client):
    server, a, b = served
    client.push_weights(read_weights(a), version="before")
    arguments = [server.url, TOKEN, str(b / "model.safetensors")]
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TRAINER), *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "begun\n"
    assert get(server, "/status")["state"] == "receiving"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert completions(server.url) == reference(a, options=server.options)
    with pytest.raises(PushFailed, match="lease_held") as held:
        client.push_weights(read_weights(b), version="too early")
    assert "dead" in str(held.value)
    time.sleep(2.5)
    client.push_weights(read_weights(b), version="after")
    assert completions(server.url) == reference(b, options=server.options)


def test_no_route_answers_without_the_token_and_nothing_happens(served):
    server, _, _ = served
    before = get(server, "/status")
    schema = httpx.get(f"{server.url}/openapi.json", timeout=30).json()
    routes = [(m, p) for p, methods in schema["paths"].items() if p.startswith("/nixl/") for m in methods]
    routes.remove(("get", "/nixl/v1/ui"))  # the page, in which there is nothing
    assert len(routes) >= 10
    for method, path in routes:
        url = server.url + path.replace("{update_id}", "0" * 32)
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
            answer = httpx.request(method, url, headers=headers, content=b"{}", timeout=30)
            if answer.status_code == 429:  # so many wrong tokens are not even looked at for a while
                time.sleep(answer.json()["error"]["details"]["retry_after_s"] + 0.1)
                answer = httpx.request(method, url, headers=headers, content=b"{}", timeout=30)
            assert answer.status_code == 401, (method, path)
            assert answer.json()["error"]["code"] == "unauthorized"
    assert get(server, "/status") == before
    assert get(server, "/ready")["ready"]


WITHOUT = """
    import sys

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == sys.argv[1]:
                raise ImportError(f"{name} is blocked")

    sys.meta_path.insert(0, Blocker())
"""


def run_without(package: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = textwrap.dedent(WITHOUT) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", script, package, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PUSH_WEIGHTS_TOKEN": TOKEN},
    )


def test_the_trainer_pushes_from_an_environment_that_has_no_vllm(served):
    server, _, b = served
    code = """
        from safetensors.torch import load_file
        from trainer_client import WeightClient
        with WeightClient([sys.argv[2]]) as client:
            print(client.push_weights(load_file(sys.argv[3]), version="no vLLM here"))
        assert "vllm" not in sys.modules
    """
    done = run_without("vllm", code, server.url, str(b / "model.safetensors"))
    assert done.returncode == 0, done.stderr
    assert completions(server.url) == reference(b, options=server.options)
    assert get(server, "/status")["weight_version"] == "no vLLM here"


def test_the_plugin_imports_without_the_trainer():
    code = """
        import importlib, pkgutil, vllm_nixl_plugin
        for module in pkgutil.iter_modules(vllm_nixl_plugin.__path__):
            importlib.import_module(f"vllm_nixl_plugin.{module.name}")
        assert vllm_nixl_plugin.NixlWorkerExtension
    """
    done = run_without("trainer_client", code)
    assert done.returncode == 0, done.stderr


def merged(weights: dict[str, torch.Tensor], part: dict[str, torch.Tensor], path: Path, like: Path) -> Path:
    return write_weights(path, weights | part, like=like)


PARTS = {
    "one of the fused": ["model.layers.0.self_attn.k_proj.weight"],
    "a whole layer": [],
    "norms": ["model.norm.weight", "model.layers.1.input_layernorm.weight"],
}


@pytest.mark.parametrize("part", PARTS)
def test_a_partial_push_merges_with_what_serves(served, client, tmp_path, part):
    server, a, b = served
    names = PARTS[part] or [n for n in read_weights(b) if n.startswith("model.layers.1.")]
    chosen = {n: w for n, w in read_weights(b).items() if n in names}
    both = merged(read_weights(a), chosen, tmp_path / "merged", a)
    client.push_weights(read_weights(a))
    client.push_weights(chosen, partial=True)
    assert completions(server.url) == reference(both, options=server.options)
    client.push_weights(read_weights(b))
    assert completions(server.url) == reference(b, options=server.options)


def test_a_server_that_takes_lora_adapters_is_updated_below_them(tmp_path):
    options = EngineOptions(args=("--enable-lora", "--max-lora-rank", "8"))
    a, b = (write_checkpoint(tmp_path / f"qwen3-{seed}", "qwen3", seed) for seed in (1, 2))
    with Server(a, options) as server, WeightClient([server.url], token=TOKEN) as client:
        assert completions(server.url) == reference(a, options=options)
        for target in (b, a, b):
            client.push_weights(read_weights(target))
            assert completions(server.url) == reference(target, options=options)


def test_a_head_that_vllm_has_tied_since_loading_is_not_pushed_into(tmp_path):
    a, b = (write_checkpoint(tmp_path / f"qwen3-{seed}", "qwen3-tied", seed) for seed in (1, 2))
    equal, different = dict(read_weights(a)), dict(read_weights(b))
    equal["lm_head.weight"] = equal["model.embed_tokens.weight"].clone()
    different["lm_head.weight"] = different["model.embed_tokens.weight"] + 1
    tied = write_weights(tmp_path / "tied", equal, like=a)
    with Server(tied, SCALE_OUT) as server, WeightClient([server.url], token=TOKEN) as client:
        before = completions(server.url)
        with pytest.raises(PushFailed, match="tied them into one"):
            client.push_weights(different)
        assert completions(server.url) == before
