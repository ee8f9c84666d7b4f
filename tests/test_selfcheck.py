"""The self-check: which units a load falls into, the data it is tried on, and the loaders that it sees through."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from harness import TOKEN, EngineOptions, Server
from harness.checkpoints import read_weights, write_checkpoint
from trainer_client import WeightClient
from vllm_nixl_plugin import replay
from vllm_nixl_plugin.copies import Copy
from vllm_nixl_plugin.errors import PlanRefused
from vllm_nixl_plugin.layout import identity
from vllm_nixl_plugin.loadunits import LoadUnits, Unit, block_of
from vllm_nixl_plugin.noise import Noise
from vllm_nixl_plugin.plane import WorkerPlane
from vllm_nixl_plugin.planning import Fill, TracedDestination, make_plan
from vllm_nixl_plugin.repeats import Repeats
from vllm_nixl_plugin.scratch import Scratch
from vllm_nixl_plugin.settings import WorkerSettings, self_check_mode
from vllm_nixl_plugin.tracing import Piece, Source
from vllm_nixl_plugin.wire import Manifest, Step, WeightSpec

# Units


def spec(name: str, *shape: int, dtype: str = "bfloat16") -> WeightSpec:
    return WeightSpec(name=name, shape=shape or (4,), dtype=dtype)


def destination(key: int, path: str, *sources: str) -> TracedDestination:
    pieces = [
        Piece(Source(name), Copy((4,), 0, (2,), 2, 8 * i, (2,), 2)) for i, name in enumerate(sources)
    ]
    return TracedDestination(key, (path,), 8 * len(sources), True, tuple(pieces))


def units_of(weights: list[WeightSpec], traced: list[TracedDestination], unwritten: dict[int, str]) -> LoadUnits:
    planned = make_plan(Manifest(weights=weights), traced, None, ())
    paths = {d.key: d.names for d in traced} | {key: tuple(path.split()) for key, path in unwritten.items()}
    return LoadUnits(weights, traced, planned, paths, {})


def layer(number: int, key: int) -> tuple[list[WeightSpec], list[TracedDestination]]:
    names = [f"m.layers.{number}.{part}" for part in ("q", "k", "norm")]
    return [spec(n) for n in names], [
        destination(key, f"layers.{number}.qk", *names[:2]), destination(key + 1, f"layers.{number}.norm", names[2]),
    ]  # fmt: skip


def model(*numbers: int) -> tuple[list[WeightSpec], list[TracedDestination]]:
    weights, traced = [spec("m.embed")], [destination(1, "embed.weight", "m.embed")]
    for number in numbers:
        more = layer(number, 100 * (number + 1))
        weights += more[0]
        traced += more[1]
    return weights, traced


def test_a_block_is_a_unit_with_all_that_is_connected_with_it():
    units = units_of(*model(0, 1), {102: "layers.0.table"})
    assert [(u.weights, u.storages) for u in units.all] == [
        ((0,), (1,)), ((1, 2, 3), (100, 101, 102)), ((4, 5, 6), (200, 201)),
    ]  # fmt: skip
    assert block_of("layers.10.mlp.0.weight") == "layers.10"
    assert block_of("lm_head.weight") == "lm_head"


def test_units_that_share_a_source_are_one():
    weights, traced = model(0, 1)
    traced.append(destination(7, "layers.1.copy", "m.layers.0.q"))
    assert sorted(len(u.weights) for u in units_of(weights, traced, {}).all) == [1, 6]


def test_a_table_that_nobody_writes_does_not_hold_blocks_together():
    assert len(units_of(*model(0, 1), {9: "layers.0.rope layers.1.rope"}).all) == 3


def test_an_unused_weight_is_loaded_with_those_that_have_names_like_it():
    weights, traced = model(0, 1)
    units = units_of([*weights, spec("m.layers.1.rotary.freq"), spec("lm_head")], traced, {5: "lm_head"})
    assert (4, 5, 6, 7) in [u.weights for u in units.all]
    assert ((8,), (5,)) in [(u.weights, u.storages) for u in units.all]


def test_blocks_that_differ_in_their_number_only_are_alike():
    units = units_of(*model(0, 1, 12), {})
    signatures = [units.signature(u) for u in units.all]
    assert len(set(signatures)) == 2
    weights, traced = model(0, 1)
    turned = destination(200, "layers.1.qk", "m.layers.1.k", "m.layers.1.q")
    other = units_of(weights, [turned if d.key == 200 else d for d in traced], {})
    assert len({other.signature(u) for u in other.all}) == 3


def test_of_many_weights_that_are_alike_a_sample_takes_the_first_and_the_last():
    names = [f"m.layers.0.experts.{e}.up" for e in range(9)] + [f"m.layers.0.experts.{e}.down" for e in range(9)]
    units = units_of([spec(n) for n in names], [destination(1, "layers.0.up", *names[:9])], {})
    [unit] = units.all
    assert units.thinned(unit) == Unit((0, 8, 9, 17), (1,))


# Data


def room(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def test_scratch_memory_is_used_again_and_new_memory_taken_where_it_ends():
    scratch = Scratch()
    scratch.reserve(200)
    first, second, third = scratch.take(100), scratch.take(60), scratch.take(20)
    assert second.data_ptr() - first.data_ptr() == 128
    assert first.untyped_storage().nbytes() == 100
    assert third.data_ptr() not in range(first.data_ptr(), first.data_ptr() + 200)
    scratch.reset()
    assert scratch.take(1).data_ptr() == first.data_ptr()
    assert scratch.take(0).numel() == 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float64",
                                   "float8_e8m0fnu", "complex64"])  # fmt: skip
def test_random_floats_are_finite_and_the_same_for_one_number(dtype):
    noise = Noise()
    noise.make(100_000)
    tensor = noise.tensor(spec("w", 301, 7, dtype=dtype), 3, room, quiet=False)
    values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).to(torch.float64)
    assert torch.isfinite(values).all()
    assert len(values.unique()) > 50
    again = noise.tensor(spec("w", 301, 7, dtype=dtype), 3, room, quiet=True)
    assert torch.equal(tensor.view(torch.uint8), again.view(torch.uint8))
    other = noise.tensor(spec("w", 301, 7, dtype=dtype), 4, room, quiet=False)
    assert not torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))


def test_random_integers_are_any_or_none():
    noise = Noise()
    noise.make(1 << 30)  # the pool is smaller
    large = noise.tensor(spec("w", 20_000_000, dtype="int32"), 1, room, quiet=False)
    assert large.min() < 0 < large.max()
    assert not torch.equal(large[:4_000_000], large[16_000_000:])
    assert not noise.tensor(spec("w", 10, dtype="int64"), 1, room, quiet=True).any()
    assert noise.tensor(spec("w", 1000, dtype="bool"), 1, room, quiet=False).sum() in range(400, 600)
    assert noise.tensor(spec("w", 0), 1, room, quiet=False).numel() == 0


def test_copies_and_programs_are_carried_out_as_a_trainer_does():
    weight = torch.randn(6, 4)
    target = torch.zeros(48, dtype=torch.uint8)
    copy = Copy((4, 6), 0, (4, 16), 4, 0, (12, 2), 2)
    program = [Step(op="mul", args=(2.5,), dtype="float32"), Step(op="to", dtype="bfloat16")]
    replay.carry_out(weight.view(-1).view(torch.uint8), torch.float32, target, copy, program)
    assert torch.equal(target.view(torch.bfloat16).view(4, 6), (weight * 2.5).to(torch.bfloat16).t())


def test_a_number_fills_bytes_of_elements_too():
    target = torch.zeros(16, dtype=torch.uint8)
    replay.fill(target, Fill(Copy((6,), 0, (1,), 1, 3, (1,), 1), None), 1.5, torch.bfloat16)
    want = torch.full((8,), 1.5, dtype=torch.bfloat16).view(torch.uint8).clone()
    want[:3] = 0
    want[9:] = 0
    assert torch.equal(target, want)
    replay.fill(target, Fill(identity((16,), 1), 2), None, torch.int16)
    assert target.view(torch.int16).tolist() == [2] * 8


def test_the_setting_has_three_values(monkeypatch):
    monkeypatch.setenv("PUSH_WEIGHTS_SELF_CHECK", "yes")
    with pytest.raises(ValueError, match="sample, full or off"):
        self_check_mode()


# Blocks that repeat


def offered(read: set[str], names: list[str], reads: set[str]) -> tuple[list[str], Repeats]:
    """What a loader is offered that reads of each weight the last part of whose name is in ``reads``."""
    repeats = Repeats([spec(n) for n in names], read.__contains__, few=0)
    out = []
    for name in names:
        if not repeats.skip(name):
            out.append(name)
            if name.rpartition(".")[2] in reads:
                read.add(name)
    return out, repeats


def test_of_blocks_that_are_alike_only_what_the_first_uses_is_offered():
    names = ["head"] + [f"layers.{n}.{part}" for n in range(3) for part in ("a", "b", "c")] + ["layers.9.a"]
    read: set[str] = set()
    out, repeats = offered(read, names, {"a", "c", "head"})
    assert out == [n for n in names if n not in ("layers.1.b", "layers.2.b")]
    traced = [destination(n, f"blocks.{n}.ac", f"layers.{n}.a", f"layers.{n}.c") for n in range(3)]
    assert repeats.hold(traced)
    assert not repeats.hold([*traced[:2], destination(2, "blocks.2.ac", "layers.2.c", "layers.2.a")])
    assert not repeats.hold([*traced, destination(3, "more", "layers.1.a", "layers.2.a")])
    read.add("layers.0.b")  # by a loader that keeps weights for later
    assert not repeats.hold(traced)


def test_a_block_that_is_on_another_worker_says_nothing_about_the_others():
    names = [f"layers.{n}.{part}" for n in range(4) for part in ("a", "b")]
    read: set[str] = set()
    repeats = Repeats([spec(n) for n in names], read.__contains__, few=0)
    out = []
    for name in names:
        if not repeats.skip(name):
            out.append(name)
            if name in ("layers.1.a", "layers.2.a"):
                read.add(name)
    assert out == [*names[:4], "layers.2.a", "layers.3.a"]
    assert repeats.hold([destination(n, f"layers.{n}.a", f"layers.{n}.a") for n in (1, 2)])


# Loaders that fool the tracer, ranks that cannot run here


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("layouts") / "rows.json"
    names = [*DEMOTED, *LAYOUTS]
    subprocess.run(
        [sys.executable, "-m", "fidelity", "--layouts", *names, "--json", str(out)], check=False, timeout=500,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return {f"{row['model']}/{row['layout']}": row for row in json.loads(out.read_text())}


BOTH = "model.layers.0.{0} model.layers.1.{0}"
DEMOTED = {
    "fooling-recognizes": (BOTH + " model.layers.1.post_attention_layernorm.weight").format("self_attn.o_proj.weight"),
    "fooling-hides": BOTH.format("mlp.down_proj.weight"),
    "fooling-pokes": BOTH.format("input_layernorm.weight"),
    "fooling-views": "model.norm.weight",
    "fooling-lies": "lm_head.weight",
}
LAYOUTS = ["gemma3", "minimax-m2", "deepseek-v3-fp8-block", "jamba"]


@pytest.mark.slow
@pytest.mark.parametrize("name", DEMOTED)
def test_what_a_trace_misreads_is_left_to_the_loader(traced, name):
    demoted = traced[f"{name}/tp1"]["demoted"]
    assert sorted(w for d in demoted for w in d["weights"]) == sorted(DEMOTED[name].split())
    assert sorted(w for d in demoted for w in d["names"]) == sorted(DEMOTED[name].split())
    assert traced[f"{name}/tp1"]["fallback"] == sorted(DEMOTED[name].split())


@pytest.mark.slow
@pytest.mark.parametrize("row", ["gemma3/tp2+pp2", "minimax-m2/tp1", "minimax-m2/tp4+ep4", "jamba/tp2+ep2",
                                 "deepseek-v3-fp8-block/dp2+ep2", "deepseek-v3-fp8-block/tp2+ep2"])  # fmt: skip
def test_every_rank_loads_what_its_plan_says_and_all_of_them_read_everything(traced, row):
    assert traced[row]["result"] == "equal", "\n".join(traced[row]["details"])
    assert not traced[row]["demoted"]
    assert traced[row]["largest"] < traced[row]["weights"] or row.endswith("tp1")


def test_a_server_that_moves_experts_is_refused():
    parallel = SimpleNamespace(enable_eplb=True, world_size=1, data_parallel_index=0)
    model_config = SimpleNamespace(served_model_name="m", dtype=torch.bfloat16, quantization=None, enforce_eager=True,
                                   runner_type="generate", get_vocab_size=lambda: 1)  # fmt: skip
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=parallel, model_config=model_config, speculative_config=None),
        rank=0, device="cpu", get_model=torch.nn.Module,
    )  # fmt: skip
    with pytest.raises(PlanRefused, match="without --enable-eplb") as refused:
        WorkerPlane(worker, WorkerSettings()).make_plan(Manifest(weights=[spec("w")]))
    assert refused.value.details["eplb_active"]


@pytest.mark.server
def test_a_server_says_what_it_has_compared(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "qwen3", "qwen3", 1)
    with Server(checkpoint, EngineOptions(env=(("PUSH_WEIGHTS_SELF_CHECK", "full"),))) as server:
        with WeightClient([server.url], token=TOKEN, timeout_s=120) as client:
            client.push_weights(read_weights(checkpoint))
        headers = {"Authorization": f"Bearer {TOKEN}"}
        [worker] = httpx.get(f"{server.url}/nixl/v1/plan", headers=headers, timeout=30).json()["workers"]
    found = worker["self_check"]
    assert found["mode"] == "full"
    assert found["checked_units"] == found["units"] > 2
    assert found["checked_nbytes"] >= worker["nbytes"]
    assert found["seconds"] > 0
    assert found["demoted"] == []
