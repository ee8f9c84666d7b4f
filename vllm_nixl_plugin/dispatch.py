"""Dispatch modes that stand around vLLM's own code: what it touches, and where its large tensors are made.

No vLLM and no other file of the plugin here. `model` watches with `Watch`, `loadtrace` and `selfcheck` with `Writes`;
`twin` creates with `LargeOnMeta`, and loads under `DefaultDtype` where a thread of its own does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
LARGE_NBYTES = 1 << 20
"""Tensors above this size are on meta in a twin; smaller ones keep their creation values."""


class Watch(TorchDispatchMode):
    """Notes the storages that are written, or read by an op that is not a view, while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.touched: dict[int, str] = {}
        """Storage -> the first op that touched it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not is_view(func):
            for tensor in tensors_in([*args, *kwargs.values()]):
                self.touched.setdefault(int(tensor.untyped_storage()._cdata), str(func))
        return out


class Writes(TorchDispatchMode):
    """Notes the storages that are written while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._schema.is_mutable:
            for number, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    value = args[number] if number < len(args) else kwargs.get(argument.name)
                    self.written |= {int(t.untyped_storage()._cdata) for t in tensors_in([value])}
        return out


class DefaultDtype(TorchFunctionMode):
    """Makes new floating tensors as if the default dtype were another one: in this thread, while the process has its
    own. (`torch.set_default_dtype` is for all threads, and the engine's goes on.)"""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        free = func in _NEW and kwargs.get("dtype") is None and kwargs.get("out") is None
        if free and (func in _NEW_FLOATS or any(isinstance(a, float) for a in (*args, *kwargs.values()))):
            kwargs = kwargs | {"dtype": self.dtype}
        return func(*args, **kwargs)


_NEW_FLOATS = {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.eye, torch.linspace, torch.logspace}
_NEW = _NEW_FLOATS | {torch.full, torch.arange, torch.tensor, torch.scalar_tensor}


def is_view(func: Any) -> bool:
    """Whether an op only returns views of its arguments."""
    returns = func._schema.returns
    return func is aten.detach.default or (
        bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    )


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among arguments, nested lists and tuples included."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


_FACTORIES = {
    aten.empty.memory_format: None, aten.empty_strided.default: None, aten.zeros.default: 0, aten.ones.default: 1,
    aten.full.default: ..., aten.rand.default: None, aten.randn.default: None, aten.new_empty.default: None,
    aten.new_zeros.default: 0, aten.new_ones.default: 1, aten.new_full.default: ..., aten.empty_like.default: None,
    aten.zeros_like.default: 0, aten.ones_like.default: 1, aten.full_like.default: ...,
    aten.new_empty_strided.default: None,
}  # fmt: skip


class LargeOnMeta(TorchDispatchMode):
    """Makes factories put large tensors on meta, and remembers the value that a filled one has, and which small ones
    (ids of storages) nobody has written to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fill: dict[int, float] = {}
        self.undefined: set[int] = set()
        self.hold: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = list(tensors_in([*args, *kwargs.values()]))
        if func in _FACTORIES:
            shape, dtype = _factory_shape(func, args, kwargs)
            if shape.numel() * dtype.itemsize > LARGE_NBYTES:
                return self._on_meta(func, args, kwargs)
            if _FACTORIES[func] is None:
                out: torch.Tensor = func(*args, **kwargs)
                self.undefined.add(int(out.untyped_storage()._cdata))
                self.hold.append(out)
                return out
        elif any(t.device.type == "meta" for t in given):
            # Arithmetic on a large tensor stays on meta; small operands follow it there.
            kwargs.pop("device", None)
            args = _to_meta(args)
            for tensor in given:
                if not is_view(func) and func._schema.is_mutable:
                    self.fill.pop(int(tensor.untyped_storage()._cdata), None)
        elif func._schema.is_mutable:
            self.undefined.difference_update(int(tensor.untyped_storage()._cdata) for tensor in given)
        return func(*args, **kwargs)

    def _on_meta(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        kwargs = {k: v for k, v in kwargs.items() if k not in ("pin_memory", "generator")}
        out: torch.Tensor = func(*args, **(kwargs | {"device": torch.device("meta")}))
        value = _FACTORIES[func]
        if value is ...:
            value = kwargs.get("fill_value", args[-1] if args else 0)
        if value is not None:
            self.fill[int(out.untyped_storage()._cdata)] = value
            self.hold.append(out)
        return out


def _factory_shape(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[torch.Size, torch.dtype]:
    like = args[0] if args and isinstance(args[0], torch.Tensor) else None
    dtype = kwargs.get("dtype") or (like.dtype if like is not None else torch.get_default_dtype())
    if func.__name__.startswith("new_"):
        return torch.Size(args[1]), dtype
    return (like.shape if like is not None else torch.Size(args[0])), dtype


def _to_meta(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return values.to("meta") if values.dim() and values.device.type != "meta" else values
    return type(values)(_to_meta(v) for v in values) if isinstance(values, list | tuple) else values
