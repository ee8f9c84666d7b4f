"""Packs the weights of a checkpoint as quantizers write them.

FP8, INT8 and MXFP4 forms hold the values of the checkpoint, rounded; in the other 4-bit forms the values are random,
for only their places matter. `quantize` rewrites files and configuration; `FORMS` has what may be asked of it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainer_client import block_fp8

GROUP = 32
BLOCK = 128
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
ROUTERS = tuple(f"model.layers.{layer}.mlp.gate" for layer in range(8))
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Form:
    """``config``: what config.json says; ``pack``: the tensors that take the place of one linear weight, by what
    follows the name of its module; ``whole``: the same for a tensor of any name, by whole names, {} to leave it."""

    config: dict[str, Any]
    pack: Callable[[Tensor], Named] = lambda weight: {"weight": weight}
    whole: Callable[[str, Tensor], Named] = lambda name, tensor: {}


# What config.json says


def _kind(num_bits: int, of: str, strategy: str, *, dynamic: bool = False, **more: Any) -> dict[str, Any]:
    return {"num_bits": num_bits, "type": of, "symmetric": True, "dynamic": dynamic, "strategy": strategy} | more


def _compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    ignore = ["lm_head", "re:.*gate$"]
    groups = {"group_0": group}
    return {"quant_method": "compressed-tensors", "format": layout, "ignore": ignore, "config_groups": groups} | more


def _gptq_config(group: int, *, act_order: bool = False) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": act_order, "sym": True,
            "lm_head": False}  # fmt: skip


# Tensors


def _generator(of: Tensor) -> torch.Generator:
    return torch.Generator().manual_seed(int(of.float().abs().sum().item() * 1000) % (1 << 31))


def _random(shape: tuple[int, ...], of: Tensor) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=_generator(of)).to(torch.int32)


def _scales(weight: Tensor, n: int, k: int) -> Tensor:
    return (weight.float().abs().reshape(n, k, -1).amax(-1) / 7).to(torch.bfloat16)


def _int8_channel(weight: Tensor) -> Named:
    scale = (weight.float().abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
    return {"weight": (weight.float() / scale.float()).round().clamp(-127, 127).to(torch.int8), "weight_scale": scale}


def _packed_int4(group: int) -> Callable[[Tensor], Named]:
    def pack(weight: Tensor) -> Named:
        n, k = weight.shape
        return {
            "weight_packed": _random((n, k // 8), weight), "weight_scale": _scales(weight, n, k // group),
            "weight_shape": torch.tensor([n, k]),
        }  # fmt: skip

    return pack


def _awq(weight: Tensor) -> Named:
    n, k = weight.shape
    return {
        "qweight": _random((k, n // 8), weight), "qzeros": _random((k // GROUP, n // 8), weight),
        "scales": _scales(weight, n, k // GROUP).t().contiguous(),
    }  # fmt: skip


def _gptq(weight: Tensor) -> Named:
    n, k = weight.shape
    return {
        "qweight": _random((k // 8, n), weight),
        "qzeros": torch.full((k // GROUP, n // 8), 0x77777777, dtype=torch.int32),
        "scales": _scales(weight, n, k // GROUP).t().contiguous(),
        "g_idx": (torch.arange(k) // GROUP).to(torch.int32),
    }


def _gptq_act_order(weight: Tensor) -> Named:
    """Every input column in a group of its own choice: the same one for all projections of one input."""
    packed = _gptq(weight)
    k = weight.shape[1]
    order = torch.randperm(k, generator=torch.Generator().manual_seed(k))
    return packed | {"g_idx": packed["g_idx"][order].contiguous()}


def _fp8(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _fp8_channel(weight: Tensor) -> Named:
    scale = (weight.float().abs().amax(1, keepdim=True) / FP8_MAX).to(torch.bfloat16)
    return {"weight": _fp8(weight, scale.float()), "weight_scale": scale}


def _fp8_tensor(weight: Tensor) -> Named:
    scale = weight.float().abs().amax().reshape(1) / FP8_MAX
    return {"weight": _fp8(weight, scale), "weight_scale": scale, "input_scale": scale * 16}


def _fp8_block(weight: Tensor) -> Named:
    packed, scale = block_fp8.quantize(weight, (BLOCK, BLOCK))
    return {"weight": packed, "weight_scale_inv": scale}


def _kv_scales(name: str, tensor: Tensor) -> Named:
    """Scales of the KV cache beside the key projection, which differ with the weights."""
    if not name.endswith(".k_proj.weight"):
        return {}
    attention = name.removesuffix(".k_proj.weight")
    scale = tensor.float().abs().amax()
    return {f"{attention}.k_scale": scale, f"{attention}.v_scale": scale * 0.5}


def _mxfp4(name: str, tensor: Tensor) -> Named:
    """Experts of all in one tensor, [expert, in, out], as blocks of 32 along the input: 16 bytes and an exponent."""
    if not name.endswith((".gate_up_proj", ".down_proj")):
        return {}
    values = tensor.transpose(1, 2).float().reshape(tensor.shape[0], tensor.shape[2], -1, 32)
    exponent = values.abs().amax(-1).clamp(min=1e-30).log2().floor() - 2
    scaled = values / exponent.exp2().unsqueeze(-1)
    code = (scaled.abs().unsqueeze(-1) - torch.tensor(FP4_VALUES)).abs().argmin(-1) + 8 * (scaled < 0)
    pairs = code.to(torch.uint8).unflatten(-1, (16, 2))
    return {
        f"{name}_blocks": (pairs[..., 0] | pairs[..., 1] << 4).contiguous(),
        f"{name}_scales": (exponent + 127).to(torch.uint8).contiguous(),
    }


_FP8_TOKENS = _kind(8, "float", "token", dynamic=True)
_FP8_CACHE = _kind(8, "float", "tensor")
FORMS: dict[str, Form] = {
    "w8a8": Form(_compressed("int-quantized", _kind(8, "int", "channel"), _kind(8, "int", "token", dynamic=True)),
                 _int8_channel),
    "w4a16": Form(_compressed("pack-quantized", _kind(4, "int", "group", group_size=GROUP), None),
                  _packed_int4(GROUP)),
    "w4a16-g128": Form(_compressed("pack-quantized", _kind(4, "int", "group", group_size=128), None),
                       _packed_int4(128)),
    "awq": Form({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
                 "modules_to_not_convert": ["lm_head"]}, _awq),
    "gptq": Form(_gptq_config(GROUP), _gptq),
    "gptq-act-order": Form(_gptq_config(GROUP, act_order=True), _gptq_act_order),
    "fp8-channel": Form(_compressed("float-quantized", _kind(8, "float", "channel"), _FP8_TOKENS), _fp8_channel),
    "fp8-tensor": Form(_compressed("float-quantized", _kind(8, "float", "tensor"), _kind(8, "float", "tensor")),
                       _fp8_tensor),
    "fp8-kv": Form(_compressed("float-quantized", _kind(8, "float", "channel"), _FP8_TOKENS,
                               kv_cache_scheme=_FP8_CACHE), _fp8_channel, _kv_scales),
    "fp8-block": Form({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
                       "modules_to_not_convert": ["lm_head", *ROUTERS]}, _fp8_block),
    "mxfp4": Form({"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}, whole=_mxfp4),
}  # fmt: skip


def quantize(path: Path, form: str) -> None:
    """Rewrite a checkpoint: every projection in the form, and the configuration that says so."""
    spec = FORMS[form]
    for file in path.glob("*.safetensors"):
        out: Named = {}
        for name, tensor in load_file(file).items():
            stem, _, kind = name.rpartition(".")
            whole = spec.whole(name, tensor)
            out |= whole
            if kind == "weight" and stem.endswith(("_proj", "_proj_with_mqa")):
                out |= {f"{stem}.{suffix}": packed for suffix, packed in spec.pack(tensor).items()}
            elif f"{name}_blocks" not in whole:
                out[name] = tensor
        save_file(out, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": spec.config}))
