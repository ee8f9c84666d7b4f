"""What a push did, for whoever watches the trainer: a callback, Prometheus metrics, OpenTelemetry spans.

    on_report         called with every `PushReport`, also of pushes that failed (`WeightClient(on_report=...)`)
    prometheus_client where the process has imported it: counters and a histogram, vllm_nixl_push..., in the default
                      registry, which the trainer serves as it serves its own
    opentelemetry     where the process has set a tracer provider: a span for the push, below it one for each server,
                      and below that one for each stage. Of stages the seconds are known: they are laid end to end, in
                      the order of `report.STAGES`

`client` calls it on rank 0, when all servers are done. Nothing is imported that is not there already, and a failure in
here is logged and nothing else.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from trainer_client.report import STAGES, PushReport, ServerReport

logger = logging.getLogger("vllm.nixl_plugin")

BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Telemetry:
    """``on_report``: the callback of a client, if it has one."""

    def __init__(self, on_report: Callable[[PushReport], None] | None = None) -> None:
        self._on_report = on_report

    def tell(self, report: PushReport) -> None:
        """A push is over. Does not raise."""
        for tell in (self._on_report, _count, _trace):
            if tell is None:
                continue
            try:
                tell(report)
            except Exception:
                logger.exception("a report of version %s was not taken", report.version)


def _count(report: PushReport) -> None:
    if "prometheus_client" not in sys.modules:
        return
    pushes, nbytes, seconds = _metrics()
    for server in report.servers:
        pushes.labels(server.server, "ok" if server.ok else server.error_code or "error").inc()
        nbytes.labels(server.server).inc(server.nbytes)
        for stage, spent in server.seconds.items():
            seconds.labels(stage).observe(spent)


@cache
def _metrics() -> tuple[Any, Any, Any]:
    from prometheus_client import Counter, Histogram

    return (
        Counter("vllm_nixl_pushes", "Pushes to a server, by result.", ["server", "result"]),
        Counter("vllm_nixl_push_bytes", "Bytes written to a server.", ["server"]),
        Histogram("vllm_nixl_push_seconds", "Seconds of a push to a server, by stage.", ["stage"], buckets=BUCKETS),
    )


def _trace(report: PushReport) -> None:
    if "opentelemetry.trace" not in sys.modules:
        return
    from opentelemetry import trace

    tracer, end = trace.get_tracer("trainer_client"), time.time_ns()
    attributes = {"version": report.version, "mode": report.mode, "nbytes": report.nbytes, "ok": report.ok}
    push = tracer.start_span("push_weights", start_time=_before(end, report.seconds), attributes=_named(attributes))
    if not push.is_recording():
        return
    with trace.use_span(push, end_on_exit=False):
        for server in report.servers:
            begin = _before(end, server.seconds.get("total", report.seconds))
            about = {"server": server.server, "nbytes": server.nbytes, "packed_nbytes": server.packed_nbytes}
            span = tracer.start_span("push to server", start_time=begin, attributes=_named(about))
            if not server.ok:
                span.set_status(trace.Status(trace.StatusCode.ERROR, f"{server.error_code}: {server.error}"))
            with trace.use_span(span, end_on_exit=False):
                for stage, start, stop in _stages(server, begin):
                    tracer.start_span(stage, start_time=start).end(stop)
            span.end(end)
    if not report.ok:
        push.set_status(trace.Status(trace.StatusCode.ERROR, "some server does not have the version"))
    push.end(end)


def _stages(server: ServerReport, begin: int) -> Iterator[tuple[str, int, int]]:
    """Stage, begin and end in nanoseconds, one behind the other."""
    for stage in STAGES:
        if stage != "total" and (spent := server.seconds.get(stage)):
            yield stage, begin, begin + int(spent * 1e9)
            begin += int(spent * 1e9)


def _before(end: int, seconds: float) -> int:
    return end - int(seconds * 1e9)


def _named(attributes: dict[str, Any]) -> dict[str, Any]:
    return {f"vllm_nixl.{name}": value for name, value in attributes.items()}
