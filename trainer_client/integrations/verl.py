"""verl's checkpoint engine (interface of 2026): a backend ``nixl_push`` that its trainers send their weights by.

    actor_rollout_ref.rollout.checkpoint_engine.backend=nixl_push
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=trainer_client.integrations.verl
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.nixl_push.servers=[http://host:8000]

For every update verl calls, on all workers: ``prepare``, ``init_process_group`` with what `build_topology` gave,
``send_weights`` (trainer) and ``receive_weights`` (rollout) at once, ``finalize``. Here only the first trainer rank
does something: it keeps what the others gather with it, and pushes. A rollout worker receives nothing: its server gets
the weights.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from trainer_client.client import WeightClient
from trainer_client.group import RankGroup
from trainer_client.integrations.gathered import Gathered, draw
from vllm_nixl_plugin.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

    from trainer_client.report import PushReport

BACKEND = "nixl_push"


@CheckpointEngineRegistry.register(BACKEND)
class NixlPushCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # verl is untyped here
    """One of a trainer rank or a rollout worker; verl makes it.

    Args:
        bucket_size: of no use here; a push packs what it must into buffers of its own.
        is_master: the trainer rank that pushes.
        servers: base URLs of the rollout servers.
        gather_to: device on which the master keeps the gathered weights, ``"cpu"`` say; default: where they come.
        client_options, push_options: for `WeightClient` and every ``push_weights``.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        servers: Sequence[str] = (),
        gather_to: str | None = None,
        client_options: Mapping[str, Any] | None = None,
        push_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.report: PushReport | None = None
        self._is_master = is_master
        self._servers, self._options = tuple(servers), dict(client_options or {})
        self._push_options = dict(push_options or {})
        self._gathered = Gathered(gather_to)
        self._client: WeightClient | None = None

    def prepare(self) -> dict[str, Any]:
        """Nothing to prepare: memory and plans stay from update to update."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """No group joins trainer and rollout: every worker is told its rank on its own side."""
        return {"rank": list(range(actor_wg_world_size))}, {"rank": list(range(rollout_world_size))}

    def init_process_group(self, rank: int) -> None:
        """Nothing to initialise."""

    def finalize(self) -> None:
        """Nothing to free: what was prepared serves the next update."""

    async def send_weights(self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None) -> None:
        """Push what ``weights`` gathers, as version ``global_steps``. Errors: PushFailed, with the report."""
        if not self._is_master:
            draw(weights)
            return
        if self._client is None:
            if not self._servers:
                raise InvalidRequest(f"engine_kwargs.{BACKEND}.servers is empty; expected the rollout servers' URLs")
            self._client = WeightClient(self._servers, **({"group": RankGroup.alone()} | self._options))
        version = {} if global_steps is None else {"version": str(global_steps)}
        self.report = self._client.push_weights(self._gathered.take(weights), **(version | self._push_options))

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """Nothing: the server that this worker belongs to gets its weights from the master."""
        none: tuple[tuple[str, Tensor], ...] = ()
        for pair in none:
            yield pair
