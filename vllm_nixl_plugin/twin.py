"""The twin: a second module tree, made by vLLM's own constructors, in which every large tensor is on meta.

It is the model as created: `loadtrace` traces the real loader on it, `plane` fills it and runs the real processing on
it, as a first load does. `Twin.restore` brings it back to its state at creation. `model` makes it when vLLM has loaded
a model.

This file and `model` are the only ones that know vLLM's model loading, in vLLM 0.26 to 0.32: here is how a model is
made and processed, there how it is loaded.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm_nixl_plugin import graph
from vllm_nixl_plugin.dispatch import LARGE_NBYTES, DefaultDtype, LargeOnMeta

if TYPE_CHECKING:
    from vllm_nixl_plugin.model import LoadRecord


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
def config_context(vllm_config: Any, model_config: Any = None) -> Iterator[None]:
    """The same surroundings for a load that runs in a thread of its own: the default dtype is changed there only."""
    from vllm.config import set_current_vllm_config

    dtype = (model_config or vllm_config.model_config).dtype
    with set_current_vllm_config(vllm_config), torch.no_grad(), DefaultDtype(dtype):
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
    """A storage of the twin at creation. ``value``: its bytes (small), a number (filled), or None (undefined).
    ``defined``: small, and somebody has written to it, so that it means something without any weight."""

    names: list[str]
    nbytes: int
    device: torch.device
    value: torch.Tensor | float | None
    dtype: torch.dtype
    defined: bool = False


class Twin:
    """The module tree as created. One thread at a time."""

    def __init__(self, record: LoadRecord, live: nn.Module) -> None:
        from vllm.model_executor.model_loader.utils import initialize_model

        self.record = record
        self.config = _private_config(record.vllm_config)
        load_device = record.vllm_config.load_config.device
        self.device = torch.device(load_device or record.vllm_config.device_config.device)
        mode = LargeOnMeta()
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
        self._kept_of: dict[int, list[_Kept]] = {}
        self._spare: list[torch.Tensor] = []
        self._left_by_loading: dict[tuple[int, Any], tuple[graph.Slot, Any]] = {}
        self._objects: list[tuple[Any, Any]] = []
        self._holders: list[set[str]] = []  # of each of these objects: the modules that have it
        self._objects_of: dict[str, list[int]] = {}
        self._snapshot(mode.fill)
        for key, storage in self.storages.items():
            storage.defined = isinstance(storage.value, torch.Tensor) and key not in mode.undefined

    def _unwrap_loaders(self) -> None:
        """Online quantization wraps loaders so as to process layers while loading; a twin is traced without that."""
        for _, tensor in graph.named_tensors(self.model):
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
        number: dict[int, int] = {}
        for path, module in self.modules.items():
            mine = self._objects_of[path] = [len(self._objects)]
            self._objects.append((module, _copied(module)))
            self._holders.append({path})
            for name, slot in graph.owned(module):
                value = slot.value
                if isinstance(value, torch.Tensor):
                    self._keep(f"{path}.{name}" if path else name, value, fill, seen)
                elif graph.has_slots(value):
                    if id(value) not in number:
                        number[id(value)] = len(self._objects)
                        self._objects.append((value, _copied(value)))
                        self._holders.append(set())
                    self._holders[number[id(value)]].add(path)
                    mine.append(number[id(value)])

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
            kept = _Kept(tensor, key, int(tensor.storage_offset()), shape, stride, dtype, attributes)
            self._kept.append(kept)
            self._kept_of.setdefault(key, []).append(kept)

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

    def release(self, paths: Set[str], storages: Iterable[int]) -> None:
        """As `restore`, for some modules whose results are in place, with these storages: so their memory is free. What
        they share with other modules stays as it is."""
        for index in sorted({index for path in paths for index in self._objects_of[path]}):
            if self._holders[index] <= paths:
                _put_back(*self._objects[index])
        for key in storages:
            if {name.rpartition(".")[0] for name in self.storages[key].names} & self.modules.keys() <= paths:
                self._empty(key)

    def drop_unused(self, paths: Iterable[str], storages: Iterable[int]) -> None:
        """Free the larger ones of these storages that nothing of these processed modules uses any more."""
        large = [key for key in storages if self.storages[key].nbytes > LARGE_NBYTES]
        if not large:
            return
        used = {t.untyped_storage().data_ptr() for path in paths for t in graph.reachable_tensors(self.modules[path])}
        for key in large:
            if all(kept.tensor.untyped_storage().data_ptr() not in used for kept in self._kept_of[key]):
                self._empty(key)

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

    def fill_more(self, contents: Mapping[int, torch.Tensor]) -> None:
        """As `fill_tensors`, but for the given storages only: all others stay as they are."""
        for key, content in contents.items():
            for kept in self._kept_of.get(key, ()):
                _place(kept, content.untyped_storage())

    def _empty(self, key: int) -> None:
        """One storage goes back to meta or its creation value."""
        made = self._storage(self.storages[key], None)
        for kept in self._kept_of[key]:
            _place(kept, made)

    def _storage(self, info: TwinStorage, content: torch.Tensor | None) -> torch.UntypedStorage:
        if content is not None:
            return content.untyped_storage()
        if isinstance(info.value, torch.Tensor):
            return info.value.clone().untyped_storage()
        return torch.empty(info.nbytes, dtype=torch.uint8, device="meta").untyped_storage()

    def made_anew(self, key: int) -> torch.Tensor:
        """Memory for a storage, with what it holds at creation, as far as that is defined."""
        info = self.storages[key]
        if isinstance(info.value, torch.Tensor):
            return info.value.clone()
        made = torch.empty(info.nbytes, dtype=torch.uint8, device=info.device)
        if info.value is not None:
            made.view(info.dtype).fill_(info.value)
        return made

    def destination_tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of the twin by path, shared modules left out."""
        return {
            (f"{path}.{name}" if path else name): tensor
            for path, module in self.modules.items()
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        }

    def defined(self) -> set[int]:
        """Ids of the small tensors that were given a value when they were made."""
        return {id(kept.tensor) for kept in self._kept if self.storages[kept.storage].defined}

    def storage_keys(self) -> dict[int, int]:
        """Storage key by the id of each tensor object that the twin had at creation."""
        return {id(kept.tensor): kept.storage for kept in self._kept}

    def is_as_created(self, key: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor of a small storage still has the bytes that this was made with."""
        value = self.storages[key].value
        return not isinstance(value, torch.Tensor) or torch.equal(value, graph.raw_bytes(tensor))

    def storages_in_use(self) -> dict[int, int]:
        """Storage key by the id of the storage that its tensors have now."""
        return {int(kept.tensor.untyped_storage()._cdata): kept.storage for kept in self._kept}

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

    def processing(self, paths: set[str]) -> Iterator[None]:
        """vLLM's post-load processing of the given modules, in vLLM's order, a module at a time: each step has to be
        made in `engine_context`. Where a module's processing talks to other ranks, all have to make the same steps."""
        for slot, value in self._left_by_loading.values():
            slot.rebind(value)
        for module in self._quantized(paths):
            method: Any = module.quant_method
            method.process_weights_after_loading(module)
            if hasattr(module, "update_param_tp_status"):
                module.update_param_tp_status()  # type: ignore[operator]
            yield
        for path, module in self.modules.items():
            if path in paths and _is_deferred_attention(module):
                attention: Any = module
                attention.process_weights_after_loading(self.record.model_config.dtype)
                yield
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
