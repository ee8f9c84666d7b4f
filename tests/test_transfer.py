"""Prepared writes carry the present bytes, tell the workers the truth about them, and know whether they are drained."""

import time
import uuid

import pytest
import torch

from fake_server import Worker, model
from trainer_client import transfer as module
from trainer_client.conversion import convert_shards
from trainer_client.registration import BUFFERS, SendBuffers, SourceMemory
from trainer_client.routing import Offer, compute_route
from trainer_client.sources import collect
from trainer_client.transfer import Lane, Transfer
from vllm_nixl_plugin.agent import NixlAgent
from vllm_nixl_plugin.encoding import decode_landed, plan_digest
from vllm_nixl_plugin.errors import DeadlineExceeded, FabricError, InvalidRequest
from vllm_nixl_plugin.memory_fabric import MemoryFabric, MemoryNetwork
from vllm_nixl_plugin.wire import Manifest


class Setting:
    """Two workers, one trainer and the transfer between them."""

    def __init__(self, weights=None, *, direct: int = 1024, buffer: int = 4096, real: bool = False) -> None:
        self.network = MemoryNetwork()
        self.weights = weights or model()
        make_agent = NixlAgent if real else lambda name: MemoryFabric(name, self.network)
        self.workers = [Worker(rank, 2, make_agent) for rank in range(2)]
        self.fabric = make_agent(f"trainer-{uuid.uuid4().hex}")
        self.sources = collect(self.weights)
        conversion = convert_shards(self.sources.shards, None)
        self.offer = Offer(self.sources.shards, ["cpu"] * len(self.sources.storages), conversion)
        self.plans = [worker.plan(Manifest(weights=conversion.weights)) for worker in self.workers]
        self.memory, self.buffers = SourceMemory(self.fabric, self.sources), SendBuffers(self.fabric)
        self.lanes = [
            Lane(plan_digest(plan), worker.binding(plan, "shadow"),
                 compute_route(self.offer, plan, direct_run_bytes=direct, buffer_bytes=buffer))
            for worker, plan in zip(self.workers, self.plans, strict=True)
        ]  # fmt: skip
        self.transfer = Transfer(self.fabric, self.memory, self.buffers, self.lanes)

    def run(self, timeout_s: float = 10.0, check=lambda: None):
        self.progress: list[int] = []
        self.update_id = uuid.uuid4().hex
        return self.transfer.run(
            self.update_id, time.monotonic() + timeout_s, check=check, progress=self.progress.append
        )

    def expect(self) -> None:
        for worker in self.workers:
            params = {name: torch.zeros_like(p) for name, p in worker.params.items()}
            worker.load_weights(params, self.weights.items())
            for name, expected in params.items():
                assert torch.equal(worker.shadow[name], expected), name


@pytest.mark.parametrize("direct", [1, 1024, 1 << 30])
@pytest.mark.parametrize("buffer", [512, 4096, 1 << 20])
def test_every_run_carries_the_present_bytes_and_messages_count_them(direct, buffer) -> None:
    setting = Setting(direct=direct, buffer=buffer)
    for _ in range(3):
        for tensor in setting.weights.values():
            tensor.add_(1.0)
        sent = setting.run()
        setting.expect()
        for worker, plan in zip(setting.workers, setting.plans, strict=True):
            landed = [decode_landed(message) for _, message in worker.agent.notifications()]
            assert [m.sequence for m in landed] == sorted(m.sequence for m in landed)
            assert sorted({m.sequence for m in landed}) == list(range(len(landed)))
            assert {(m.update_id, m.plan) for m in landed} == {(setting.update_id, plan_digest(plan)[:16])}
            assert sum(m.nbytes for m in landed) == plan.nbytes
        assert sum(setting.progress) == sent.nbytes == sum(plan.nbytes for plan in setting.plans)
        assert setting.transfer.drain(0.0)


def test_everything_is_packed_when_no_run_is_long_enough_and_nothing_is_registered_for_it() -> None:
    setting = Setting(direct=1 << 30)
    sent = setting.run()
    assert sent.packed_nbytes == sent.nbytes
    assert setting.memory._registered == {}


def test_direct_writes_are_closed_at_the_size_that_progress_asks_for(monkeypatch) -> None:
    monkeypatch.setattr(module, "WRITE_NBYTES", 8192)
    setting = Setting()
    setting.run()
    setting.expect()
    assert max(len(lane.direct) for lane in setting.lanes) > 2


def test_a_stopped_worker_ends_in_a_deadline_and_not_in_drained() -> None:
    setting = Setting()
    setting.network.freeze(setting.workers[0].agent.name)
    with pytest.raises(DeadlineExceeded, match="still in flight"):
        setting.run(timeout_s=0.2)
    assert setting.transfer.in_flight
    assert not setting.transfer.drain(0.05)
    with pytest.raises(FabricError):
        setting.transfer.release()
    setting.network.thaw(setting.workers[0].agent.name)
    assert setting.transfer.drain(1.0)
    setting.transfer.release()
    setting.memory.release()
    setting.buffers.release()


def test_a_send_buffer_is_not_filled_again_while_it_is_on_the_wire() -> None:
    setting = Setting(direct=1 << 30, buffer=512)
    setting.network.freeze(setting.workers[1].agent.name)
    with pytest.raises(DeadlineExceeded):
        setting.run(timeout_s=0.2)
    posted = len(setting.transfer._posted)
    assert posted <= BUFFERS + 1 < len(setting.transfer._packed)


def test_a_failed_write_is_raised_and_never_drained() -> None:
    setting = Setting()
    setting.network.inject("done", FabricError("the cable is out"))
    with pytest.raises(FabricError, match="cable"):
        setting.run()
    assert not setting.transfer.drain(1.0)
    setting.transfer.release()


def test_a_check_that_raises_ends_the_run() -> None:
    setting = Setting()

    def check() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        setting.run(check=check)
    assert setting.transfer.drain(1.0)


def test_a_preparation_that_fails_leaves_nothing_behind() -> None:
    setting = Setting()
    setting.transfer.release()
    setting.network.inject("prepare", FabricError("no"), times=1)
    with pytest.raises(FabricError, match="no"):
        Transfer(setting.fabric, setting.memory, setting.buffers, setting.lanes)
    assert setting.fabric._writes == set()


def test_a_worker_that_answers_for_another_agent_is_refused() -> None:
    setting = Setting()
    setting.transfer.release()
    lane = setting.lanes[0]
    lane.binding = lane.binding.model_copy(update={"agent": "somebody"})
    with pytest.raises(InvalidRequest, match="somebody"):
        Transfer(setting.fabric, setting.memory, setting.buffers, [lane])


def test_the_same_over_nixl_within_one_process() -> None:
    setting = Setting(real=True)
    try:
        for _ in range(2):
            for tensor in setting.weights.values():
                tensor.add_(1.0)
            setting.run()
            setting.expect()
            for worker, plan in zip(setting.workers, setting.plans, strict=True):
                arrived, deadline = 0, time.monotonic() + 5.0
                while arrived < plan.nbytes and time.monotonic() < deadline:
                    arrived += sum(decode_landed(message).nbytes for _, message in worker.agent.notifications())
                assert arrived == plan.nbytes
        setting.transfer.release()
        setting.buffers.release()
        setting.memory.release()
    finally:
        setting.fabric.close()
        for worker in setting.workers:
            worker.agent.close()
