"""What a push did: bytes and seconds per stage and server, and who serves which version now.

`WeightClient.push_weights` fills one `ServerReport` per server and returns them as a `PushReport`, also inside the
`PushFailed` error. Numbers only; ``str(report)`` is a table for people, ``to_dict()`` is for logs, ``save_trace`` and
``to_html`` draw its timeline (see `trainer_client.timeline`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

STAGES = (
    "collect", "meet", "measure", "plan", "route", "begin", "pack", "wire", "join", "verify", "prepare", "pause",
    "install", "resume", "commit", "total",
)  # fmt: skip
"""Stages in the order of the push; all before ``total`` together are ``total``, but for a moment here and there.

``prepare`` … ``resume`` are the server's clock, the rest the client's; ``commit`` is what passes from asking for the
install to hearing of its end beside those four. ``measure`` is there only where weights are quantized. ``join``: from
the end of the transfer on the slowest rank until rank 0 has heard of it.

``pack`` and ``wire`` overlap: ``pack`` is the time spent copying into send buffers, ``wire`` the time from the first
post to the last completed write, less ``pack``. ``prepare`` waits for the last notifications and runs vLLM's processing
beside the serving weights, in slices, between which tokens are made; requests stand still for pause, install and resume
together.
"""

SERVER_STAGES = {"prepare": "wait_s", "pause": "pause_s", "install": "install_s", "resume": "resume_s"}
"""Stages that the server times, and what it calls them."""


@dataclass(frozen=True)
class Span:
    """A stretch of time in a push, for `trainer_client.timeline`. ``start``: seconds since the call of the push.

    ``name``: a stage. ``worker``: of the server, whose bytes these are; None where it is no single one's.
    """

    name: str
    start: float
    seconds: float
    nbytes: int = 0
    worker: int | None = None


@dataclass(frozen=True)
class RankReport:
    """What one rank of the trainer sent. ``seconds``: from its order to its last completed write.

    ``spans``: every filling of a send buffer (``pack``), and for each worker the time from the first post to its last
    completed write (``wire``). Those of other ranks than 0 are laid from the moment that rank 0 gave the order.
    """

    rank: int
    nbytes: int
    packed_nbytes: int
    seconds: float
    spans: tuple[Span, ...] = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RankReport:
        """The report of which these are ``asdict``."""
        return cls(**dict(values) | {"spans": _spans(values)})


@dataclass(frozen=True)
class ServerReport:
    """One server. ``version`` is what it serves after the push; ``error`` says why that is not the pushed one.

    ``nbytes`` and ``packed_nbytes`` are those of all ranks, ``pack`` and ``wire`` the longest of any; ``ranks`` is in
    the order of the ranks, and empty when the bytes are not all there.
    """

    server: str
    version: str | None
    nbytes: int = 0
    packed_nbytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    error_code: str | None = None
    ranks: tuple[RankReport, ...] = ()
    window: Mapping[str, int | None] | None = None
    """In mode ``streamed``: ``groups``, ``window_nbytes``, ``working_nbytes`` beside it, and ``budget_nbytes``."""
    stale: tuple[str, ...] = ()
    """Models of the server for which the push had no weights, and which keep theirs: ``draft``."""
    spans: tuple[Span, ...] = ()
    """When which stage ran; a stage that ran twice has two. The server's own are laid behind the commit's request."""

    @property
    def ok(self) -> bool:
        """The server has the version."""
        return self.error is None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "server": self.server, "version": self.version, "ok": self.ok, "nbytes": self.nbytes,
            "packed_nbytes": self.packed_nbytes, "seconds": dict(self.seconds), "error": self.error,
            "error_code": self.error_code, "ranks": [asdict(rank) for rank in self.ranks],
            "stale": list(self.stale), "window": self.window and dict(self.window),
            "spans": [asdict(span) for span in self.spans],
        }  # fmt: skip

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ServerReport:
        """The report of which these are `to_dict`."""
        ranks = tuple(RankReport.from_dict(rank) for rank in values["ranks"])
        shaped = {"ranks": ranks, "stale": tuple(values["stale"]), "spans": _spans(values)}
        return cls(**{name: value for name, value in values.items() if name != "ok"} | shaped)


@dataclass(frozen=True)
class PushReport:
    """One push to all servers. ``seconds``: from the call to the last server's answer."""

    version: str
    mode: str
    servers: tuple[ServerReport, ...]
    nbytes: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Every server has the version."""
        return all(server.ok for server in self.servers)

    @property
    def succeeded(self) -> tuple[str, ...]:
        """The servers that have the version."""
        return tuple(server.server for server in self.servers if server.ok)

    @property
    def ranks(self) -> tuple[RankReport, ...]:
        """What each rank of the trainer sent to all servers; ``seconds``: to the slowest of them."""
        found: dict[int, RankReport] = {}
        for one in (rank for server in self.servers for rank in server.ranks):
            sofar = found.get(one.rank, RankReport(one.rank, 0, 0, 0.0))
            found[one.rank] = RankReport(
                one.rank, sofar.nbytes + one.nbytes, sofar.packed_nbytes + one.packed_nbytes,
                max(sofar.seconds, one.seconds),
            )  # fmt: skip
        return tuple(found[rank] for rank in sorted(found))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "version": self.version, "mode": self.mode, "ok": self.ok, "nbytes": self.nbytes, "seconds": self.seconds,
            "servers": [server.to_dict() for server in self.servers], "ranks": [asdict(rank) for rank in self.ranks],
        }  # fmt: skip

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PushReport:
        """The report of which these are `to_dict`."""
        servers = tuple(ServerReport.from_dict(server) for server in values["servers"])
        return cls(values["version"], values["mode"], servers, values["nbytes"], values["seconds"])

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline of the push as Chrome trace events (JSON), for Perfetto or ``chrome://tracing``."""
        from trainer_client.timeline import trace

        Path(path).write_text(json.dumps(trace(self)), encoding="utf-8")

    def to_html(self) -> str:
        """The timeline of the push as a page of its own, with a table of all numbers; it loads nothing."""
        from trainer_client.timeline import page

        return page(self)

    def __str__(self) -> str:
        shown = [stage for stage in STAGES if any(stage in server.seconds for server in self.servers)]
        rows = [["server", "version", "bytes", "packed", *(f"{stage} s" for stage in shown)]]
        for server in self.servers:
            times = [f"{server.seconds[s]:.3f}" if s in server.seconds else "-" for s in shown]
            sizes = [format_nbytes(server.nbytes), format_nbytes(server.packed_nbytes)]
            rows.append([server.server, server.version or "?", *sizes, *times])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        took = f"{len(self.succeeded)} of {len(self.servers)} servers"
        lines = [f"version {self.version} ({self.mode}): {took}, {format_nbytes(self.nbytes)} in {self.seconds:.3f} s"]
        for row in rows:
            left = "  ".join(cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False))
            right = "  ".join(cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True))
            lines.append(f"{left}  {right}")
        if len(ranks := self.ranks) > 1:
            least, most = (pick(ranks, key=lambda rank: rank.nbytes) for pick in (min, max))
            slowest = max(ranks, key=lambda rank: rank.seconds)
            lines.append(
                f"{len(ranks)} ranks sent {format_nbytes(least.nbytes)} (rank {least.rank}) to "
                f"{format_nbytes(most.nbytes)} (rank {most.rank}), the slowest (rank {slowest.rank}) in "
                f"{slowest.seconds:.3f} s"
            )
        lines += [_window_line(s.server, s.window) for s in self.servers if s.window]
        lines += [f"{s.server}: stale: {', '.join(s.stale)} (the push had no weights for it)"
                  for s in self.servers if s.stale]  # fmt: skip
        lines += [f"{s.server}: {s.error_code or 'error'}: {s.error}" for s in self.servers if s.error is not None]
        return "\n".join(lines)


def _window_line(server: str, window: Mapping[str, int | None]) -> str:
    nbytes, working, budget = (window[name] or 0 for name in ("window_nbytes", "working_nbytes", "budget_nbytes"))
    most = f"of {format_nbytes(budget)}" if budget else "no PUSH_WEIGHTS_SHADOW_BYTES"
    return (
        f"{server}: {window['groups']} groups went through {format_nbytes(nbytes)}, with {format_nbytes(working)} to "
        f"process them ({most})"
    )


def _spans(values: Mapping[str, Any]) -> tuple[Span, ...]:
    return tuple(Span(**span) for span in values.get("spans", ()))


def format_nbytes(nbytes: int) -> str:
    """``1.50 GB``: decimal units, as NICs count."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"
