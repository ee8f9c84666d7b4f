"""Pairing of serving modules with their processed twins: what is copied, what is bound anew, what is left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from vllm_nixl_plugin import graph
from vllm_nixl_plugin.errors import NeedsRestart
from vllm_nixl_plugin.model import state_of
from vllm_nixl_plugin.pairing import Pairing


class Kernel:
    """A plain object that belongs to a module, as a quantization method's kernel does."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale
        self.names = ["a", "b"]


Kernel.__module__ = "some_engine.kernels"


class Handle:
    """An object that frees something when it dies."""

    def __init__(self, pointer: int) -> None:
        self.pointer = torch.tensor(pointer)

    def __del__(self) -> None:
        pass


Handle.__module__ = "some_engine.kernels"


class Layer(nn.Module):
    def __init__(self, value: float, *, pointer: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 3), value), requires_grad=False)
        self.register_buffer("table", torch.full((2,), value))
        self.kernel = Kernel(torch.full((3,), value))
        packed = torch.full((5,), value)
        self.apply_packed = lambda x: x + packed
        self.size = 4
        self.cached: torch.Tensor | None = None
        handle = Handle(pointer)
        self.apply_handle = lambda x: x + handle.pointer


def at_load(module: nn.Module) -> dict[str, Any]:
    return {f"m.{path}": state_of(slot.value) for path, slot in graph.owned(module)}


def paired(served: nn.Module, twin: nn.Module, *, captured: bool = False, state: dict[str, Any] | None = None):
    pairing = Pairing(at_load(served) if state is None else state, captured=captured)
    pairing.module("m", served, twin)
    return pairing.change


def test_tensors_of_the_same_geometry_are_poured_wherever_they_are_kept():
    served, twin = Layer(1.0), Layer(2.0)
    held = {"weight": served.weight, "table": served.table, "scale": served.kernel.scale, "kernel": served.kernel}
    closure = served.apply_packed
    paired(served, twin).apply()
    assert served.weight is held["weight"]
    assert served.kernel is held["kernel"]
    assert served.apply_packed is closure
    for tensor in (held["weight"], held["table"], held["scale"], closure(torch.zeros(5))):
        assert torch.equal(tensor, torch.full_like(tensor, 2.0))


def test_what_an_object_frees_is_bound_anew_and_never_copied():
    served, twin = Layer(1.0, pointer=7), Layer(2.0, pointer=9)
    old = served.apply_handle.__closure__[0].cell_contents
    paired(served, twin).apply()
    new = served.apply_handle.__closure__[0].cell_contents
    assert old is not new
    assert int(old.pointer) == 7
    assert int(new.pointer) == 9


def test_a_rebind_is_refused_by_path_where_graphs_are_captured_and_nothing_has_changed():
    served, twin = Layer(1.0), Layer(2.0)
    with pytest.raises(NeedsRestart, match=r"m\.apply_handle\.handle"):
        paired(served, twin, captured=True)
    assert torch.equal(served.weight, torch.ones(4, 3))


def test_a_number_that_processing_derives_is_bound_anew():
    served, twin = Layer(1.0), Layer(2.0)
    twin.size = 8
    paired(served, twin).apply()
    assert served.size == 8


def test_what_the_running_engine_has_changed_since_loading_is_left_alone():
    served, twin = Layer(1.0), Layer(2.0)
    twin.kv_cache = torch.empty(0)
    served.kv_cache = torch.empty(0)
    state = at_load(served)
    served.kv_cache = torch.ones(100)
    served.size = 99
    paired(served, twin, state=state).apply()
    assert served.kv_cache.shape == (100,)
    assert served.size == 99


def test_a_cast_that_appeared_in_a_first_forward_is_dropped():
    served, twin = Layer(1.0), Layer(2.0)
    state = at_load(served)
    served.cached = served.weight.double()
    served.late = served.weight.half()
    paired(served, twin, state=state).apply()
    assert served.cached is None
    assert not hasattr(served, "late")


def test_a_tensor_of_another_geometry_is_bound_anew_as_an_object_of_its_own():
    served, twin = Layer(1.0), Layer(2.0)
    twin.table = torch.full((7,), 3.0)
    taken = twin.table
    paired(served, twin).apply()
    assert torch.equal(served.table, torch.full((7,), 3.0))
    assert served.table is not taken


def test_a_tensor_held_in_two_places_is_poured_once():
    served, twin = Layer(1.0), Layer(2.0)
    served.kernel.scale = served.table
    twin.kernel.scale = twin.table
    change = paired(served, twin)
    assert sum(old is served.table for old, _ in change.pours) == 1


def test_tensors_of_a_twin_that_is_not_processed_are_on_meta_and_leave_the_served_ones_alone():
    served, twin = Layer(1.0), Layer(2.0)
    twin.weight = nn.Parameter(torch.empty(4, 3, device="meta"), requires_grad=False)
    paired(served, twin).apply()
    assert torch.equal(served.weight, torch.ones(4, 3))


def test_an_alias_shares_memory_class_and_attributes():
    weight = nn.Parameter(torch.ones(3), requires_grad=False)
    weight.weight_loader = "loader"  # type: ignore[attr-defined]
    other = graph.alias(weight)
    other.zero_()
    assert other is not weight
    assert torch.equal(weight, torch.zeros(3))
    assert isinstance(other, nn.Parameter)
    assert other.weight_loader == "loader"
    assert copy.copy(other) is not other
