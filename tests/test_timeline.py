"""The timeline of a push: spans that say when, a trace that Perfetto reads, a page that loads nothing."""

from __future__ import annotations

import itertools
import json
import re
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fake_server import Servers, model
from ranks import Trainer
from trainer_client import PushFailed, PushReport
from trainer_client.report import SERVER_STAGES, STAGES, RankReport, ServerReport, Span
from trainer_client.timeline import lanes, page, trace
from trainer_client.transfer import MAX_SPANS, _fewer


@pytest.fixture(scope="module")
def report() -> PushReport:
    """Two ranks to two servers with two workers each."""
    trainer = Trainer(Servers(2), 2)
    weights = model()
    try:
        found = trainer.push([weights, weights], version="v<1>")
    finally:
        for client in trainer.clients:
            client.close()
    assert isinstance(found[0], PushReport), found
    assert found[0] == found[1]  # what rank 0 has told the others
    return found[0]


def test_every_stage_of_the_table_has_a_span_of_the_same_length(report: PushReport) -> None:
    for server in report.servers:
        seconds: dict[str, float] = defaultdict(float)
        for span in server.spans:
            seconds[span.name] += span.seconds
        timed = {name: value for name, value in server.seconds.items() if name not in ("total", "pack", "wire")}
        assert seconds == pytest.approx(timed)


def test_the_spans_of_a_server_follow_each_other_within_the_push(report: PushReport) -> None:
    for server in report.servers:
        names = [span.name for span in server.spans]
        order = ["collect", "meet", "plan", "route", "begin", "join", "prepare", "pause", "install", "resume", "commit"]
        assert [name for name, _ in itertools.groupby(names)] == order
        starts = [span.start for span in server.spans]
        assert starts == sorted(starts)
        assert starts[0] == pytest.approx(0)


def test_what_went_to_each_worker_adds_up_to_the_bytes_of_its_rank(report: PushReport) -> None:
    for server in report.servers:
        assert len(server.ranks) == 2
        for rank in server.ranks:
            wires = [span for span in rank.spans if span.name == "wire"]
            packs = [span for span in rank.spans if span.name == "pack"]
            assert {span.worker for span in wires} == {0, 1}
            assert sum(span.nbytes for span in wires) == rank.nbytes
            assert sum(span.nbytes for span in packs) == rank.packed_nbytes
        assert server.packed_nbytes > 0


def test_a_report_with_its_spans_survives_the_way_through_json(report: PushReport) -> None:
    assert PushReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_the_trace_is_chromes_with_a_process_per_server_and_a_thread_per_lane(
    report: PushReport, tmp_path: Path
) -> None:
    report.save_trace(tmp_path / "push.json")
    saved = json.loads((tmp_path / "push.json").read_text())
    assert saved == json.loads(json.dumps(trace(report)))
    events = saved["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {s.server for s in report.servers}
    assert len(names) == sum(len(lanes(server)) for server in report.servers)
    complete = [e for e in events if e["ph"] == "X"]
    assert {e["name"] for e in complete} <= set(STAGES)
    assert all((e["pid"], e["tid"]) in names and e["ts"] >= 0 and e["dur"] >= 0 for e in complete)
    assert {e["name"] for e in complete if e["cat"] == "standstill"} == {"pause", "install", "resume"}
    for thread, name in names.items():  # slices of a thread must not overlap, or Perfetto drops them
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in complete if (e["pid"], e["tid"]) == thread)
        assert all(end <= begin + 1 for (_, end), (begin, _) in itertools.pairwise(mine)), name


def test_the_page_has_a_bar_for_every_span_and_loads_nothing(report: PushReport) -> None:
    html = report.to_html()
    spans = [s for server in report.servers for lane in lanes(server) for s in lane.spans]
    pictures = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    bars = [len(ET.fromstring(picture).findall(".//rect")) for picture in pictures]
    assert bars[0] == len(spans)
    assert not re.search(r"https?://(?!fake-)|<script|<link|@import|url\(|src=", html)
    assert "v&lt;1&gt;" in html
    assert "v<1>" not in html
    check_html(html)


def test_a_first_push_shows_its_end_once_more_where_planning_hides_it() -> None:
    spans = (Span("plan", 0, 9), Span("begin", 9, 0.1), Span("commit", 9.1, 0.1))
    server = ServerReport("http://a", "1", seconds={"plan": 9, "begin": 0.1, "commit": 0.1}, spans=spans)
    report = PushReport("1", "shadow", (server,), 0, 9.2)
    pictures = re.findall(r"<svg.*?</svg>", page(report), re.DOTALL)
    assert [len(ET.fromstring(picture).findall(".//rect")) for picture in pictures] == [3, 3]
    assert "9.000 to 9.200 s" in pictures[1]


def test_a_push_that_failed_has_a_timeline_too() -> None:
    servers = Servers(1)
    servers.down.add(servers.all[0].url)
    with Trainer(servers, 1).clients[0] as client, pytest.raises(PushFailed) as failed:
        client.push_weights(model())
    html = failed.value.report.to_html()
    assert "unreachable" in html
    assert trace(failed.value.report)["otherData"]["ok"] is False


def test_a_report_from_before_there_were_spans_is_still_read() -> None:
    old = {"server": "http://a", "version": "1", "ok": True, "nbytes": 8, "packed_nbytes": 0, "seconds": {"total": 1.0},
           "error": None, "error_code": None, "stale": [],
           "ranks": [{"rank": 0, "nbytes": 8, "packed_nbytes": 0, "seconds": 1.0}]}  # fmt: skip
    read = ServerReport.from_dict(old)
    assert read.spans == ()
    assert read.ranks == (RankReport(0, 8, 0, 1.0),)
    assert "http://a" in page(PushReport("1", "shadow", (read,), 8, 1.0))


@pytest.mark.parametrize("count", [1, MAX_SPANS, MAX_SPANS + 1, 5 * MAX_SPANS + 3])
def test_many_fillings_are_laid_together_and_keep_their_bytes(count: int) -> None:
    fills = [Span("pack", float(number), 0.5, 10, number % 2) for number in range(count)]
    fewer = list(_fewer(fills))
    assert len(fewer) <= MAX_SPANS
    assert sum(span.nbytes for span in fewer) == 10 * count
    assert (fewer[0].start, fewer[-1].start + fewer[-1].seconds) == (0.0, count - 0.5)


@pytest.mark.parametrize("name", ["push.html", "push.json"])
def test_the_command_draws_a_report_that_was_kept(report: PushReport, tmp_path: Path, monkeypatch, name: str) -> None:
    kept, out = tmp_path / "report.json", tmp_path / name
    kept.write_text(json.dumps(report.to_dict()))
    assert command(monkeypatch, "timeline", kept, out) == 0
    assert out.read_text() == (report.to_html() if name.endswith("html") else json.dumps(trace(report)))


@pytest.mark.parametrize(("text", "name", "said"), [
    ("{}", "push.html", "is no report of a push"),
    ("[1", "push.html", "is no report of a push"),
    ("{}", "push.png", ".html or .json"),
])  # fmt: skip
def test_the_command_says_what_it_cannot_draw(
    tmp_path: Path, monkeypatch, capsys, text: str, name: str, said: str
) -> None:
    (tmp_path / "report.json").write_text(text)
    assert command(monkeypatch, "timeline", tmp_path / "report.json", tmp_path / name) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    from trainer_client.cli import main

    monkeypatch.setattr(sys, "argv", ["vllm-nixl", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_every_stage_has_a_colour() -> None:
    style = (Path(__file__).parent.parent / "trainer_client" / "timeline.html").read_text()
    assert set(re.findall(r"rect\.(\w+)", style)) >= set(STAGES) - {"total"}
    assert set(SERVER_STAGES) <= set(STAGES)


def check_html(text: str) -> None:
    """Every element that is opened is closed, in order."""
    void = {"meta", "br", "input", "hr", "img"}
    stack: list[str] = []

    class Checker(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in void:
                stack.append(tag)

        def handle_startendtag(self, tag: str, attrs: object) -> None:
            pass

        def handle_endtag(self, tag: str) -> None:
            assert stack.pop() == tag

    Checker().feed(text)
    assert stack == []
