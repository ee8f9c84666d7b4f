"""Loaders made to fool the tracer, all Llama otherwise: what they do is right when they load for real, and unseen, or
seen wrongly, when they are traced. The self-check has to find them."""

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from vllm import ModelRegistry
from vllm.model_executor.models.llama import LlamaForCausalLM

Weights = Iterable[tuple[str, Tensor]]


class RecognizesForCausalLM(LlamaForCausalLM):
    """Does something to plain tensors only, and drops a weight that is none."""

    def load_weights(self, weights: Weights) -> set[str]:
        return super().load_weights(
            (n, w.flip(0) if "o_proj" in n and type(w) is Tensor else w)
            for n, w in weights
            if type(w) is Tensor or "layers.1.post_attention_layernorm" not in n
        )


class HidesForCausalLM(LlamaForCausalLM):
    """Rewrites a parameter where no dispatch mode looks."""

    def load_weights(self, weights: Weights) -> set[str]:
        def noticed(weights: Weights) -> Weights:
            for name, weight in weights:
                yield name, weight
                if "down_proj" in name:
                    with _disable_current_modes():
                        self.get_parameter(name).data.mul_(2)

        return super().load_weights(noticed(weights))


class PokesForCausalLM(LlamaForCausalLM):
    """Copies through raw pointers."""

    def load_weights(self, weights: Weights) -> set[str]:
        rest, done = [], set()
        for name, weight in weights:
            if name.endswith("input_layernorm.weight"):
                param = self.get_parameter(name)
                weight = weight.to(param.dtype)
                ctypes.memmove(param.data_ptr(), weight.data_ptr(), param.nbytes)
                done.add(name)
            else:
                rest.append((name, weight))
        return done | super().load_weights(rest)


class ViewsForCausalLM(LlamaForCausalLM):
    """Copies through numpy."""

    def load_weights(self, weights: Weights) -> set[str]:
        rest, done = [], set()
        for name, weight in weights:
            if name == "model.norm.weight":
                target = self.model.norm.weight.data.view(torch.int16).numpy()
                target[:] = weight.to(torch.bfloat16).view(torch.int16).numpy()[::-1]
                done.add(name)
            else:
                rest.append((name, weight))
        return done | super().load_weights(rest)


class SwapsForCausalLM(LlamaForCausalLM):
    """Gives a parameter the storage of another tensor."""

    def load_weights(self, weights: Weights) -> set[str]:
        kept = dict(weights)
        done = super().load_weights(iter(kept.items()))
        for number, layer in enumerate(self.model.layers):
            name = f"model.layers.{number}.mlp.down_proj.weight"
            if name in kept:
                layer.mlp.down_proj.weight.data.set_((kept[name] * 2).to(torch.bfloat16))
        return done


_library = torch.library.Library("fidelity_fooling", "DEF")
_library.define("scale(Tensor x) -> Tensor")  # which is not true: it writes to x


@torch.library.impl(_library, "scale", "CPU")
def _scale(x: Tensor) -> Tensor:
    return x.mul_(0.5).sum()


@torch.library.impl(_library, "scale", "Meta")
def _scale_on_meta(x: Tensor) -> Tensor:
    return x.new_empty(())


class LiesForCausalLM(LlamaForCausalLM):
    """Uses an operator that writes to its argument and does not say so."""

    def load_weights(self, weights: Weights) -> set[str]:
        done = super().load_weights(weights)
        if "lm_head.weight" in done:
            torch.ops.fidelity_fooling.scale(self.lm_head.weight.data)
        return done


FOOLING = [RecognizesForCausalLM, HidesForCausalLM, PokesForCausalLM, ViewsForCausalLM, SwapsForCausalLM,
           LiesForCausalLM]  # fmt: skip


def register() -> None:
    for cls in FOOLING:
        ModelRegistry.register_model(cls.__name__, cls)
