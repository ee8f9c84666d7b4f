"""Answers that are lost after the server has acted, and requests that come twice: each route bears both."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from faults.cells import Cell
from faults.proxy import Mishap, Proxy
from faults.runner import Fleet, World, ask, seen, status_of
from harness import TOKEN
from trainer_client import WeightClient, transfer
from trainer_client.control import Control
from vllm_nixl_plugin.wire import BeginRequest

pytestmark = pytest.mark.server

OF_A_PUSH = (
    ("GET", "/status"), ("POST", "/plan"), ("POST", "/updates"), ("POST", "/updates/{id}/renew"),
    ("POST", "/updates/{id}/commit"),
)  # fmt: skip


@pytest.fixture
def fleet(world: World) -> Fleet:
    """The one server."""
    return world.fleet(Cell("trainer", "kill", "begun", "shadow"))


@pytest.fixture
def proxy(fleet: Fleet) -> Iterator[Proxy]:
    with Proxy(fleet.victim.port) as made:
        yield made


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
@pytest.mark.parametrize("mishap", ["answer lost", "sent twice"])
def test_a_push_bears_a_mishap_on_each_of_its_routes(
    world: World, fleet: Fleet, proxy: Proxy, mishap: Mishap, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = transfer.Transfer.run

    def slowly(self: Any, *args: Any, **options: Any) -> Any:
        deadline = time.monotonic() + 30
        while not proxy.seen["POST", "/updates/{id}/renew"] and time.monotonic() < deadline:
            time.sleep(0.05)
        return send(self, *args, **options)

    monkeypatch.setattr(transfer.Transfer, "run", slowly)
    seed = 2 if fleet.seed != 2 else 3
    proxy.mishaps = dict.fromkeys(OF_A_PUSH, mishap)
    incarnation = status_of(fleet.victim)["incarnation"]
    with WeightClient([proxy.url], token=TOKEN, progress=False, timeout_s=60, lease_s=1.5) as client:
        report = client.push_weights(world.weights(seed), mode=mode)
    fleet.seed = seed
    assert not proxy.mishaps, "a route that the push did not use"
    assert seen(fleet.victim) == world.fresh(seed, fleet.victim.options)
    status = status_of(fleet.victim)
    assert (status["weight_version"], status["lease"], status["ready"]) == (report.version, None, True)
    assert status["incarnation"] == incarnation, "nothing was under way, so nothing had to be fenced off"


@pytest.mark.parametrize("mishap", ["answer lost", "sent twice"])
def test_pause_resume_abort_and_status_bear_it_too(world: World, fleet: Fleet, proxy: Proxy, mishap: Mishap) -> None:
    assert fleet.push(fleet.seed, world.version(fleet.seed)) == "ok"
    plans = tuple(row["plan"] for row in ask(fleet.victim, "/plan")["workers"])
    with Control(proxy.url, token=TOKEN) as control:
        proxy.mishaps["POST", "/pause"] = mishap
        control.pause("keep", "keep", 30)
        assert ask(fleet.victim, "/ready", status=503)["reason"] == "generation was paused by hand"
        proxy.mishaps["POST", "/resume"] = mishap
        control.resume()
        assert ask(fleet.victim, "/ready")["ready"]
        opened = control.begin(BeginRequest(plans=plans, version="never", lease_s=30, holder="the test"), 30)
        for kind in (("GET", "/updates/{id}"), ("DELETE", "/updates/{id}")):
            proxy.mishaps[kind] = mishap
        assert control.update(opened.update_id, 0).state == "open"
        assert control.abort(opened.update_id, drained=True).state == "aborted"
    assert not proxy.mishaps
    assert status_of(fleet.victim)["lease"] is None
    assert seen(fleet.victim) == world.fresh(fleet.seed, fleet.victim.options)
