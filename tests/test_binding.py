"""Memory of a worker: what is registered, released, set aside, and where shadows are made."""

from __future__ import annotations

import subprocess
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_nixl_plugin import memory
from vllm_nixl_plugin.binding import Binder
from vllm_nixl_plugin.composition import Held, Part, Place
from vllm_nixl_plugin.errors import EngineAsleep, FabricError, InsufficientMemory
from vllm_nixl_plugin.graph import raw_bytes
from vllm_nixl_plugin.memory import Arena, Registrations
from vllm_nixl_plugin.memory_fabric import MemoryFabric, MemoryNetwork
from vllm_nixl_plugin.processes import is_gone, this_process
from vllm_nixl_plugin.settings import WorkerSettings
from vllm_nixl_plugin.wire import Destination, WorkerPlan

CPU = torch.device("cpu")


@dataclass
class Model:
    """What a binder asks of a loaded model: where its live tensors are."""

    tensors: dict[str, torch.Tensor]
    twin: Any = field(default_factory=lambda: types.SimpleNamespace(storages={}))

    def live_storage(self, destination: Destination) -> torch.Tensor:
        return raw_bytes(self.tensors[destination.names[0]])


def held(model: Any, **homes: str) -> Held:
    destinations = [
        Destination(names=(name,), nbytes=raw_bytes(model.tensors[name]).numel(), home=home)
        for name, home in homes.items()
    ]
    plan = WorkerPlan(weights=(), destinations=tuple(destinations), copies=())
    places = tuple(Place(model, (0, i), d, ()) for i, d in enumerate(destinations))
    return Held(plan, False, (Part(model, plan, places, {}, False),))


def binder() -> Binder:
    made = Binder(0, WorkerSettings(), lambda: CPU)
    made.agent = MemoryFabric("worker", MemoryNetwork())
    return made


def registered(agent: Any) -> set[int]:
    return {region.address for one in agent._registrations for region in one.regions}


def test_live_memory_that_moved_is_registered_anew_and_what_vanished_is_released():
    model = Model({"a": torch.ones(4), "b": torch.ones(8)})
    plan, made = held(model, a="live", b="live"), binder()
    first = made.bind(plan, "in_place")
    assert registered(made.agent) == set(first.addresses)
    assert made.bind(plan, "in_place") is first
    old = model.tensors["a"]
    model.tensors["a"] = torch.ones(4)
    second = made.bind(plan, "in_place")
    assert second.addresses[0] == model.tensors["a"].data_ptr() != old.data_ptr()
    assert second.addresses[1] == first.addresses[1]
    assert registered(made.agent) == set(second.addresses)
    assert second.digest() != first.digest()


def test_memory_that_was_unmapped_and_mapped_again_at_the_same_address_is_registered_anew(
    monkeypatch: pytest.MonkeyPatch,
):
    number = 1
    monkeypatch.setattr("vllm_nixl_plugin.memory.allocation_of", lambda tensor: number)
    monkeypatch.setattr("vllm_nixl_plugin.binding.allocation_of", lambda tensor: number)
    plan, made = held(Model({"a": torch.ones(4)}), a="live"), binder()
    made.bind(plan, "in_place")
    [before] = made.agent._registrations
    made.bind(plan, "in_place")
    assert made.agent._registrations == {before}
    number = 2
    made.bind(plan, "in_place")
    assert before not in made.agent._registrations
    assert len(made.agent._registrations) == 1


def test_memory_that_cannot_be_deregistered_any_more_does_not_keep_its_successor_out(caplog: pytest.LogCaptureFixture):
    agent = MemoryFabric("worker", MemoryNetwork())
    agent._register = lambda regions: lambda: (_ for _ in ()).throw(FabricError("gone"))  # type: ignore[method-assign]
    registrations = Registrations(agent)
    registrations.keep({"w": torch.ones(4)})
    moved = torch.ones(4)
    registrations.keep({"w": moved})
    assert moved.data_ptr() in registered(agent)
    assert "could not be deregistered" in caplog.text


def test_shadows_are_set_aside_at_a_fence_until_their_writers_are_gone():
    plan, made = held(Model({"a": torch.ones(4)}), a="shadow"), binder()
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as writer:
        fields = Path(f"/proc/{writer.pid}/stat").read_text().rpartition(")")[2].split()
        name = f"{this_process().rpartition('/')[0]}/{writer.pid}@{fields[19]}"
        assert not is_gone(name)
        first = made.bind(plan, "shadow")
        before = made.incarnation
        made.fence([name])
        assert made.incarnation != before
        made.agent = MemoryFabric("worker again", MemoryNetwork())
        second = made.bind(plan, "shadow")
        assert second.addresses != first.addresses
        assert len(made._condemned) == 1
        writer.kill()
        writer.wait()
    assert is_gone(name)
    made.bind(plan, "shadow")
    assert made._condemned == []


@pytest.mark.parametrize("writers", [[], ["of another namespace"]])
def test_shadows_whose_writers_cannot_be_known_are_set_aside_for_good(writers: list[str]):
    if writers:
        writers = [f"{this_process().split(' ')[0]} pid:[1]/7@7"]
    plan, made = held(Model({"a": torch.ones(4)}), a="shadow"), binder()
    made.bind(plan, "shadow")
    made.fence(writers)
    made.agent = MemoryFabric("worker again", MemoryNetwork())
    made.bind(plan, "shadow")
    assert len(made._condemned) == 1


def test_a_process_of_another_machine_cannot_reach_memory_that_is_deregistered():
    assert is_gone("another-boot pid:[1]/7@7")
    assert not is_gone("")
    assert not is_gone(this_process())


@pytest.mark.parametrize(("shadow", "free", "device"), [
    ("auto", 1 << 30, "meta"), ("auto", 100, "cpu"), ("device", 1 << 30, "meta"), ("host", 1 << 30, "cpu"),
])  # fmt: skip
def test_shadows_are_on_the_device_or_on_the_host(
    monkeypatch: pytest.MonkeyPatch, shadow: Any, free: int, device: str
):
    """"meta" stands for a device that is not the host."""
    pinned = []
    monkeypatch.setattr(memory, "available_nbytes", lambda at: (1 << 40) if at == CPU else free + (256 << 20))
    monkeypatch.setattr(memory, "_pin", pinned.append)
    arena = Arena(torch.device("meta"), shadow)
    arena.reserve([("a", 1000), ("b", 24)])
    assert {arena["a"].device.type, arena["b"].device.type} == {device}
    assert len(pinned) == (device == "cpu")


def test_shadows_that_fit_nowhere_are_refused_with_what_is_lacking(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "available_nbytes", lambda at: (256 << 20) + (70 if at == CPU else 7))
    with pytest.raises(InsufficientMemory, match="186 are lacking") as refused:
        Arena(torch.device("meta")).reserve([("a", 200)])
    assert refused.value.details == {"needed_nbytes": 256, "free_nbytes": 70}


def test_an_engine_whose_weights_sleep_refuses_begin(monkeypatch: pytest.MonkeyPatch):
    from vllm_nixl_plugin.plane import WorkerPlane

    data = types.SimpleNamespace(tag="weights", is_asleep=True)
    allocator = types.SimpleNamespace(instance=types.SimpleNamespace(pointer_to_data={1: data}))
    module = types.ModuleType("cumem")
    module.CuMemAllocator = allocator  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", module)
    plan, plane = held(Model({"a": torch.ones(4)}), a="shadow"), object.__new__(WorkerPlane)
    plane.worker, plane.binder, plane._torn = object(), binder(), set()
    plane.installer = types.SimpleNamespace(untidy=False)  # type: ignore[assignment]
    plane._held = {id(plan.plan): plan}  # type: ignore[assignment]
    with pytest.raises(EngineAsleep, match="wake_up"):
        plane.bind(plan.plan, "shadow")
    assert plane.binder.arena is None
    data.is_asleep = False
    assert plane.bind(plan.plan, "shadow").addresses
