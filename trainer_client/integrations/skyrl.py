"""SkyRL (2026, on vLLM's weight-transfer API): a `build_trainer_engine` in the place of SkyRL's own.

SkyRL's policy workers call ``build_trainer_engine`` on every rank, ``send_weights`` of what it returns after every
step, and ``shutdown`` at the end; around the send they read the three ``skyrl_`` attributes. Bind this function where
SkyRL imports its own. Of an FSDP source the shards are sent from where they lie; every other is gathered to rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trainer_client.integrations.vllm import NixlPushInitInfo, NixlPushTrainerEngine
from vllm_nixl_plugin.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor


class SkyrlPushEngine(NixlPushTrainerEngine):
    """Pushes a SkyRL source, and says what SkyRL's workers want to know around ``send_weights``."""

    skyrl_handles_prefix_cache_reset = True
    skyrl_force_disable_expandable_segments = False
    skyrl_empty_cache_after_send = False

    @staticmethod
    def gathers(source: Any) -> bool:
        """No, where the source shows its module, as SkyRL's for FSDP does."""
        return not hasattr(source, "model")

    def present(self) -> dict[str, Tensor]:
        """The shards of this rank, by the names that the source gives them."""
        return {f"{self.source.weight_prefix}{name}": value for name, value in self.source.model.state_dict().items()}


def build_trainer_engine(
    *,
    ie_cfg: Any,
    colocate_all: bool,
    rank: int,
    inference_world_size: int,
    source_factory: Callable[[Any, str], Any],
    server_urls: Sequence[str],
    data_parallel_size: int,
    base_model_path: str | None = None,
    **options: Any,
) -> SkyrlPushEngine:
    """The engine of this rank. ``options`` are those of `NixlPushInitInfo`; the rest is as SkyRL calls it.

    Errors: InvalidRequest when trainer and servers share their GPUs (``colocate_all``).
    """
    import torch

    if colocate_all:
        raise InvalidRequest("colocate_all is set; expected servers on GPUs of their own: use SkyRL's ipc backend here")
    source = source_factory(getattr(torch, ie_cfg.model_dtype), "nccl")
    return SkyrlPushEngine.trainer_init(NixlPushInitInfo(server_urls, rank=rank, **options), client=None, source=source)
