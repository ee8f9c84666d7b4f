"""One worker's view of a model in one process: its twin, at any rank of any parallel layout, without the other ranks.

vLLM's groups are made on torch's fake process group, in which no collective does anything: creation and loading of a
model need none. A process can take one view; run each in a child of its own (`runner.in_child`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch


@dataclass(frozen=True)
class Layout:
    """Sizes of the groups; ``ep``: experts spread over all workers of tensor and data parallelism."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False

    @property
    def ranks(self) -> int:
        """Workers of all engines."""
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        parts = [f"{name}{n}" for name, n in (("tp", self.tp), ("pp", self.pp), ("dp", self.dp)) if n > 1]
        return "+".join([*parts, *([f"ep{self.tp * self.dp}"] if self.ep else [])]) or "tp1"


def engine_config(path: Path | str, layout: Layout, rank: int, **args: Any) -> Any:
    """vLLM's configuration of the worker with this rank over all engines."""
    from vllm.engine.arg_utils import EngineArgs

    defaults = {"enforce_eager": True, "dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": 4, "seed": 0,
                "kv_cache_memory_bytes": 1 << 26, "skip_tokenizer_init": True}  # fmt: skip
    sizes = {"tensor_parallel_size": layout.tp, "pipeline_parallel_size": layout.pp, "data_parallel_size": layout.dp,
             "enable_expert_parallel": layout.ep, "distributed_executor_backend": "external_launcher"}  # fmt: skip
    with mock.patch.dict("os.environ", {"WORLD_SIZE": str(layout.ranks), "RANK": str(rank), "LOCAL_RANK": "0"}):
        config = EngineArgs(model=str(path), **(defaults | sizes | args)).create_engine_config()
    parallel = config.parallel_config
    parallel.data_parallel_rank = rank // (layout.tp * layout.pp)
    parallel.rank = rank % (layout.tp * layout.pp)
    return config


def take_place(config: Any, layout: Layout, rank: int) -> None:
    """Make vLLM's groups as the worker with this rank sees them."""
    import vllm.distributed.parallel_state as state
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.ranks)
    new_group = torch.distributed.new_group

    def fake_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **more: Any) -> Any:
        return new_group(ranks, backend="fake")

    patches: list[Any] = [
        mock.patch.object(torch.distributed, "new_group", fake_group),
        mock.patch.object(state, "_node_count", return_value=1),
        mock.patch.object(state, "in_the_same_node_as", lambda group, source_rank=0: [True] * group.size()),
        mock.patch.object(MessageQueue, "create_from_process_group", return_value=None),
        mock.patch.object(CpuCommunicator, "_all_group_ranks_share_shm_group_name", return_value=False),
    ]
    for patch in patches:
        patch.start()  # for the life of the process
    with set_current_vllm_config(config):
        state.init_distributed_environment(layout.ranks, rank, "env://", 0, "fake")
        state.initialize_model_parallel(layout.tp, layout.pp, backend="fake")


def twin_of(config: Any) -> Any:
    """The model of this worker as created."""
    from torch import nn

    from vllm_nixl_plugin.model import LoadRecord
    from vllm_nixl_plugin.twin import Twin

    return Twin(LoadRecord(config, config.model_config, ""), nn.Module())
