"""The only file that knows vLLM's model loading: how a model is made, loaded and processed, in vLLM 0.26 to 0.32.

Stages trace and install lean on two things that are made here while vLLM loads a model:

1. The *load record*: which tensors vLLM's own post-load processing left alone (same storage, geometry and bytes, never
   read by anything but a view). Only those may be live homes. Also the names, shapes and dtypes of the checkpoint.
2. The *twin*: a second module tree, made by vLLM's own constructors, in which every large tensor is on meta. It is
   the model as created: `loadtrace` traces the real loader on it, `plane` fills it and runs the real processing on it,
   as a first load does. `Twin.restore` brings it back to its state at creation.

`install_hook` is called by the general plugin in every process. It puts a recording subclass in the place of each
registered loader class, so that no code of vLLM is replaced.
"""

from __future__ import annotations

import contextlib
import copy
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_nixl_plugin import graph
from vllm_nixl_plugin.wire import WeightSpec

aten = torch.ops.aten
LARGE_NBYTES = 1 << 20
"""Tensors above this size are on meta in a twin; smaller ones keep their creation values."""


# What vLLM's first processing does


@dataclass(frozen=True, slots=True)
class _Fact:
    """A tensor between loading and processing."""

    tensor: weakref.ref[torch.Tensor]
    geometry: tuple[Any, ...]
    digest: int


@dataclass(slots=True)
class LoadRecord:
    """What was seen while vLLM loaded one model; paths are ``module.path.name``."""

    vllm_config: Any
    model_config: Any
    prefix: str
    checkpoint: list[WeightSpec] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    not_live: dict[str, str] = field(default_factory=dict)
    """The reason, for every tensor that is not live."""
    derived: set[str] = field(default_factory=set)
    """Paths of modules in which processing made tensors that were not there before."""
    state: dict[str, Any] = field(default_factory=dict)
    """Geometry of tensors and plain values, by path, when loading ended: what differs later is the engine's."""
    modules: dict[str, weakref.ref[nn.Module]] = field(default_factory=dict)
    """The module objects by path when loading ended. LoRA may wrap them later: they serve on below the wrapper."""
    twin: Twin | None = None
    twin_error: str | None = None
    seconds: float = 0.0


    def served(self) -> dict[str, nn.Module]:
        """The modules that were loaded and still serve, by the path that they had then."""
        return {path: module for path, ref in self.modules.items() if (module := ref()) is not None}

    def tensor_at(self, path: str) -> torch.Tensor | None:
        """The parameter, buffer or tensor attribute that is served now under a path of then."""
        parent, _, name = path.rpartition(".")
        ref = self.modules.get(parent)
        module = ref() if ref is not None else None
        if module is None:
            return None
        value = module._parameters.get(name, module._buffers.get(name))
        return value if value is not None else getattr(module, name, None)


_records: weakref.WeakKeyDictionary[nn.Module, LoadRecord] = weakref.WeakKeyDictionary()


def record_of(model: nn.Module) -> LoadRecord | None:
    """The record of a model that was loaded after `install_hook`, or None."""
    return _records.get(model)


def state_of(value: Any) -> Any:
    """What of a value is compared between two times: a tensor's geometry, a plain value, else its type."""
    if isinstance(value, torch.Tensor):
        return geometry_of(value)
    return value if isinstance(value, int | float | str | bytes | type(None)) else type(value)


def geometry_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, strides, dtype and device."""
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def digest(tensor: torch.Tensor) -> int:
    """A 64-bit order-sensitive checksum of the elements of a tensor, computed where it lies."""
    flat = tensor.detach().contiguous().view(-1)
    if not flat.numel():
        return 0
    data = flat.view(torch.uint8)
    total, step = 0, 1 << 25
    for start in range(0, data.numel(), step):
        part = data[start : start + step]
        words = torch.nn.functional.pad(part, (0, -part.numel() % 8)).view(torch.int64)
        weights = torch.arange(start + 1, start + 1 + words.numel(), device=part.device) * 0x9E3779B97F4A7C1
        total = (total * 31 + int((words * (weights | 1)).sum())) & 0xFFFFFFFFFFFFFFFF
    return total


class Watch(TorchDispatchMode):
    """Notes the storages that are written, or read by an op that is not a view, while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.touched: dict[int, str] = {}
        """Storage -> the first op that touched it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not _is_view(func):
            for tensor in _tensors_in([*args, *kwargs.values()]):
                self.touched.setdefault(int(tensor.untyped_storage()._cdata), str(func))
        return out


def _is_view(func: Any) -> bool:
    """Whether an op only returns views of its arguments."""
    returns = func._schema.returns
    return func is aten.detach.default or (
        bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    )


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of all modules under every path that leads to them."""
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}" if path else name, tensor


class _Recorder:
    """Watches one `load_model` call of a loader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.model: nn.Module | None = None
        self.checkpoint: dict[str, WeightSpec] = {}
        self.geometry: dict[str, tuple[Any, ...]] = {}
        self.facts: dict[str, _Fact] = {}
        self.watch = Watch()
        self.before: dict[str, set[int]] = {}
        self.stack = contextlib.ExitStack()

    def created(self, model: nn.Module) -> None:
        """Before loading. What is on meta now is made, and processed, while it is loaded."""
        self.geometry = {p: geometry_of(t) for p, t in named_tensors(model) if t.device.type != "meta"}

    def loaded(self, model: nn.Module) -> None:
        """Between loading and processing."""
        self.model = model
        for path, tensor in named_tensors(model):
            if self.geometry.get(path) == geometry_of(tensor):
                self.facts[path] = _Fact(weakref.ref(tensor), geometry_of(tensor), digest(tensor))
        self.before = {path: _storages(module) for path, module in model.named_modules()}
        self.stack.enter_context(self.watch)

    def processed(self, record: LoadRecord) -> None:
        assert self.model is not None
        for path, module in self.model.named_modules():
            record.modules[path] = weakref.ref(module)
            if _storages(module) - self.before.get(path, set()):
                record.derived.add(path)
            for name, slot in graph.owned(module):
                record.state[f"{path}.{name}" if path else name] = state_of(slot.value)
        for path, tensor in named_tensors(self.model):
            reason = self._why_not_live(self.facts.get(path), tensor)
            if not reason and path.rpartition(".")[0] in record.derived:
                # A kernel that bypasses the dispatcher may have read it for them.
                reason = "its module made other tensors in processing"
            if reason:
                record.not_live[path] = reason
            else:
                record.live.add(path)
        record.checkpoint = list(self.checkpoint.values())


    def _why_not_live(self, fact: _Fact | None, tensor: torch.Tensor) -> str:
        if fact is None:
            return "made or processed while loading"
        if fact.tensor() is not tensor:
            return "replaced by processing"
        if fact.geometry != geometry_of(tensor):
            return "laid out anew by processing"
        if op := self.watch.touched.get(int(tensor.untyped_storage()._cdata)):
            return f"processing applies {op} to it"
        return "" if fact.digest == digest(tensor) else "bytes changed by processing"


def _storages(module: nn.Module) -> set[int]:
    return {int(t.untyped_storage()._cdata) for _, t in graph.tensors(module) if t.numel()}


def _recording(cls: type) -> type:
    """A subclass of a vLLM loader class that records what its `load_model` does."""

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        vllm_config = kwargs.get("vllm_config", args[0] if args else None)
        model_config = kwargs.get("model_config", args[1] if len(args) > 1 else None)
        prefix = kwargs.get("prefix", args[2] if len(args) > 2 else "")
        recorder = self._nixl_recorder = _Recorder(self)
        try:
            with recorder.stack:
                model = cls.load_model(self, *args, **kwargs)  # type: ignore[attr-defined]
        finally:
            self._nixl_recorder = None
        if recorder.model is not None:
            start = time.perf_counter()
            record = LoadRecord(vllm_config, model_config, prefix)
            recorder.processed(record)
            try:
                record.twin = Twin(record, model)
            except Exception as error:  # noqa: BLE001 - vLLM must serve all the same; a push is then refused with this text
                record.twin_error = f"{type(error).__name__}: {error}"
            record.seconds = time.perf_counter() - start
            _records[recorder.model] = record
        return model

    def load_weights(self: Any, model: nn.Module, model_config: Any) -> None:
        recorder = getattr(self, "_nixl_recorder", None)
        if recorder is not None:
            recorder.created(model)
        cls.load_weights(self, model, model_config)  # type: ignore[attr-defined]
        if recorder is not None:
            recorder.loaded(model)

    def get_all_weights(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        recorder = getattr(self, "_nixl_recorder", None)
        for name, tensor in cls.get_all_weights(self, *args, **kwargs):  # type: ignore[attr-defined]
            if recorder is not None:
                recorder.checkpoint[name] = WeightSpec(
                    name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch.")
                )
            yield name, tensor

    members: dict[str, Any] = {"load_model": load_model, "load_weights": load_weights, "__module__": cls.__module__}
    if hasattr(cls, "get_all_weights"):
        members["get_all_weights"] = get_all_weights
    return type(cls.__name__, (cls,), members)


def install_hook() -> None:
    """Put a recording subclass in the place of every loader class that is registered with vLLM. Idempotent."""
    from vllm.model_executor import model_loader

    registry = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    made: dict[type, type] = {}
    for load_format, cls in list(registry.items()):
        if not getattr(cls, "_nixl_recording", False):
            if cls not in made:
                made[cls] = _recording(cls)
                made[cls]._nixl_recording = True  # type: ignore[attr-defined]
            registry[load_format] = made[cls]


# The twin


_FACTORIES = {
    aten.empty.memory_format: None, aten.empty_strided.default: None, aten.zeros.default: 0, aten.ones.default: 1,
    aten.full.default: ..., aten.rand.default: None, aten.randn.default: None, aten.new_empty.default: None,
    aten.new_zeros.default: 0, aten.new_ones.default: 1, aten.new_full.default: ..., aten.empty_like.default: None,
    aten.zeros_like.default: 0, aten.ones_like.default: 1, aten.full_like.default: ...,
    aten.new_empty_strided.default: None,
}  # fmt: skip


class _LargeOnMeta(TorchDispatchMode):
    """Makes factories put large tensors on meta, and remembers the value that a filled one has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fill: dict[int, float] = {}
        self.hold: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = list(_tensors_in([*args, *kwargs.values()]))
        if func in _FACTORIES:
            shape, dtype = _factory_shape(func, args, kwargs)
            if shape.numel() * dtype.itemsize > LARGE_NBYTES:
                return self._on_meta(func, args, kwargs)
        elif any(t.device.type == "meta" for t in given):
            # Arithmetic on a large tensor stays on meta; small operands follow it there.
            kwargs.pop("device", None)
            args = _to_meta(args)
            for tensor in given:
                if not _is_view(func) and func._schema.is_mutable:
                    self.fill.pop(int(tensor.untyped_storage()._cdata), None)
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


@contextlib.contextmanager
def engine_context(vllm_config: Any, model_config: Any) -> Iterator[None]:
    """The surroundings in which vLLM loads and processes a model: current config, default dtype, no grad."""
    from vllm.config import set_current_vllm_config

    before = torch.get_default_dtype()
    torch.set_default_dtype(model_config.dtype)
    try:
        with torch.no_grad(), set_current_vllm_config(vllm_config):
            yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def config_context(vllm_config: Any) -> Iterator[None]:
    """Only the current configuration: tracing runs in a thread, and the default dtype belongs to the whole process."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(vllm_config):
        yield


def _private_config(vllm_config: Any) -> Any:
    """A copy of the configuration whose registries (layers by name, counters) a second tree may fill."""
    private = copy.copy(vllm_config)
    private.compilation_config = copy.copy(vllm_config.compilation_config)
    for name, value in vars(private.compilation_config).items():
        if isinstance(value, dict | list | set | Counter):
            private.compilation_config.__dict__[name] = copy.copy(value)
    private.compilation_config.static_forward_context = {}
    return private


@dataclass(slots=True)
class _Kept:
    """A tensor object of the twin and what it was at creation."""

    tensor: torch.Tensor
    storage: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    attributes: dict[str, Any]


@dataclass(slots=True)
class TwinStorage:
    """A storage of the twin at creation. ``value``: its bytes (small), a number (filled), or None (undefined)."""

    names: list[str]
    nbytes: int
    device: torch.device
    value: torch.Tensor | float | None
    dtype: torch.dtype


class Twin:
    """The module tree as created. One thread at a time."""

    def __init__(self, record: LoadRecord, live: nn.Module) -> None:
        from vllm.model_executor.model_loader.utils import initialize_model

        self.record = record
        self.config = _private_config(record.vllm_config)
        load_device = record.vllm_config.load_config.device
        self.device = torch.device(load_device or record.vllm_config.device_config.device)
        mode = _LargeOnMeta()
        with engine_context(self.config, record.model_config), self.device, mode:
            self.model: nn.Module = initialize_model(
                vllm_config=self.config, model_config=record.model_config, prefix=record.prefix
            )
        self.model.eval()
        shared = {id(m) for m in live.modules()}
        self.modules: dict[str, nn.Module] = {p: m for p, m in self.model.named_modules() if id(m) not in shared}
        self._unwrap_loaders()
        self._detach_views()
        self.storages: dict[int, TwinStorage] = {}
        self._kept: list[_Kept] = []
        self._spare: list[torch.Tensor] = []
        self._left_by_loading: dict[tuple[int, Any], tuple[graph.Slot, Any]] = {}
        self._objects: list[tuple[Any, Any]] = []
        self._snapshot(mode.fill)

    def _unwrap_loaders(self) -> None:
        """Online quantization wraps loaders so as to process layers while loading; a twin is traced without that."""
        for _, tensor in named_tensors(self.model):
            loader = getattr(tensor, "weight_loader", None)
            while loader is not None and getattr(loader, "__name__", "") == "online_process_loader":
                loader = loader.__wrapped__
                tensor.weight_loader = loader  # type: ignore[attr-defined]

    def _detach_views(self) -> None:
        """A tensor made as a view holds the object it was made from, which could not be swapped then; sharing the
        storage is enough."""
        views = {
            id(t): t for module in self.modules.values() for _, t in graph.tensors(module) if t._is_view()
        }
        for tensor in views.values():
            torch.utils.swap_tensors(tensor, graph.alias(tensor))

    def _snapshot(self, fill: Mapping[int, float]) -> None:
        seen: set[int] = set()
        for path, module in self.modules.items():
            self._objects.append((module, _copied(module)))
            for name, slot in graph.owned(module):
                value = slot.value
                if isinstance(value, torch.Tensor):
                    self._keep(f"{path}.{name}" if path else name, value, fill, seen)
                elif graph.has_slots(value) and id(value) not in seen:
                    seen.add(id(value))
                    self._objects.append((value, _copied(value)))

    def _keep(self, path: str, tensor: torch.Tensor, fill: Mapping[int, float], seen: set[int]) -> None:
        old = tensor.untyped_storage()
        key = int(old._cdata)
        if key not in self.storages:
            value: torch.Tensor | float | None = fill.get(key)
            if tensor.device.type != "meta":
                value = graph.raw_bytes(tensor).clone()
            device = self.device if tensor.device.type == "meta" else tensor.device
            self.storages[key] = TwinStorage([], old.nbytes(), device, value, tensor.dtype)
        if path not in self.storages[key].names:
            self.storages[key].names.append(path)
        if id(tensor) not in seen:
            seen.add(id(tensor))
            shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
            attributes = dict(tensor.__dict__)
            self._kept.append(_Kept(tensor, key, int(tensor.storage_offset()), shape, stride, dtype, attributes))

    def adopt(self, path: str, like: torch.Tensor) -> None:
        """A parameter or buffer that the loader makes becomes one that the twin has had since its creation."""
        parent, _, name = path.rpartition(".")
        module = self.modules[parent]
        table: Any = module._parameters if isinstance(like, nn.Parameter) else module._buffers
        made = torch.empty(like.shape, dtype=like.dtype, device="meta")
        while int(made.untyped_storage()._cdata) in self.storages:  # an id that a storage of the past had
            self._spare.append(made)
            made = torch.empty(like.shape, dtype=like.dtype, device="meta")
        if isinstance(like, nn.Parameter):
            made = nn.Parameter(made, requires_grad=False)
        made.__class__ = type(like)
        made.__dict__.update(like.__dict__)
        table[name] = made
        self._objects = [(h, _copied(h) if h is module else state) for h, state in self._objects]
        self._keep(path, made, {}, set())

    def note_what_loading_left(self) -> None:
        """Numbers, names and flags that the loader has just set; `process` finds them set, as after a load."""
        for holder, state in self._objects:
            if not isinstance(state, dict):
                continue
            for key, slot in graph.slots(holder).items():
                if slot.kind in ("attr", "item", "cell") and isinstance(slot.value, int | float | str | bytes | None):
                    old = state.get(key, self)
                    if type(old) is not type(slot.value) or old != slot.value:
                        self._left_by_loading[id(slot.holder), key] = (slot, slot.value)

    def restore(self) -> None:
        """Back to the state at creation: attributes of all objects, tensors on meta or with their creation values."""
        for holder, state in self._objects:
            _put_back(holder, state)
        self.fill_tensors({})

    def fill_tensors(self, contents: Mapping[int, torch.Tensor]) -> None:
        """Give tensors the given storages (uint8 tensors by storage key); others go back to meta or creation values.

        Tensor objects keep their identity, so that every holder sees the new contents.
        """
        made: dict[int, torch.UntypedStorage] = {}
        for kept in self._kept:
            info = self.storages[kept.storage]
            if kept.storage not in made:
                made[kept.storage] = self._storage(info, contents.get(kept.storage))
            _place(kept, made[kept.storage])

    def _storage(self, info: TwinStorage, content: torch.Tensor | None) -> torch.UntypedStorage:
        if content is not None:
            return content.untyped_storage()
        if isinstance(info.value, torch.Tensor):
            return info.value.clone().untyped_storage()
        return torch.empty(info.nbytes, dtype=torch.uint8, device="meta").untyped_storage()

    def destination_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of the twin by path, shared modules left out."""
        return {
            (f"{path}.{name}" if path else name): tensor
            for path, module in self.modules.items()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        }

    def storage_keys(self) -> dict[int, int]:
        """Storage key by the id of each tensor object that the twin had at creation."""
        return {id(kept.tensor): kept.storage for kept in self._kept}

    @contextlib.contextmanager
    def in_place_of(self, stand_ins: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """While entered, the twin's parameter objects *are* the stand-ins (by path)."""
        pairs = [(tensor, stand_ins[path]) for path, tensor in _once(self.destination_tensors()) if path in stand_ins]
        for tensor, stand_in in pairs:
            torch.utils.swap_tensors(tensor, stand_in)
        try:
            yield
        finally:
            for tensor, stand_in in pairs:
                torch.utils.swap_tensors(tensor, stand_in)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """vLLM's own loader on the twin."""
        root: Any = self.model
        root.load_weights(iter(weights))

    def process(self, paths: set[str]) -> None:
        """vLLM's post-load processing of the given modules, in vLLM's order. Call it in `engine_context`."""
        for slot, value in self._left_by_loading.values():
            slot.rebind(value)
        for module in self._quantized(paths):
            method: Any = module.quant_method
            method.process_weights_after_loading(module)
            if hasattr(module, "update_param_tp_status"):
                module.update_param_tp_status()  # type: ignore[operator]
        for path, module in self.modules.items():
            if path in paths and _is_deferred_attention(module):
                attention: Any = module
                attention.process_weights_after_loading(self.record.model_config.dtype)
        if hasattr(self.model, "process_weights_after_loading"):
            root: Any = self.model
            root.process_weights_after_loading()

    def _quantized(self, paths: set[str]) -> list[nn.Module]:
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        return [
            module
            for path, module in self.modules.items()
            if path in paths and isinstance(getattr(module, "quant_method", None), QuantizeMethodBase)
        ]


def _once(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    return [(p, t) for p, t in tensors.items() if not (id(t) in seen or seen.add(id(t)))]  # type: ignore[func-returns-value]


def _place(kept: _Kept, storage: torch.UntypedStorage) -> None:
    old = kept.tensor
    fresh = torch.empty(0, dtype=kept.dtype, device=storage.device)
    fresh.set_(storage, kept.offset, kept.shape, kept.stride)
    if isinstance(old, nn.Parameter):
        fresh = nn.Parameter(fresh, requires_grad=False)
    fresh.__class__ = type(old)
    fresh.__dict__.update(kept.attributes)
    torch.utils.swap_tensors(old, fresh)


def _copied(holder: Any) -> Any:
    """A shallow copy of an object's state, for `_put_back`."""
    if isinstance(holder, nn.Module):
        state = dict(holder.__dict__)
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            state[name] = copy.copy(state[name])
        return state
    if isinstance(holder, dict | list):
        return copy.copy(holder)
    if graph.is_closure(holder):
        return {k: slot.value for k, slot in graph.slots(holder).items()}
    return dict(vars(holder)) if graph.is_plain_object(holder) else None


def _put_back(holder: Any, state: Any) -> None:
    if isinstance(holder, nn.Module):
        holder.__dict__.clear()
        for name, value in state.items():
            is_table = name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
            holder.__dict__[name] = copy.copy(value) if is_table else value
    elif isinstance(holder, dict):
        holder.clear()
        holder.update(state)
    elif isinstance(holder, list):
        holder[:] = state
    elif graph.is_closure(holder):
        for key, slot in graph.slots(holder).items():
            if key in state and slot.value is not state[key]:
                slot.rebind(state[key])
    elif state is not None:
        vars(holder).clear()
        vars(holder).update(state)


def _is_deferred_attention(module: nn.Module) -> bool:
    if not callable(getattr(module, "process_weights_after_loading", None)):
        return False
    try:
        from vllm.model_executor.layers.attention import is_deferred_attention_layer
    except ImportError:  # before 0.27
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

        return isinstance(module, AttentionLayerBase) or not hasattr(module, "quant_method")
    return bool(is_deferred_attention_layer(module))


# The worker


def describe_worker(worker: Any) -> dict[str, Any]:
    """Who a worker is, as plain values: index over all engines, ranks and sizes of its groups, model, dtype, device."""
    import vllm
    from vllm.distributed import parallel_state

    parallel, model = worker.vllm_config.parallel_config, worker.vllm_config.model_config
    index = getattr(parallel, "data_parallel_index", 0) or 0

    def rank_in(group: str) -> tuple[int, int]:
        try:
            found = getattr(parallel_state, f"get_{group}_group")()
            return int(found.rank_in_group), int(found.world_size)
        except (AssertionError, AttributeError):
            return 0, 1

    tp, pp, ep = (rank_in(group) for group in ("tp", "pp", "ep"))
    return {
        "worker": index * parallel.world_size + worker.rank,
        "workers_per_engine": parallel.world_size,
        "rank": worker.rank,
        "engine": index,
        "tp_rank": tp[0], "tp_size": tp[1], "pp_rank": pp[0], "pp_size": pp[1], "ep_rank": ep[0], "ep_size": ep[1],
        "model": str(model.served_model_name if isinstance(model.served_model_name, str) else model.model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization) if model.quantization else None,
        "device": str(worker.device),
        "eager": bool(model.enforce_eager),
        "vllm": str(vllm.__version__),
    }  # fmt: skip


def is_asleep(worker: Any) -> bool:
    """Whether sleep mode has unmapped the weights of this worker."""
    try:
        from vllm.device_allocator.cumem import CuMemAllocator
    except ImportError:
        return False
    allocator = getattr(CuMemAllocator, "instance", None)
    if allocator is None:
        return False
    return any(data.tag == "weights" and data.is_asleep for data in allocator.pointer_to_data.values())
