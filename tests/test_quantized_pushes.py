"""A trainer in bf16 keeps servers on block-FP8 checkpoints up to date, with half the bytes: real servers, real NIXL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness import TOKEN, EngineOptions, Server, completions
from harness.checkpoints import random_model, read_weights, write_checkpoint
from trainer_client import BlockFP8, PushFailed, WeightClient
from trainer_client.block_fp8 import quantize
from trainer_client.control import Control
from trainers.world import World

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        not torch.cpu._is_amx_tile_supported(), reason="vLLM's CPU build multiplies block FP8 on AMX only"
    ),
]

CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
          "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]}  # fmt: skip


def write_fp8(path: Path, name: str, seed: int) -> Path:
    """The checkpoint of that name and seed as it is published in block FP8: every projection with its scales."""
    write_checkpoint(path, name, seed)
    for file in path.glob("*.safetensors"):
        packed: dict[str, Tensor] = {}
        for weight, tensor in load_file(file).items():
            packed[weight] = tensor
            if weight.endswith("_proj.weight"):
                packed[weight], packed[f"{weight}_scale_inv"] = quantize(tensor)
        save_file(packed, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    return path


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe"])
def served(request, tmp_path_factory) -> Iterator[tuple[str, Server, Server]]:
    """The model's name, a server on seed 1 and one on seed 2."""
    root = tmp_path_factory.mktemp(request.param)
    first, second = (write_fp8(root / str(seed), request.param, seed) for seed in (1, 2))
    with Server(first) as server, Server(second) as fresh:
        yield request.param, server, fresh


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A trainer of two ranks."""
    with World(2) as made:
        yield made


def readings(server: Server) -> list[dict[str, str] | None]:
    with Control(server.url, token=TOKEN) as control:
        return [worker.paths for worker in control.fingerprint().workers]


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_a_server_of_an_fp8_checkpoint_takes_a_bf16_model(served, mode):
    name, server, fresh = served
    model = random_model(name, 2)
    with WeightClient([server.url], token=TOKEN, timeout_s=120, progress=False) as client:
        client.push_weights(random_model(name, 3), quantize=BlockFP8(), mode=mode)
        assert readings(server) != readings(fresh)
        report = client.push_weights(model, quantize=BlockFP8(), mode=mode)
        projections = sum(p.nbytes for n, p in model.named_parameters() if "_proj" in n)
        others = sum(p.nbytes for n, p in model.named_parameters() if "_proj" not in n)
        assert others + projections / 2 < report.nbytes < others + projections * 0.51
    assert readings(server) == readings(fresh)
    assert completions(server.url) == completions(fresh.url)


def test_a_server_of_an_fp8_checkpoint_refuses_bf16(served):
    name, server, _ = served
    with (
        WeightClient([server.url], token=TOKEN, timeout_s=120, progress=False) as client,
        pytest.raises(PushFailed, match=r"expected float8_e4m3fn, got bfloat16"),
    ):
        client.push_weights(random_model(name, 2))


def test_a_server_without_a_checkpoint_needs_all_weights_but_those_that_a_checkpoint_may_leave_out(tmp_path):
    """Scales of the KV cache, of which vLLM makes parameters that most checkpoints do not have."""
    path = write_fp8(tmp_path / "2", "qwen3", 2)
    weights = dict(read_weights(path))
    scale, norm = next(n for n in weights if n.endswith("_scale_inv")), "model.norm.weight"
    with (
        Server(path, EngineOptions(args=("--load-format", "dummy"))) as server, Server(path) as fresh,
        WeightClient([server.url], token=TOKEN, timeout_s=120, progress=False) as client,
    ):  # fmt: skip
        for left_out in (scale, norm):
            with pytest.raises(PushFailed, match="1 weights are missing from the push"):
                client.push_weights({n: t for n, t in weights.items() if n != left_out})
        client.push_weights(weights)
        (mine,), (theirs,) = readings(server), readings(fresh)
        assert mine is not None
        assert theirs is not None
        assert {path for path in mine.keys() | theirs.keys() if mine.get(path) != theirs.get(path)} == set()
        assert completions(server.url) == completions(fresh.url)


def test_other_blocks_than_those_of_the_server_are_refused(served):
    name, server, _ = served
    with WeightClient([server.url], token=TOKEN, timeout_s=120, progress=False) as client:
        with pytest.raises(Exception, match=r"give quantize the block of that checkpoint") as refused:
            client.push_weights(random_model(name, 2), quantize=BlockFP8(block=(64, 128)))
        assert refused.type.__name__ == "InvalidRequest"


def test_a_snapshot_is_quantized_while_training_goes_on(served):
    name, server, fresh = served
    model = random_model(name, 2)
    with WeightClient([server.url], token=TOKEN, timeout_s=120, progress=False) as client:
        client.push_weights(random_model(name, 3), quantize=BlockFP8())
        push = client.push_weights_async(model, quantize=BlockFP8())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        push.wait()
    assert readings(server) == readings(fresh)


@pytest.mark.parametrize(
    "layout", ["declared", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("fsdp2", "tp"))]
)
def test_ranks_quantize_what_they_have_together(served, layout, world):
    """Also where they cut blocks between them, as ``declared`` does: the first of two ranks has 85 of 256 rows."""
    name, server, fresh = served
    with WeightClient([server.url], token=TOKEN, timeout_s=120, progress=False) as client:
        client.push_weights(random_model(name, 3), quantize=BlockFP8())
    assert readings(server) != readings(fresh)
    answers = world.all("push_quantized", layout=layout, model=name, seed=2, servers=[server.url])
    assert readings(server) == readings(fresh)
    assert sum(a["nbytes"] for a in answers) == answers[0]["planned"]
    assert all(a["nbytes"] <= 1.1 * a["fair"] for a in answers)
    assert not any(a["collectives"] for a in answers)


def test_one_layer_may_be_pushed_quantized(served, tmp_path):
    name, server, fresh = served
    first, second = (read_weights(write_checkpoint(tmp_path / str(seed), name, seed)) for seed in (1, 2))
    layers = [{n: t for n, t in state.items() if ".layers.1." in n} for state in (first, second)]
    with WeightClient([server.url], token=TOKEN, timeout_s=120, progress=False) as client:
        client.push_weights(second, quantize=BlockFP8())
        client.push_weights(layers[0], quantize=BlockFP8(), partial=True)
        assert readings(server) != readings(fresh)
        client.push_weights(layers[1], quantize=BlockFP8(), partial=True)
    assert readings(server) == readings(fresh)
