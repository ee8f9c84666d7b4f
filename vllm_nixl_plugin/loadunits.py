"""Cut a load into units that can be loaded, and compared, by themselves; tell which of them are alike. Pure.

A *unit* is a block of the model (the storages below ``layers.3``, or those of a module outside all numbered blocks)
with everything that the trace connects to it: no weight of a unit goes elsewhere, nothing of it comes from elsewhere.
Weights that the trace takes for unused are in the unit whose weights have names most like theirs; storages that nothing
writes are in the unit of their block. Called by `selfcheck`.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_nixl_plugin.planning import Planned, TracedDestination
from vllm_nixl_plugin.tracing import Opaque, Source
from vllm_nixl_plugin.wire import PlannedCopy, WeightSpec


@dataclass(frozen=True, slots=True)
class Unit:
    """``weights``: indices into the manifest, in its order; ``storages``: keys of the twin."""

    weights: tuple[int, ...]
    storages: tuple[int, ...]


class LoadUnits:
    """The units of one trace. ``paths``: where each storage of the twin can be found; ``kinds``: what is known of it
    beside its size (dtype, module class, loader), for telling units apart."""

    def __init__(
        self,
        weights: Sequence[WeightSpec],
        traced: Sequence[TracedDestination],
        planned: Planned,
        paths: Mapping[int, Sequence[str]],
        kinds: Mapping[int, Hashable],
    ) -> None:
        self.weights = weights
        self.paths = paths
        self._kinds = kinds
        index = {w.name: i for i, w in enumerate(weights)}
        self._sources = {t.key: {index[name] for name in _names(t)} for t in traced}
        self.copies: dict[int, list[PlannedCopy]] = {}
        for copy in planned.plan.copies:
            if isinstance(planned.keys[copy.destination], int):
                self.copies.setdefault(copy.weight, []).append(copy)
        self._planned = planned
        self._covered: dict[int, int] = {}
        for copies in self.copies.values():
            for copy in copies:
                self._covered[self._key(copy)] = self._covered.get(self._key(copy), 0) + copy.copy_.dst_nbytes
        self._numbers = {key: i for i, key in enumerate(planned.keys) if isinstance(key, int)}
        self._rank = {key: i for i, key in enumerate(paths)}
        self.all = self._cut()

    def merged(self, units: Iterable[Unit]) -> Unit:
        """One unit of several."""
        nodes: dict[tuple[str, int], None] = {}
        for unit in units:
            nodes |= {("weight", w): None for w in unit.weights} | {("storage", s): None for s in unit.storages}
        return self._unit(nodes)

    def _unit(self, nodes: Iterable[tuple[str, Any]]) -> Unit:
        nodes = list(nodes)
        return Unit(
            tuple(sorted(n for kind, n in nodes if kind == "weight")),
            tuple(sorted((n for kind, n in nodes if kind == "storage"), key=self._rank.__getitem__)),
        )

    def _cut(self) -> list[Unit]:
        groups = _Groups()
        for key, paths in self.paths.items():
            # What nobody writes may be shared by many blocks (tables, workspaces) without holding them together.
            for path in paths if self.is_written(key) else paths[:1]:
                groups.join(("storage", key), ("block", block_of(path)))
            for weight in self._sources.get(key, ()):
                groups.join(("storage", key), ("weight", weight))
        like: dict[str, tuple[str, int]] = {}
        for sources in self._sources.values():
            for number in sources:
                for prefix in _prefixes(self.weights[number].name):
                    like.setdefault(prefix, ("weight", number))
        for key, paths in self.paths.items():
            for path in paths:
                for prefix in _prefixes(path):
                    like.setdefault(prefix, ("storage", key))
        anywhere = next(iter(like.values()), None)
        for number, spec in enumerate(self.weights):
            if ("weight", number) not in groups:
                node = next((like[p] for p in _prefixes(spec.name) if p in like), anywhere)
                groups.join(("weight", number), node or ("weight", number))
        return [self._unit(nodes) for nodes in groups.lists()]

    def components(self, unit: Unit) -> list[Unit]:
        """The parts of a unit that the trace does not connect with each other. An unused weight is one by itself."""
        groups = _Groups()
        for key in unit.storages:
            groups.join(("storage", key), ("storage", key))
            for weight in self._sources.get(key, ()):
                groups.join(("storage", key), ("weight", weight))
        for weight in unit.weights:
            groups.join(("weight", weight), ("weight", weight))
        return [self._unit(nodes) for nodes in groups.lists()]

    def covers(self, key: int, nbytes: int) -> bool:
        """Whether copies of the plan write every byte of a storage (no two of them write the same)."""
        return self._covered.get(key, 0) == nbytes

    def is_written(self, key: int) -> bool:
        """Whether the trace found anything that writes the storage."""
        return bool(self._sources.get(key))

    def outside(self) -> list[Unit]:
        """The units outside all numbered blocks."""
        return [u for u in self.all if not any(_NUMBER.search(p) for key in u.storages for p in self.paths[key])]

    def nbytes(self, unit: Unit, sizes: Mapping[str, int]) -> int:
        """Bytes of the unit's weights; ``sizes``: of an element by dtype."""
        return sum(_numel(self.weights[w]) * sizes[self.weights[w].dtype] for w in unit.weights)

    def signature(self, unit: Unit) -> Hashable:
        """Equal for units that differ in the number of their block only."""
        numbers = {match[0] for key in unit.storages for p in self.paths[key] if (match := _NUMBER.search(p))}
        number = numbers.pop() if len(numbers) == 1 else ""
        place = {key: i for i, key in enumerate(unit.storages)}
        weights = []
        for w in unit.weights:
            spec = self.weights[w]
            copies = tuple((place[self._key(c)], c.copy_, c.program) for c in self.copies.get(w, ()))
            weights.append((_neutral(spec.name, number), spec.shape, spec.dtype, copies))
        storages = []
        for key in unit.storages:
            n = self._numbers.get(key)
            fills = tuple((f.copy, f.value is None) for f in self._planned.fills[n]) if n is not None else ()
            sources = tuple(sorted(_neutral(self.weights[w].name, number) for w in self._sources.get(key, ())))
            names = tuple(_neutral(p, number) for p in self.paths[key])
            storages.append((names, self._kinds.get(key), fills, sources))
        return hash((tuple(weights), tuple(storages)))

    def _key(self, copy: PlannedCopy) -> int:
        key = self._planned.keys[copy.destination]
        assert isinstance(key, int)
        return key

    def thinned(self, unit: Unit) -> Unit:
        """The same storages, but of weights that are alike (names but for numbers, geometry) only first and last."""
        kinds: dict[Hashable, list[int]] = {}
        for w in unit.weights:
            spec = self.weights[w]
            copies = tuple(
                (self._key(c), c.copy_.shape, c.copy_.src_strides, c.copy_.dst_strides, c.program)
                for c in self.copies.get(w, ())
            )
            kinds.setdefault((re.sub(r"\d+", "#", spec.name), spec.shape, spec.dtype, copies), []).append(w)
        return Unit(tuple(sorted({w for of in kinds.values() for w in (of[0], of[-1])})), unit.storages)


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def block_of(path: str) -> str:
    """The numbered block that a tensor is in (``model.layers.3``), or else its module."""
    match = _NUMBER.search(path)
    return path[: match.end()] if match else path.rpartition(".")[0]


def _neutral(name: str, number: str) -> str:
    match = _NUMBER.search(name) if number else None
    return f"{name[: match.start()]}#{name[match.end() :]}" if match and match[0] == number else name


def _prefixes(name: str) -> list[str]:
    """``a.b.c`` -> ``a.b.c``, ``a.b``, ``a``."""
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts), 0, -1)]


def _names(traced: TracedDestination) -> set[str]:
    names: set[str] = set()
    for piece in traced.pieces:
        if isinstance(piece.root, Source):
            names.add(piece.root.name)
        elif isinstance(piece.root, Opaque):
            names |= piece.root.sources
    return names


def _numel(spec: WeightSpec) -> int:
    n = 1
    for extent in spec.shape:
        n *= extent
    return n


class _Groups:
    """Sets that are joined (union-find), in the order in which their members came."""

    def __init__(self) -> None:
        self._parent: dict[Any, Any] = {}

    def __contains__(self, node: Any) -> bool:
        return node in self._parent

    def _root(self, node: Any) -> Any:
        self._parent.setdefault(node, node)
        while (parent := self._parent[node]) != node:
            self._parent[node] = self._parent[parent]
            node = self._parent[node]
        return node

    def join(self, a: Any, b: Any) -> None:
        a, b = self._root(a), self._root(b)
        if a != b:
            self._parent[b] = a

    def lists(self) -> list[list[Any]]:
        out: dict[Any, list[Any]] = {}
        for node in list(self._parent):
            out.setdefault(self._root(node), []).append(node)
        return list(out.values())
