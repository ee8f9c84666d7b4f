"""What was measured: `Results`, as one object of JSON and as tables for people.

Ratios are ours over theirs, each pair measured one right after the other; the median of the pairs is told.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.table import Table

KEYS = (
    "wire_vs_raw", "push_vs_disk_reload", "push_vs_broadcast", "gap_vs_disk_reload", "repush_overhead_ms",
    "window_peak_vs_budget", "plan_seconds",
)  # fmt: skip
"""Always in the JSON; null where the part was not measured, ``not_measured`` says why."""
GOALS = {
    "wire_vs_raw": 1.10, "push_vs_disk_reload": 1 / 3, "push_vs_broadcast": 1 / 2, "gap_vs_disk_reload": 0.20,
}  # fmt: skip
"""Not to be exceeded by a dense model of a GB or more; on a machine that does something else meanwhile they may be."""
TOLD = {
    "wire_vs_raw": "wire / one raw NIXL WRITE of the same bytes",
    "wire_vs_copy": "wire / copy in memory",
    "push_vs_disk_reload": "push (shadow) / save and reload",
    "push_vs_broadcast": "push (shadow) / gloo broadcast and reload",
    "in_place_push_vs_disk_reload": "push (in place) / save and reload",
    "in_place_push_vs_broadcast": "push (in place) / gloo broadcast and reload",
    "streamed_push_vs_disk_reload": "push (streamed) / save and reload",
    "streamed_push_vs_broadcast": "push (streamed) / gloo broadcast and reload",
    "gap_vs_disk_reload": "longest token gap, push (shadow) / reload from disk",
    "gap_vs_broadcast": "longest token gap, push (shadow) / broadcast and reload",
    "in_place_gap_vs_disk_reload": "longest token gap, push (in place) / reload from disk",
    "in_place_gap_vs_broadcast": "longest token gap, push (in place) / broadcast and reload",
    "streamed_gap_vs_disk_reload": "longest token gap, push (streamed) / reload from disk",
    "streamed_gap_vs_broadcast": "longest token gap, push (streamed) / broadcast and reload",
    "window_peak_vs_budget": "peak memory of a streamed push / its budget",
}


@dataclass
class Results:
    """Figures by what they say. ``seconds`` and ``stages`` are medians; ``growth`` has one row per case."""

    settings: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    extra_nbytes: dict[str, int] = field(default_factory=dict)
    overhead: dict[str, float] = field(default_factory=dict)
    window: dict[str, float] = field(default_factory=dict)
    growth: list[dict[str, Any]] = field(default_factory=list)
    not_measured: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values: `KEYS` first."""
        found = self.ratios | self.overhead
        absent = {key: self.not_measured.get(key, "its part was not asked for") for key in KEYS if key not in found}
        settings = {name: str(v) if isinstance(v, os.PathLike) else v for name, v in self.settings.items()}
        rest = asdict(self) | {"not_measured": self.not_measured | absent, "settings": settings}
        return {key: found.get(key) for key in KEYS} | rest | {"versions": versions()}

    def show(self, console: Console) -> None:
        """Tables."""
        if self.ratios:
            table = Table("ours / theirs, in one run", "ratio", "goal", title=self._title(), title_justify="left")
            for key, ratio in self.ratios.items():
                goal = GOALS.get(key)
                met = "" if goal is None else f"at most {goal:.2f}: {'met' if ratio <= goal else 'MISSED'}"
                table.add_row(TOLD.get(key, key), f"{ratio:.3f}", met)
            console.print(table)
        if self.seconds:
            console.print(self._rates())
        if self.extra_nbytes:
            table = Table("memory at most, beyond that before", "MB", "of the model")
            for what, nbytes in self.extra_nbytes.items():
                table.add_row(what, f"{nbytes / 1e6:.0f}", f"{nbytes / self.model['nbytes']:.2f}")
            console.print(table)
        for title, stages in self.stages.items():
            table = Table("stage", "ms", title=title, title_justify="left")
            for stage, seconds in stages.items():
                if seconds >= 5e-5:
                    table.add_row(stage, f"{seconds * 1e3:.1f}")
            console.print(table)
        if self.overhead:
            table = Table("overhead", "")
            for what, value in self.overhead.items():
                table.add_row(what, f"{value:.2f}")
            console.print(table)
        self._show_growth(console)
        for key, reason in self.not_measured.items():
            console.print(f"{key}: {reason}")

    def _title(self) -> str:
        nbytes = self.model.get("nbytes", 0)
        return f"model {self.model.get('shape')}, {nbytes / 1e9:.2f} GB, {self.model.get('weights')} weights"

    def _rates(self) -> Group:
        table = Table("median", "s", "GB/s")
        for what, seconds in self.seconds.items():
            rate = "" if "gap" in what or not seconds else f"{self.model['nbytes'] / 1e9 / seconds:.2f}"
            table.add_row(what, f"{seconds:.3f}", rate)
        return Group(table)

    def _show_growth(self, console: Console) -> None:
        if self.growth:
            columns = list(self.growth[0])
            table = Table(*columns, title="growth", title_justify="left")
            for row in self.growth:
                table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
            console.print(table)


def median(values: Sequence[float]) -> float:
    """Of at least one."""
    return float(statistics.median(values))


def paired(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of ours over theirs, pair by pair."""
    return median([a / b for a, b in zip(ours, theirs, strict=True)])


def versions() -> dict[str, Any]:
    """Of what took part, and of the machine."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
    }
    for name in ("vllm-nixl-plugin", "vllm", "torch", "nixl"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
