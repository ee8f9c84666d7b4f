"""Whether anything grows: resident memory, descriptors, threads, agents, registered memory and writes, by process.

`Watch.sample` looks at every process; `Watch.table` has what each had at the start, after warm-up and at the end, and
the slope: the median of the slopes between any two samples after warm-up, per 100 pushes. `Watch.leaks` names what
grows faster than `BOUNDS` after warm-up, and still does in the second half of that: a cache that has filled is no leak.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from pathlib import Path

from soak.counts import ask

WARM_UP = 0.25
"""The part of a process's samples that is warm-up: plans, caches and allocators fill."""
FEWEST = 6
"""Samples after warm-up below which a process has no slope: it was killed and started again."""
BOUNDS = {
    "rss MiB": 4.0, "fds": 1.0, "threads": 1.0, "python threads": 1.0, "agents": 0.5, "remotes": 1.0,
    "registrations": 1.0,
    "registered MiB": 0.5, "writes": 2.0,
}  # fmt: skip
"""The largest slopes, per 100 pushes, that count as flat."""
MIB = 1 << 20

Series = list[tuple[int, float]]


class Watch:
    """``folder``: where processes answer (counts.py)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._series: dict[tuple[str, int], dict[str, Series]] = defaultdict(lambda: defaultdict(list))

    def sample(self, processes: dict[str, list[int]], pushes: int) -> None:
        """Look at the processes, which are given by what they belong to."""
        for owner, pids in processes.items():
            for pid in pids:
                try:
                    found = _outside(pid)
                except OSError:  # it has ended
                    continue
                held = ask(pid, self._folder)
                if held is not None:
                    found |= {name: float(number) for name, number in held.items() if name != "registered"}
                    found["registered MiB"] = held["registered"] / MIB
                for name, value in found.items():
                    self._series[owner, pid][name].append((pushes, value))

    def rows(self) -> list[tuple[str, int, str, float, float, float, float | None]]:
        """Process, PID, what, at the start, after warm-up, at the end, slope per 100 pushes (None: too few samples)."""
        rows = []
        for (owner, pid), by_name in self._series.items():
            for name, series in by_name.items():
                warm = series[int(len(series) * WARM_UP) :]
                rows.append((owner, pid, name, series[0][1], warm[0][1], series[-1][1], _slope(warm)))
        return rows

    def leaks(self) -> list[str]:
        """What grows faster than it may."""
        return [
            f"{owner} (PID {pid}): {name} grows by {slope:.2f} per 100 pushes; flat is up to {BOUNDS[name]:g}"
            for owner, pid, name, _, _, _, slope in self.rows()
            if slope is not None and min(slope, self._late(owner, pid, name)) > BOUNDS[name]
        ]

    def _late(self, owner: str, pid: int, name: str) -> float:
        series = self._series[owner, pid][name]
        return _slope(series[len(series) - int(len(series) * (1 - WARM_UP) / 2) :], fewest=2) or 0.0

    def table(self) -> str:
        """All rows, without a slope where there are too few samples."""
        head = f"{'process':34} {'':15} {'start':>9} {'warm':>9} {'end':>9} {'per 100 pushes':>15}"
        lines = [
            f"{f'{owner} ({pid})':34} {name:15} {first:9.1f} {warm:9.1f} {last:9.1f} {_said(slope):>15}"
            for owner, pid, name, first, warm, last, slope in self.rows()
        ]
        return "\n".join([head, *lines])


def _said(slope: float | None) -> str:
    return "-" if slope is None else f"{slope:.2f}"


def _slope(series: Series, fewest: int = FEWEST) -> float | None:
    if len(series) < fewest:
        return None
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(series, 2) if x2 > x1]
    return 100 * statistics.median(slopes) if slopes else None


def _outside(pid: int) -> dict[str, float]:
    process = Path(f"/proc/{pid}")
    lines = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    if "VmRSS" not in lines:
        raise OSError(f"process {pid} has ended")
    return {
        "rss MiB": int(lines["VmRSS"].split()[0]) / 1024,
        "fds": float(len(list((process / "fd").iterdir()))),
        "threads": float(lines["Threads"]),
    }
