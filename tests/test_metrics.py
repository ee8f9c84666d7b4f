"""vLLM's /metrics tells how a real server stands and what its updates took, whichever API server is asked."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import prometheus_client.parser
import pytest

from harness import TOKEN, EngineOptions, Server, servers
from harness.checkpoints import read_weights
from trainer_client import WeightClient, telemetry
from trainer_client.control import Control
from vllm_nixl_plugin.metrics import Metrics, Observer, metrics
from vllm_nixl_plugin.wire import BeginRequest, Manifest

DASHBOARD = Path(__file__).parent.parent / "docs" / "grafana.json"

Sample = tuple[str, tuple[tuple[str, str], ...]]


def sample(name: str, **labels: str) -> Sample:
    return f"vllm_nixl_{name}", tuple(sorted(labels.items()))


def scrape(url: str) -> dict[Sample, float]:
    """Our samples, by name and labels, from whichever process answers a new connection."""
    text = httpx.get(f"{url}/metrics", timeout=30, follow_redirects=True).text
    families = prometheus_client.parser.text_string_to_metric_families(text)
    return {
        (s.name, tuple(sorted((k, v) for k, v in s.labels.items() if k != "pid"))): s.value
        for family in families for s in family.samples if s.name.startswith("vllm_nixl_")
    }  # fmt: skip


def scraped(url: str, name: Sample, value: float) -> dict[Sample, float]:
    """The samples, once this one has that value."""
    deadline = time.monotonic() + 240  # a busy machine
    while (found := scrape(url)).get(name) != value:
        assert time.monotonic() < deadline, (name, value, found)
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def pushed(checkpoint: Callable[..., Path]) -> Iterator[tuple[str, str]]:
    """URLs of a server with one API server and of one with two, after two pushes and an update that was aborted."""
    one, two = Server(checkpoint("qwen3", 1)), Server(checkpoint("qwen3", 1), EngineOptions(api_servers=2))
    with servers(one, two):
        urls = (one.url, two.url)
        with WeightClient(urls, token=TOKEN) as client:
            for version in ("seven", "8"):
                client.push_weights(read_weights(checkpoint("qwen3", 2)), version=version)
        for url in urls:
            with Control(url, token=TOKEN) as control:
                manifest = Manifest(weights=control.checkpoint().weights)
                control.plan(manifest, 60)
                plans = tuple(each["plan"] for each in control.plan_summary())
                opened = control.begin(BeginRequest(plans=plans, version="9", holder="test", lease_s=600), 60)
                found = scraped(url, sample("lease_held"), 1)
                assert found[sample("state", state="receiving")] == 1
                assert 0 < found[sample("lease_expires_seconds")] <= 600
                assert found[sample("expected_bytes")] > 0
                control.abort(opened.update_id, drained=True)
        yield urls


@pytest.mark.server
@pytest.mark.parametrize("number", [0, 1], ids=["one API server", "two API servers"])
def test_metrics_tell_state_version_results_bytes_and_seconds(pushed: tuple[str, str], number: int) -> None:
    url = pushed[number]
    scraped(url, sample("updates_total", mode="shadow", result="aborted"), 1)
    scraped(url, sample("lease_held"), 0)
    for _ in range(5):
        found = scrape(url)
        assert found[sample("updates_total", mode="shadow", result="done")] == 2
        assert found[sample("updates_total", mode="shadow", result="aborted")] == 1
        assert found[sample("updates_total", mode="shadow", result="failed")] == 0
        assert found[sample("state", state="serving")] == found[sample("ready")] == found[sample("workers")] == 1
        assert found[sample("state", state="receiving")] == found[sample("torn")] == found[sample("held")] == 0
        assert (found[sample("weight_version")], found[sample("epoch")]) == (8, 3)
        assert found[sample("received_bytes_total", mode="shadow")] > 1e6
        for stage in ("prepare", "pause", "install", "resume", "total", "install.copy"):
            assert found[sample("update_seconds_count", stage=stage)] == 2
            assert found[sample("update_seconds_sum", stage=stage)] > 0
    shown = {labels for name, labels in found if name == "vllm_nixl_weight_version_info"}
    assert shown == ({(("version", "8"),)} if number == 0 else set())


@pytest.mark.server
def test_every_query_of_the_dashboard_names_a_metric_that_there_is(pushed: tuple[str, str]) -> None:
    telemetry._metrics()
    there = {name for name, _ in scrape(pushed[0])}
    there |= {s.name for family in prometheus_client.REGISTRY.collect() for s in family.samples}
    there |= {f"vllm_nixl_{name}" for name in (
        "push_seconds_sum", "push_seconds_count", "pushes_total", "push_bytes_total", "update_failures_total"
    )}  # fmt: skip
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [each["query"]["query"] for each in dashboard["templating"]["list"] if isinstance(each["query"], dict)]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) > 15
    assert all(re.search(r"vllm_nixl_\w+", query) for query in queries)
    assert {name for query in queries for name in re.findall(r"vllm_nixl_\w+", query)} <= there
    known = {"instance", "datasource", "__rate_interval"}
    assert {name for query in queries for name in re.findall(r"\$\{?(\w+)", query)} <= known


def test_of_several_processes_one_observes_until_it_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    first, second = Observer(None), Observer(None)  # type: ignore[arg-type]
    assert [each._is_mine() for each in (first, second, first)] == [True, False, True]
    assert first._lock
    first._lock.close()
    assert second._is_mine()
    assert second._lock
    second._lock.close()


def test_an_update_that_failed_is_counted_by_its_code() -> None:
    record = {
        "mode": "in_place", "state": "failed", "arrived_nbytes": 5, "timings": {"wait_s": 1.0}, "at": 0.0,
        "error": {"code": "incomplete"},
    }  # fmt: skip

    def now(name: str, **labels: str) -> float:
        return prometheus_client.REGISTRY.get_sample_value(f"vllm_nixl_{name}", labels) or 0.0

    made: Metrics = metrics()
    before = now("update_seconds_count", stage="prepare")
    made.ended(record)
    assert now("updates_total", mode="in_place", result="failed") == 1
    assert now("update_failures_total", code="incomplete") == 1
    assert now("received_bytes_total", mode="in_place") == 5
    assert now("update_seconds_count", stage="prepare") == before
