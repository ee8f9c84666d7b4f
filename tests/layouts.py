"""Sharded layouts of real trainers, for 2 and 4 gloo ranks: what `collect` finds in each, against the full tensors.

`run_ranks(world)` starts the ranks; each runs all layouts of that world and hands back, per layout, what went wrong
(None: nothing), so that one start of processes serves many tests. The boxes are judged by the bytes: every rank reads
its shards through storage address and strides, and rank 0 puts them together.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_client import LocalShard
from trainer_client.sources import Sources, collect, unwrap
from vllm_nixl_plugin.errors import InvalidRequest

VIEWS = {"aten::slice", "aten::narrow", "aten::detach", "aten::alias", "aten::view"}
LAYOUTS: dict[int, dict[str, Callable[[], Any]]] = {2: {}, 4: {}}


def layout(*worlds: int) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """A function that gives (what is collected, full values by name) on each rank of these worlds."""

    def kept(function: Callable[[], Any]) -> Callable[[], Any]:
        for world in worlds:
            LAYOUTS[world][function.__name__] = function
        return function

    return kept


class Recorded(TorchDispatchMode):
    """The names of all ops that run, collectives among them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def read(sources: Sources, number: int) -> np.ndarray[Any, Any]:
    """The bytes of shard ``number``, through the address of its storage."""
    shard = sources.shards[number]
    storage = sources.storages[shard.storage]
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * max(storage.nbytes, 1)).from_address(storage.address))
    view = np.lib.stride_tricks.as_strided(
        memory[shard.offset_bytes :], (*shard.shape, shard.itemsize), (*shard.strides_bytes, 1)
    )
    return np.array(view)


def full(value: Any) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def check(given: Any, expected: dict[str, torch.Tensor], allowed: set[str] = VIEWS) -> None:
    """Raises AssertionError unless the ranks' shards make up ``expected``, each element held equally often."""
    with Recorded() as recorded:
        sources = collect(given)
    assert recorded.names <= allowed, f"collect ran {recorded.names - allowed}"
    mine = [
        (s.name, s.dtype, s.global_shape, s.offsets, s.shape, read(sources, i)) for i, s in enumerate(sources.shards)
    ]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    for name, value in expected.items():
        itemsize = value.element_size()
        found = np.zeros((*value.shape, itemsize), np.uint8)
        held = np.zeros(tuple(value.shape), int)
        for holder, dtype, shape, offsets, extents, data in (shard for rank in ranks for shard in rank):
            if holder == name:
                assert (dtype, shape) == (str(value.dtype).removeprefix("torch."), tuple(value.shape)), name
                assert 0 not in extents or 0 in value.shape, f"{name}: an empty box"
                box = tuple(slice(o, o + n) for o, n in zip(offsets, extents, strict=True))
                found[box], held[box] = data, held[box] + 1
        assert held.min(initial=1) >= 1, f"{name}: not all elements are held: {held}"
        assert held.min(initial=9) == held.max(initial=held.min(initial=9)), f"{name}: not held equally often: {held}"
        real = value.contiguous().view(-1).view(torch.uint8).numpy().reshape(found.shape)
        assert np.array_equal(found, real), f"{name} differs"
    names = {shard[0] for rank in ranks for shard in rank}
    assert names == expected.keys(), f"names {names ^ expected.keys()}"


def _main(rank: int, world: int, folder: str, results: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    outcome: dict[str, str | None] = {}
    for name, make in LAYOUTS[world].items():
        torch.manual_seed(0)
        try:
            make()
            outcome[name] = None
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - reported by the test of this layout
            outcome[name] = f"rank {rank}: {traceback.format_exc()}"
        dist.barrier()
    results.put(outcome)
    dist.destroy_process_group()


def run_ranks(world: int, folder: Path) -> dict[str, list[str]]:
    """For every layout of this world, what went wrong on its ranks."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_main, args=(rank, world, str(folder), results)) for rank in range(world)]
    for process in ranks:
        process.start()
    try:
        outcomes = [results.get(timeout=300) for _ in ranks]
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    return {name: [out[name] for out in outcomes if out[name]] for name in LAYOUTS[world]}


class Net(nn.Module):
    """Extents that 2 and 4 ranks cannot divide, one that leaves ranks empty, a buffer, an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6, dtype=torch.bfloat16)
        self.gate = nn.Linear(6, 1, bias=False)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(self.norm(self.down(self.up(x).to(self.down.weight.dtype)).float()))


def mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])


def distributed(placements: Any, on: DeviceMesh, **tensors: torch.Tensor) -> dict[str, Any]:
    return {name: distribute_tensor(tensor, on, placements) for name, tensor in tensors.items()}


def tensors() -> dict[str, torch.Tensor]:
    """The same on all ranks: two dims that are odd, one short, one in bf16, one of integers, one without elements."""
    return {
        "odd": torch.randn(7, 5),
        "short": torch.randn(3, 2, 9),
        "half": torch.randn(8, 8, dtype=torch.bfloat16),
        "whole": torch.arange(16).view(4, 4),
        "none": torch.randn(0, 3),
    }


@layout(2, 4)
def fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    net = Net()
    expected = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    fully_shard(net.down)
    fully_shard(net)
    for value in (net, net.state_dict(), list(net.state_dict().items())):
        check(value, expected)
    net(torch.randn(3, 6)).sum().backward()
    check(net, expected | {name: full(value) for name, value in net.state_dict().items()})
    net.eval()
    with torch.no_grad():
        net(torch.randn(3, 6))  # the parameters of the root stay gathered until its next backward pass
    check(net, {name: full(value) for name, value in net.state_dict().items()})


@layout(2, 4)
def fsdp2_over_another_dim() -> None:
    from torch.distributed.fsdp import fully_shard

    net = nn.Sequential(nn.Linear(8, 3, bias=False), nn.Linear(4, 5, bias=False))
    expected = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    fully_shard(net, shard_placement_fn=lambda _: Shard(1))
    check(net, expected)


@layout(2)
def fsdp2_with_parameters_on_the_cpu() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    net = Net()
    expected = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    fully_shard(net, offload_policy=CPUOffloadPolicy(pin_memory=False))
    check(net, expected)


@layout(2)
def wrapped_submodules() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard

    net = Net()
    expected = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    net.up = torch.compile(net.up)
    net.down = torch.compile(checkpoint_wrapper(net.down))
    net.gate = checkpoint_wrapper(net.gate)
    fully_shard(net.down)
    fully_shard(net)
    check(net, expected)
    check(torch.compile(net), expected)
    check([*net.named_parameters(), *net.named_buffers()], expected)


@layout(2)
def tied_heads() -> None:
    import transformers
    from torch.distributed.fsdp import fully_shard

    config = transformers.Qwen3Config(
        vocab_size=33, hidden_size=16, intermediate_size=24, num_hidden_layers=1, head_dim=4, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    check(model, expected)


@layout(2, 4)
def fsdp1() -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    grid = mesh(2, dist.get_world_size() // 2)
    for options in (
        {}, {"use_orig_params": True}, {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})},
        {"sharding_strategy": ShardingStrategy.NO_SHARD}, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": True},
        {"device_mesh": grid, "sharding_strategy": ShardingStrategy.HYBRID_SHARD},
    ):  # fmt: skip
        net = Net()
        net.down.float()
        net.tied = nn.Linear(6, 1, bias=False)
        net.tied.weight = net.gate.weight
        expected = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        wrapped = FullyShardedDataParallel(net, device_id=torch.device("cpu"), **options)
        assert unwrap(wrapped) is net
        check(wrapped, expected)
        for parameter in wrapped.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD(wrapped.parameters(), lr=0.5).step()
        expected = {name: t - 0.5 if "norm.r" not in name and "num_" not in name else t for name, t in expected.items()}
        wrapped.eval()
        with torch.no_grad():
            wrapped(torch.randn(3, 6))
        check(wrapped, expected)
        check(dict(get_model_state_dict(wrapped)), expected)


@layout(2)
def fsdp1_with_a_replaced_parameter() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True)
    wrapped.weight.data = wrapped.weight.data + 1
    refused(wrapped, "weight was replaced after FSDP1 had flattened it")


@layout(2)
def tensor_parallel() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6), nn.LayerNorm(6))
    expected = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    parallelize_module(net, mesh(2), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    check(net, expected)


@layout(4)
def tensor_parallel_and_fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for width in (12, 10, 7, 5):
        grid = mesh(2, 2)
        net = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 5), nn.LayerNorm(5))
        expected = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        parallelize_module(net, grid["b"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(net, mesh=grid["a"])
        assert any(isinstance(p, _StridedShard) for p in net[0].weight.placements)
        check(net, expected)


@layout(4)
def hybrid_shards() -> None:
    from torch.distributed.fsdp import fully_shard

    net = Net()
    expected = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    fully_shard(net, mesh=mesh(2, 2))
    check(net, expected)


@layout(2)
def one_mesh_dim() -> None:
    for placement in (Shard(0), Shard(1), Replicate()):
        torch.manual_seed(0)
        check(distributed([placement], mesh(2), **tensors()), tensors_again())


def tensors_again() -> dict[str, torch.Tensor]:
    """The values of the last `tensors()`: every layout begins with the same seed."""
    torch.manual_seed(0)
    return tensors()


@layout(4)
def two_mesh_dims() -> None:
    for one in (Shard(0), Shard(1), Replicate()):
        for two in (Shard(0), Shard(1), Replicate()):
            torch.manual_seed(0)
            given = distributed([one, two], mesh(2, 2), **tensors())
            check(given, {name: full(value) for name, value in given.items()})
            check(given, tensors_again())


@layout(4)
def all_ranks_along_each_dim() -> None:
    for placement in (Shard(0), Shard(1)):
        torch.manual_seed(0)
        check(distributed([placement], mesh(4), **tensors()), tensors_again())


@layout(4)
def strided_shards_of_several_runs() -> None:
    for groups, extent in ((2, 8), (4, 8), (3, 12), (2, 16)):
        for placements in ([_StridedShard(0, split_factor=groups), Replicate()],
                           [_StridedShard(0, split_factor=groups), Shard(1)],
                           [_StridedShard(0, split_factor=groups), _StridedShard(1, split_factor=groups)],
                           [Replicate(), _StridedShard(1, split_factor=groups)]):  # fmt: skip
            value = torch.randn(extent, extent)
            given = {"w": distribute_tensor(value, mesh(2, 2), placements)}
            assert torch.equal(full(given["w"]), value)
            boxes = collect(given).shards
            assert len(boxes) > 1 or groups * 2 > extent
            check(given, {"w": value})


@layout(4)
def shards_in_an_order_of_their_own() -> None:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

    grid, value = mesh(2, 2), torch.randn(7, 2)
    first, second = grid.get_coordinate()[1], grid.get_coordinate()[0]
    local = value.tensor_split([4])[first].tensor_split([2])[second].clone()
    spec = DTensorSpec(
        grid, (Shard(0), Shard(0)), TensorMeta(value.shape, value.stride(), value.dtype),
        shard_order=(ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),),
    )  # fmt: skip
    check({"w": DTensor(local, spec, requires_grad=False)}, {"w": value})


@layout(2)
def strided_and_mixed_tensors() -> None:
    transposed = torch.randn(6, 8)
    plain = torch.randn(4, 9)
    given = {
        "transposed": distribute_tensor(transposed.t(), mesh(2), [Shard(0)]),
        "plain": plain[1:, ::2],
        "scalar": torch.tensor(3.0),
        "frozen": distribute_tensor(torch.ones(5), mesh(2), [Replicate()]),
    }
    local = torch.randn(3, 8).t()
    given["column"] = DTensor.from_local(local, mesh(2), [Shard(1)], run_check=False)
    assert not local.is_contiguous()
    expected = {name: full(value) for name, value in given.items()}
    assert torch.equal(expected["transposed"], transposed.t())
    check(given, expected)


@layout(4)
def a_tensor_on_some_ranks_only() -> None:
    """A pipeline: layer 0 on ranks 0 and 1, layer 1 on ranks 2 and 3; the DTensor of a stage exists there only."""
    stage, values = dist.get_rank() // 2, [torch.randn(5, 2), torch.randn(3, 2)]
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    given = {f"layers.{stage}": distribute_tensor(values[stage], meshes[stage], [Shard(0)])}
    check(given, {f"layers.{i}": value for i, value in enumerate(values)})
    elsewhere = DTensor.from_local(torch.ones(2) if stage else torch.ones(0), meshes[1], [Replicate()], run_check=False)
    assert [s.name for s in collect({"w": elsewhere}).shards] == ["w"] * stage


@layout(2, 4)
def declared_boxes() -> None:
    """Megatron's way: columns, rows, experts, and a fused tensor of which a rank has one box in each part."""
    rank, world = dist.get_rank(), dist.get_world_size()
    column, row, fused = torch.randn(8, 3), torch.randn(3, 8), torch.randn(16, 2)
    experts = torch.randn(4, 3, 2)
    n = 8 // world
    mine = torch.cat([fused[rank * n : (rank + 1) * n], fused[8 + rank * n : 8 + (rank + 1) * n]])
    given = {
        "column": LocalShard(column.chunk(world, 0)[rank].clone(), (8, 3), (rank * n, 0)),
        "row": LocalShard(row.chunk(world, 1)[rank], (3, 8), (0, rank * n)),
        "fused": [LocalShard(mine[:n], (16, 2), (rank * n, 0)), LocalShard(mine[n:], (16, 2), (8 + rank * n, 0))],
        "norm": torch.ones(5),
    }
    if rank < 2:
        given["experts"] = LocalShard(experts[2 * rank : 2 * rank + 2], (4, 3, 2), (2 * rank, 0, 0))
    check(given, {"column": column, "row": row, "fused": fused, "norm": torch.ones(5), "experts": experts})


@layout(4)
def experts_of_an_expert_parallel_rank_under_fsdp2() -> None:
    """The rank's experts are a DTensor over the ranks that have the same ones; which they are is declared."""
    grid, experts = mesh(2, 2), torch.randn(6, 5, 2)
    group = grid.get_coordinate()[0]
    mine = distribute_tensor(experts[3 * group : 3 * group + 3], grid["b"], [Shard(0)], src_data_rank=None)
    check({"experts": LocalShard(mine, (6, 5, 2), (3 * group, 0, 0))}, {"experts": experts})
    columns = distribute_tensor(experts[3 * group : 3 * group + 3], grid["b"], [Shard(1)], src_data_rank=None)
    check({"experts": LocalShard(columns, (6, 5, 2), (3 * group, 0, 0))}, {"experts": experts})


@layout(2)
def what_a_dtensor_cannot_say() -> None:
    on = mesh(2)
    summands = DTensor.from_local(torch.ones(2), on, [Partial()], run_check=False)
    uneven = DTensor.from_local(
        torch.ones(1 + 3 * dist.get_rank()), on, [Shard(0)], run_check=False, shape=torch.Size([5]), stride=(1,)
    )
    meta = DTensor.from_local(torch.ones(2, device="meta"), on, [Shard(0)], run_check=False)
    refused({"w": summands}, "w is a DTensor with placement .*summands, not values. Call redistribute")
    refused({"w": uneven}, r"w is a DTensor\[5\] placed as .*should be .* but is .*declare what the rank has")
    refused({"w": meta}, "w is on the meta device")


def refused(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        collect(given)
