"""Packs the linears of a checkpoint as quantizers write them; the values are random, for only their places matter."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": "channel"}
_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False, "strategy": "group", "group_size": GROUP}


def _compressed(layout: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    ignore = ["lm_head", "re:.*gate$"]
    groups = {"group_0": group}
    return {"quant_method": "compressed-tensors", "format": layout, "ignore": ignore, "config_groups": groups}


CONFIGS: dict[str, dict[str, Any]] = {
    "w8a8": _compressed("int-quantized", _INT8, _TOKENS),
    "w4a16": _compressed("pack-quantized", _INT4, None),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": ["lm_head"]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True,
             "lm_head": False},
}  # fmt: skip


def _random(shape: tuple[int, ...], of: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(int(of.float().abs().sum().item() * 1000) % (1 << 31))
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).to(torch.int32)


def _scales(weight: Tensor, n: int, k: int) -> Tensor:
    return (weight.float().abs().reshape(n, k, -1).amax(-1) / 7).to(torch.bfloat16)


def _w8a8(weight: Tensor) -> dict[str, Tensor]:
    scale = (weight.float().abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
    return {"weight": (weight.float() / scale.float()).round().clamp(-127, 127).to(torch.int8), "weight_scale": scale}


def _w4a16(weight: Tensor) -> dict[str, Tensor]:
    n, k = weight.shape
    return {
        "weight_packed": _random((n, k // 8), weight), "weight_scale": _scales(weight, n, k // GROUP),
        "weight_shape": torch.tensor([n, k]),
    }  # fmt: skip


def _awq(weight: Tensor) -> dict[str, Tensor]:
    n, k = weight.shape
    return {
        "qweight": _random((k, n // 8), weight), "qzeros": _random((k // GROUP, n // 8), weight),
        "scales": _scales(weight, n, k // GROUP).t().contiguous(),
    }  # fmt: skip


def _gptq(weight: Tensor) -> dict[str, Tensor]:
    n, k = weight.shape
    return {
        "qweight": _random((k // 8, n), weight),
        "qzeros": torch.full((k // GROUP, n // 8), 0x77777777, dtype=torch.int32),
        "scales": _scales(weight, n, k // GROUP).t().contiguous(),
        "g_idx": (torch.arange(k) // GROUP).to(torch.int32),
    }


PACKERS: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "w8a8": _w8a8, "w4a16": _w4a16, "awq": _awq, "gptq": _gptq,
}  # fmt: skip


def quantize(path: Path, form: str) -> None:
    """Rewrite a checkpoint: every projection in the form, and the configuration that says so."""
    for file in path.glob("*.safetensors"):
        out: dict[str, Tensor] = {}
        for name, tensor in load_file(file).items():
            stem, _, kind = name.rpartition(".")
            if kind == "weight" and stem.endswith("_proj"):
                out |= {f"{stem}.{k}": t for k, t in PACKERS[form](tensor).items()}
            else:
                out[name] = tensor
        save_file(out, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[form]}))
