"""The plans of a worker's models as one plan (the stage: plan).

Each model is planned for by itself; on the wire a worker has one plan. `compose` puts the parts together; a `Held` plan
remembers which destination of the whole belongs to which model. Pure data; called by `plane`, read by `binding` and
`install`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_nixl_plugin.loaded import LoadedModel
from vllm_nixl_plugin.planning import Fill, Planned
from vllm_nixl_plugin.wire import Destination, Manifest, PlannedCopy, WorkerPlan

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

    @property
    def processed(self) -> set[str]:
        """Modules on which vLLM's processing has to run: those with a shadow home, and those that derive tensors."""
        shadows = {n.rpartition(".")[0] for d in self.plan.destinations if d.home == "shadow" for n in d.names}
        if not shadows and not self.plan.fallback:
            return set()
        return {p for p in shadows | self.model.record.derived if p in self.model.twin.modules}
    self_check: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A plan that the worker can carry out."""

    plan: WorkerPlan
    partial: bool
    parts: tuple[Part, ...]

    @property
    def places(self) -> tuple[Place, ...]:
        """In the order of the plan's destinations."""
        return tuple(place for part in self.parts for place in part.places)


def compose(manifest: Manifest, planned: Sequence[tuple[LoadedModel, Planned]]) -> Held:
    """One plan of several."""
    if len(planned) == 1 and planned[0][1].plan.weights == manifest.weights:
        [(model, of)] = planned
        return Held(of.plan, manifest.partial, (_part(model, of),))
    parts: list[Part] = []
    destinations: list[Destination] = []
    copies: list[PlannedCopy] = []
    fallback: dict[str, None] = {}
    index = {w.name: i for i, w in enumerate(manifest.weights)}
    for model, of in planned:
        first = len(destinations)
        numbers = [index[w.name] for w in of.plan.weights]
        copies += [
            PlannedCopy(weight=numbers[c.weight], destination=first + c.destination, copy_=c.copy_, program=c.program)
            for c in of.plan.copies
        ]
        destinations += of.plan.destinations
        fallback |= dict.fromkeys(of.plan.fallback)
        parts.append(_part(model, of))
    unused = set.intersection(*(set(of.plan.unused) for _, of in planned))
    plan = WorkerPlan(
        weights=manifest.weights, destinations=tuple(destinations), copies=tuple(copies),
        unused=tuple(w.name for w in manifest.weights if w.name in unused), fallback=tuple(fallback),
    )  # fmt: skip
    return Held(plan, manifest.partial, tuple(parts))


def _part(model: LoadedModel, of: Planned) -> Part:
    places = zip(of.keys, of.plan.destinations, of.fills, strict=True)
    return Part(model, of.plan, tuple(Place(model, (model.number, k), d, f) for k, d, f in places), of.self_check)
