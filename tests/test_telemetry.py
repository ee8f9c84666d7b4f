"""What a push did is told to whoever watches the trainer, once, and a watcher that fails harms nobody."""

import logging
from typing import Any

import prometheus_client
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fake_server import TOKEN, Servers, model
from trainer_client import PushFailed, PushReport, WeightClient
from vllm_nixl_plugin.errors import PlanRefused


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


def client_of(servers: Servers, **options: Any) -> WeightClient:
    return WeightClient(
        [server.url for server in servers.all],
        token=TOKEN,
        fabric=servers.fabric,
        transport=servers.transport,
        **options,
    )


def count(name: str, **labels: str) -> float:
    return prometheus_client.REGISTRY.get_sample_value(name, labels) or 0.0


def test_a_push_is_told_by_callback_metrics_and_spans(spans: InMemorySpanExporter) -> None:
    servers, told = Servers(2), []
    for server in servers.all:
        server.url = server.url.replace("fake", "telemetry")
    before = count("vllm_nixl_push_bytes_total", server=servers.all[0].url)
    with client_of(servers, on_report=told.append) as client:
        report = client.push_weights(model(1), version="v1")
    assert told == [report]
    for server in report.servers:
        assert count("vllm_nixl_pushes_total", server=server.server, result="ok") == 1
    assert count("vllm_nixl_push_bytes_total", server=servers.all[0].url) - before == report.servers[0].nbytes
    finished = {span.name: span for span in spans.get_finished_spans()}
    push, one, wire = finished["push_weights"], finished["push to server"], finished["install"]
    assert push.attributes["vllm_nixl.version"] == "v1"
    assert (one.parent.span_id, wire.parent.trace_id) == (push.context.span_id, push.context.trace_id)
    assert wire.end_time - wire.start_time == pytest.approx(report.servers[0].seconds["install"] * 1e9, rel=0.5)
    assert sum(span.name == "push to server" for span in spans.get_finished_spans()) == 2


def test_a_push_that_failed_is_told_with_its_code_before_it_is_raised(spans: InMemorySpanExporter) -> None:
    servers, told = Servers(1), []
    servers.all[0].url = "http://telemetry-failing"
    servers.all[0].fail["POST", "/plan"] = [PlanRefused("no")]
    with client_of(servers, on_report=told.append) as client, pytest.raises(PushFailed):
        client.push_weights(model(1))
    assert [report.ok for report in told] == [False]
    assert count("vllm_nixl_pushes_total", server=servers.all[0].url, result="plan_refused") == 1
    [server] = [span for span in spans.get_finished_spans() if span.name == "push to server"]
    assert server.status.description == "plan_refused: no"


def test_a_callback_that_raises_does_not_harm_the_push(caplog: pytest.LogCaptureFixture) -> None:
    def broken(report: PushReport) -> None:
        raise RuntimeError("the watcher is broken")

    servers = Servers(1)
    with caplog.at_level(logging.ERROR), client_of(servers, on_report=broken) as client:
        assert client.push_weights(model(1)).ok
    assert "the watcher is broken" in caplog.text
