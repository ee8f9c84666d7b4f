"""Draws the growth of a push: a picture (PNG) and a page that needs nothing else (HTML). Needs the extra ``bench``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_nixl_plugin.errors import InvalidRequest

SERIES = {"whole": "whole push", "bytes_s": "bytes: packing and wire", "server_s": "server: prepare to resume",
          "control_s": "control"}  # fmt: skip
AXES = {"bytes": "GB of the model", "weights": "weights", "servers": "servers", "ranks": "ranks of the trainer"}
NAMES = ("growth.png", "growth.html")


def check(folder: Path) -> None:
    """Errors: InvalidRequest, where the libraries are missing or the folder cannot be one."""
    missing = [name for name in ("altair", "vl_convert") if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidRequest(
            f"--plot needs {' and '.join(missing)}, which are not installed: pip install 'vllm-nixl-plugin[bench]'"
        )
    if folder.exists() and not folder.is_dir():
        raise InvalidRequest(f"--plot {folder} is a file: name a folder")


def draw(rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write both files; their paths."""
    import altair as alt

    panels = []
    for by, title in AXES.items():
        points = [
            {"x": row["x"] / 1e9 if by == "bytes" else row["x"], "seconds": row[name], "part": told}
            for row in rows if row["by"] == by
            for name, told in SERIES.items()
        ]  # fmt: skip
        if points:
            chart = alt.Chart(alt.Data(values=points), width=320, height=220).mark_line(point=True)
            panels.append(chart.encode(
                x=alt.X("x:Q", title=title, scale=alt.Scale(zero=True)),
                y=alt.Y("seconds:Q", title="seconds"),
                color=alt.Color("part:N", title=None, sort=list(SERIES.values())),
                tooltip=["part:N", alt.Tooltip("x:Q", title=title), alt.Tooltip("seconds:Q", format=".3f")],
            ))  # fmt: skip
    whole = alt.concat(*panels, columns=2, title="A push in shadow mode: medians").configure_axis(tickCount=5)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in NAMES]
    whole.save(paths[0], scale_factor=2)
    whole.save(paths[1], inline=True)
    return paths
