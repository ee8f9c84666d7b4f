"""Trace vLLM's own loader on a model's twin for one manifest (the stage: trace, on the server).

`trace_load` is called by `plane`. It repeats the trace without the weights whose values the loader asks for, until it
ends; those are then loaded for real at install, and the storages that they write are found by loading zeros. A weight
that the loader rejects is named with the loader's own reason.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from vllm_nixl_plugin.dispatch import Writes
from vllm_nixl_plugin.errors import PlanRefused
from vllm_nixl_plugin.layout import identity
from vllm_nixl_plugin.planning import TracedDestination, dtype_of
from vllm_nixl_plugin.repeats import FEW, Repeats
from vllm_nixl_plugin.tracing import Creation, NeedsData, Opaque, Piece, Source, Tracer
from vllm_nixl_plugin.twin import Twin, config_context
from vllm_nixl_plugin.wire import WeightSpec

MAX_REJECTED = 20


@dataclass(frozen=True, slots=True)
class LoadTrace:
    """Every loadable storage of the twin and who writes it.

    ``needs_data``: weights that only the real loader can place.
    """

    destinations: tuple[TracedDestination, ...]
    needs_data: frozenset[str]


class _Offered:
    """The weights in the order in which a loader sees them; ``current`` is the one it took last, ``ended`` whether it
    has taken all."""

    def __init__(self, tracer: Tracer, weights: Sequence[WeightSpec], without: set[str], few: int) -> None:
        self._tracer, self._weights, self._without = tracer, weights, without
        self.repeats = Repeats(weights, lambda name: name in without or tracer.is_read(name), few)
        self.current = ""
        self.ended = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for w in self._weights:
            if not self.repeats.skip(w.name) and w.name not in self._without:
                self.current = w.name
                yield w.name, self._tracer.source(w.name, w.shape, dtype_of(w.dtype))
        self.ended = True


def trace_load(twin: Twin, weights: Sequence[WeightSpec], live: set[str], few: int = FEW) -> LoadTrace:
    """Trace the loader with the given weights. ``live``: paths of tensors that are proven live; ``few``: up to so many
    weights are all offered, of more only those that are used (`repeats`).

    Errors: PlanRefused naming the weights that the loader does not take.
    """
    needs_data: set[str] = set()
    rejected: dict[str, str] = {}
    adopted: set[str] = set()
    tables = _tables(twin)
    while True:
        made: dict[str, torch.Tensor] = {}
        tracer = Tracer()
        offered = _Offered(tracer, weights, needs_data | set(rejected), few)
        try:
            destinations = _once(twin, tracer, offered, live, tables)
            if offered.repeats.hold(destinations):
                break
            few = len(weights)
        except _TableWritten as written:
            tables -= written.keys
        except NeedsData as need:
            fresh = need.sources - needs_data
            if not fresh and offered.current and not offered.ended:
                fresh = frozenset({offered.current})
            traceback.clear_frames(need.__traceback__)  # they hold views of the twin's tensors
            if not fresh:
                raise PlanRefused(
                    f"vLLM's loader asks for values that no weight holds ({need.op}); this model cannot be traced"
                ) from need
            needs_data |= fresh
        except _TreeChanged as tree:
            made = tree.made
            if adopted & made.keys():
                raise PlanRefused(
                    f"vLLM's loader makes {', '.join(sorted(made)[:5])} anew, in another form at each load; this "
                    "model cannot be traced"
                ) from tree
            adopted |= made.keys()
        except PlanRefused:
            raise
        except Exception as error:
            if offered.repeats.skipped:  # perhaps it wants all weights
                traceback.clear_frames(error.__traceback__)
                few = len(weights)
                continue
            name = _blamed(error.__traceback__, tracer) or offered.current
            traceback.clear_frames(error.__traceback__)
            if not name or name in rejected or len(rejected) >= MAX_REJECTED:
                raise PlanRefused(f"vLLM's loader failed while it was traced: {_reason(error)}") from error
            rejected[name] = _reason(error)
        finally:
            twin.restore()
        for path, tensor in made.items():
            twin.adopt(path, tensor)
    if rejected:
        lines = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
        raise PlanRefused(
            f"vLLM's loader does not take {len(rejected)} of the weights: {lines}. Check names and shapes against the "
            "checkpoint that the server started from.",
            unused=sorted(rejected),
        )
    if needs_data:
        destinations = _with_real_loads(twin, weights, needs_data, destinations)
    return LoadTrace(tuple(destinations), frozenset(needs_data))


class _TableWritten(Exception):
    """The loader wrote to storages that were taken for tables which it only reads."""

    def __init__(self, keys: set[int]) -> None:
        super().__init__(str(keys))
        self.keys = keys


def _tables(twin: Twin) -> set[int]:
    """Storages of integers and flags whose values at creation are known, and that are no parameters: as long as no
    loader writes to them they need not be traced, and it can look at them (which experts are on this rank)."""
    keys = twin.storage_keys()
    tensors = [(keys[id(t)], t) for t in twin.destination_tensors().values()]
    written = {k for k, t in tensors if isinstance(t, torch.nn.Parameter) or t.is_floating_point()}
    return {k for k, _ in tensors if isinstance(twin.storages[k].value, torch.Tensor)} - written


class _TreeChanged(Exception):
    """The loader made parameters or buffers that the model did not have, or not in this form, when it was created."""

    def __init__(self, made: dict[str, torch.Tensor]) -> None:
        super().__init__(", ".join(made))
        self.made = made


def _once(
    twin: Twin, tracer: Tracer, offered: _Offered, live: set[str], tables: set[int]
) -> list[TracedDestination]:
    keys = twin.storage_keys()
    everything = twin.destination_tensors()
    real = {path: tensor for path, tensor in everything.items() if keys[id(tensor)] in tables}
    targets = {path: tensor for path, tensor in everything.items() if path not in real}
    stand_ins = tracer.stand_ins(targets, twin.device)
    paths: dict[int, list[str]] = {}
    for path, tensor in targets.items():
        paths.setdefault(keys[id(tensor)], []).append(path)
    with config_context(twin.config, twin.record.model_config), twin.in_place_of(stand_ins):
        before = _tree(twin)
        with tracer, _no_collection():
            twin.load_weights(offered)
        replaced = {p: t for p, t in twin.destination_tensors().items() if before.get(p) != _identity(t)}
        last_words = {path: tracer.read(t) for path, t in replaced.items()}
        forms = {path: _form_of(t) for path, t in replaced.items()}
        twin.note_what_loading_left()
    if changed := {
        key
        for path, tensor in real.items()
        for key in [keys[id(tensor)]]
        if path in replaced or tracer.has_changed(tensor) or not twin.is_as_created(key, tensor)
    }:
        raise _TableWritten(changed)
    made = {path: t for path, t in forms.items() if path not in everything or not _same_form(everything[path], t)}
    if made:
        raise _TreeChanged(made)
    out: list[TracedDestination] = []
    for key, names in paths.items():
        last = next((last_words[name] for name in names if name in last_words), None)
        pieces = tuple(tracer.pieces(stand_ins[names[0]]) if last is None else last)
        if any(not isinstance(p.root, Creation) for p in pieces):
            nbytes = twin.storages[key].nbytes
            out.append(TracedDestination(key, tuple(names), nbytes, all(n in live for n in names), pieces))
    return out


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collection, which would look at all of vLLM's objects again and again: nothing made here is
    garbage before the trace ends."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _tree(twin: Twin) -> dict[str, tuple[int, int]]:
    return {p: _identity(t) for p, t in twin.destination_tensors().items()}


def _identity(tensor: torch.Tensor) -> tuple[int, int]:
    return id(tensor), int(tensor.untyped_storage()._cdata)


def _form_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without data that has the shape, class and attributes of a traced or real one."""
    form = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        form = torch.nn.Parameter(form, requires_grad=False)
    form.__class__ = getattr(type(tensor), "traced_base", type(tensor))
    form.__dict__.update(tensor.__dict__)
    return form


def _same_form(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether what a loader puts in the place of a tensor can be written into that tensor's storage instead."""
    return (
        (old.shape, old.dtype) == (new.shape, new.dtype)
        and old.is_contiguous()
        and old.untyped_storage().nbytes() == old.numel() * old.element_size()
    )


def _with_real_loads(
    twin: Twin, weights: Sequence[WeightSpec], names: set[str], traced: list[TracedDestination]
) -> list[TracedDestination]:
    """Find which storages the real loader writes for weights that cannot be traced: load zeros and watch.

    A storage belongs to the weights that were loaded when it was written, and to those for which nothing was.
    """
    targets, keys = twin.destination_tensors(), twin.storage_keys()
    known = {t.key: t for t in traced}
    # On the CPU, where memory that nobody touches costs nothing. Small tables keep what they were made with.
    large = {k: info.nbytes for k, info in twin.storages.items() if not isinstance(info.value, torch.Tensor)}
    twin.fill_tensors({k: torch.zeros(nbytes, dtype=torch.uint8) for k, nbytes in large.items()})
    writes, owners = Writes(), dict[int, set[str]]()

    def offered() -> Iterator[tuple[str, torch.Tensor]]:
        for w in weights:
            if w.name in names:
                yield w.name, torch.zeros(w.shape, dtype=dtype_of(w.dtype))
                for sid in writes.written:
                    owners.setdefault(sid, set()).add(w.name)
                writes.written.clear()

    try:
        with config_context(twin.config, twin.record.model_config), writes:
            twin.load_weights(offered())
        for sid in writes.written:  # after the last weight
            owners.setdefault(sid, set())
        idle = names - {name for of in owners.values() for name in of}
        paths: dict[int, list[str]] = {}
        for path, tensor in targets.items():
            paths.setdefault(keys[id(tensor)], []).append(path)
        for key, of in {keys[id(t)]: owners.get(int(t.untyped_storage()._cdata)) for t in targets.values()}.items():
            if of is not None:
                old = known.get(key)
                mark = Piece(Opaque("loader", frozenset((of or names) | idle)), identity((0,), 1))
                pieces = (*(old.pieces if old else ()), mark)
                known[key] = TracedDestination(key, tuple(paths[key]), twin.storages[key].nbytes, False, pieces)
    finally:
        twin.restore()
    return list(known.values())


def _blamed(at: TracebackType | None, tracer: Tracer) -> str | None:
    """The weight that was being loaded when the loader failed: the innermost local tensor with a single source."""
    for frame, _ in reversed(list(traceback.walk_tb(at))):
        if frame.f_globals.get("__name__") in (__name__, "vllm_nixl_plugin.tracing"):
            continue
        for value in frame.f_locals.values():
            if isinstance(value, torch.Tensor) and tracer.is_traced(value):
                names = {p.root.name for p in tracer.pieces(value) if isinstance(p.root, Source)}
                if len(names) == 1:
                    return names.pop()
    return None


def _reason(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
