"""Every call of NIXL fails once, at each place where a push makes it: no other error comes of it than NIXL's own, the
old weights serve on, and the next push works. Over the in-process fabric.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fake_server import TOKEN, Servers, model
from trainer_client import PushFailed, WeightClient
from vllm_nixl_plugin import binding
from vllm_nixl_plugin.composition import Held, Part, Place
from vllm_nixl_plugin.errors import FabricError, PushWeightsError, RegistrationFailed
from vllm_nixl_plugin.graph import raw_bytes
from vllm_nixl_plugin.memory_fabric import MemoryFabric, MemoryNetwork
from vllm_nixl_plugin.settings import WorkerSettings
from vllm_nixl_plugin.wire import Destination, WorkerPlan

OF_TRAINER = (
    "create", "register", "deregister", "connect", "disconnect", "prepare", "release", "post", "done", "notify",
)  # fmt: skip
OF_WORKER = ("create", "register", "deregister", "metadata", "notifications")


def error_of(operation: str) -> FabricError:
    """What NIXL's failure becomes."""
    return RegistrationFailed("injected") if operation == "register" else FabricError("injected")


class Trainer:
    """A client of one fake server, and the pushes that make every call: the first, one of moved tensors, one to a
    server that has restarted, and the end."""

    def __init__(self) -> None:
        self.servers = Servers(1)
        [self.server] = self.servers.all
        self.client = self.another()
        self.failures: list[PushWeightsError] = []
        self.kept: list[dict[str, torch.Tensor]] = []

    def another(self) -> WeightClient:
        """A client of this server."""
        return WeightClient(
            [self.server.url], transport=self.servers.transport, fabric=self.servers.fabric, token=TOKEN,
            progress=False, direct_run_bytes=1024, send_buffer_bytes=4096, timeout_s=20.0,
        )  # fmt: skip

    def push(self, seed: int) -> None:
        """To weights in other memory than before. A failure has to be NIXL's, and the server serves what it did."""
        before = [{name: p.clone() for name, p in worker.params.items()} for worker in self.server.workers]
        self.kept.append(model(seed))
        try:
            self.client.push_weights(self.kept[-1])
        except PushFailed as failure:
            self._failed(failure)
            assert all(
                torch.equal(p, was[name])
                for was, worker in zip(before, self.server.workers, strict=True)
                for name, p in worker.params.items()
            )
        except FabricError as failure:
            self._failed(failure)
        else:
            self.server.expect(self.kept[-1])

    def _failed(self, failure: PushWeightsError) -> None:
        assert "injected" in failure.message, failure.message
        self.failures.append(failure)

    def run(self) -> None:
        """All of them."""
        for number in range(4):
            if number == 2:
                self.server.restart()
            self.push(number)
        self.client.close()


def calls_of(operation: str) -> int:
    """How often the trainer makes the call when nothing fails."""
    trainer = Trainer()
    trainer.run()
    assert not trainer.failures
    calls = trainer.servers.network.calls
    return sum(n for (called, agent), n in calls.items() if called == operation and agent.startswith("trainer"))


@pytest.mark.parametrize("operation", OF_TRAINER)
def test_a_call_of_nixl_that_fails_in_the_trainer_is_told_and_the_next_push_works(operation: str) -> None:
    for number in range(min(calls_of(operation), 12)):
        trainer = Trainer()
        trainer.servers.network.inject(operation, error_of(operation), agent="trainer", after=number)
        trainer.run()
        assert len(trainer.failures) <= 1, (operation, number, trainer.failures)
        with trainer.another() as client:
            assert client.push_weights(model(9)).ok
        trainer.server.expect(model(9))


class Model:
    """What a binder asks of a loaded model, and the plan of its two tensors."""

    def __init__(self) -> None:
        self.tensors = {"a": torch.ones(4), "b": torch.ones(8)}
        self.twin = SimpleNamespace(storages={})
        destinations = [
            Destination(names=(name,), nbytes=raw_bytes(t).numel(), home="live") for name, t in self.tensors.items()
        ]
        plan = WorkerPlan(weights=(), destinations=tuple(destinations), copies=())
        places = tuple(Place(self, (0, i), d, ()) for i, d in enumerate(destinations))
        self.held = Held(plan, False, (Part(self, plan, places, {}, False),))

    def live_storage(self, destination: Destination) -> torch.Tensor:
        return raw_bytes(self.tensors[destination.names[0]])


@pytest.mark.parametrize("operation", OF_WORKER)
def test_a_call_of_nixl_that_fails_in_a_worker_is_told_and_the_next_begin_works(
    monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    for number in range(8):
        network, model, failures = MemoryNetwork(), Model(), []
        monkeypatch.setattr(binding, "NixlAgent", lambda name, network=network, **_: MemoryFabric(name, network))
        binder = binding.Binder(0, WorkerSettings(), lambda: torch.device("cpu"))
        network.inject(operation, error_of(operation), after=number)
        for step in ("begin", "tensors move", "begin", "fence", "begin", "tensors move", "begin", "begin"):
            try:
                if step == "fence":
                    binder.fence(())
                elif step == "begin":
                    binder.notifications()
                    found = binder.bind(model.held, "in_place")
                else:
                    model.tensors = {name: t.clone() for name, t in model.tensors.items()}
            except FabricError as failure:
                failures.append(failure.message)
        assert failures in ([], ["injected"]), number
        assert found.addresses == tuple(t.data_ptr() for t in model.tensors.values())
        assert binder.agent is not None
        registered = [region.address for one in binder.agent._registrations for region in one.regions]
        assert set(found.addresses) <= set(registered)
