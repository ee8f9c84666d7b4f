"""The timeline of a push: `PushReport.save_trace` and `PushReport.to_html` call `trace` and `page`.

Both draw the `Span`s of a report, lane by lane: what rank 0 did for a server, what the server did by itself, and for
each rank its fillings of send buffers (``pack``) and what was under way to each worker (``wire``). Times are seconds
since the call of the push on the clock of rank 0. Two kinds of spans are laid there, since their own clocks are others:
those of other ranks begin when rank 0 gave the order, and those of the server follow the request for its commit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from trainer_client.report import SERVER_STAGES, STAGES, PushReport, ServerReport, Span, format_nbytes

STANDSTILL = ("pause", "install", "resume")
"""Stages in which no token is made."""

WIDTH, LABELS, ROW, BAR = 1080, 170, 24, 18
"""Of the picture, of the names beside it, of a lane and of a bar in it: pixels."""
LETTER = 7
"""About the width of a letter in a bar."""


@dataclass(frozen=True)
class Lane:
    """A line of the picture; its spans do not overlap."""

    name: str
    spans: tuple[Span, ...]


def lanes(server: ServerReport) -> tuple[Lane, ...]:
    """The lanes of one server, from the trainer to the workers."""
    own = [span for span in server.spans if span.name not in SERVER_STAGES]
    theirs = [span for span in server.spans if span.name in SERVER_STAGES]
    found = [Lane("trainer", tuple(own))]
    for rank in server.ranks:
        if packs := tuple(span for span in rank.spans if span.name == "pack"):
            found.append(Lane(f"rank {rank.rank}: pack", packs))
        wires = sorted((span for span in rank.spans if span.name == "wire"), key=lambda span: span.worker or 0)
        for worker, spans in itertools.groupby(wires, key=lambda span: span.worker):
            found.append(Lane(f"rank {rank.rank} → worker {worker}", tuple(spans)))
    found.append(Lane("server", tuple(theirs)))
    return tuple(lane for lane in found if lane.spans)


def trace(report: PushReport) -> dict[str, Any]:
    """Chrome trace events: a process for each server, a thread for each lane, times in microseconds."""
    events: list[dict[str, Any]] = []
    for pid, server in enumerate(report.servers, 1):
        events += [_metadata("process_name", pid, 0, server.server), _metadata("process_sort_index", pid, 0, pid)]
        for tid, lane in enumerate(lanes(server), 1):
            events += [_metadata("thread_name", pid, tid, lane.name), _metadata("thread_sort_index", pid, tid, tid)]
            events += [_event(pid, tid, span) for span in lane.spans]
    numbers = report.to_dict()
    for server_numbers in numbers["servers"]:
        del server_numbers["spans"], server_numbers["ranks"]
    del numbers["ranks"]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": numbers}


def _metadata(name: str, pid: int, tid: int, value: str | int) -> dict[str, Any]:
    key = "name" if isinstance(value, str) else "sort_index"
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {key: value}}


def _event(pid: int, tid: int, span: Span) -> dict[str, Any]:
    category = "standstill" if span.name in STANDSTILL else "push"
    event = {"ph": "X", "name": span.name, "cat": category, "pid": pid, "tid": tid,
             "ts": span.start * 1e6, "dur": span.seconds * 1e6}  # fmt: skip
    args: dict[str, Any] = {} if span.worker is None else {"worker": span.worker}
    if span.nbytes:
        args |= {"nbytes": span.nbytes, "GB/s": round(span.nbytes / span.seconds / 1e9, 3) if span.seconds else None}
    return event | {"args": args}


def page(report: PushReport) -> str:
    """A page of its own: the picture, a second one of its end where the first push hides that, and tables."""
    end = max([report.seconds, *(s.start + s.seconds for server in report.servers for s in _spans(server))])
    begins = [s.start for server in report.servers for s in server.spans if s.name == "begin"]
    first = min(begins, default=0.0)
    pictures = _titled("The whole push", _picture(report, 0.0, end))
    if first > end / 2:
        pictures += _titled(f"From {first:.3f} s on: what every push does", _picture(report, first, end))
    template = Template(files("trainer_client").joinpath("timeline.html").read_text(encoding="utf-8"))
    took = f"{len(report.succeeded)} of {_count(len(report.servers), 'server')}"
    sent = f"{format_nbytes(report.nbytes)} from {_count(len(report.ranks), 'rank')}"
    return template.substitute(
        title=escape(f"Push of version {report.version}"),
        summary=escape(
            f"{took} in {report.seconds:.3f} s, {sent}, mode {report.mode}. "
            f"Requests stood still for {_standstill(report)}."
        ),
        pictures=pictures, legend=_legend(report), stages=_stages(report), ranks=_ranks(report), errors=_errors(report),
    )  # fmt: skip


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _spans(server: ServerReport) -> Iterator[Span]:
    yield from server.spans
    for rank in server.ranks:
        yield from rank.spans


def _standstill(report: PushReport) -> str:
    longest = [sum(server.seconds.get(stage, 0.0) for stage in STANDSTILL) for server in report.servers]
    return f"{max(longest, default=0.0):.3f} s" + (" at most" if len(longest) > 1 else "")


def _titled(title: str, picture: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{picture}\n"


def _picture(report: PushReport, begin: float, end: float) -> str:
    scale = (WIDTH - LABELS - 20) / max(end - begin, 1e-9)
    drawn: list[str] = []
    y = 26
    for server in report.servers:
        drawn.append(f'<text class="server" x="0" y="{y + 13}">{escape(server.server)}</text>')
        y += ROW
        for lane in lanes(server):
            drawn.append(f'<text class="lane" x="{LABELS - 8}" y="{y + 13}">{escape(lane.name)}</text>')
            for span in lane.spans:
                drawn += _bar(span, begin, end, scale, y)
            y += ROW
        y += 6
    axis = [
        f'<g class="axis"><line x1="{x:.1f}" x2="{x:.1f}" y1="20" y2="{y}"/><text x="{x:.1f}" y="14">{text}</text></g>'
        for x, text in _ticks(begin, end, scale)
    ]
    name = escape(f"Timeline of the push of version {report.version}, {begin:.3f} to {end:.3f} s")
    return (f'<div class="scroll"><svg role="img" aria-label="{name}" viewBox="0 0 {WIDTH} {y + 4}">\n'
            + "\n".join(axis + drawn) + "\n</svg></div>")  # fmt: skip


def _bar(span: Span, begin: float, end: float, scale: float, y: int) -> Iterator[str]:
    start, stop = max(span.start, begin), min(span.start + span.seconds, end)
    if stop < start:
        return
    x, width = LABELS + (start - begin) * scale, max((stop - start) * scale, 1.5)
    text = f"{span.name}: {span.seconds:.4f} s, from {span.start:.4f} s"
    if span.nbytes:
        text += f", {format_nbytes(span.nbytes)}" + (
            f" at {span.nbytes / span.seconds / 1e9:.2f} GB/s" if span.seconds else ""
        )
    yield (f'<rect class="{span.name}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BAR}" rx="2">'
           f"<title>{escape(text)}</title></rect>")  # fmt: skip
    if width > (len(span.name) + 1) * LETTER:
        yield f'<text class="in {span.name}" x="{x + 5:.2f}" y="{y + 13}">{span.name}</text>'


def _ticks(begin: float, end: float, scale: float) -> Iterator[tuple[float, str]]:
    """Places and labels of round times, about eight of them."""
    rough, step = max(end - begin, 1e-9) / 8, 1e-9
    for step in (m * 10.0**e for e in range(-6, 7) for m in (1, 2, 5)):
        if step >= rough:
            break
    number = -(-begin // step)
    while number * step <= end:
        time = number * step
        yield LABELS + (time - begin) * scale, f"{time:.10g} s" if step >= 1 else f"{time * 1000:.10g} ms"
        number += 1


def _legend(report: PushReport) -> str:
    shown = {span.name for server in report.servers for span in _spans(server)}
    return "\n".join(
        f'<li><i class="{name}"></i>{name}</li>' for name in STAGES if name in shown
    )  # fmt: skip


def _stages(report: PushReport) -> str:
    shown = [stage for stage in STAGES if any(stage in server.seconds for server in report.servers)]
    rows = [
        ["version", *(server.version or "?" for server in report.servers)],
        ["bytes", *(format_nbytes(server.nbytes) for server in report.servers)],
        ["packed", *(format_nbytes(server.packed_nbytes) for server in report.servers)],
    ]
    for stage in shown:
        cells = [f"{server.seconds[stage]:.4f} s" if stage in server.seconds else "-" for server in report.servers]
        rows.append([stage, *cells])
    return _table(["", *(server.server for server in report.servers)], rows)


def _ranks(report: PushReport) -> str:
    head = ["Server", "Rank", "Bytes", "Packed", "Seconds", "GB/s"]
    rows = [
        [server.server, str(rank.rank), format_nbytes(rank.nbytes), format_nbytes(rank.packed_nbytes),
         f"{rank.seconds:.4f}", f"{rank.nbytes / rank.seconds / 1e9:.2f}" if rank.seconds else "-"]
        for server in report.servers for rank in server.ranks
    ]  # fmt: skip
    return _table(head, rows)


def _errors(report: PushReport) -> str:
    said = [f"{s.server}: {s.error_code or 'error'}: {s.error}" for s in report.servers if s.error is not None]
    said += [f"{s.server}: stale: {', '.join(s.stale)}" for s in report.servers if s.stale]
    return "\n".join(f'<p class="error">{escape(line)}</p>' for line in said)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
