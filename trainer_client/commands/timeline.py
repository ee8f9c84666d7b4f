"""``vllm-nixl timeline``: the picture of a push from its report, as ``push --json`` prints it or a trainer keeps it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainer_client.report import PushReport
from vllm_nixl_plugin.errors import InvalidRequest


def timeline(
    report: Annotated[Path, typer.Argument(help="The report as JSON (its `to_dict`); - for standard input.")],
    out: Annotated[Path, typer.Argument(help="What to write: .html, a page; .json, Chrome trace events for Perfetto.")],
) -> None:
    """Draw when each stage of a push ran, on every rank and server; exit status 0 when it is written."""
    if out.suffix not in (".html", ".json"):
        raise InvalidRequest(f"{out} ends in {out.suffix or 'nothing'}: expected .html or .json")
    try:
        text = sys.stdin.read() if str(report) == "-" else report.read_text("utf-8")
        found = PushReport.from_dict(json.loads(text))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{report} is no report of a push ({type(error).__name__}: {error})") from None
    if out.suffix == ".json":
        found.save_trace(out)
    else:
        out.write_text(found.to_html(), encoding="utf-8")
    print(f"{out}: {out.stat().st_size:,} bytes")
