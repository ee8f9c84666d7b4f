"""Stage 1 of a push of unchanged shape: the `Sources` of the last push, after a look at what they were collected from.

    collect     what was seen last is what is there now?  ->  the last `Sources`, else `sources.collect` and remember it

The look reads what `sources.collect` reads and compares it with the last time, by loops inside of the interpreter: no
Python code runs for a tensor. It finds every tensor that was replaced, also by ``p.data = ...``, every name, module,
shape, stride, dtype, placement and address that has changed, and memory that has moved under a storage. Whatever it
does not know (hooks that make a state dict, FSDP1, tensor classes without a meaning here) is collected anew each time.
Nothing of a module is kept alive by being remembered. `WeightClient` has one `Collector` and calls it in every push.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, call, eq, is_
from typing import TYPE_CHECKING, Any

from trainer_client.sharding import LocalShard
from trainer_client.sources import Sources, collect, has_fsdp1, unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainer_client.sources import Value

HARMLESS_HOOKS = ("torch.distributed.fsdp._fully_shard.", "torch.distributed.algorithms._checkpoint.")
"""Where hooks of state dicts come from that change names at most; others may put anything into a state dict."""
AT_A_TIME = 256


class Unusual(Exception):
    """This cannot be compared."""


class Collector:
    """`sources.collect` with a memory of the last call."""

    def __init__(self) -> None:
        self._last: tuple[_Tree | _Names, _Memory, Sources] | None = None

    def collect(
        self, model: nn.Module | Mapping[str, Value] | Iterable[tuple[str, Value]], *, copied: bool = False
    ) -> Sources:
        """The shards of ``model``: the very `Sources` of the last call if nothing has changed since.

        They are held until the next call, unless they are ``copied`` and those of a mapping or iterable, which may have
        been made for this push alone. Errors: those of `sources.collect`.
        """
        from torch import nn

        if self._last is not None:
            seen, memory, sources = self._last
            try:
                if seen.same(model) and memory.same():
                    return sources
            except Exception:  # noqa: BLE001 - if something is wrong with the model, collecting it says so
                pass
        self.forget()
        sources = collect(model)
        if copied and not isinstance(model, nn.Module):
            return sources
        try:
            self._last = _seen(model, sources), _Memory(sources), sources
        except Exception:  # noqa: BLE001 - `Unusual`, or a class that answers in its own way: not to be compared
            self.forget()
        return sources

    def forget(self) -> None:
        """Let go of the last `Sources`."""
        self._last = None


def _seen(model: Any, sources: Sources) -> _Tree | _Names:
    from torch import nn

    if isinstance(model, nn.Module):
        return _Tree(model, sources)
    if isinstance(model, Mapping):
        return _Names(model)
    raise Unusual


class _Memory:
    """The storages of `Sources`: they are held, but somebody may free what they hold, and have others there.

    That they have not moved is known by their tensors.
    """

    def __init__(self, sources: Sources) -> None:
        self._owners = sources.owners
        self._nbytes = [storage.nbytes for storage in sources.storages]

    def same(self) -> bool:
        """Whether they still hold as much."""
        from torch import UntypedStorage

        return all(map(eq, map(UntypedStorage.nbytes, self._owners), self._nbytes))


class _Names:
    """A mapping: its names and values."""

    def __init__(self, model: Mapping[str, Any]) -> None:
        self._names = list(model)
        self._values = _Values(list(model.values()))

    def same(self, model: Any) -> bool:
        """Whether ``model`` has the same."""
        return isinstance(model, Mapping) and list(model) == self._names and self._values.same(list(model.values()))


class _Tree:
    """A module whose state dict is its parameters and buffers: its modules, and what each holds."""

    def __init__(self, model: nn.Module, sources: Sources) -> None:
        root = unwrap(model)
        modules: list[Any] = list(root.modules())
        if has_fsdp1(model) or not all(map(_saves_as_usual, modules)):
            raise Unusual
        number = {id(module): i for i, module in enumerate([*modules, None])}
        self._modules = list(map(weakref.ref, modules))
        self._kinds = list(map(type, modules))
        counts, names, children = _held(modules, "_modules")
        self._children = [number[id(child)] for child in children]
        self._named, tensors = _tensors(modules)
        self._named += counts, names
        self._left_out = _left_out(root, modules)
        self._values = _Values(tensors)
        held = {_local(tensor).untyped_storage()._cdata for tensor in tensors if tensor is not None}
        if not {owner._cdata for owner in sources.owners} <= held:
            raise Unusual

    def same(self, model: Any) -> bool:
        """Whether ``model`` has the same."""
        modules: list[Any] = list(map(call, self._modules))
        root = modules[0]
        if root is None or unwrap(model) is not root or "state_dict" in vars(root):
            return False
        if list(map(type, modules)) != self._kinds or _has_hooks(modules):
            return False
        counts, names, children = _held(modules, "_modules")
        expected = map([*modules, None].__getitem__, self._children)
        if len(children) != len(self._children) or not all(map(is_, children, expected)):
            return False
        named, tensors = _tensors(modules)
        return (
            (*named, counts, names) == self._named
            and _left_out(root, modules) == self._left_out
            and self._values.same(tensors)
        )


def _tensors(modules: Sequence[nn.Module]) -> tuple[tuple[list[Any], ...], list[Tensor | None]]:
    """Counts and names of parameters and buffers, and what stands there."""
    parameters, buffers = _held(modules, "_parameters"), _held(modules, "_buffers")
    return (*parameters[:2], *buffers[:2]), parameters[2] + buffers[2]


def _held(modules: Sequence[nn.Module], kind: str) -> tuple[list[int], list[str], list[Any]]:
    """What modules hold of a kind: how many each, their names, and themselves."""
    found: list[dict[str, Any]] = list(map(attrgetter(kind), modules))
    return list(map(len, found)), list(chain.from_iterable(found)), list(chain.from_iterable(map(dict.values, found)))


def _left_out(root: nn.Module, modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """What decides which of the tensors of a module are sent."""
    hidden = [frozenset(m._non_persistent_buffers_set) for m in modules if m._buffers]
    tied = getattr(root, "all_tied_weights_keys", None)
    ignored = tuple(getattr(root, "_keys_to_ignore_on_save", None) or ())
    return hidden, ignored, dict(tied) if isinstance(tied, Mapping) else None


def _saves_as_usual(module: nn.Module) -> bool:
    from torch import nn

    kind = type(module)
    usual = kind.state_dict is nn.Module.state_dict and kind._save_to_state_dict is nn.Module._save_to_state_dict
    return usual and not vars(module).keys() & {"state_dict", "_save_to_state_dict"} and not _has_hooks([module])


def _has_hooks(modules: Sequence[nn.Module]) -> bool:
    """Whether there are hooks that could put something else into a state dict."""
    for kind in ("_state_dict_hooks", "_state_dict_pre_hooks"):
        of = attrgetter(kind)
        if any(map(of, modules)):
            hooks = chain.from_iterable(map(dict.values, map(of, modules)))
            if not all(str(name).startswith(HARMLESS_HOOKS) for name in set(map(attrgetter("__module__"), hooks))):
                return True
    return False


class _Values:
    """Values of a push in order: tensors, DTensors, and declared `LocalShard`s."""

    def __init__(self, values: list[Any]) -> None:
        """Errors: Unusual."""
        self._kinds = list(map(type, values))
        self._same: list[Callable[[list[Any]], bool]] = []
        for kind in set(self._kinds):
            compared = _comparison(kind)
            chosen = [i for i, of in enumerate(self._kinds) if of is kind]
            one = compared([values[i] for i in chosen])
            self._same.append(one if len(chosen) == len(values) else _of_some(chosen, one))

    def same(self, values: list[Any]) -> bool:
        """Whether these are the same values in the same memory."""
        return list(map(type, values)) == self._kinds and all(same(values) for same in self._same)


def _of_some(chosen: Sequence[int], same: Callable[[list[Any]], bool]) -> Callable[[list[Any]], bool]:
    return lambda values: same(list(map(values.__getitem__, chosen)))


def _comparison(kind: type) -> Callable[[list[Any]], Callable[[list[Any]], bool]]:
    """How values of a class are compared. Errors: Unusual."""
    import torch
    from torch import Tensor

    if kind is type(None):
        return lambda _: lambda _: True
    if kind is LocalShard:
        return _declared
    if kind in (list, tuple):
        return _several
    if not issubclass(kind, Tensor):
        raise Unusual
    functions = (Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
    plain = kind.__torch_dispatch__ is Tensor.__torch_dispatch__
    if plain and kind.__torch_function__ in functions:
        return _plain
    if not plain and torch.distributed.is_available():
        from torch.distributed.tensor import DTensor

        if kind is DTensor:
            return _distributed
    raise Unusual


def _plain(tensors: list[Tensor]) -> Callable[[list[Tensor]], bool]:
    """Address, and all that a tensor is but its values: class, layout, device, dtype, shape, strides, lazy negation.

    Some at a time, so that the second look finds in the processor's cache what the first has fetched.
    """
    from torch import Tensor

    parts = [slice(at, at + AT_A_TIME) for at in range(0, len(tensors), AT_A_TIME)]
    seen = [(part, list(map(Tensor.data_ptr, tensors[part])), _form(tensors[part])) for part in parts]
    return lambda now: all(form(now[part]) and list(map(Tensor.data_ptr, now[part])) == at for part, at, form in seen)


def _form(tensors: list[Tensor]) -> Callable[[list[Tensor]], bool]:
    from torch import Tensor

    try:  # what torch.compile asks before it runs compiled code: the same in one loop of C++
        from torch._C._dynamo.guards import TensorGuards

        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        if guards.check(*tensors):
            return lambda now: bool(guards.check(*now))
    except (ImportError, TypeError, ValueError, RuntimeError, SystemError):
        pass
    shapes, strides = list(map(Tensor.size, tensors)), list(map(Tensor.stride, tensors))
    rest = attrgetter("dtype", "device", "layout")
    others = list(map(rest, tensors))
    if any(map(Tensor.is_neg, tensors)) or any(map(Tensor.is_conj, tensors)):
        raise Unusual
    return lambda now: (
        all(map(eq, map(Tensor.size, now), shapes))
        and all(map(eq, map(Tensor.stride, now), strides))
        and all(map(eq, map(rest, now), others))
        and not any(map(Tensor.is_neg, now))
        and not any(map(Tensor.is_conj, now))
    )


def _distributed(tensors: list[Any]) -> Callable[[list[Any]], bool]:
    """DTensors: how they are placed, and their local tensors."""
    import torch

    parts = attrgetter("_spec"), attrgetter("_local_tensor")

    def shapes(now: list[Any]) -> list[Any]:
        with torch._C.DisableTorchFunctionSubclass():
            return list(map(torch.Tensor.size, now))

    specs, whole = list(map(parts[0], tensors)), shapes(tensors)
    local = _Values(list(map(parts[1], tensors)))
    return lambda now: (
        list(map(parts[0], now)) == specs and shapes(now) == whole and local.same(list(map(parts[1], now)))
    )


def _declared(shards: list[LocalShard]) -> Callable[[list[LocalShard]], bool]:
    where, tensor = attrgetter("global_shape", "offsets"), attrgetter("tensor")
    places, values = list(map(where, shards)), _Values(list(map(tensor, shards)))
    return lambda now: list(map(where, now)) == places and values.same(list(map(tensor, now)))


def _several(lists: list[Sequence[Any]]) -> Callable[[list[Sequence[Any]]], bool]:
    lengths, values = list(map(len, lists)), _Values(list(chain.from_iterable(lists)))
    return lambda now: list(map(len, now)) == lengths and values.same(list(chain.from_iterable(now)))


def _local(tensor: Any) -> Tensor:
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found
