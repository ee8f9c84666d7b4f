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
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from trainer_client.client import WeightClient
from trainer_client.group import RankGroup
from trainer_client.integrations.gathered import Gathered, draw
from trainer_client.report import PushReport
from vllm_nixl_plugin.errors import InvalidRequest

BACKEND = "nixl_push"


@dataclass
class NixlPushInitInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM is untyped here
    """The servers to push to. ``client_options`` go to `WeightClient`, ``push_options`` to every push.

    ``gather_to``: the device on which rank 0 keeps what a `WeightSource` gathers; default: where it comes.
    """

    backend: ClassVar[str] = BACKEND

    servers: Sequence[str]
    client_options: Mapping[str, Any] = field(default_factory=dict)
    push_options: Mapping[str, Any] = field(default_factory=dict)
    gather_to: str | None = None


class NixlPushTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]  # vLLM is untyped here
    """Pushes its source with a `WeightClient` of its own."""

    init_info_cls = NixlPushInitInfo

    def __init__(self, init_info: NixlPushInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.report: PushReport | None = None
        """Of the last push; None where this rank took no part in it."""
        self._push_options = dict(init_info.push_options)
        self._gathered = Gathered(init_info.gather_to)
        self._gathers = self.gathers(source)
        self._weights: WeightClient | None = None
        if self.is_sender or not self._gathers:
            alone = {"group": RankGroup.alone()} if self._gathers else {}
            self._weights = WeightClient(init_info.servers, **(alone | dict(init_info.client_options)))

    @classmethod
    def trainer_init(cls, init_info: NixlPushInitInfo, *, client: Any, source: Any = None) -> Self:
        """Make the client; nothing is sent yet.

        ``source``: whatever ``push_weights`` takes, best the module itself: every rank sends its shards from where they
        lie. A `WeightSource` gathers every tensor on every rank, and rank 0 keeps and sends them all.
        Errors: InvalidRequest without a source.
        """
        if source is None:
            raise InvalidRequest("source is None; expected the trainer's module, or a WeightSource of its weights")
        return cls(init_info, client=client, source=source)

    def send_weights(self) -> None:
        """Bring all servers to the present weights. Errors: PushFailed, with the report."""
        if self._weights is None:
            draw(self.source)
            return
        found = self._gathered.take(self.source) if self._gathers else self.present()
        self.report = self._weights.push_weights(found, **self._push_options)

    @staticmethod
    def gathers(source: Any) -> bool:
        """Whether the source gives full tensors, gathered by all ranks."""
        return isinstance(source, WeightSource)

    def present(self) -> Any:
        """What a rank that gathers nothing pushes: the source."""
        return self.source

    def shutdown(self) -> None:
        """Close the client."""
        if self._weights is not None:
            self._weights.close()


def register() -> None:
    """Make ``nixl_push`` known to vLLM's factory, once per process."""
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, __name__, NixlPushTrainerEngine.__name__)
