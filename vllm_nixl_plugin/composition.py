"""The plans of a worker's models as one plan (the stage: plan).

A worker serves a target model and, with speculative decoding, a drafter. Each is planned for by itself; on the wire a
worker has one plan. `plan_models` says which weights are meant for whom and puts the parts together, and what of them
is installed together (`grouping`); a `Held` plan remembers which destination of the whole belongs to which model.
Called by `plane`, read by `binding`, `install` and `streaming`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from vllm_nixl_plugin import graph
from vllm_nixl_plugin.errors import PlanRefused
from vllm_nixl_plugin.grouping import Grouped, Unit, group
from vllm_nixl_plugin.loaded import LoadedModel
from vllm_nixl_plugin.planning import Fill, Planned, dtype_of
from vllm_nixl_plugin.wire import Destination, Manifest, PlannedCopy, WorkerPlan

DRAFT_PREFIX = "draft:"
"""Before the names of the weights of a drafter that has a checkpoint of its own."""

Key = tuple[int, int | str]
"""Names a destination's memory in the worker: the model, and its storage or (for the fallback) its weight."""


@dataclass(frozen=True, slots=True)
class Place:
    """A destination of the whole plan. ``destination`` has the names that it has in its model."""

    model: LoadedModel
    key: Key
    destination: Destination
    fills: tuple[Fill, ...]

    @property
    def live(self) -> bool:
        """Whether kernels read these very bytes."""
        return self.destination.home == "live"


@dataclass(frozen=True, slots=True)
class Part:
    """What the plan has for one model; ``places`` in the order of its destinations."""

    model: LoadedModel
    plan: WorkerPlan
    places: tuple[Place, ...]
    self_check: Mapping[str, Any]
    partial: bool
    groups: tuple[Grouped, ...] = ()

    @property
    def processed(self) -> set[str]:
        """Modules on which vLLM's processing has to run: those with a shadow home, and those that derive tensors.

        Of the latter, a partial plan needs those that can see what it writes.
        """
        shadows = {n.rpartition(".")[0] for d in self.plan.destinations if d.home == "shadow" for n in d.names}
        if not shadows and not self.plan.fallback:
            return set()
        derived = self.model.record.derived & self.model.twin.modules.keys()
        if self.partial and self.model.has_hook:
            shadows |= {n.rpartition(".")[0] for d in self.model.baseline() if not d.live for n in d.names}
        elif self.partial:
            written = {place.key[1] for place in self.places}
            derived = {path for path in derived if self.model.within_reach(path) & written}
        return (shadows & self.model.twin.modules.keys()) | derived


@dataclass(frozen=True, eq=False)
class Held:
    """A plan that the worker can carry out."""

    plan: WorkerPlan
    partial: bool
    parts: tuple[Part, ...]

    @property
    def labels(self) -> set[str]:
        """Those of the drafters that the plan has weights for."""
        return {part.model.label for part in self.parts} - {""}

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """In the order of the plan's destinations."""
        return tuple(place for part in self.parts for place in part.places)

    @cached_property
    def offered_nbytes(self) -> int:
        """Bytes of all weights of the manifest."""
        return sum(math.prod(w.shape) * dtype_of(w.dtype).itemsize for w in self.plan.weights)


def plan_models(manifest: Manifest, target: LoadedModel, drafters: Sequence[LoadedModel]) -> Held:
    """One plan for all models that the manifest has weights for. A drafter without any keeps its own.

    Errors: PlanRefused naming weights.
    """
    planned = [(target, target.plan(_offered(manifest, target)))]
    used = _accepted(planned)
    stale: list[str] = []
    for drafter in drafters:
        offered = _offered(manifest, drafter)
        if not drafter.is_meant({w.name for w in offered.weights}, set() if drafter.prefix else used):
            stale.append(drafter.label)
            continue
        try:
            planned.append((drafter, drafter.plan(offered)))
        except PlanRefused as error:
            raise PlanRefused(f"the draft model: {error.message}", **error.details) from error
    return _compose(manifest, planned, tuple(stale))


def _offered(manifest: Manifest, model: LoadedModel) -> Manifest:
    """The weights of a name space: ``draft:`` for a drafter with a checkpoint of its own, the rest for all others."""
    weights = tuple(w for w in manifest.weights if w.name.startswith(DRAFT_PREFIX) == (model.prefix == DRAFT_PREFIX))
    if not model.prefix:
        return manifest if len(weights) == len(manifest.weights) else manifest.model_copy(update={"weights": weights})
    cut = tuple(w.model_copy(update={"name": w.name.removeprefix(DRAFT_PREFIX)}) for w in weights)
    return manifest.model_copy(update={"weights": cut})


def _accepted(planned: Sequence[tuple[LoadedModel, Planned]]) -> set[str]:
    """Names, as in the manifest, of the weights that go somewhere."""
    names: set[str] = set()
    for model, of in planned:
        numbers = {c.weight for c in of.plan.copies}
        names |= {model.prefix + of.plan.weights[i].name for i in numbers}
    return names


def _compose(manifest: Manifest, planned: Sequence[tuple[LoadedModel, Planned]], stale: tuple[str, ...]) -> Held:
    if len(planned) == 1 and planned[0][1].plan.weights == manifest.weights:
        [(model, of)] = planned
        part = _part(model, of, manifest.partial)
        plan = of.plan.model_copy(update={"stale": stale, "groups": tuple(each.group for each in part.groups)})
        return Held(plan, manifest.partial, (part,))
    destinations: list[Destination] = []
    copies: list[PlannedCopy] = []
    fallback: dict[str, None] = {}
    unknown = {w.name for w in manifest.weights}
    index = {w.name: i for i, w in enumerate(manifest.weights)}
    parts: list[Part] = []
    for model, of in planned:
        first = len(destinations)
        parts.append(_part(model, of, manifest.partial, first))
        numbers = [index[model.prefix + w.name] for w in of.plan.weights]
        copies += [
            PlannedCopy(weight=numbers[c.weight], destination=first + c.destination, copy_=c.copy_, program=c.program)
            for c in of.plan.copies
        ]
        destinations += [_labelled(d, model.label) for d in of.plan.destinations]
        fallback |= dict.fromkeys(model.prefix + name for name in of.plan.fallback)
        unknown -= {model.prefix + w.name for w in of.plan.weights} - {model.prefix + name for name in of.plan.unused}
    plan = WorkerPlan(
        weights=manifest.weights, destinations=tuple(destinations), copies=tuple(copies),
        unused=tuple(w.name for w in manifest.weights if w.name in unknown), fallback=tuple(fallback), stale=stale,
        groups=tuple(each.group for part in parts for each in part.groups),
    )  # fmt: skip
    return Held(plan, manifest.partial, tuple(parts))


def _labelled(destination: Destination, label: str) -> Destination:
    if not label:
        return destination
    return destination.model_copy(update={"names": tuple(f"{label}/{name}" for name in destination.names)})


def _part(model: LoadedModel, of: Planned, partial: bool, first: int = 0) -> Part:
    """``first``: the number of its first destination in the whole plan."""
    rows = zip(of.keys, of.plan.destinations, of.fills, strict=True)
    places = tuple(Place(model, (model.number, k), d, f) for k, d, f in rows)
    part = Part(model, of.plan, places, of.self_check, partial)
    return part if partial else replace(part, groups=tuple(_groups(part, of.together, first)))


def _groups(part: Part, together: Sequence[Sequence[int]], first: int) -> list[Grouped]:
    """What of a model is installed together in mode ``streamed``."""
    model, destinations = part.model, part.plan.destinations
    number = {place.key[1]: i for i, place in enumerate(part.places)}
    position = {path: i for i, path in enumerate(model.twin.modules)}
    keys = model.twin.storage_keys()
    units = []
    for path in part.processed:
        module = model.twin.modules[path]
        mine = {keys[id(t)] for _, t in graph.tensors(module) if id(t) in keys}
        reads = mine | {keys[id(t)] for t in graph.reachable_tensors(module) if id(t) in keys}
        filled = sum(model.twin.storages[key].nbytes for key in mine)
        working = filled + max(filled, model.record.owned_nbytes.get(path, 0))
        units.append(Unit(path, position[path], frozenset(number[k] for k in reads if k in number), working))
    units.sort(key=lambda unit: unit.position)
    if model.has_hook and units:  # vLLM processes the model as a whole, after its modules
        together = [*together, range(len(destinations))]
    last = len(position)
    at = [min((position.get(name.rpartition(".")[0], last) for name in d.names), default=last) for d in destinations]
    return group(destinations, at, units, together, first)
