"""Put new weights in place with first-load semantics (the stage: install).

    prepare   the twin's modules get what has arrived and vLLM's own processing runs on them, as at a first load; then
              `pairing` lists what has to change. Nothing that serves is touched.
    install   carry the list out, the engine being paused: the point of no return

Called by `plane`, in the worker's main thread.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import torch

from vllm_nixl_plugin import graph
from vllm_nixl_plugin.binding import Binder
from vllm_nixl_plugin.composition import Held, Part
from vllm_nixl_plugin.errors import InstallFailed, PushWeightsError
from vllm_nixl_plugin.loaded import LoadedModel
from vllm_nixl_plugin.memory import Arena
from vllm_nixl_plugin.model import state_of
from vllm_nixl_plugin.pairing import Change, Pairing
from vllm_nixl_plugin.planning import dtype_of
from vllm_nixl_plugin.twin import engine_context
from vllm_nixl_plugin.wire import Mode

logger = logging.getLogger("vllm.nixl_plugin")


@dataclass(slots=True)
class _Live:
    """Tensors that serve and their shadows, for live homes whose modules are not processed."""

    served: list[torch.Tensor]
    shadows: list[torch.Tensor]


@dataclass(slots=True)
class Prepared:
    """What an install carries out. ``changes``: of each model."""

    held: Held
    mode: Mode
    changes: list[tuple[LoadedModel, Change]]
    live: _Live
    seconds: dict[str, float]


class Installer:
    """See the module."""

    def __init__(self, worker: Any, number: int, binder: Binder) -> None:
        self.worker = worker
        self.number = number
        self.binder = binder
        self.prepared: Prepared | None = None
        self._twins_in_use: list[LoadedModel] = []

    def prepare(self, held: Held, mode: Mode) -> Prepared:
        """Run vLLM's processing on the twin and work out what an install will change. Nothing that serves is touched.

        Errors: NeedsRestart, InstallFailed; always ``untouched`` in shadow mode.
        """
        self.prepared = None
        seconds: dict[str, float] = {}
        clock = _Clock(seconds)
        live = _Live([], [])
        try:
            changes = [(part.model, self._prepare_part(part, held, mode, live, clock)) for part in held.parts]
            self._synchronize()
            self.prepared = Prepared(held, mode, changes, live, seconds)
        except Exception as error:
            self.release()
            if isinstance(error, PushWeightsError):
                error.details["untouched"] = mode == "shadow"
                raise
            logger.exception("worker %s could not prepare an install", self.number)
            raise InstallFailed(
                f"worker {self.number}: {type(error).__name__}: {error}", untouched=mode == "shadow"
            ) from error
        return self.prepared

    def _prepare_part(self, part: Part, held: Held, mode: Mode, live: _Live, clock: _Clock) -> Change:
        record, twin = part.model.record, part.model.twin
        captured = self._captured()
        engines = set() if captured else graph.memory_held(getattr(self.worker, "model_runner", None))
        pairing = Pairing(record.state, captured=captured, engines=engines)
        paths = part.processed
        written = {n.rpartition(".")[0] for d in part.plan.destinations for n in d.names if d.home != "source"}
        served = record.served()
        if paths:
            self._process(part, held, mode, paths)
            clock.lap("process")
            for path in sorted(paths & set(served)):
                pairing.module(path, served[path], twin.modules[path])
        for path in () if captured else (written - paths) & set(served):
            pairing.unprocessed(path, served[path])
        clock.lap("compare")
        if mode == "shadow":
            for place in part.places:
                if place.live and not any(n.rpartition(".")[0] in paths for n in place.destination.names):
                    live.served.append(part.model.live_storage(place.destination))
                    live.shadows.append(self._arena[place.key])
        return pairing.change

    def install(self, held: Held, mode: Mode) -> dict[str, float]:
        """Put the prepared weights in place; seconds by stage (those of `prepare` among them).

        Errors: those of `prepare`, and InstallFailed without ``untouched`` when a copy failed half-way.
        """
        prepared = self.prepared
        if prepared is None or prepared.held is not held or prepared.mode != mode:
            prepared = self.prepare(held, mode)
        clock = _Clock(prepared.seconds)
        try:
            for served, shadow in zip(prepared.live.served, prepared.live.shadows, strict=True):
                served.copy_(shadow, non_blocking=True)
            for _, change in prepared.changes:
                change.apply()
            self._synchronize()
        except Exception as error:
            logger.exception("worker %s could not finish an install", self.number)
            raise InstallFailed(f"worker {self.number}: {type(error).__name__}: {error}") from error
        finally:
            clock.lap("copy")
            for model, change in prepared.changes:
                for path, _, value in change.rebinds:
                    model.record.state[path] = state_of(value)
            self.release()
        self.binder.remainder.installed(held, mode)
        clock.lap("release")
        return prepared.seconds

    def release(self) -> None:
        """Forget what was prepared; the twins go back to their state at creation."""
        self.prepared = None
        while self._twins_in_use:
            self._twins_in_use.pop().twin.restore()

    @property
    def _arena(self) -> Arena:
        assert self.binder.arena is not None
        return self.binder.arena

    def _captured(self) -> bool:
        return self.binder.device().type == "cuda" and not self.worker.vllm_config.model_config.enforce_eager

    def _process(self, part: Part, held: Held, mode: Mode, paths: set[str]) -> None:
        twin, record = part.model.twin, part.model.record
        self._twins_in_use.append(part.model)
        twin.restore()
        twin.fill_tensors(self._contents(part, held, mode, paths))
        with engine_context(twin.config, record.model_config):
            if part.plan.fallback:
                specs = {w.name: w for w in part.plan.weights}
                weights = []
                for name in part.plan.fallback:
                    raw = self._arena[part.model.number, name].cpu()
                    weights.append((name, raw.view(dtype_of(specs[name].dtype)).view(specs[name].shape)))
                twin.load_weights(weights)
            twin.process(paths)

    def _contents(self, part: Part, held: Held, mode: Mode, paths: set[str]) -> dict[int, torch.Tensor]:
        """Storages for the modules that are processed: copies of what arrived, else what creation or the engine has."""
        model, arena = part.model, self._arena
        twin = model.twin
        places = {place.key: place for place in part.places}
        served = model.record.served()
        wanted: dict[int, torch.Tensor] = {}
        keys = twin.storage_keys()
        for path in paths:
            for name, tensor in graph.tensors(twin.modules[path]):
                storage = keys.get(id(tensor))
                if storage is None or storage in wanted:
                    continue
                info, key = twin.storages[storage], (model.number, storage)
                place = places.get(key)
                if place is not None and (mode == "shadow" or not place.live):
                    wanted[storage] = arena[key].to(info.device, copy=True)
                elif place is not None:
                    wanted[storage] = model.live_storage(place.destination).clone()
                elif held.partial and self.binder.remainder.is_whole(key):
                    wanted[storage] = arena[key].to(info.device, copy=True)
                elif path in served and (info.value is None or (held.partial and model.is_live(info.names))):
                    today = dict(graph.tensors(served[path])).get(name)
                    if today is not None and today.untyped_storage().nbytes() == info.nbytes:
                        wanted[storage] = graph.raw_bytes(today).clone()
                    else:
                        wanted[storage] = torch.empty(info.nbytes, dtype=torch.uint8, device=info.device)
                elif isinstance(info.value, int | float):
                    wanted[storage] = torch.empty(info.nbytes, dtype=torch.uint8, device=info.device)
                    wanted[storage].view(info.dtype).fill_(info.value)
        for number, rest in self.binder.remainder.needed(part) if held.partial else ():
            if isinstance(rest, int) and rest not in wanted:
                wanted[rest] = arena[number, rest].to(twin.storages[rest].device, copy=True)
        return wanted

    def _synchronize(self) -> None:
        device = self.binder.device()
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class _Clock:
    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds, self._at = seconds, time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._at
        self._at = now
