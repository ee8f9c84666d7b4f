"""What vLLM did when it loaded a model, and who its worker is.

Stages trace and install lean on two things that are made here while vLLM loads a model:

1. The *load record*: which tensors vLLM's own post-load processing left alone (same storage, geometry and bytes, never
   read by anything but a view). Only those may be live homes. Also the names, shapes and dtypes of the checkpoint.
2. The *twin*, the model as created: see `twin`.

`install_hook` is called by the general plugin in every process. It puts a recording subclass in the place of each
registered loader class, so that no code of vLLM is replaced.

This file and `twin` are the only ones that know vLLM's model loading, in vLLM 0.26 to 0.32: here is how a model is
loaded, there how it is made and processed.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vllm_nixl_plugin import graph
from vllm_nixl_plugin.dispatch import LARGE_NBYTES, Watch
from vllm_nixl_plugin.twin import Twin
from vllm_nixl_plugin.wire import WeightSpec

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
    digests: dict[str, int] = field(default_factory=dict)
    """Checksums of tensors as they were loaded, before any processing, by path."""
    state: dict[str, Any] = field(default_factory=dict)
    """Geometry of tensors and plain values, by path, when loading ended: what differs later is the engine's."""
    owned_nbytes: dict[str, int] = field(default_factory=dict)
    """Bytes of the tensors that each module had when loading ended."""
    modules: dict[str, weakref.ref[nn.Module]] = field(default_factory=dict)
    """The module objects by path when loading ended. LoRA may wrap them later: they serve on below the wrapper."""
    twin: Twin | None = None
    twin_error: str | None = None
    seconds: float = 0.0


    def keep_reachable(self, model: nn.Module) -> None:
        """Forget the modules that are no longer part of the model: another model's have taken their place."""
        reachable = {id(module) for module in model.modules()}
        self.modules = {path: ref for path, ref in self.modules.items() if id(ref()) in reachable}

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
        value = value if value is not None else getattr(module, name, None)
        return value if isinstance(value, torch.Tensor) else None  # kernels wrap tensors in classes of their own


_records: weakref.WeakKeyDictionary[nn.Module, LoadRecord] = weakref.WeakKeyDictionary()


def draft_models(worker: Any) -> list[nn.Module]:
    """The models with which a worker guesses tokens ahead of its target model (speculative decoding)."""
    find = getattr(worker, "get_draft_model", None)
    found = find() if callable(find) else None
    runner = vars(getattr(worker, "model_runner", None) or object)
    held = [found, *(value for at in (runner, *map(_attributes, runner.values())) for value in at.values())]
    known = {id(worker.get_model())}
    return [
        m for m in held
        if isinstance(m, nn.Module) and (m is found or m in _records) and not (id(m) in known or known.add(id(m)))  # type: ignore[func-returns-value]
    ]  # fmt: skip


def _attributes(value: Any) -> dict[str, Any]:
    return vars(value) if graph.is_plain_object(value) else {}


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


def read_checkpoint(record: LoadRecord, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint that the model was loaded from, read once more, by the loader that vLLM has for it."""
    from vllm.model_executor.model_loader import get_model_loader

    loader: Any = get_model_loader(record.vllm_config.load_config)
    yield from loader.get_all_weights(record.model_config, model)


class _Recorder:
    """Watches one `load_model` call of a loader."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.checkpoint: dict[str, WeightSpec] = {}
        self.geometry: dict[str, tuple[Any, ...]] = {}
        self.facts: dict[str, _Fact] = {}
        self.watch = Watch()
        self.before: dict[str, set[int]] = {}
        self.stack = contextlib.ExitStack()

    def created(self, model: nn.Module) -> None:
        """Before loading. What is on meta now is made, and processed, while it is loaded."""
        self.geometry = {p: geometry_of(t) for p, t in graph.named_tensors(model) if t.device.type != "meta"}

    def loaded(self, model: nn.Module) -> None:
        """Between loading and processing."""
        self.model = model
        for path, tensor in graph.named_tensors(model):
            if self.geometry.get(path) == geometry_of(tensor):
                self.facts[path] = _Fact(weakref.ref(tensor), geometry_of(tensor), digest(tensor))
        self.before = {path: set(_storages(module)) for path, module in model.named_modules()}
        self.stack.enter_context(self.watch)

    def processed(self, record: LoadRecord) -> None:
        assert self.model is not None
        for path, module in self.model.named_modules():
            record.modules[path] = weakref.ref(module)
            if _storages(module).keys() - self.before.get(path, set()):
                record.derived.add(path)
            record.owned_nbytes[path] = sum(_storages(module).values())
            for name, slot in graph.owned(module):
                record.state[f"{path}.{name}" if path else name] = state_of(slot.value)
        for path, tensor in graph.named_tensors(self.model):
            reason = self._why_not_live(self.facts.get(path), tensor)
            if not reason and path.rpartition(".")[0] in record.derived:
                # A kernel that bypasses the dispatcher may have read it for them.
                reason = "its module made other tensors in processing"
            if reason:
                record.not_live[path] = reason
            else:
                record.live.add(path)
        record.checkpoint = list(self.checkpoint.values())
        record.digests = {path: fact.digest for path, fact in self.facts.items()}


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


def _storages(module: nn.Module) -> dict[int, int]:
    """The storages of a module's tensors and their bytes."""
    storages = (t.untyped_storage() for _, t in graph.tensors(module) if t.numel())
    return {int(storage._cdata): storage.nbytes() for storage in storages}


def _constants(model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Small tensors that need no checkpoint, and their values: buffers, and scalars such as the scales of a KV cache. A
    load of random weights (``--load-format dummy``) overwrites them, and no push would bring them back.
    """
    return [
        (tensor, tensor.detach().clone())
        for tensor in (*model.buffers(), *(p for p in model.parameters() if not p.dim()))
        if tensor.device.type != "meta" and tensor.numel() * tensor.element_size() <= LARGE_NBYTES
    ]


def _recording(cls: type) -> type:
    """A subclass of a vLLM loader class that records what its `load_model` does."""

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        vllm_config = kwargs.get("vllm_config", args[0] if args else None)
        model_config = kwargs.get("model_config", args[1] if len(args) > 1 else None)
        prefix = kwargs.get("prefix", args[2] if len(args) > 2 else "")
        recorder = self._nixl_recorder = _Recorder()
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
        constants = _constants(model) if self.load_config.load_format == "dummy" else []
        cls.load_weights(self, model, model_config)  # type: ignore[attr-defined]
        for tensor, value in constants:
            tensor.data.copy_(value)
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
        "runner": str(model.runner_type),
        "vocab_size": int(model.get_vocab_size()),
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
