"""Push the weights of a trainer to running vLLM servers, by one-sided NIXL writes: the trainer side.

    from trainer_client import WeightClient
    with WeightClient(["http://host:8000"], token=...) as client:
        print(client.push_weights(model))

The path of a push is read in `client`; its stages are `sources`, `conversion`, `routing`, `packing`, `transfer`, and
`delivery` joins them for one server. Importing this loads nothing heavy; vLLM is never needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_client.asynchronous import PushHandle
    from trainer_client.block_fp8 import BlockFP8
    from trainer_client.client import WeightClient
    from trainer_client.group import RankGroup
    from trainer_client.progress import ServerProgress
    from trainer_client.report import PushReport, ServerReport
    from trainer_client.sharding import LocalShard
    from vllm_nixl_plugin.errors import PushFailed, PushWeightsError, RankLost

__all__ = [
    "BlockFP8", "LocalShard", "PushFailed", "PushHandle", "PushReport", "PushWeightsError", "RankGroup", "RankLost",
    "ServerProgress", "ServerReport", "WeightClient",
]  # fmt: skip

_HOMES = {
    "BlockFP8": "trainer_client.block_fp8",
    "LocalShard": "trainer_client.sharding",
    "PushFailed": "vllm_nixl_plugin.errors",
    "PushHandle": "trainer_client.asynchronous",
    "PushReport": "trainer_client.report",
    "PushWeightsError": "vllm_nixl_plugin.errors",
    "RankGroup": "trainer_client.group",
    "RankLost": "vllm_nixl_plugin.errors",
    "ServerProgress": "trainer_client.progress",
    "ServerReport": "trainer_client.report",
    "WeightClient": "trainer_client.client",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
