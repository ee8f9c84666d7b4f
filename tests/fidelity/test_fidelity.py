"""A sample of the fidelity suite (`make fidelity` runs all of it), and what the judge itself has to see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm_nixl_plugin.fingerprint import differences, fingerprint

MORE = ("gpt-oss-fp16", "phi", "odd-notes", "odd-caches")
SAMPLE = [
    pytest.param(name, marks=[pytest.mark.thorough] if name in MORE else [])
    for name in ("gpt-oss", "gpt-oss-fp16", "phi", "gpt2", "llama-awq", "odd-looks", "odd-notes", "odd-caches",
                 "fooling-recognizes")
]  # fmt: skip
"""Biases held by plain objects; a cast made by the first forward; a parameter that the loader makes; transposed
weights; packed integers; the fallback; what a loader leaves behind; what a forward keeps; a
loader that fools the tracer."""


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What the models of this session's tests came to, all in one process."""
    asking = [item for item in request.session.items if "rows" in getattr(item, "fixturenames", ())]
    wanted = {item.callspec.params["model"] for item in asking}
    out = tmp_path_factory.mktemp("fidelity") / "rows.json"
    tests = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "fidelity", *sorted(wanted), "--json", str(out)],
        check=False, env=os.environ | {"PYTHONPATH": str(tests)}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert out.exists(), done.stdout + done.stderr
    return {row["model"]: row for row in json.loads(out.read_text())}


@pytest.mark.server
@pytest.mark.parametrize("model", SAMPLE)
def test_an_engine_after_pushes_equals_a_fresh_one_in_every_tensor_it_can_read(rows, model):
    assert rows[model]["result"] == "equal", "\n".join(rows[model]["details"])


class Handle:
    """Stands for a library's object whose memory no tensor shows."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.address = torch.tensor(weight.data_ptr())
        self._weight = weight

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self._weight.t()

    def __del__(self) -> None:
        pass


class Method:
    """Stands for a quantization method that keeps a tensor of its own."""

    def __init__(self) -> None:
        self.scale = torch.ones(2)
        self.factor = 0.5

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return layer.run(x)


def engine(weight: torch.Tensor) -> SimpleNamespace:
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.empty(0))
    layer.register_buffer("mean", torch.arange(3.0))
    layer.quant_method = Method()
    layer.input_size_per_partition = weight.shape[1]
    handle, inside = Handle(weight), torch.arange(4.0)
    layer.run = lambda x: handle.multiply(x) + 0 * inside.sum()
    layer.cache = torch.zeros(5)
    model = nn.Sequential(layer)
    return SimpleNamespace(get_model=lambda: model, model_runner=Runner(layer.cache), layer=layer, inside=inside)


class Runner:
    """Stands for vLLM's: it holds the KV caches."""

    def __init__(self, cache: torch.Tensor) -> None:
        self.kv_caches = [cache]


def weight() -> torch.Tensor:
    return torch.arange(600.0).reshape(2, 300)


def test_equal_engines_have_equal_fingerprints_whatever_is_in_their_caches():
    a, b = engine(weight()), engine(weight())
    b.layer.cache.fill_(7)
    assert fingerprint(a) == fingerprint(b)


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.layer.mean.add_(1),
        lambda e: e.layer.quant_method.scale.mul_(2),
        lambda e: setattr(e.layer.quant_method, "factor", 0.25),
        lambda e: e.inside.add_(1),
        lambda e: setattr(e.layer.quant_method, "late", torch.ones(1)),
        lambda e: setattr(e.layer, "mean", e.layer.mean.clone().flip(0)),
    ],
    ids=["buffer", "method", "number", "closure", "late tensor", "order"],
)
def test_the_fingerprint_sees_every_place_a_tensor_can_be(change):
    a, b = engine(weight()), engine(weight())
    change(b)
    assert len(differences(fingerprint(a), fingerprint(b))) == 1


def test_the_fingerprint_sees_through_an_opaque_handle():
    last = weight()
    last[1, 299] += 1
    assert [line.split(":")[0] for line in differences(fingerprint(engine(weight())), fingerprint(engine(last)))] == [
        "0()"
    ]


def test_the_fingerprint_sees_that_tensors_no_longer_share_memory():
    a, b = engine(weight()), engine(weight())
    for e in (a, b):
        e.layer.view = e.layer.mean
    assert fingerprint(a) == fingerprint(b)
    b.layer.view = b.layer.mean.clone()
    assert len(differences(fingerprint(a), fingerprint(b))) == 1
