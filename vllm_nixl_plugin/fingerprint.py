"""What a worker's engine can read, as one checksum per path: the judge of "equal to a freshly started engine".

`fingerprint` walks the object graph of every module (`graph.slots`): parameters, buffers, derived weights, tensors in
schemes, kernels and closures, and the numbers that kernels take as arguments. Opaque handles, whose memory no tensor
shows, are seen through by running the layer that holds them on an identity matrix. Left out is what belongs to the
running engine: tensors in the memory that its runner holds (KV caches, input buffers), and numbers that changed since
loading. The order is that of the paths, so that two engines compare line by line. Those of a draft model begin with
``draft/``.

`fingerprint` blocks for as long as reading all weights takes; `slices` hands over what a tenth of a second gave, so
that an engine can serve in between. The weights must stay the same until the end. No NIXL, no network.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from vllm_nixl_plugin import graph
from vllm_nixl_plugin.model import digest, draft_models, geometry_of, record_of, state_of

_ROWS = 256
SLICE_S = 0.1


def fingerprint(worker: Any) -> dict[str, str]:
    """Checksums of one vLLM worker by path. Two engines are equal when all paths and all checksums are."""
    return dict(_lines(worker))


def slices(worker: Any, slice_s: float = SLICE_S) -> Iterator[list[tuple[str, str]]]:
    """`fingerprint` in pieces of about ``slice_s`` seconds of work each (one tensor more, at most)."""
    piece: list[tuple[str, str]] = []
    end = time.monotonic() + slice_s
    for line in _lines(worker):
        piece.append(line)
        if time.monotonic() >= end:
            yield piece
            piece, end = [], time.monotonic() + slice_s
    yield piece


def _lines(worker: Any) -> Iterator[tuple[str, str]]:
    engines = graph.memory_held(getattr(worker, "model_runner", None))
    first: dict[int, str] = {}
    known: dict[tuple[Any, ...], int] = {}
    models = [("", worker.get_model()), *(("draft/", drafter) for drafter in draft_models(worker))]
    for above, model in models:
        record = record_of(model)
        at_load: Mapping[str, Any] = record.state if record is not None else {}
        for path, module in sorted(model.named_modules()):
            opaque = False
            for name, value in _values(module):
                inside = f"{path}.{name}" if path else name
                place = above + inside
                if isinstance(value, torch.Tensor):
                    storage = value.untyped_storage()
                    if value.numel() and storage.data_ptr() in engines:
                        continue
                    shared = first.setdefault(storage.data_ptr(), place) if value.numel() else place
                    yield place, _line(value, known) + (f" shares {shared}" if shared != place else "")
                elif graph.is_releasing(value) or isinstance(value, torch.ScriptObject):
                    opaque = True
                elif isinstance(value, int | float) and _of_the_model(value, inside, at_load):
                    yield place, repr(value)
            if opaque:
                yield f"{above}{path}()", _seen_through(module)


def differences(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """One line for each path on which two fingerprints differ."""
    unlike = [p for p in sorted(a.keys() | b.keys()) if a.get(p) != b.get(p)]
    return [f"{p}: {a.get(p, 'absent')} | {b.get(p, 'absent')}" for p in unlike]


def _of_the_model(value: float, path: str, at_load: Mapping[str, Any]) -> bool:
    """Whether a number is what loading left: others count what the engine has done (requests, hits of a cache)."""
    return not at_load or (path in at_load and at_load[path] == state_of(value))


def _line(tensor: torch.Tensor, known: dict[tuple[Any, ...], int]) -> str:
    shape, stride, dtype, device = geometry = geometry_of(tensor)
    if device.type == "meta":
        return f"{dtype}{list(shape)} meta"
    key = (tensor.data_ptr(), *geometry)
    if key not in known:
        known[key] = digest(tensor)
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}{list(stride)} {known[key]:016x}"


def _values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Everything that a module owns by path, each holder once, in the order of the keys."""
    seen = {id(module)}
    todo: list[tuple[str, Any]] = [("", module)]
    while todo:
        prefix, holder = todo.pop(0)
        for key, slot in sorted(graph.slots(holder).items(), key=lambda item: str(item[0])):
            path = f"{prefix}.{key}" if prefix else str(key)
            yield path, slot.value
            inside = graph.has_slots(slot.value) and not graph.is_releasing(slot.value)
            if inside and id(slot.value) not in seen:
                seen.add(id(slot.value))
                todo.append((path, slot.value))


def _seen_through(module: nn.Module) -> str:
    """The checksum of what a layer with an opaque handle makes of the identity matrix."""
    method, width = getattr(module, "quant_method", None), _width(module)
    if width is None or not callable(getattr(method, "apply", None)):
        return f"cannot be seen through ({type(module).__name__})"
    weight = next((p for p in module.parameters(recurse=False)), None)
    if weight is None:
        return f"cannot be seen through ({type(module).__name__} without parameters)"
    total = 0
    with torch.no_grad():
        for start in range(0, width, _ROWS):
            rows = torch.zeros(min(_ROWS, width - start), width, dtype=weight.dtype, device=weight.device)
            rows.diagonal(start).fill_(1)
            result = method.apply(module, rows, None)  # type: ignore[union-attr]
            total = (total * 31 + digest(result)) & 0xFFFFFFFFFFFFFFFF
    return f"of identity {width}: {total:016x}"


def _width(module: nn.Module) -> int | None:
    for name in ("input_size_per_partition", "embedding_dim", "in_features"):
        found = getattr(module, name, None)
        if isinstance(found, int):
            return found
    return None
