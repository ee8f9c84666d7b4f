"""Partial pushes are merged with what serves: the server is that of a checkpoint with just those weights changed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from torch import Tensor

from harness import TOKEN, EngineOptions, Server, completions, reference
from harness.checkpoints import read_weights, write_checkpoint, write_weights
from trainer_client import PushFailed, WeightClient
from trainer_client.control import Control

pytestmark = pytest.mark.server

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """The checkpoint of a model and seed."""
    root = tmp_path_factory.mktemp("checkpoints")

    def make(name: str, seed: int) -> Path:
        path = root / f"{name}-{seed}"
        return path if path.exists() else write_checkpoint(path, name, seed)

    return make


@pytest.fixture
def client_of() -> Iterator[Callable[[Server], WeightClient]]:
    made: list[WeightClient] = []

    def make(server: Server) -> WeightClient:
        made.append(WeightClient([server.url], token=TOKEN, timeout_s=120, progress=False))
        return made[-1]

    yield make
    for client in made:
        client.close()


def part(weights: Weights, *endings: str) -> Weights:
    found = {name: tensor for name, tensor in weights.items() if any(ending in name for ending in endings)}
    assert found
    return found


def readings(server: Server) -> list[dict[str, str] | None]:
    with Control(server.url, token=TOKEN) as control:
        return [worker.paths for worker in control.fingerprint().workers]


def expect(server: Server, weights: Weights, like: Path, folder: Path) -> None:
    """The server cannot be told from one that has just started from these weights."""
    path = write_weights(folder, weights, like=like)
    with Server(path, server.options) as fresh:
        assert readings(server) == readings(fresh)
        assert completions(server.url) == completions(fresh.url)


SUBSETS = {
    "merged adapters": ("qwen3", ("q_proj", "1.mlp.down_proj")),
    "one layer": ("qwen3", ("layers.1.",)),
    "keys of a fused projection": ("qwen3", ("k_proj",)),
    "a norm": ("qwen3", ("0.input_layernorm",)),
    "a tied head": ("qwen3-tied", ("embed_tokens",)),
    "one expert": ("qwen3-moe", ("layers.0.mlp.experts.3.",)),
    "half of an expert": ("qwen3-moe", ("layers.1.mlp.experts.5.up_proj",)),
    "what attention derives its weights from": ("deepseek-v2", ("layers.1.self_attn.kv_b_proj",)),
    "wide layers, which the CPU keeps in handles": ("qwen3-wide", ("layers.0.self_attn.v_proj", "1.mlp.up_proj")),
}


ALWAYS = ("merged adapters", "keys of a fused projection", "one expert", "what attention derives its weights from")
CASES = [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.thorough) for name in SUBSETS]


@pytest.mark.parametrize("subset", CASES)
def test_a_first_push_may_be_partial(subset, checkpoint, client_of, tmp_path):
    name, endings = SUBSETS[subset]
    a, b = (checkpoint(name, seed) for seed in (1, 2))
    changed = part(read_weights(b), *endings)
    with Server(a) as server:
        report = client_of(server).push_weights(changed, partial=True)
        assert report.nbytes < 0.8 * sum(w.nbytes for w in read_weights(a).values())
        expect(server, read_weights(a) | changed, a, tmp_path / "merged")


def test_partial_pushes_add_up_whatever_the_modes_and_whatever_came_before(checkpoint, client_of, tmp_path):
    a, b, c = (checkpoint("qwen3", seed) for seed in (1, 2, 3))
    now = read_weights(a)
    with Server(a) as server:
        client = client_of(server)
        steps = [
            (c, ("0.self_attn.q_proj",), "shadow"),
            (b, ("0.self_attn.v_proj", "norm"), "in_place"),
            (b, ("",), "in_place"),
            (c, ("1.mlp", "k_norm"), "shadow"),
            (c, ("k_proj", "embed"), "in_place"),
            (a, ("",), "shadow"),
            (b, ("gate_proj", "lm_head"), "in_place"),
            (c, ("gate_proj", "1.input_layernorm"), "shadow"),
        ]
        for number, (path, endings, mode) in enumerate(steps):
            changed = part(read_weights(path), *endings)
            client.push_weights(changed, partial=endings != ("",), mode=mode)
            now |= changed
            if number in (1, 4, 7):
                expect(server, now, a, tmp_path / f"merged-{number}")


def test_ranks_merge_their_own_parts(checkpoint, client_of, tmp_path):
    a, b = (checkpoint("qwen3", seed) for seed in (1, 2))
    changed = part(read_weights(b), "v_proj", "0.mlp.down_proj")
    with Server(a, EngineOptions(tensor_parallel=2)) as server:
        client_of(server).push_weights(changed, partial=True)
        expect(server, read_weights(a) | changed, a, tmp_path / "merged")


def test_a_partial_push_that_was_given_up_is_no_base_for_the_next(checkpoint, client_of, tmp_path):
    """Its bytes lie in the shadows. They are loaded anew while the server has what it started with; else it refuses."""
    a, b, c = (checkpoint("qwen3", seed) for seed in (1, 2, 3))
    half, other = part(read_weights(b), "q_proj", "1.mlp"), part(read_weights(c), "q_proj", "1.mlp.up_proj")
    with Server(a) as server:
        client = client_of(server)
        give_up(server, half)
        give_up(server, other)
        client.push_weights(other, partial=True)
        expect(server, read_weights(a) | other, a, tmp_path / "first")
        give_up(server, half)
        with pytest.raises(PushFailed, match=r"pushes have changed them since. Push all weights once") as refused:
            client.push_weights(half, partial=True)
        assert [s.error_code for s in refused.value.report.servers] == ["plan_refused"]
        assert completions(server.url) == reference(tmp_path / "first")
        client.push_weights(read_weights(c))
        client.push_weights(half, partial=True)
        expect(server, read_weights(c) | half, a, tmp_path / "second")


def give_up(server: Server, weights: Weights) -> None:
    """Write an update, and abort it instead of committing."""

    def fail(*_):
        raise RuntimeError("given up")

    with (
        patch.object(Control, "commit", fail),
        WeightClient([server.url], token=TOKEN, progress=False) as client,
        pytest.raises(PushFailed, match="given up"),
    ):
        client.push_weights(weights, partial=True)


def test_a_server_without_a_checkpoint_needs_all_weights_once(checkpoint, client_of, tmp_path):
    a, b = (checkpoint("qwen3", seed) for seed in (1, 2))
    changed = part(read_weights(b), "k_proj")
    with Server(a, EngineOptions(args=("--load-format", "dummy"))) as server:
        client = client_of(server)
        with pytest.raises(PushFailed, match=r"this server started without a checkpoint. Push all weights once"):
            client.push_weights(changed, partial=True)
        client.push_weights(read_weights(a))
        client.push_weights(changed, partial=True)
        merged = write_weights(tmp_path / "merged", read_weights(a) | changed, like=a)
        assert completions(server.url) == reference(merged)


def test_a_checkpoint_that_was_written_over_is_no_base(checkpoint, client_of, tmp_path):
    a, b = (checkpoint("qwen3", seed) for seed in (1, 2))
    path = Path(shutil.copytree(a, tmp_path / "served"))
    with Server(path) as server:
        for file in b.glob("*.safetensors"):
            (path / "new").write_bytes(file.read_bytes())
            (path / "new").rename(path / file.name)
        with pytest.raises(PushFailed, match=r"the server's checkpoint has changed since the server started"):
            client_of(server).push_weights(part(read_weights(b), "q_proj"), partial=True)
        assert completions(server.url) == reference(a)
