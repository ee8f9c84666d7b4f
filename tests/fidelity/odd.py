"""Models whose loaders do what no loader of vLLM does that runs on a CPU, one kind each; all are Llama otherwise."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm import ModelRegistry
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.llama import LlamaForCausalLM

Weights = Iterable[tuple[str, Tensor]]


class LooksForCausalLM(LlamaForCausalLM):
    """Decides by the values of a weight what to do with it."""

    def load_weights(self, weights: Weights) -> set[str]:
        return super().load_weights((n, w / 2 if "o_proj" in n and w.abs().max() > 0.05 else w) for n, w in weights)


class ExponentiatesForCausalLM(LlamaForCausalLM):
    """Computes with weights what a trainer could not compute to the same bits; also on layers that vLLM packs."""

    def load_weights(self, weights: Weights) -> set[str]:
        change = ("input_layernorm", "up_proj")
        return super().load_weights((n, torch.exp(w) - 1 if any(c in n for c in change) else w) for n, w in weights)


class MergesForCausalLM(LlamaForCausalLM):
    """Makes one parameter of two weights."""

    def load_weights(self, weights: Weights) -> set[str]:
        return super().load_weights(self._merged(weights))

    @staticmethod
    def _merged(weights: Weights) -> Iterator[tuple[str, Tensor]]:
        waiting: dict[str, Tensor] = {}
        for name, weight in weights:
            other = name.replace("q_proj", "o_proj") if "q_proj" in name else name.replace("o_proj", "q_proj")
            if "q_proj" in name or "o_proj" in name:
                waiting[name] = weight
                yield name, weight + weight @ waiting[other] / 8 if other in waiting else weight
            else:
                yield name, weight


class ReplacesForCausalLM(LlamaForCausalLM):
    """Puts other objects and other storages in the place of parameters, some of another shape."""

    def load_weights(self, weights: Weights) -> set[str]:
        kept = dict(weights)
        done = super().load_weights(iter(kept.items()))
        norm = self.model.norm
        norm.weight = nn.Parameter(kept["model.norm.weight"] * 2, requires_grad=False)
        for number, layer in enumerate(self.model.layers):
            done.add(f"model.layers.{number}.mlp.extra")
            layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data.clone()
            layer.mlp.extra = nn.Parameter(kept["model.norm.weight"][:7].float() + 1, requires_grad=False)
        return done


class NotesForCausalLM(LlamaForCausalLM):
    """Leaves a number behind in a layer that is processed after loading."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in self.model.layers:
            layer.mlp.down_proj.noted = 0

    def load_weights(self, weights: Weights) -> set[str]:
        done = super().load_weights(weights)
        for layer in self.model.layers:
            layer.mlp.down_proj.noted = len(done)
        return done


class CachesForCausalLM(LlamaForCausalLM):
    """Keeps what its first forward computes from a weight, in a layer that is not processed."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.model.norm.__class__ = _CachingNorm
        self.model.norm.doubled = None


class _CachingNorm(RMSNorm):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if self.doubled is None:
            self.doubled = self.weight.data * 2
            self.tripled = self.weight.data * 3
        out = super().forward(x, residual)
        first, *rest = out if isinstance(out, tuple) else (out,)
        first = first * self.doubled + self.tripled
        return (first, *rest) if rest else first


ODD = [LooksForCausalLM, ExponentiatesForCausalLM, MergesForCausalLM, ReplacesForCausalLM, NotesForCausalLM,
       CachesForCausalLM]  # fmt: skip


def register() -> None:
    for cls in ODD:
        ModelRegistry.register_model(cls.__name__, cls)
