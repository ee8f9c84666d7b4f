"""vLLM's own weight-transfer API (0.32): a trainer's half named ``nixl_push`` for `WeightTransferTrainerFactory`.

    register()
    engine = WeightTransferTrainerFactory.trainer_init(
        NixlPushInitInfo(["http://host:8000"], rank=rank), client=client, source=model)
    engine.send_weights()               # after every step, on every rank
    engine.shutdown()

Servers need no ``--weight-transfer-config`` and no development mode: a push has its own control plane, which plans,
pauses, installs, sets the version and resumes. So ``client``, by which the other backends drive the server, is never
called, and nothing of a server's half is registered (docs/design.md says why).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from trainer_client.client import WeightClient
from trainer_client.report import PushReport
from vllm_nixl_plugin.errors import InvalidRequest

BACKEND = "nixl_push"


@dataclass
class NixlPushInitInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM is untyped here
    """The servers to push to. ``client_options`` go to `WeightClient`, ``push_options`` to every push."""

    backend: ClassVar[str] = BACKEND

    servers: Sequence[str]
    client_options: Mapping[str, Any] = field(default_factory=dict)
    push_options: Mapping[str, Any] = field(default_factory=dict)


class NixlPushTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]  # vLLM is untyped here
    """Pushes its source with a `WeightClient` of its own."""

    init_info_cls = NixlPushInitInfo

    def __init__(self, init_info: NixlPushInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._push_options = dict(init_info.push_options)
        self._weights = WeightClient(init_info.servers, **init_info.client_options)
        self.report: PushReport | None = None
        """Of the last push."""

    @classmethod
    def trainer_init(cls, init_info: NixlPushInitInfo, *, client: Any, source: Any = None) -> NixlPushTrainerEngine:
        """Make the client; nothing is sent yet.

        ``source``: whatever ``push_weights`` takes, best the module itself: its shards are sent from where they lie. Of
        a `WeightSource`, which gathers every tensor, all tensors are held at once. Errors: InvalidRequest without one.
        """
        if source is None:
            raise InvalidRequest("source is None; expected the trainer's module, or a WeightSource of its weights")
        return cls(init_info, client=client, source=source)

    def send_weights(self) -> None:
        """Bring all servers to the present weights. Errors: PushFailed, with the report."""
        source = self.source
        if isinstance(source, WeightSource):
            source = {name: tensor for name, tensor in source if tensor is not None}
        self.report = self._weights.push_weights(source, **self._push_options)

    def shutdown(self) -> None:
        """Close the client."""
        self._weights.close()


def register() -> None:
    """Make ``nixl_push`` known to vLLM's factory, once per process."""
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, __name__, NixlPushTrainerEngine.__name__)
