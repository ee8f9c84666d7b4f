"""TRL (1.16): trainers in vLLM's server mode that push by a `WeightClient` instead of TRL's NCCL broadcast.

    with WeightClient(["http://host:8000"]) as client:
        with pushing_by(client):
            trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="server", ...))
        trainer.train()

A trainer makes a `VLLMGeneration`; when the step has changed it calls ``sync_weights`` of it on every rank, and then
``generate``. Only the first is replaced: generation stays TRL's, by the HTTP routes of any ``vllm serve``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from accelerate.utils import is_peft_model
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from trainer_client.conversion import checkpoint_converter
from vllm_nixl_plugin.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_client.client import WeightClient
    from trainer_client.report import PushReport

logger = logging.getLogger(__name__)


@contextmanager
def pushing_by(client: WeightClient, **options: Any) -> Iterator[None]:
    """TRL trainers that are made inside bring their weights to vLLM by ``client``, for as long as they live.

    ``options`` go to every ``push_weights``. The reports of the pushes are in ``trainer.vllm_generation.reports``.
    TRL is told one server of the client's to generate on, as always (``vllm_server_base_url``).
    Adapters (PEFT) are merged for the time of a push.
    Errors, when a trainer is made: InvalidRequest for another mode than ``server``, and for adapters under FSDP and
    ZeRO 3.
    """

    def adopt(generation: VLLMGeneration) -> None:
        generation.__class__ = PushedGeneration
        generation.weight_client, generation.push_options, generation.reports = client, options, []
        generation._init_vllm()

    with patch.object(VLLMGeneration, "_init_vllm", adopt):
        yield


class PushedGeneration(VLLMGeneration):  # type: ignore[misc]  # TRL is untyped here
    """TRL's generation on a server, with weights that come by ``weight_client``."""

    weight_client: WeightClient
    push_options: dict[str, Any]
    reports: list[PushReport]

    def _init_vllm(self) -> None:
        if self.mode != "server":
            raise InvalidRequest(
                f"vllm_mode is {self.mode!r}; expected 'server': in mode 'colocate' vLLM lives in the trainer, and "
                "there is nothing to push"
            )
        self.push_options = dict(self.push_options)
        if is_peft_model(self.model):
            if self._dist.is_fsdp or self._dist.is_zero3:
                raise InvalidRequest("the model has adapters, which cannot be merged in sharded weights: use DDP")
            self.push_options.setdefault("convert", checkpoint_converter(self.model.get_base_model()))
        if self.accelerator.is_main_process:
            url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
            self.vllm_client = _GeneratingClient(base_url=url, connection_timeout=self.server_timeout)
        self.accelerator.wait_for_everyone()

    def sync_weights(self) -> None:
        """Push the present weights, on every rank. Errors: PushFailed; the servers then have the weights before."""
        with _merged(self.model) if is_peft_model(self.model) else nullcontext(self.model) as weights:
            self.reports.append(self.weight_client.push_weights(weights, **self.push_options))


@contextmanager
def _merged(model: Any) -> Iterator[dict[str, Tensor]]:
    """The weights of a PEFT model's base, by their names in it, with the adapters in them while this is entered."""
    model.merge_adapter()
    try:
        found = {}
        for name, param in model.named_parameters():
            if model.prefix not in name and "original_module" not in name:
                name = name.removeprefix("base_model.model.").replace(".base_layer", "")
                found[name.replace("modules_to_save.default.", "")] = param.data
        yield found
    finally:
        model.unmerge_adapter()


class _GeneratingClient(VLLMClient):  # type: ignore[misc]  # TRL is untyped here
    """TRL's client without a process group; it does not need the server's development mode."""

    def get_server_info(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = super().get_server_info()
        except RuntimeError:
            logger.warning(
                "%s does not show its configuration (VLLM_SERVER_DEV_MODE is not set); TRL's importance sampling "
                "correction takes it that the server runs with --logprobs-mode processed_logprobs", self.base_url,
            )  # fmt: skip
            found = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        return found
