"""What an install changes: serving modules compared with their processed twins (the stage: install).

`Pairing` walks the serving modules and the twin's side by side and lists what has to happen: *pours*, values copied
into the tensors that serve (captured graphs and closures hold them), and *rebinds*, where processing made something
that cannot be copied into. Where graphs are captured a rebind is refused. `Change.apply` carries the list out, while
the engine is paused. Called by `install`.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vllm_nixl_plugin import graph
from vllm_nixl_plugin.errors import NeedsRestart
from vllm_nixl_plugin.model import geometry_of, state_of

_MISSING = object()
_PLAIN = (int, float, str, bytes, bool, complex, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(slots=True)
class Change:
    """What an install does: ``pours`` are (serving tensor, new values), ``rebinds`` (path, slot, new value)."""

    pours: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    rebinds: list[tuple[str, graph.Slot, Any]] = field(default_factory=list)
    removals: list[tuple[str, graph.Slot]] = field(default_factory=list)

    def apply(self) -> None:
        """The point of no return. Copies go first, so that values bound afterwards share nothing with the twin."""
        with torch.no_grad():
            for served, new in self.pours:
                served.data.copy_(new)
        for _, slot, value in self.rebinds:
            # The twin takes its tensor objects back when it is restored.
            slot.rebind(graph.alias(value) if isinstance(value, torch.Tensor) else value)
        for _, slot in self.removals:
            slot.remove()


class Pairing:
    """Compares serving modules with their processed twins.

    ``at_load``: `LoadRecord.state`; what differs from it today belongs to the running engine (KV cache, buffers) and is
    left alone. ``captured``: whether CUDA graphs hold addresses, so that rebinding would go unseen. ``engines``:
    addresses of memory that is the engine's own (KV caches).
    """

    def __init__(self, at_load: Mapping[str, Any], *, captured: bool, engines: Set[int] = frozenset()) -> None:
        self.at_load = at_load
        self.captured = captured
        self.engines = engines
        self.change = Change()
        self._seen: set[tuple[int, int]] = set()
        self._poured: set[int] = set()

    def module(self, path: str, served: nn.Module, twin: nn.Module) -> None:
        """Errors: NeedsRestart naming the path that a captured graph has baked in."""
        self._holder(path, served, twin)

    def derived_late(self, path: str, served: nn.Module) -> None:
        """What a forward of the module has derived from its weights since loading is dropped. Call it when no forward
        can come any more."""
        listed = {below for below, *_ in (*self.change.rebinds, *self.change.removals)}
        for name, slot in graph.owned(served):
            below = f"{path}.{name}" if path else name
            if slot.kind in ("attr", "buffer") and below not in listed and self._appeared_later(below, slot.value):
                if below in self.at_load:
                    self.change.rebinds.append((below, slot, None))
                else:
                    self.change.removals.append((below, slot))

    def _holder(self, path: str, served: Any, twin: Any) -> None:
        old, new = graph.slots(served), graph.slots(twin)
        for key, slot in new.items():
            below = f"{path}.{key}" if path else str(key)
            mine = old.get(key)
            value = mine.value if mine is not None else _MISSING
            if not self._merge(below, value, slot.value):
                place = mine or graph.Slot(served, slot.kind, key, None)
                self._rebind(below, place, slot.value)
        for key, mine in old.items():
            below = f"{path}.{key}" if path else str(key)
            if key not in new and self._appeared_later(below, mine.value) and mine.kind in ("attr", "buffer", "item"):
                self.change.removals.append((below, mine))

    def _rebind(self, path: str, slot: graph.Slot, value: Any) -> None:
        if self.captured:
            raise NeedsRestart(
                f"{path} of the running engine cannot be changed in place ({_kind(slot.value)} -> {_kind(value)}), and "
                "captured CUDA graphs would not see a new one. Restart the server with the new checkpoint, or serve "
                "with --enforce-eager.",
                path=path,
            )
        self.change.rebinds.append((path, slot, value))

    def _merge(self, path: str, old: Any, new: Any) -> bool:
        """Whether the new value is or will be in place without rebinding ``path``."""
        if old is new or (id(old), id(new)) in self._seen:
            return True
        if isinstance(new, torch.Tensor) or isinstance(old, torch.Tensor):
            return self._tensors(path, old, new)
        if isinstance(new, nn.Module):
            return isinstance(old, nn.Module)
        if old is _MISSING or type(old) is not type(new):
            return self._engine_owned(path, old) and old is not _MISSING
        if isinstance(new, _PLAIN):
            return _same(old, new) or self._engine_owned(path, old)
        if isinstance(new, types.FunctionType):
            if old.__code__ is not new.__code__:
                return False
        elif isinstance(new, types.MethodType) and old.__func__ is not new.__func__:
            return False
        if isinstance(new, torch.ScriptObject) or graph.is_releasing(new):
            return False
        if not graph.has_slots(new):
            return True  # configuration, groups, loggers: shared, or the engine's own
        return self._inside(path, old, new)

    def _inside(self, path: str, old: Any, new: Any) -> bool:
        self._seen.add((id(old), id(new)))
        if isinstance(new, dict | list) or graph.is_plain_object(new) or graph.is_closure(new):
            if isinstance(new, list) and len(old) != len(new):
                return self._engine_owned(path, old) or not _tensors_below(new)
            self._holder(path, old, new)
            return True
        mine = graph.slots(old)
        return len(mine) == len(graph.slots(new)) and all(
            self._merge(f"{path}.{key}", mine[key].value, slot.value)
            for key, slot in graph.slots(new).items()
            if key in mine
        )

    def _tensors(self, path: str, old: Any, new: Any) -> bool:
        if isinstance(new, torch.Tensor) and new.device.type == "meta":
            return True  # of a module that is not processed
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and geometry_of(old) == geometry_of(new):
            if id(old) not in self._poured and old.numel():
                self._poured.add(id(old))
                self.change.pours.append((old, new))
            return True
        if self._recast(path, old, new) or self._appeared_later(path, old):
            return False
        return self._engine_owned(path, old)

    def _recast(self, path: str, old: Any, new: Any) -> bool:
        """Whether a first forward put another form of a tensor in its place: it goes back to what loading leaves.

        A placeholder for what the engine brings (a KV cache) is empty after loading.
        """
        both = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
        return both and new.numel() > 0 and self.at_load.get(path) == geometry_of(new)

    def _appeared_later(self, path: str, old: Any) -> bool:
        """Whether a tensor was made from the weights after loading, by a first forward: it is dropped, and made again.

        Under captured graphs it must stay where it is; integers and bytes are workspaces, not weights.
        """
        return (
            isinstance(old, torch.Tensor)
            and old.is_floating_point()
            and not self.captured
            and self.at_load.get(path) is None
            and old.untyped_storage().data_ptr() not in self.engines
        )

    def _engine_owned(self, path: str, old: Any) -> bool:
        """Whether the running engine has put its own value here since loading."""
        return path in self.at_load and old is not _MISSING and not _same(state_of(old), self.at_load[path])


def _same(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or (a != a and b != b)
    except Exception:  # noqa: BLE001 - a foreign __eq__ that refuses: not the same
        return False


def _tensors_below(values: Iterable[Any]) -> bool:
    return any(isinstance(v, torch.Tensor) for v in values)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor {list(value.shape)} {value.dtype}"
    return f"{type(value).__name__}" + (f" {value!r}" if isinstance(value, int | float | str) else "")
