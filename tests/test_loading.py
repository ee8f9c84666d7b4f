"""What the recording subclass of a loader leaves in a model. With vLLM's own loaders: test_quantized_pushes.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm_nixl_plugin.model import _recording


class Loader:
    """Writes 7 into everything, as no loader but that of random weights does for no reason."""

    def __init__(self, load_format: str) -> None:
        self.load_config = SimpleNamespace(load_format=load_format)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        for tensor in model.state_dict().values():
            tensor.fill_(7)


def model() -> nn.Module:
    made = nn.Module()
    made.weight = nn.Parameter(torch.ones(2))
    made.scale = nn.Parameter(torch.tensor(-1.0))
    made.register_buffer("bias", torch.zeros(2))
    return made


@pytest.mark.parametrize(("load_format", "expected"), [
    ("dummy", {"weight": [7, 7], "scale": -1, "bias": [0, 0]}),
    ("sharded_state", {"weight": [7, 7], "scale": 7, "bias": [7, 7]}),
])  # fmt: skip
def test_only_random_weights_are_kept_from_constants(load_format: str, expected: dict[str, Any]) -> None:
    loaded = model()
    _recording(Loader)(load_format).load_weights(loaded, None)
    assert {name: tensor.tolist() for name, tensor in loaded.state_dict().items()} == expected
