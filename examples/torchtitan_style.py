#!/usr/bin/env python3
"""A torchtitan-style trainer, tensor parallel and FSDP2 on one mesh, pushes its `DTensor`s into running vLLM servers.

    vllm serve CHECKPOINT ...                                        # a Llama model; see docs/quickstart.md
    torchrun --nproc-per-node 4 examples/torchtitan_style.py CHECKPOINT http://127.0.0.1:8000 [SAVE_TO]

The model is a Llama with torchtitan's names and its rotary embedding, which pairs neighbouring elements of a head;
checkpoints of Llama pair its halves. `to_checkpoint` renames and permutes. No rank ever has more than its shards: with
SAVE_TO, and only then, the model is gathered and written as a checkpoint, so that you can compare.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as torch's own documentation has it
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from trainer_client import WeightClient


class Attention(nn.Module):
    """Grouped-query attention; heads are counted by the width that a tensor-parallel rank has."""

    def __init__(self, width: int, heads: int, kv_heads: int, theta: float) -> None:
        super().__init__()
        self.dim, self.theta = width // heads, theta
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, kv_heads * self.dim, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        q, k, v = (w(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))

    def rotated(self, x: Tensor) -> Tensor:
        """Each pair of neighbours, turned by an angle that grows with the position."""
        rates = self.theta ** -(torch.arange(0, self.dim, 2) / self.dim)
        angles = torch.outer(torch.arange(x.shape[-2]), rates)
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2).type_as(x)


class FeedForward(nn.Module):
    """Gated, as Llama's."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["hidden_size"]
        theta = (config.get("rope_parameters") or config)["rope_theta"]
        self.attention = Attention(width, config["num_attention_heads"], config["num_key_value_heads"], theta)
        self.feed_forward = FeedForward(width, config["intermediate_size"])
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(width, config["rms_norm_eps"]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """A Llama of the sizes in a checkpoint's config.json."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, vocabulary = config["hidden_size"], config["vocab_size"]
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config["num_hidden_layers"])})
        self.norm = nn.RMSNorm(width, config["rms_norm_eps"])
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, tokens) to logits."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def parallelize(model: Transformer, tp: int, dp: int) -> None:
    """Tensor parallel within a layer, FSDP2 over the rest, as torchtitan does it."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {f"attention.{name}": columns for name in ("wq", "wk", "wv")} | {"attention.wo": rows}
    plan |= {"feed_forward.w1": columns, "feed_forward.w3": columns, "feed_forward.w2": rows}
    embedding = RowwiseParallel(input_layouts=Replicate())
    head = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tp"], {"tok_embeddings": embedding, "output": head})
    for layer in model.layers.values():
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def to_checkpoint(state: dict[str, Tensor], heads: int, kv_heads: int) -> Iterator[tuple[str, Tensor]]:
    """torchtitan's tensors as those of a Llama checkpoint; traced, so it never sees data."""
    renamed = {
        "tok_embeddings": "model.embed_tokens", "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj", "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj", "layers.": "model.layers.",
    }  # fmt: skip
    for name, tensor in state.items():
        if name.endswith(("wq.weight", "wk.weight")):
            n = heads if name.endswith("wq.weight") else kv_heads
            tensor = tensor.unflatten(0, (n, -1, 2)).transpose(1, 2).reshape(tensor.shape)
        for old, new in renamed.items():
            name = name.replace(old, new)
        yield {"norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}.get(name, name), tensor


def main(checkpoint: Path, server: str, save_to: Path | None = None) -> None:
    """One rank."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    config = json.loads((checkpoint / "config.json").read_text())
    torch.manual_seed(5)
    model = Transformer(config)
    parallelize(model, tp=2, dp=world // 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def convert(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        return to_checkpoint(state, config["num_attention_heads"], config["num_key_value_heads"])

    with WeightClient([server], token=os.environ["PUSH_WEIGHTS_TOKEN"]) as client:
        for step in range(2):
            tokens = torch.randint(config["vocab_size"], (4, 16), generator=torch.Generator().manual_seed(step))
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = client.push_weights(model, convert=convert)
            if rank == 0:
                print(f"step {step}: loss {loss.item():.3f}\n{report}")
    if save_to is not None:
        full = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
        if rank == 0:
            shutil.copytree(checkpoint, save_to, ignore=shutil.ignore_patterns("*.safetensors*"))
            weights = {name: tensor.contiguous() for name, tensor in convert(full)}
            save_file(weights, save_to / "model.safetensors", {"format": "pt"})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(Path, sys.argv[3:]))
