"""Install the groups of a plan one after the other, the engine being paused (mode ``streamed``; the stage: install).

    fill        the modules of the group get copies of what has arrived in the window, which has room again then
    process     vLLM's own processing on them, as at a first load
    compare     `pairing` lists what has to change in the modules that serve, and that is done at once
    release     what the group took beside the window is free again

The same code as in mode ``shadow``, for fewer modules at a time. From the first group on a failure leaves a worker with
half of an update. Called by `install`, in the worker's main thread, for all ranks of a model at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from vllm_nixl_plugin import graph
from vllm_nixl_plugin.binding import Binder
from vllm_nixl_plugin.composition import Held, Part
from vllm_nixl_plugin.filling import Filling, whole_weights
from vllm_nixl_plugin.grouping import Grouped
from vllm_nixl_plugin.loaded import LoadedModel
from vllm_nixl_plugin.model import state_of
from vllm_nixl_plugin.pairing import Pairing
from vllm_nixl_plugin.twin import engine_context


class Streaming:
    """The groups of one update. ``installed``: how many are in place."""

    def __init__(self, worker: Any, binder: Binder, held: Held) -> None:
        self.held = held
        self.installed = 0
        self.seconds: dict[str, float] = {}
        self._worker, self._binder = worker, binder
        self._steps = [(part, grouped) for part in held.parts for grouped in part.groups]
        self._fillings: dict[int, Filling] = {}
        self._begun: list[LoadedModel] = []
        self._captured = binder.device().type == "cuda" and not worker.vllm_config.model_config.enforce_eager
        self._engines = set() if self._captured else graph.memory_held(getattr(worker, "model_runner", None))
        self._served = {part.model.number: part.model.record.served() for part in held.parts}

    @property
    def done(self) -> bool:
        """Whether all groups are in place."""
        return self.installed == len(self._steps)

    def install(self, hand_back: Callable[[], None]) -> None:
        """Install the next group, all of which has landed. ``hand_back``: its place in the window is free.

        Errors: NeedsRestart, FabricError, and whatever vLLM raises.
        """
        part, grouped = self._steps[self.installed]
        filled = self._fill(part, grouped)
        hand_back()
        if grouped.paths:
            self._process(part, grouped)
        self._put_in_place(part, grouped)
        if grouped.paths:
            part.model.twin.release(set(grouped.paths), filled)
        self.installed += 1

    def release(self) -> None:
        """The twins go back to their state at creation."""
        while self._begun:
            self._begun.pop().twin.restore()

    def _fill(self, part: Part, grouped: Grouped) -> set[int]:
        start = time.perf_counter()
        model, filled = part.model, set[int]()
        if not grouped.paths:
            return filled
        if model not in self._begun:
            self._begun.append(model)
            model.twin.restore()
            self._fillings[model.number] = Filling(part, self._binder, "streamed")
        for path in grouped.paths:
            filled |= self._fillings[model.number].fill(path)
        places = [self.held.places[i] for i in grouped.group.destinations]
        names = [place.destination.names[0] for place in places if place.destination.home == "source"]
        if names:
            with engine_context(model.twin.config, model.record.model_config):
                model.twin.load_weights(whole_weights(part, self._binder, names))
        self._synchronize()
        self._count("fill", start)
        return filled

    def _process(self, part: Part, grouped: Grouped) -> None:
        start = time.perf_counter()
        twin = part.model.twin
        with engine_context(twin.config, part.model.record.model_config):
            for _ in twin.processing(set(grouped.paths)):
                pass
        self._count("process", start)

    def _put_in_place(self, part: Part, grouped: Grouped) -> None:
        start = time.perf_counter()
        record, served = part.model.record, self._served[part.model.number]
        pairing = Pairing(record.state, captured=self._captured, engines=self._engines)
        for path in grouped.paths:
            if path in served:
                pairing.module(path, served[path], part.model.twin.modules[path])
        if not self._captured:
            places = [self.held.places[i].destination for i in grouped.group.destinations]
            written = {n.rpartition(".")[0] for d in places if d.home != "source" for n in d.names}
            for path in (written | set(grouped.paths)) & served.keys():
                pairing.derived_late(path, served[path])
        self._count("compare", start)
        start = time.perf_counter()
        try:
            pairing.change.apply()
            self._synchronize()
        finally:
            for path, _, value in pairing.change.rebinds:
                record.state[path] = state_of(value)
        self._count("copy", start)

    def _count(self, stage: str, start: float) -> None:
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    def _synchronize(self) -> None:
        device = self._binder.device()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
