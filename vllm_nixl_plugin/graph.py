"""Walk what a module owns: its tensors, and its plain objects, containers and closures down to theirs.

A leaf under the install stage. `Slot` is one place in a holder where a value can be read and rebound; `slots` lists
them for every kind of holder, so that nothing has to be listed by layer class. Modules below a module are not entered:
a caller visits them by their paths. `tensors` finds every tensor that a module can read, wherever it is kept.
"""

from __future__ import annotations

import enum
import functools
import operator
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_NN_INTERNAL = frozenset(nn.Module().__dict__) - {"training"}
# Configuration, communication and library objects are shared by the whole process; they are not a module's state.
_FOREIGN = (
    "builtins", "torch", "transformers.configuration", "vllm.config", "vllm.distributed", "vllm.platforms", "logging",
    "threading", "functools", "typing", "pathlib", "enum", "numpy", "vllm.compilation", "vllm.transformers_utils",
    "pydantic", "weakref", "_thread", "concurrent", "asyncio", "collections",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slot:
    """``kind``: param, buffer, attr, item or cell; ``key``: name, index or dict key in ``holder``."""

    holder: Any
    kind: str
    key: Any
    value: Any

    def rebind(self, value: Any) -> None:
        """Put another value there. Raises TypeError for a slot of an immutable holder."""
        if self.kind == "param":
            self.holder._parameters[self.key] = value
        elif self.kind == "buffer":
            self.holder._buffers[self.key] = value
        elif self.kind == "attr":
            object.__setattr__(self.holder, self.key, value)
        elif self.kind == "item":
            self.holder[self.key] = value
        elif self.kind == "cell":
            self.holder.cell_contents = value
        else:
            raise TypeError(f"{self.kind} {self.key!r} cannot be rebound")

    def remove(self) -> None:
        """Take the value out of its holder."""
        if self.kind in ("param", "buffer"):
            (self.holder._parameters if self.kind == "param" else self.holder._buffers).pop(self.key)
        elif self.kind == "attr":
            self.holder.__dict__.pop(self.key)
        else:
            del self.holder[self.key]


def is_closure(value: Any) -> bool:
    """Whether a value is a function with cells."""
    return isinstance(value, types.FunctionType) and value.__closure__ is not None


def is_plain_object(value: Any) -> bool:
    """An object with attributes of its own that belongs to a module: scheme, kernel, runner, implementation."""
    if isinstance(value, nn.Module | torch.Tensor | type | types.ModuleType | types.FunctionType | enum.Enum):
        return False
    if not hasattr(value, "__dict__") or isinstance(value, types.MethodType | types.BuiltinFunctionType):
        return False
    return not type(value).__module__.startswith(_FOREIGN)


def is_releasing(value: Any) -> bool:
    """Whether the object frees something when it dies: what it holds must not be copied out of it or into it."""
    return hasattr(type(value), "__del__")


def slots(holder: Any) -> dict[Any, Slot]:
    """The places of one holder; empty for a leaf."""
    out: dict[Any, Slot] = {}
    if isinstance(holder, nn.Module):
        out.update({k: Slot(holder, "attr", k, v) for k, v in holder.__dict__.items() if k not in _NN_INTERNAL})
        out.update({k: Slot(holder, "param", k, v) for k, v in holder._parameters.items()})
        out.update({k: Slot(holder, "buffer", k, v) for k, v in holder._buffers.items()})
    elif isinstance(holder, dict):
        out.update({k: Slot(holder, "item", k, v) for k, v in holder.items()})
    elif isinstance(holder, list):
        out.update({i: Slot(holder, "item", i, v) for i, v in enumerate(holder)})
    elif isinstance(holder, tuple):
        out.update({i: Slot(holder, "fixed", i, v) for i, v in enumerate(holder)})
    elif is_closure(holder):
        for name, cell in zip(holder.__code__.co_freevars, holder.__closure__, strict=True):
            try:
                out[name] = Slot(cell, "cell", name, cell.cell_contents)
            except ValueError:  # a cell that is not filled yet
                continue
    elif isinstance(holder, functools.partial):
        out["func"] = Slot(holder, "fixed", "func", holder.func)
        out["args"] = Slot(holder, "fixed", "args", holder.args)
        out["keywords"] = Slot(holder, "fixed", "keywords", holder.keywords)
    elif isinstance(holder, types.MethodType):
        out["self"] = Slot(holder, "fixed", "self", holder.__self__)
    elif is_plain_object(holder):
        out.update({k: Slot(holder, "attr", k, v) for k, v in vars(holder).items()})
    return out


def has_slots(value: Any) -> bool:
    """Whether `slots` looks into the value (and it is no module)."""
    return not isinstance(value, nn.Module) and (
        isinstance(value, dict | list | tuple | functools.partial | types.MethodType)
        or is_closure(value)
        or is_plain_object(value)
    )


def owned(module: nn.Module) -> Iterator[tuple[str, Slot]]:
    """Every slot below a module with its path, without entering other modules; each holder once."""
    seen = {id(module)}
    todo: list[tuple[str, Any]] = [("", module)]
    while todo:
        prefix, holder = todo.pop()
        for key, slot in slots(holder).items():
            path = f"{prefix}.{key}" if prefix else str(key)
            yield path, slot
            if has_slots(slot.value) and id(slot.value) not in seen:
                seen.add(id(slot.value))
                todo.append((path, slot.value))


def tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that a module can read, by path; a tensor in two places comes twice."""
    for path, slot in owned(module):
        if isinstance(slot.value, torch.Tensor):
            yield path, slot.value


class Look:
    """What a module and its objects held when it was made, to tell quickly whether they hold something else now."""

    def __init__(self, module: nn.Module) -> None:
        self._seen: list[tuple[dict[Any, Any] | list[Any], list[Any]]] = []
        self._add(module)
        for _, slot in owned(module):
            if not isinstance(slot.value, nn.Module):
                self._add(slot.value)

    def _add(self, holder: Any) -> None:
        if isinstance(holder, nn.Module):
            held: tuple[Any, ...] = (holder.__dict__, holder._parameters, holder._buffers)
        elif isinstance(holder, dict | list):
            held = (holder,)
        else:
            held = (vars(holder),) if is_plain_object(holder) else ()
        self._seen += [(values, _values(values)) for values in held]

    def changed(self) -> bool:
        """Whether any of them has got, lost or exchanged a value."""
        return any(
            len(now := _values(held)) != len(before) or not all(map(operator.is_, now, before))
            for held, before in self._seen
        )


def _values(held: dict[Any, Any] | list[Any]) -> list[Any]:
    return list(held.values()) if isinstance(held, dict) else list(held)


def reachable_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Every tensor that can be come by from a module: `tensors`, and those of the modules below it and of all modules
    that it or an object of its own holds. Each at least once."""
    seen = {id(module)}
    todo: list[Any] = [module]
    while todo:
        holder = todo.pop()
        below = holder._modules.values() if isinstance(holder, nn.Module) else ()
        for value in (*(slot.value for slot in slots(holder).values()), *below):
            if isinstance(value, torch.Tensor):
                yield value
            elif id(value) not in seen and (isinstance(value, nn.Module) or has_slots(value)):
                seen.add(id(value))
                todo.append(value)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of all modules under every path that leads to them."""
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}" if path else name, tensor


def memory_held(holder: Any, depth: int = 4) -> set[int]:
    """Addresses of the memory of all tensors that an object holds outside modules: of vLLM's runner, the KV caches and
    its input and output buffers."""
    found: set[int] = set()
    seen: set[int] = set()
    todo = [(0, holder)]
    while todo:
        level, at = todo.pop()
        for slot in slots(at).values():
            value = slot.value
            if isinstance(value, torch.Tensor) and value.device.type != "meta" and value.numel():
                found.add(value.untyped_storage().data_ptr())
            elif level < depth and has_slots(value) and id(value) not in seen and not _of_numbers(value):
                seen.add(id(value))
                todo.append((level + 1, value))
    return found


def _of_numbers(value: Any) -> bool:
    """Token ids and the like, which can be long."""
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], int | float | str)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage under a tensor, as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor object over the same memory, with the same class and attributes."""
    other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    other.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad=False)
    other.__class__ = type(tensor)
    other.__dict__.update(tensor.__dict__)
    return other
