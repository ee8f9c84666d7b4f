"""The table of docs/faults.md: what is promised for each cell, cells of the same outcome in one row.

`make faults ARGS=--write` puts it there together with the longest seconds that it has measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from faults.cells import MODES, Cell, expected
from faults.runner import Row

PAGE = Path(__file__).parent.parent.parent / "docs" / "faults.md"
BEGIN, END = "<!-- make faults ARGS=--write: begin -->\n", "<!-- make faults ARGS=--write: end -->\n"


def table(cells: Iterable[Cell]) -> str:
    """In markdown."""
    lines = ["| Fault | Mode | Stage | The push ends with | The server then | The next push |", "|---" * 6 + "|"]
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        wanted = expected(cell)
        ends = " or ".join(f"`{end}`" if end not in ("ok", "killed") else end for end in wanted.push)
        after = "`lease_held` while the victim stands, then ok" if wanted.blocked else "ok"
        after = "ok after a restart" if wanted.server == "server dead" else after
        server = "; ".join([wanted.server, *(f"or `{push}`, and {stands}" for push, stands in wanted.otherwise)])
        groups.setdefault((f"{cell.how} {cell.victim}", cell.mode, ends, server, after), []).append(cell)
    rows: dict[tuple[str, ...], list[str]] = {}
    for (fault, mode, *outcome), alike in groups.items():
        rows.setdefault((fault, _stages(mode, [cell.stage for cell in alike]), *outcome), []).append(mode)
    for (fault, stages, *outcome), modes in rows.items():
        which = "all" if len(modes) == len(MODES) else ", ".join(modes)
        lines.append("| " + " | ".join([fault, which, stages, *outcome]) + " |")
    return "\n".join(lines) + "\n"


def _stages(mode: str, stages: list[str]) -> str:
    of = MODES[mode]
    first, last = of.index(stages[0]), of.index(stages[-1])
    whole = len(stages) > 2 and list(of[first : last + 1]) == stages
    return f"{stages[0]} to {stages[-1]}" if whole else ", ".join(stages)


def seconds(rows: Sequence[Row]) -> str:
    """The longest of each kind."""
    if not rows:
        return ""
    most = {of: max(getattr(row, of) for row in rows) for of in ("push_s", "server_s", "next_s")}
    return (
        f"Longest in a run of `make faults` over {len(rows)} cells (two cores, leases of 2 s, a rank counts as lost\n"
        f"after 4 s): {most['push_s']:.1f} s from the fault to the end of the push, {most['server_s']:.1f} s until\n"
        f"the server stood as above, {most['next_s']:.1f} s for the next push.\n"
    )


def write(cells: Iterable[Cell], rows: Sequence[Row]) -> None:
    """Put table and seconds where they belong."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    parts = [before + BEGIN, table(cells), *([seconds(rows)] if rows else []), END + rest.partition(END)[2]]
    PAGE.write_text("\n".join(parts), encoding="utf-8")
