"""Sources are used again only where nothing has changed: whatever a trainer may do to its tensors is noticed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from trainer_client import LocalShard, collector
from trainer_client.collector import Collector
from trainer_client.sources import collect


class Block(nn.Module):
    """Parameters, a persistent buffer and one that is not, a child that is there twice, and one that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 6)
        self.two = nn.Linear(6, 4, bias=False)
        self.again = self.two
        self.register_module("nothing", None)
        self.register_parameter("absent", None)
        self.register_buffer("saved", torch.ones(3))
        self.register_buffer("volatile", torch.ones(2), persistent=False)


def module() -> nn.Module:
    return nn.Sequential(Block(), Block())


def state() -> dict[str, Any]:
    rows = torch.randn(8, 4)
    boxes = [LocalShard(rows[:2], (16, 4), (0, 0)), LocalShard(rows[2:4], (16, 4), (8, 0))]
    return {"w": torch.randn(4, 4), "v": torch.randn(6), "p": nn.Parameter(torch.randn(4)), "one": boxes[0],
            "boxes": boxes[1:]}  # fmt: skip


@pytest.fixture(params=["guards of torch", "loops"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "loops":
        monkeypatch.setitem(__import__("sys").modules, "torch._C._dynamo.guards", None)


def check(model: Any, change: Callable[[Any], None] | None) -> None:
    """After ``change`` the collector gives what `collect` gives; before it, and after it again, its last answer."""
    again = Collector()
    first = again.collect(model)
    assert again.collect(model) is first
    if change is None:
        return
    change(model)
    second = again.collect(model)
    assert second is not first
    expected = collect(model)
    assert second.shards == expected.shards
    assert second.places() == expected.places()
    assert again.collect(model) is second


def set_data(tensor: Tensor, value: Tensor) -> None:
    tensor.data = value


def swap(block: Any) -> None:
    block.one, block.two = nn.Linear(4, 6), block.one


def move_parameter(model: Any) -> None:
    """The tensors of all modules, one after the other, stay the same."""
    weight = model[1].two.weight
    del model[1].two.weight
    model[1].two.extra = nn.Linear(1, 1, bias=False)
    model[1].two.extra.weight = weight


def rename(model: Any) -> None:
    weight = model[0].two.weight
    del model[0].two.weight
    model[0].two.kernel = weight


def resized(model: Any) -> None:
    """As FSDP1 does: the tensor stays, its memory goes and comes."""
    storage = model[0].one.weight.untyped_storage()
    nbytes, before, others = storage.nbytes(), storage.data_ptr(), []
    while storage.data_ptr() == before:
        storage.resize_(0)
        others.append(torch.empty(nbytes, dtype=torch.uint8))
        storage.resize_(nbytes)


CHANGES: dict[str, Callable[[Any], None]] = {
    "a parameter is replaced": lambda m: setattr(m[0].one, "weight", nn.Parameter(torch.randn(6, 4))),
    "p.data = other memory": lambda m: set_data(m[1].two.weight, torch.randn(4, 6)),
    "p.data = another shape": lambda m: set_data(m[1].two.weight, m[1].two.weight.data.view(6, 4)),
    "p.data = other strides": lambda m: set_data(m[1].two.weight, m[1].two.weight.data.view(6, 4).t()),
    "p.data = another dtype there": lambda m: set_data(m[0].saved, m[0].saved.view(torch.int32)),
    "p.data = a part": lambda m: set_data(m[0].one.bias, m[0].one.bias.data[:3]),
    "to another dtype": lambda m: m.to(torch.bfloat16),
    "a storage is freed and made again": resized,
    "a parameter more": lambda m: m[0].register_parameter("more", nn.Parameter(torch.ones(1))),
    "a parameter where there was none": lambda m: setattr(m[0], "absent", nn.Parameter(torch.ones(1))),
    "a parameter less": lambda m: m[0].one.register_parameter("bias", None),
    "a parameter is deleted": lambda m: delattr(m[0].one, "bias"),
    "a parameter has another name": rename,
    "a parameter moves to another module": move_parameter,
    "a module more": lambda m: m.append(Block()),
    "a module less": lambda m: delattr(m[0], "two"),
    "a module where there was none": lambda m: setattr(m[0], "nothing", nn.Linear(2, 2)),
    "modules change places": lambda m: swap(m[0]),
    "tied": lambda m: setattr(m[0].one, "weight", m[1].one.weight),
    "untied": lambda m: setattr(m[0], "again", nn.Linear(6, 4, bias=False)),
    "a buffer is replaced": lambda m: setattr(m[0], "saved", torch.zeros(3)),
    "a buffer is saved no more": lambda m: m[0].register_buffer("saved", m[0].saved, persistent=False),
    "a buffer is saved from now on": lambda m: m[0].register_buffer("volatile", m[0].volatile, persistent=True),
    "names that are not saved": lambda m: setattr(m, "_keys_to_ignore_on_save", ["0.one.bias"]),
}


@pytest.mark.parametrize("change", [None, *CHANGES], ids=str)
def test_a_module_that_has_changed_is_collected_anew(change: str | None) -> None:
    check(module(), CHANGES[change] if change else None)


def declared_tied(model: Any) -> None:
    model.all_tied_weights_keys["0.one.weight"] = "1.one.weight"


def test_a_tie_that_is_declared_or_broken_is_noticed() -> None:
    model: Any = module()
    model.all_tied_weights_keys = {}
    model[0].one.weight = model[1].one.weight
    check(model, declared_tied)
    check(model, lambda m: setattr(m[0].one, "weight", nn.Parameter(m[1].one.weight.detach().clone())))


STATE_CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "replaced": lambda s: s.update(w=torch.randn(4, 4)),
    "another view": lambda s: s.update(w=s["w"].t()),
    "a shorter view": lambda s: s.update(v=s["v"][:5]),
    "a later view": lambda s: s.update(v=s["v"][1:]),
    "another dtype there": lambda s: s.update(v=s["v"].view(torch.int32)),
    "a parameter": lambda s: s.update(p=nn.Parameter(torch.randn(4))),
    "a name more": lambda s: s.update(more=torch.ones(1)),
    "a name less": lambda s: s.pop("v"),
    "another order": lambda s: s.update(w=s.pop("w")),
    "another name": lambda s: s.update(x=s.pop("boxes")),
    "names change places": lambda s: s.update(w=s["v"], v=s["w"]),
    "a box elsewhere": lambda s: s.update(one=LocalShard(s["one"].tensor, (16, 4), (4, 0))),
    "a box of another tensor": lambda s: s.update(one=LocalShard(s["one"].tensor, (24, 4), (0, 0))),
    "a box in other memory": lambda s: s.update(one=LocalShard(torch.randn(2, 4), (16, 4), (0, 0))),
    "a box more": lambda s: s["boxes"].append(LocalShard(torch.randn(2, 4), (16, 4), (14, 0))),
    "a box, not a list": lambda s: s.update(boxes=s["boxes"][0]),
}


@pytest.mark.parametrize("change", [None, *STATE_CHANGES], ids=str)
def test_a_mapping_that_has_changed_is_collected_anew(change: str | None) -> None:
    check(state(), STATE_CHANGES[change] if change else None)


def test_other_tensors_over_the_same_memory_are_the_same() -> None:
    model, again = module(), Collector()
    first = again.collect(model.state_dict())
    assert again.collect(model.state_dict()) is first
    given = state()
    boxes = {k: v if k != "boxes" else [LocalShard(b.tensor[:], b.global_shape, b.offsets) for b in v]
             for k, v in given.items()}  # fmt: skip
    assert again.collect(given) is again.collect(boxes)


def test_a_lazy_negation_is_still_refused() -> None:
    again, given = Collector(), {"v": torch.randn(4)}
    again.collect(given)
    given["v"] = torch._neg_view(given["v"])
    with pytest.raises(Exception, match="resolve_neg"):
        again.collect(given)


def test_what_a_hook_or_a_class_of_its_own_puts_into_a_state_dict_is_asked_for_each_time() -> None:
    class Mean(nn.Linear):
        """Saves an average of its weights."""

        average = torch.zeros(4, 4)

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            destination[prefix + "weight"] = self.average

    def hooked() -> nn.Module:
        made = nn.Linear(4, 4)
        made.register_state_dict_post_hook(lambda m, d, prefix, _: d.update({f"{prefix}weight": averages[-1]}))
        return nn.Sequential(made)

    averages = [torch.zeros(4, 4)]
    again, model = Collector(), hooked()
    again.collect(model)
    averages.append(torch.ones(4, 4))
    assert averages[-1].data_ptr() in [s.address for s in again.collect(model).storages]

    model = nn.Sequential(Mean(4, 4))
    again.collect(model)
    Mean.average = torch.ones(4, 4)
    assert Mean.average.data_ptr() in [s.address for s in again.collect(model).storages]

    model = nn.Sequential(nn.Linear(4, 4))
    again.collect(model)
    inner: Any = model[0]
    inner.register_state_dict_post_hook(lambda m, d, prefix, _: d.update({f"{prefix}weight": averages[-1]}))
    assert averages[-1].data_ptr() in [s.address for s in again.collect(model).storages]

    patched: Any = nn.Linear(4, 4)
    again.collect(patched)
    patched.state_dict = lambda: {"weight": averages[0]}
    assert [s.address for s in again.collect(patched).storages] == [averages[0].data_ptr()]


def test_among_many_tensors_the_one_that_moved_is_found() -> None:
    state = {str(i): torch.randn(2) for i in range(600)}
    for name in ("0", "255", "256", "599"):
        check(state, lambda s, name=name: s.update({name: torch.randn(2)}))  # type: ignore[misc]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def local(model: Any) -> Any:
    return model[0].one.weight._local_tensor


def place_anew(model: Any) -> None:
    weight = model[0].one.weight
    model[0].one.weight = nn.Parameter(DTensor.from_local(weight.to_local(), weight.device_mesh, [Replicate()]))


DISTRIBUTED: dict[str, Callable[[Any], None]] = {
    "a local tensor elsewhere": lambda m: set_data(local(m), local(m).clone()),
    "a local tensor is another": lambda m: setattr(m[0].one.weight, "_local_tensor", local(m).clone()),
    "another placement of the same memory": place_anew,
    "a plain tensor": lambda m: setattr(m[0].one, "weight", nn.Parameter(local(m))),
    "gathered": lambda m: m[0].unshard(),
}


@pytest.mark.parametrize("change", [None, *DISTRIBUTED], ids=str)
@pytest.mark.usefixtures("alone")
def test_an_fsdp2_module_that_has_changed_is_collected_anew(change: str | None) -> None:
    model, mesh = module(), init_device_mesh("cpu", (1,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    check(model, DISTRIBUTED[change] if change else None)
    again = Collector()
    first = again.collect(model.state_dict())
    assert again.collect(model.state_dict()) is first
    with torch.no_grad():
        model[1].two.weight.add_(1)
    assert again.collect(model.state_dict()) is first


def test_another_module_of_the_same_form_is_another() -> None:
    again, one, two = Collector(), module(), module()
    first = again.collect(one)
    assert again.collect(two).places() == collect(two).places() != first.places()


def test_iterables_are_drawn_each_time() -> None:
    again, weight = Collector(), torch.randn(4)
    assert again.collect(iter([("w", weight)])) is not again.collect(iter([("w", weight)]))
    assert again.collect({"w": weight}, copied=True) is not again.collect({"w": weight}, copied=True)


def test_a_module_is_not_kept_alive() -> None:
    again, model = Collector(), module()
    again.collect(model)
    gone = weakref.ref(model), weakref.ref(model[0].one.weight)  # type: ignore[index]
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert again.collect({"w": torch.ones(2)}).shards


def test_what_cannot_be_compared_is_collected_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: type) -> Any:
        raise collector.Unusual

    monkeypatch.setattr(collector, "_comparison", refuse)
    again, model = Collector(), module()
    assert again.collect(model) is not again.collect(model)
