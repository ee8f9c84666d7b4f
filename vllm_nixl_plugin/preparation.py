"""Make an install ready, a unit of work at a time, while the engine serves (the stage: install).

    fill      each module of a group that is to be processed gets what has arrived
    process   vLLM's own processing on it, as at a first load
    compare   `pairing` lists what has to change in the module that serves

Nothing that serves is touched. The work needs the process's default dtype and vLLM's current configuration, which
belong to all threads, so it is done in the worker's main thread: in slices, between which the engine makes tokens.
A slice is a number of units that is the same on all ranks, since some processing talks to the others. Called by
`install`.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vllm_nixl_plugin import graph
from vllm_nixl_plugin.binding import Binder
from vllm_nixl_plugin.composition import Held, Part
from vllm_nixl_plugin.filling import Filling, whole_weights
from vllm_nixl_plugin.loaded import LoadedModel
from vllm_nixl_plugin.pairing import Change, Pairing
from vllm_nixl_plugin.twin import engine_context
from vllm_nixl_plugin.wire import Mode

SLICE_NBYTES = 64 << 20
_MOST_MODULES = 64
_LOOK, _WORK = 1, 16
"""What a unit counts for: one that only looks at a module, and one that fills or processes it."""


@dataclass(slots=True)
class Live:
    """Tensors that serve and their shadows, for live homes whose modules are not processed."""

    served: list[torch.Tensor] = field(default_factory=list)
    shadows: list[torch.Tensor] = field(default_factory=list)


class Preparation:
    """What an install of one plan will carry out, once all `units` are done. ``changes``: of each model."""

    def __init__(self, worker: Any, binder: Binder, held: Held, mode: Mode) -> None:
        self.held = held
        self.mode = mode
        self.changes: list[tuple[LoadedModel, Change]] = []
        self.live = Live()
        self.seconds: dict[str, float] = {}
        self.done = False
        self._worker = worker
        self._binder = binder
        self._filled: list[LoadedModel] = []
        self._looks: list[tuple[Pairing, str, nn.Module, graph.Look]] = []
        self._paths = [part.processed for part in held.parts]
        self._units = self._all()
        self._per_slice = self._slice()

    def advance(self, *, whole: bool) -> bool:
        """Do a slice, or all that is left. Returns whether that was the last.

        Errors: NeedsRestart, and whatever vLLM raises.
        """
        left = self._per_slice
        for spent in self._units:
            left -= spent
            if left <= 0 and not whole:
                return False
        self.done = True
        return True

    def note_late(self) -> None:
        """What forwards have derived from the weights that are about to go, since it was looked for, is dropped too."""
        for pairing, path, module, look in self._looks:
            if look.changed():
                pairing.derived_late(path, module)

    def release(self) -> None:
        """The twins go back to their state at creation."""
        self._units.close()
        while self._filled:
            self._filled.pop().twin.restore()

    def _slice(self) -> int:
        """What the units of a slice count for together, from numbers that all ranks have in common: ranks differ in the
        bytes of their modules."""
        modules = sum(len(paths) for paths in self._paths)
        ranks: int = self._worker.vllm_config.parallel_config.world_size
        per_module = max(self.held.offered_nbytes // max(modules, 1) // ranks, 1)
        return _WORK * min(max(SLICE_NBYTES // per_module, 1), _MOST_MODULES)

    def _all(self) -> Generator[int, None, None]:
        for part, paths in zip(self.held.parts, self._paths, strict=True):
            yield from self._part(part, paths)

    def _part(self, part: Part, paths: set[str]) -> Iterator[int]:
        record = part.model.record
        captured = self._binder.device().type == "cuda" and not self._worker.vllm_config.model_config.enforce_eager
        engines = set() if captured else graph.memory_held(getattr(self._worker, "model_runner", None))
        pairing = Pairing(record.state, captured=captured, engines=engines)
        self.changes.append((part.model, pairing.change))
        written = {n.rpartition(".")[0] for d in part.plan.destinations for n in d.names if d.home != "source"}
        served = record.served()
        if paths:
            yield from self._fill_and_process(part, paths)
        yield from self._timed("compare", self._compare(part, pairing, paths))
        if not captured:
            modules = {path: served[path] for path in sorted((written | paths) & set(served))}
            yield from self._timed("compare", self._look(pairing, modules))
        if self.mode == "shadow":
            for place in part.places:
                if place.live and not any(n.rpartition(".")[0] in paths for n in place.destination.names):
                    self.live.served.append(part.model.live_storage(place.destination))
                    self.live.shadows.append(self._binder.shadow(place.key))

    def _timed(self, stage: str, units: Iterator[int]) -> Iterator[int]:
        """The same units; their seconds, without what lies between slices, are added to a stage."""
        while True:
            start = time.perf_counter()
            spent = next(units, None)
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
            if spent is None:
                return
            yield spent

    def _fill_and_process(self, part: Part, paths: set[str]) -> Iterator[int]:
        """What belongs together is filled before any of it is processed: a module may read its neighbours. Groups come
        one after the other, so that the memory of one serves for the next; a partial plan has none, and is one."""
        twin = part.model.twin
        self._filled.append(part.model)
        twin.restore()
        filling = Filling(part, self._binder, self.mode)
        for grouped in part.groups:
            places = [self.held.places[i].destination for i in grouped.group.destinations]
            weights = [place.names[0] for place in places if place.home == "source"]
            yield from self._group(part, filling, grouped.paths, weights)
        if not part.groups:
            yield from self._group(part, filling, sorted(paths), part.plan.fallback)

    def _group(self, part: Part, filling: Filling, paths: Sequence[str], weights: Sequence[str]) -> Iterator[int]:
        filled = set[int]()
        yield from self._timed("fill", self._fill(filling, paths, filled))
        yield from self._timed("process", self._process(part, set(paths), weights))
        part.model.twin.drop_unused(paths, filled)

    def _fill(self, filling: Filling, paths: Sequence[str], filled: set[int]) -> Iterator[int]:
        for path in paths:
            filled |= filling.fill(path)
            yield _WORK
        if self.held.partial:
            for _ in filling.fill_rest():
                yield _WORK

    def _process(self, part: Part, paths: set[str], weights: Sequence[str]) -> Iterator[int]:
        twin, config = part.model.twin, part.model.record.model_config
        if weights:
            with engine_context(twin.config, config):
                twin.load_weights(whole_weights(part, self._binder, weights))
            yield _WORK
        steps = twin.processing(paths)
        while True:
            with engine_context(twin.config, config):
                if next(steps, self) is self:
                    return
            yield _WORK

    def _look(self, pairing: Pairing, modules: dict[str, nn.Module]) -> Iterator[int]:
        """What forwards have derived so far. Later ones may derive more: those modules are looked at once more."""
        for path, module in modules.items():
            self._looks.append((pairing, path, module, graph.Look(module)))
            pairing.derived_late(path, module)
            yield _LOOK

    def _compare(self, part: Part, pairing: Pairing, paths: set[str]) -> Iterator[int]:
        served = part.model.record.served()
        for path in sorted(paths & set(served)):
            pairing.module(path, served[path], part.model.twin.modules[path])
            yield _LOOK
