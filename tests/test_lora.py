"""Base weights are updated under adapters: base and adapters answer as on a fresh server with the new base."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file

from harness import PROMPTS, TOKEN, Completion, Server, completions, servers
from harness.checkpoints import read_weights
from trainer_client import WeightClient

pytestmark = pytest.mark.server

RANK = 4
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(path: Path, base: Path, seed: int) -> Path:
    """A random adapter on every linear of the checkpoint's layers, as PEFT writes one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in read_weights(base).items():
        stem = name.removesuffix(".weight")
        if stem.endswith(LAYERS):
            rows, columns = weight.shape
            for part, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
                noise = torch.randn(shape, generator=generator) * 0.1
                tensors[f"base_model.model.{stem}.lora_{part}.weight"] = noise.bfloat16()
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none",
              "target_modules": list(LAYERS), "base_model_name_or_path": str(base)}  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def with_adapters(base: Path, **adapters: Path) -> Server:
    """A server that has loaded adapters at its start, and takes more by its API."""
    args = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"]
    if adapters:
        args += ["--lora-modules", *(f"{name}={path}" for name, path in adapters.items())]
    return Server(base, args=args, env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"})


def answers(server: Server, *adapters: str) -> dict[str, tuple[Completion, ...]]:
    """What the base and each of the adapters generate."""
    return {name: completions(server.url, PROMPTS[1:3], 8, model=name) for name in ("model", *adapters)}


def fingerprint(server: Server) -> dict[str, str]:
    url, headers = f"{server.url}/nixl/v1/fingerprint", {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.get(url, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    [worker] = answer.json()["workers"]
    return dict(worker["paths"])


@pytest.mark.parametrize(
    "model", ["qwen3", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("qwen3-tied", "qwen3-wide"))]
)
def test_base_weights_are_updated_under_adapters_in_use(checkpoint: Callable[..., Path], tmp_path: Path, model: str):
    a, b = checkpoint(model, 1), checkpoint(model, 2)
    first, second = (write_adapter(tmp_path / f"adapter-{seed}", a, seed) for seed in (7, 8))
    with servers(with_adapters(a, first=first), with_adapters(b, first=first)) as (server, fresh):
        load = {"lora_name": "second", "lora_path": str(second)}
        for one in (server, fresh):  # by the API, after the start
            assert httpx.post(f"{one.url}/v1/load_lora_adapter", json=load, timeout=60).status_code == 200
        want = answers(fresh, "first", "second")
        before = answers(server, "first", "second")
        assert len({*map(str, want.values()), *map(str, before.values())}) == 6
        with WeightClient([server.url], token=TOKEN) as client:
            client.push_weights(read_weights(b))
            assert answers(server, "first", "second") == want
            assert fingerprint(server) == fingerprint(fresh)
            client.push_weights(read_weights(a), mode="in_place")
            assert answers(server, "first", "second") == before
            client.push_weights(read_weights(b), mode="in_place")
            assert answers(server, "second", "first") == want


def test_an_adapter_that_is_loaded_after_a_push_works_on_the_new_base(checkpoint: Callable[..., Path], tmp_path: Path):
    a, b = checkpoint("qwen3", 1), checkpoint("qwen3", 2)
    adapter = write_adapter(tmp_path / "adapter", a, 7)
    both = servers(with_adapters(a), with_adapters(b, late=adapter))
    with both as (server, fresh), WeightClient([server.url], token=TOKEN) as client:
        client.push_weights(read_weights(b))
        load = {"lora_name": "late", "lora_path": str(adapter)}
        assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=load, timeout=60).status_code == 200
        assert answers(server, "late") == answers(fresh, "late")


def test_pushes_while_an_adapter_answers(checkpoint: Callable[..., Path], tmp_path: Path):
    a, b = checkpoint("qwen3", 1), checkpoint("qwen3", 2)
    adapter = write_adapter(tmp_path / "adapter", a, 7)
    with servers(with_adapters(a, used=adapter), with_adapters(b, used=adapter)) as (server, fresh):
        stop, failures = threading.Event(), list[BaseException]()

        def ask() -> None:
            try:
                while not stop.is_set():
                    completions(server.url, model="used")
            except BaseException as error:  # noqa: BLE001 - told to the test below
                failures.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            with WeightClient([server.url], token=TOKEN) as client:
                for source, mode in ((b, "shadow"), (a, "in_place"), (b, "shadow")):
                    client.push_weights(read_weights(source), mode=mode)
        finally:
            stop.set()
            asking.join(120)
        assert not failures
        assert answers(server, "used") == answers(fresh, "used")
