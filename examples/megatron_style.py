#!/usr/bin/env python3
"""Ranks that keep plain tensors, as Megatron-LM does, push them into running vLLM servers where they lie.

    vllm serve CHECKPOINT ...                                        # a Qwen3 model; see docs/quickstart.md
    torchrun --nproc-per-node 4 examples/megatron_style.py CHECKPOINT http://127.0.0.1:8000

Half of the ranks, and two at least, are a tensor-parallel group; the rest is pipeline stages. What a real trainer has
already, `megatron_state` cuts out of a checkpoint here. Two things are to be said then:

- `declared`: which box of which tensor each rank holds, in the words of Megatron (column, row, fused, replicated);
- `to_checkpoint`: how the tensors of the whole model become those of the checkpoint. It never sees data.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from trainer_client import LocalShard, WeightClient

State = dict[str, Tensor]


def megatron_state(checkpoint: Path, config: dict[str, int], tp: tuple[int, int], pp: tuple[int, int]) -> State:
    """What a rank of Megatron holds of a Qwen3 model. ``tp`` and ``pp``: rank and size of its groups."""
    full = {name: t for file in checkpoint.glob("*.safetensors") for name, t in load_file(file).items()}
    rank, size = tp
    state: State = {}
    if pp[0] == 0:
        state["embedding.word_embeddings.weight"] = full["model.embed_tokens.weight"].chunk(size)[rank]
    layers = config["num_hidden_layers"]
    for layer in range(layers * pp[0] // pp[1], layers * (pp[0] + 1) // pp[1]):
        theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        groups = config["num_key_value_heads"]
        q, k, v = (full[f"{theirs}self_attn.{x}_proj.weight"].unflatten(0, (groups, -1)) for x in "qkv")
        qkv = torch.cat([q, k, v], 1).flatten(0, 1)  # the queries of a group, its key, its value; group by group
        gate, up = (full[f"{theirs}mlp.{x}_proj.weight"].chunk(size)[rank] for x in ("gate", "up"))
        state |= {
            ours + "self_attention.linear_qkv.layer_norm_weight": full[theirs + "input_layernorm.weight"],
            ours + "self_attention.linear_qkv.weight": qkv.chunk(size)[rank],
            ours + "self_attention.q_layernorm.weight": full[theirs + "self_attn.q_norm.weight"],
            ours + "self_attention.k_layernorm.weight": full[theirs + "self_attn.k_norm.weight"],
            ours + "self_attention.linear_proj.weight": full[theirs + "self_attn.o_proj.weight"].chunk(size, 1)[rank],
            ours + "mlp.linear_fc1.layer_norm_weight": full[theirs + "post_attention_layernorm.weight"],
            ours + "mlp.linear_fc1.weight": torch.cat([gate, up]),
            ours + "mlp.linear_fc2.weight": full[theirs + "mlp.down_proj.weight"].chunk(size, 1)[rank],
        }
    if pp[0] == pp[1] - 1:
        state["decoder.final_layernorm.weight"] = full["model.norm.weight"]
        state["output_layer.weight"] = full["lm_head.weight"].chunk(size)[rank]
    return {name: tensor.clone() for name, tensor in state.items()}


def declared(state: State, rank: int, size: int) -> dict[str, Tensor | list[LocalShard]]:
    """Each tensor of a rank with its place in the whole. Stages need no word: a rank gives the layers that it has."""
    columns = ("linear_qkv.weight", "word_embeddings.weight", "output_layer.weight")
    rows = ("linear_proj.weight", "linear_fc2.weight")
    found: dict[str, Tensor | list[LocalShard]] = {}
    for name, tensor in state.items():
        n, *more = tensor.shape
        if name.endswith(columns):
            found[name] = [LocalShard(tensor, (n * size, *more), (n * rank, 0))]
        elif name.endswith(rows):
            found[name] = [LocalShard(tensor, (n, more[0] * size), (0, more[0] * rank))]
        elif name.endswith("linear_fc1.weight"):  # gate and up of this rank: two boxes of all gates over all ups
            half, shape = n // 2, (n * size, *more)
            gate, up = tensor.split(half)
            found[name] = [LocalShard(gate, shape, (half * rank, 0)), LocalShard(up, shape, (half * (size + rank), 0))]
        else:
            found[name] = tensor  # replicated: whoever has it sends its share
    return found


def to_checkpoint(state: State, groups: int, head_dim: int) -> Iterator[tuple[str, Tensor]]:
    """Megatron's tensors as those of a Qwen3 checkpoint; traced."""
    renamed = {
        "embedding.word_embeddings": "model.embed_tokens", "decoder.final_layernorm": "model.norm",
        "output_layer": "lm_head", "decoder.layers.": "model.layers.",
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "self_attention.q_layernorm": "self_attn.q_norm", "self_attention.k_layernorm": "self_attn.k_norm",
        "self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj",
    }  # fmt: skip
    for name, tensor in state.items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        if name.endswith("linear_qkv.weight"):
            grouped = tensor.unflatten(0, (groups, -1, head_dim))
            for key, part in zip("qkv", grouped.split([grouped.shape[1] - 2, 1, 1], 1), strict=True):
                yield name.replace("self_attention.linear_qkv", f"self_attn.{key}_proj"), part.flatten(0, 2)
        elif name.endswith("linear_fc1.weight"):
            for key, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
                yield name.replace("linear_fc1", f"{key}_proj"), part
        else:
            yield name, tensor


def main(checkpoint: Path, *servers: str) -> None:
    """One rank."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    size = max(2, world // 2)
    config = json.loads((checkpoint / "config.json").read_text())
    state = megatron_state(checkpoint, config, (rank % size, size), (rank // size, world // size))

    def convert(tensors: State) -> Iterator[tuple[str, Tensor]]:
        return to_checkpoint(tensors, config["num_key_value_heads"], config["head_dim"])

    with WeightClient(servers, token=os.environ["PUSH_WEIGHTS_TOKEN"]) as client:
        report = client.push_weights(declared(state, rank % size, size), convert=convert)
        # A trainer goes on here, writes its next step into the same tensors, and pushes again.
    if rank == 0:
        print(report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
