"""What a self-check has found, and what becomes of a trace by it. Made by `selfcheck`, read by `loaded` and `plane`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_nixl_plugin.errors import PlanRefused
from vllm_nixl_plugin.layout import identity
from vllm_nixl_plugin.planning import TracedDestination
from vllm_nixl_plugin.tracing import Opaque, Piece
from vllm_nixl_plugin.twin import Twin


@dataclass(frozen=True, slots=True)
class Demotion:
    """``weights`` that the loader itself has to place, ``storages`` of the twin that it writes, and why."""

    weights: tuple[str, ...]
    storages: tuple[int, ...]
    names: tuple[str, ...]
    reason: str


@dataclass(slots=True)
class Findings:
    """What was compared, in how long, and what came of it."""

    mode: str
    units: int = 0
    checked_units: int = 0
    checked_nbytes: int = 0
    seconds: float = 0.0
    demoted: list[Demotion] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For the summary of a plan."""
        return {
            "mode": self.mode, "units": self.units, "checked_units": self.checked_units,
            "checked_nbytes": self.checked_nbytes, "seconds": round(self.seconds, 4),
            "demoted": [{"weights": list(d.weights), "names": list(d.names), "reason": d.reason} for d in self.demoted],
        }  # fmt: skip


def summed(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The findings on all models of a worker as one."""
    if len(reports) == 1:
        return dict(reports[0])
    total = Findings("").as_dict()
    for report in reports:
        total = {key: report[key] if key == "mode" else total[key] + report[key] for key in total}
    return total


def demote(
    traced: Sequence[TracedDestination], demoted: Sequence[Demotion], twin: Twin
) -> list[TracedDestination]:
    """The destinations with those that are demoted left to the loader."""
    out = {t.key: t for t in traced}
    paths = _paths(twin)
    for demotion in demoted:
        for key in demotion.storages:
            names = tuple(paths.get(key, ()))
            if not names:
                raise PlanRefused(
                    f"vLLM's loader writes {demotion.names[0]}, which is neither a parameter nor a buffer; this model "
                    "cannot be updated"
                )
            nbytes = twin.storages[key].nbytes
            mark = Piece(Opaque("self-check", frozenset(demotion.weights)), identity((nbytes,), 1))
            out[key] = TracedDestination(key, names, nbytes, False, (mark,))
    return list(out.values())


def _paths(twin: Twin) -> dict[int, list[str]]:
    keys = twin.storage_keys()
    out: dict[int, list[str]] = {}
    for path, tensor in twin.destination_tensors().items():
        if id(tensor) in keys:
            out.setdefault(keys[id(tensor)], []).append(path)
    return out
