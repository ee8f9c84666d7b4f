"""Turn traced copies and homes into the plan of one worker. Pure: no device, no network, no clock.

The second stage of the path (plan), called by `plane` with what `tracing` found. In order: source pieces become planned
copies; constants and creation values become fills that the worker makes itself; opaque pieces send their sources whole
(the fallback, on which vLLM's own loader runs at install). Then coverage: what the server's checkpoint wrote must be
written by the manifest too, and every weight must be used, or the plan is refused with the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_nixl_plugin.errors import PlanRefused
from vllm_nixl_plugin.layout import Copy, contiguous_strides, subtract
from vllm_nixl_plugin.tracing import Constant, Creation, Opaque, Operation, Piece, Source
from vllm_nixl_plugin.wire import Destination, Home, Manifest, PlannedCopy, Step, WeightSpec, WorkerPlan

_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True, slots=True)
class TracedDestination:
    """A storage of the worker and who writes it. ``key`` names the storage in the worker; ``live``: proven live."""

    key: int
    names: tuple[str, ...]
    nbytes: int
    live: bool
    pieces: tuple[Piece, ...]

    @property
    def weights(self) -> set[str]:
        """Names of the weights that go there."""
        of = [{p.root.name} if isinstance(p.root, Source) else p.root.sources
              for p in self.pieces if isinstance(p.root, Source | Opaque)]  # fmt: skip
        return set().union(*of)


@dataclass(frozen=True, slots=True)
class Fill:
    """Bytes of a destination that no weight writes: ``value`` is a number, a tensor (its storage holds ``copy.src``)
    or None for what the destination held at creation."""

    copy: Copy
    value: Any


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan, and what the worker has to know beyond it: storage keys and fills, in the order of the destinations."""

    plan: WorkerPlan
    keys: tuple[int | str, ...]
    fills: tuple[tuple[Fill, ...], ...]
    self_check: Mapping[str, Any] = field(default_factory=dict)
    """What `selfcheck` found, for the summary."""
    together: tuple[tuple[int, ...], ...] = ()
    """Destinations that vLLM's loader fills from the same whole weights, with those of these weights."""


def make_plan(
    manifest: Manifest,
    traced: Sequence[TracedDestination],
    baseline: Mapping[int, Sequence[Piece]] | None,
    ignorable: Iterable[str],
) -> Planned:
    """The plan of one worker for one manifest.

    ``baseline``: the pieces of the server's own checkpoint by storage key, or None where coverage need not be compared
    (the manifest has the very names and shapes of that checkpoint, or is partial). ``ignorable``: weights of the
    server's own checkpoint that its loader does not use. Errors: PlanRefused naming the weights that are missing.
    """
    index = {w.name: i for i, w in enumerate(manifest.weights)}
    destinations: list[Destination] = []
    copies: list[PlannedCopy] = []
    keys: list[int | str] = []
    fills: list[tuple[Fill, ...]] = []
    used: set[str] = set()
    whole: dict[str, None] = {}
    loaded: list[tuple[int, set[str]]] = []
    for item in traced:
        of_item: list[Fill] = []
        number = len(destinations)
        mine: list[PlannedCopy] = []
        for piece in item.pieces:
            root = piece.root
            if isinstance(root, Source):
                used.add(root.name)
                program = tuple(_step(o) for o in piece.program)
                mine.append(
                    PlannedCopy(weight=index[root.name], destination=number, copy_=piece.copy, program=program)
                )
            elif isinstance(root, Constant):
                of_item.append(Fill(piece.copy, _constant(root.value, piece)))
            elif isinstance(root, Creation):
                of_item.append(Fill(piece.copy, None))
            else:
                whole.update(dict.fromkeys(sorted(root.sources)))
                loaded.append((number, set(root.sources)))
                of_item.append(Fill(piece.copy, None))
        if mine or any(isinstance(p.root, Opaque) for p in item.pieces):
            home: Home = "live" if item.live and not any(isinstance(p.root, Opaque) for p in item.pieces) else "shadow"
            destinations.append(Destination(names=item.names, nbytes=item.nbytes, home=home))
            copies += mine
            keys.append(item.key)
            fills.append(tuple(of_item))
    used |= set(whole)
    first = len(destinations)
    at = {name: first + i for i, name in enumerate(whole)}
    together = tuple((number, *sorted(at[name] for name in names)) for number, names in loaded)
    for name in whole:
        spec = manifest.weights[index[name]]
        copies.append(_whole(spec, index[name], len(destinations)))
        destinations.append(Destination(names=(name,), nbytes=copies[-1].copy_.dst_nbytes, home="source"))
        keys.append(name)
        fills.append(())
    if baseline is not None:
        refuse_missing(missing(baseline, {t.key: t.pieces for t in traced}))
    unused = tuple(w.name for w in manifest.weights if w.name not in used and w.name not in set(ignorable))
    plan = WorkerPlan(
        weights=manifest.weights, destinations=tuple(destinations), copies=tuple(copies), unused=unused,
        fallback=tuple(whole),
    )  # fmt: skip
    return Planned(plan, tuple(keys), tuple(fills), together=together)


def _step(operation: Operation) -> Step:
    return Step(op=operation.op, args=operation.args, dtype=dtype_name(operation.dtype))


def _constant(value: Any, piece: Piece) -> Any:
    """Constants that went through a program are worked out here, where they are numbers."""
    if not piece.program:
        return value
    if isinstance(value, torch.Tensor):
        raise PlanRefused("a loader computes with a tensor of its own; this is not supported", op=str(piece.program))
    for operation in piece.program:
        if operation.op != "to":
            value = getattr(torch.tensor(value, dtype=operation.dtype), operation.op)(*operation.args).item()
    return value


def _whole(spec: WeightSpec, weight: int, destination: int) -> PlannedCopy:
    size = dtype_of(spec.dtype).itemsize
    strides = contiguous_strides(spec.shape, size)
    return PlannedCopy(
        weight=weight, destination=destination, copy_=Copy(spec.shape, 0, strides, size, 0, strides, size)
    )


def missing(baseline: Mapping[int, Sequence[Piece]], offered: Mapping[int, Sequence[Piece]]) -> set[str]:
    """Names of baseline weights some of whose destination bytes nobody offers to write."""
    names: set[str] = set()
    for key, pieces in baseline.items():
        covers = [p.copy for p in offered.get(key, ()) if isinstance(p.root, Source | Opaque | Constant)]
        for piece in pieces:
            if not isinstance(piece.root, Source | Opaque):
                continue
            left = [piece.copy]
            for cover in covers:
                left = [rest for part in left for rest in subtract(part, cover)]
                if not left:
                    break
            if left:
                names |= {piece.root.name} if isinstance(piece.root, Source) else piece.root.sources
    return names


def refuse_missing(names: set[str]) -> None:
    """Errors: PlanRefused, if there is any name."""
    if names:
        raise PlanRefused(
            f"{len(names)} weights are missing from the push: {_some(names)}. The server's checkpoint has them and "
            "nothing is sent in their place. Send them, or use partial=True to keep their present values.",
            missing=sorted(names)[:1000],
        )


def check_against_checkpoint(manifest: Manifest, checkpoint: Sequence[WeightSpec]) -> None:
    """Compare shapes and dtypes with the tensors of the same names that the server itself started from.

    Floating dtypes of 16 bits and more may replace each other (they are cast as vLLM's loader casts); any other change
    of dtype would reinterpret values. Errors: PlanRefused naming all that differ.
    """
    known = {w.name: w for w in checkpoint}
    misshaped: list[str] = []
    mistyped: list[str] = []
    for w in manifest.weights:
        k = known.get(w.name)
        if k is None:
            continue
        if k.shape != w.shape:
            misshaped.append(f"{w.name}: expected {list(k.shape)}, got {list(w.shape)}")
        if k.dtype != w.dtype and not (k.dtype in _FLOATS and w.dtype in _FLOATS):
            mistyped.append(f"{w.name}: expected {k.dtype}, got {w.dtype}")
    if misshaped or mistyped:
        parts = [f"{len(misshaped)} misshaped ({_some(misshaped)})"] if misshaped else []
        parts += [f"{len(mistyped)} wrongly typed ({_some(mistyped)})"] if mistyped else []
        raise PlanRefused(
            f"the push does not fit the model that the server runs: {'; '.join(parts)}. Check that trainer and server "
            "run the same model.",
            misshaped=misshaped[:1000],
            mistyped=mistyped[:1000],
        )


def _some(names: Iterable[str], most: int = 5) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype on the wire."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name on the wire. Errors: PlanRefused for a name that torch does not have."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise PlanRefused(f"torch has no dtype {name!r}", mistyped=[name])
    return found
