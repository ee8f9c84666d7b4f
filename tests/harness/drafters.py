"""Tiny random checkpoints of targets and drafters for speculative decoding, written on the spot."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from harness.checkpoints import _DENSE, _MLA, _write_tokenizer

_LAYERS = 2
_MTP = _MLA | {"q_lora_rank": 64, "num_hidden_layers": _LAYERS + 1, "scoring_func": "sigmoid"} | {
    "topk_method": "noaux_tc"
}  # fmt: skip


def write_target(path: Path, seed: int) -> Path:
    """A Llama of two layers."""
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**_DENSE))
    return _write(path, _random(model.state_dict(), seed), model.config.to_dict())


def write_eagle(path: Path, seed: int, embeddings: Tensor | None = None) -> Path:
    """A head of one layer that drafts from the target's hidden states (method eagle).

    embeddings: its own ones; without, it has none in its checkpoint and takes the target's.
    """
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**_DENSE | {"num_hidden_layers": 1}))
    left_out = ("lm_head.", "model.norm.", "model.layers.0.input_layernorm.", "model.embed_tokens.")
    weights = {n.removeprefix("model."): t for n, t in model.state_dict().items() if not n.startswith(left_out)}
    weights["fc.weight"] = torch.empty(model.config.hidden_size, 2 * model.config.hidden_size)
    weights = _random(weights, seed)
    if embeddings is not None:
        weights["embed_tokens.weight"] = embeddings
    return _write(path, weights, model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]})


def write_eagle3(path: Path, seed: int) -> Path:
    """A head that drafts from three hidden states of the target (method eagle3), over a vocabulary of its own: it has a
    head and a table of ids, and takes the target's embeddings."""
    vocabulary = 128
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**_DENSE | {"num_hidden_layers": 1}))
    width = model.config.hidden_size
    weights = {
        name.replace("model.layers.0.", "midlayer."): tensor
        for name, tensor in model.state_dict().items()
        if "model.layers.0." in name
    }
    for part in "qkv":
        name = f"midlayer.self_attn.{part}_proj.weight"
        weights[name] = torch.empty(weights[name].shape[0], 2 * width)
    weights |= {f"{name}.weight": torch.empty(width) for name in ("midlayer.hidden_norm", "norm")}
    weights |= {"fc.weight": torch.empty(width, 3 * width), "lm_head.weight": torch.empty(vocabulary, width)}
    weights = _random(weights, seed)
    ids = torch.randperm(model.config.vocab_size, generator=torch.Generator().manual_seed(seed))[:vocabulary]
    weights["d2t"] = ids.sort().values - torch.arange(vocabulary)
    extra = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": vocabulary}
    extra["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    return _write(path, weights, model.config.to_dict() | extra)


def write_mtp(path: Path, seed: int) -> Path:
    """A DeepSeek-V3 of two layers, with a third one that predicts a token ahead (method mtp)."""
    model = tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**_MTP))
    weights = dict(revert_weight_conversion(model, model.state_dict()))
    width, ahead = model.config.hidden_size, f"model.layers.{_LAYERS}"
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{ahead}.{name}.weight"] = torch.empty(width)
    weights[f"{ahead}.eh_proj.weight"] = torch.empty(width, 2 * width)
    for name, like in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        weights[f"{ahead}.{name}.weight"] = weights[f"{like}.weight"]
    weights = _random(weights, seed)
    config = model.config.to_dict() | {"num_hidden_layers": _LAYERS, "num_nextn_predict_layers": 1}
    return _write(path, weights, config | {"architectures": ["DeepseekV3ForCausalLM"]})


def random_like(tensor: Tensor, seed: int) -> Tensor:
    """Another tensor of its shape."""
    return _random({"weight": tensor}, seed)["weight"]


def _random(weights: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Every value depends on the seed; norms lie around 1."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=generator)
        value = noise * (1.28 / tensor.shape[-1] ** 0.5) if tensor.dim() >= 2 else noise * 0.05 + ("norm" in name)
        out[name] = value.to(torch.float32 if name.endswith("correction_bias") else torch.bfloat16)
    return out


def _write(path: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> Path:
    path.mkdir(parents=True)
    save_file({n: t.contiguous() for n, t in weights.items()}, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, default=str))
    _write_tokenizer(path)
    return path
