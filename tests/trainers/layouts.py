"""The layouts that trainers have, each made from the same tiny model: what every rank then gives to `push_weights`.

All ranks make the whole model (it is tiny), and each keeps its part, by the means of the library that people use.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from harness.checkpoints import random_model
from trainers.rows import rows_of

_COLUMN = re.compile(r"(q_proj|k_proj|v_proj|gate_proj|up_proj|lm_head|embed_tokens)\.weight$")
_ROW = re.compile(r"(o_proj|down_proj)\.weight$")
_EXPERTS = re.compile(r"experts\.(gate_up_proj|down_proj)$")


def mesh_of(*shape: int) -> DeviceMesh:
    """A mesh over all ranks."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def _replace(model: nn.Module, placed: Callable[[str, Tensor], Tensor | None]) -> None:
    """Put what ``placed`` gives in the place of each parameter; None leaves it."""
    for name, param in list(model.named_parameters()):
        new = placed(name, param.detach())
        if new is not None:
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, nn.Parameter(new, requires_grad=False))


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    def placed(name: str, param: Tensor) -> Tensor:
        placement: Placement = Replicate()
        if _COLUMN.search(name):
            placement = Shard(0)
        elif _ROW.search(name):
            placement = Shard(1)
        elif _EXPERTS.search(name):
            placement = Shard(1 if name.endswith("gate_up_proj") else 2)
        return distribute_tensor(param, mesh, [placement])

    _replace(model, placed)


def _fully_sharded(model: Any, mesh: DeviceMesh) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def fsdp2(model: Any) -> Any:
    """Every parameter sharded on dim 0 over all ranks."""
    _fully_sharded(model, mesh_of(dist.get_world_size()))
    return model


def fsdp2_fp32(model: Any) -> Any:
    """The same with masters in float32, which are cast on the way."""
    return fsdp2(model.float())


def fsdp1(model: Any) -> Any:
    """Flat parameters, one for each layer and one for the rest, of which every rank has an equal stretch."""
    layers = ModuleWrapPolicy({type(model.model.layers[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=layers, device_id=torch.device("cpu"))


def hsdp(model: Any) -> Any:
    """Sharded over two ranks, replicated over the pairs."""
    _fully_sharded(model, mesh_of(dist.get_world_size() // 2, 2))
    return model


def tp(model: Any) -> Any:
    """Megatron's columns and rows over all ranks, norms and routers on each."""
    _tensor_parallel(model, mesh_of(dist.get_world_size()))
    return model


def tp_fsdp2(model: Any) -> Any:
    """Columns and rows over two ranks, and each of them sharded over the others."""
    mesh = mesh_of(dist.get_world_size() // 2, 2)
    _tensor_parallel(model, mesh["inner"])
    _fully_sharded(model, mesh["outer"])
    return model


def ep(model: Any) -> Any:
    """Each rank has some of the experts, and all of the rest."""
    mesh = mesh_of(dist.get_world_size())
    _replace(model, lambda name, p: distribute_tensor(p, mesh, [Shard(0)]) if _EXPERTS.search(name) else None)
    return model


def pp(model: Any) -> Any:
    """Each rank has some of the layers, by checkpoint names; the first has the embedding, the last norm and head."""
    weights, rank, size = _checkpoint(model), dist.get_rank(), dist.get_world_size()
    n_layers = model.config.num_hidden_layers

    def stage(name: str) -> int:
        found = re.search(r"layers\.(\d+)\.", name)
        if found:
            return int(found[1]) * size // n_layers
        return 0 if "embed" in name else size - 1

    return {name: weight for name, weight in weights.items() if stage(name) == rank}


def declared(model: Any) -> Any:
    """Plain tensors with boxes that the trainer declares."""
    return rows_of(_checkpoint(model))


def _checkpoint(model: Any) -> dict[str, Tensor]:
    """What the model would save."""
    from transformers.core_model_loading import revert_weight_conversion

    state = dict(model.state_dict())
    return {name: value.contiguous() for name, value in revert_weight_conversion(model, state).items()}


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "fsdp1": fsdp1, "fsdp2": fsdp2, "fsdp2-fp32": fsdp2_fp32, "hsdp": hsdp, "tp": tp, "tp+fsdp2": tp_fsdp2, "ep": ep,
    "pp": pp, "declared": declared,
}  # fmt: skip


def build(layout: str, name: str, seed: int) -> Any:
    """What this rank pushes of the model of that name and seed (`harness.checkpoints`)."""
    with torch.no_grad():
        return LAYOUTS[layout](random_model(name, seed))
