"""Routes, commits and the watchdog, over several API processes and workers; engines and planes are fakes."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from fake_plane import MANIFEST, NBYTES, PARTIAL, FakeClient, FakeEngines
from vllm_nixl_plugin import access, api, channel, errors, lease, peer_routes, plugin, settings
from vllm_nixl_plugin.encoding import decode_plans
from vllm_nixl_plugin.engine import Engine
from vllm_nixl_plugin.publish import Blobs
from vllm_nixl_plugin.steps import Steps
from vllm_nixl_plugin.updates import Updates
from vllm_nixl_plugin.wire import (
    PREFIX,
    BeginRequest,
    Checkpoint,
    CommitRequest,
    Mode,
    ServerStatus,
    UpdateOpened,
    UpdateStatus,
)

TOKEN = "secret-of-the-test"
ROUTES = [
    (m, r.path)
    for router in (api.router, peer_routes.router)
    for r in router.routes
    for m in sorted(r.methods)  # type: ignore[attr-defined]
]


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PUSH_WEIGHTS_TOKEN_FILE", "PUSH_WEIGHTS_ALLOW_ANONYMOUS", "PUSH_WEIGHTS_READY_AFTER_PUSH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PUSH_WEIGHTS_TOKEN", TOKEN)


@pytest.fixture(autouse=True)
def no_failures_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "failures", access.Failures())


@pytest.fixture
def soon_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """An API process counts as dead when it has said nothing for half a second."""
    monkeypatch.setattr(lease, "STALE_HEARTBEAT_S", 0.5)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> FakeEngines:
    return FakeEngines(2, 2, monkeypatch)


class Server:
    """One API process and a trainer that talks to it."""

    def __init__(self, engines: FakeEngines, heartbeat_s: float = 0.05, watch_s: float = 0.02) -> None:
        self.engines = engines
        self.app = FastAPI()
        api.attach(self.app)
        self.updates = Updates(Engine(FakeClient(engines)), heartbeat_s=heartbeat_s, watch_s=watch_s)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url=f"http://server{PREFIX}",
            headers={"Authorization": f"Bearer {TOKEN}"},
        )  # fmt: skip
        self.plans: tuple[str, ...] = ()

    async def plan(self, manifest: Any = MANIFEST) -> tuple[str, ...]:
        got = await self.http.post("/plan", content=manifest.model_dump_json())
        assert got.status_code == 200, got.text
        workers, plans = decode_plans(got.content)
        assert {w.plan for w in workers} == set(plans)
        self.plans = tuple(w.plan for w in workers)
        return self.plans

    async def begin(self, mode: Mode = "shadow", **more: Any) -> UpdateOpened:
        body = BeginRequest(plans=self.plans or await self.plan(), version=more.pop("version", "v1"), mode=mode, **more)
        got = await self.http.post("/updates", content=body.model_dump_json())
        if got.status_code != 200:
            raise errors.from_wire(got.json())
        return UpdateOpened.model_validate_json(got.content)

    def land(self, update_id: str, skip: int | None = None) -> None:
        for plane, plan in zip(self.engines.planes, self.plans, strict=True):
            if plane.worker != skip:
                plane.land(update_id, plan)

    async def commit(self, update_id: str, wait_s: float = 0.0, **more: Any) -> httpx.Response:
        content = CommitRequest(**more).model_dump_json()
        return await self.http.post(f"/updates/{update_id}/commit", params={"wait_s": wait_s}, content=content)

    async def outcome(self, update_id: str) -> UpdateStatus:
        got = await self.http.get(f"/updates/{update_id}", params={"wait_s": 20})
        assert got.status_code == 200, got.text
        return UpdateStatus.model_validate_json(got.content)

    async def push(self, mode: Mode = "shadow", **more: Any) -> UpdateStatus:
        opened = await self.begin(mode, **more)
        self.land(opened.update_id)
        assert (await self.commit(opened.update_id)).status_code == 202
        return await self.outcome(opened.update_id)

    async def status(self) -> ServerStatus:
        return ServerStatus.model_validate_json((await self.http.get("/status")).content)

    async def ready(self, **params: str) -> int:
        return (await self.http.get("/ready", params=params)).status_code


@asynccontextmanager
async def running(*servers: Server) -> AsyncIterator[None]:
    for server in servers:
        await api.start(server.app.state, server.updates)
    try:
        yield
    finally:
        for server in servers:
            await server.updates.stop()
            await server.http.aclose()


async def until(true: Callable[[], Awaitable[bool] | bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        got = true()
        if got if isinstance(got, bool) else await got:
            return
        assert time.monotonic() < deadline, "it did not become true"
        await asyncio.sleep(0.01)


def alone(test: Callable[[Server], Awaitable[None]], engines: FakeEngines) -> None:
    async def main() -> None:
        server = Server(engines)
        async with running(server):
            await test(server)

    asyncio.run(main())


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer ", "Bearer \u00e9"]
)
def test_every_route_without_the_token_is_refused_and_nothing_happens(
    engines: FakeEngines, method: str, path: str, header: str | None
) -> None:
    async def test(server: Server) -> None:
        del server.http.headers["Authorization"]
        before = [len(p.log) for p in engines.planes], len(engines.log)
        url = path.removeprefix(PREFIX).replace("{update_id}", "0" * 32)
        headers = {"Authorization": header.encode()} if header else {}
        for content in (b"{}", b"not json"):
            got = await server.http.request(method, url, headers=headers, content=content)
            assert got.status_code == 401
            assert got.json()["error"]["code"] == "unauthorized"
            assert (got.headers["WWW-Authenticate"], got.headers["Connection"]) == ("Bearer", "close")
        assert ([len(p.log) for p in engines.planes], len(engines.log)) == before

    alone(test, engines)


def test_the_list_of_routes_is_that_of_the_protocol() -> None:
    assert sorted((m, p.removeprefix(PREFIX)) for m, p in ROUTES) == [
        ("DELETE", "/updates/{update_id}"),
        ("GET", "/checkpoint"),
        ("GET", "/fingerprint"),
        ("GET", "/history"),
        ("GET", "/metadata"),
        ("GET", "/offer"),
        ("GET", "/plan"),
        ("GET", "/ready"),
        ("GET", "/status"),
        ("GET", "/updates/{update_id}"),
        ("POST", "/catch-up"),
        ("POST", "/pause"),
        ("POST", "/plan"),
        ("POST", "/resume"),
        ("POST", "/updates"),
        ("POST", "/updates/{update_id}/commit"),
        ("POST", "/updates/{update_id}/renew"),
        ("POST", "/updates/{update_id}/verify"),
    ]


def test_the_token_file_is_read_at_each_request_and_shuts_everybody_out_when_it_is_gone(
    engines: FakeEngines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    monkeypatch.setenv("PUSH_WEIGHTS_TOKEN_FILE", str(file))

    async def test(server: Server) -> None:
        assert await server.ready() == 401
        server.http.headers["Authorization"] = "Bearer first"
        assert await server.ready() == 200
        file.write_text("second")
        assert await server.ready() == 401
        server.http.headers["Authorization"] = "Bearer second"
        assert await server.ready() == 200
        file.unlink()
        monkeypatch.setenv("PUSH_WEIGHTS_ALLOW_ANONYMOUS", "1")
        assert await server.ready() == 401

    alone(test, engines)


def test_every_line_of_the_token_file_is_a_token_so_that_clients_can_change_over(
    engines: FakeEngines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    monkeypatch.setenv("PUSH_WEIGHTS_TOKEN_FILE", str(file))

    async def test(server: Server) -> None:
        async def let_in(*tokens: str) -> list[bool]:
            got = [await server.http.get("/status", headers={"Authorization": f"Bearer {t}"}) for t in tokens]
            return [each.status_code == 200 for each in got]

        file.write_text("old\n")
        assert await let_in("old", "new") == [True, False]
        file.write_text("new\n\n old \n")
        assert await let_in("old", "new", "new\told", "") == [True, True, False, False]
        file.write_text("new")
        assert await let_in("old", "new") == [False, True]
        file.write_text("\n")
        assert await let_in("old", "new", "") == [False, False, False]

    alone(test, engines)


def test_too_many_requests_without_the_token_are_told_to_wait_and_the_right_one_gets_in(
    engines: FakeEngines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access, "LIMIT", 3)

    async def test(server: Server) -> None:
        wrong = {"Authorization": "Bearer wrong"}
        got = [await server.http.get("/status", headers=wrong) for _ in range(6)]
        assert [each.status_code for each in got] == [401] * 3 + [429] * 3
        assert got[-1].json()["error"]["code"] == "too_many_requests"
        assert 1 <= int(got[-1].headers["Retry-After"]) <= 10
        assert (await server.http.get("/status")).status_code == 200

    with caplog.at_level(logging.WARNING):
        alone(test, engines)
    assert caplog.text.count("127.0.0.1 sends requests without the token") == 1


@pytest.mark.parametrize(
    ("path", "cap"),
    [
        ("/plan", "MAX_MANIFEST_BYTES"),
        ("/updates", "BEGIN_BODY_BYTES"),
        (f"/updates/{'0' * 32}/renew", "SMALL_BODY_BYTES"),
        (f"/updates/{'0' * 32}/commit", "SMALL_BODY_BYTES"),
    ],
)
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_over_its_cap_is_refused_and_not_read_when_it_says_so(
    engines: FakeEngines, monkeypatch: pytest.MonkeyPatch, path: str, cap: str, announced: bool
) -> None:
    monkeypatch.setattr(api, cap, 1000)

    async def test(server: Server) -> None:
        read: list[int] = []

        async def body() -> AsyncIterator[bytes]:
            for number in range(100):
                read.append(number)
                yield b"x" * 100

        headers = {"Content-Length": "10000"} if announced else {}
        got = await server.http.post(path, content=body(), headers=headers)
        assert (got.status_code, got.json()["error"]["code"]) == (400, "invalid_request")
        assert "more than 1000 bytes" in got.text
        assert len(read) <= (1 if announced else 12)

    alone(test, engines)


def test_without_a_token_the_server_starts_only_when_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PUSH_WEIGHTS_TOKEN")
    with pytest.raises(settings.MissingToken, match="PUSH_WEIGHTS_TOKEN"):
        settings.check_startup()
    with pytest.raises(errors.Unauthorized):
        settings.authorize("Bearer ")
    monkeypatch.setenv("PUSH_WEIGHTS_ALLOW_ANONYMOUS", "1")
    settings.check_startup()
    settings.authorize(None)


def test_a_push_installs_on_all_workers_and_reports_its_seconds(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        assert await server.ready(version="v1") == 503
        done = await server.push()
        assert (done.state, done.error, done.arrived_nbytes) == ("done", None, NBYTES)
        assert {"wait_s", "pause_s", "install_s", "resume_s", "total_s", "install.copy"} <= set(done.timings)
        assert [p.log for p in engines.planes] == [["make_plan", "bind", "prepare", "install"]] * 4
        assert engines.log == ["pause:keep:recompute", "pause", "resume"]
        assert (engines.version, engines.paused) == ("v1", False)
        status = await server.status()
        assert (status.weight_version, status.state, status.lease) == ("v1", "serving", None)
        assert status.workers == (0, 1, 2, 3)
        assert status.last == done
        assert await server.ready(version="v1") == 200

    alone(test, engines)


def test_an_install_is_made_ready_in_slices_while_generation_goes_on(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        for plane, slices in zip(engines.planes, (1, 5, 2, 3), strict=True):
            plane.slices = slices
        done = await server.push()
        assert done.state == "done"
        assert [p.log.count("prepare") for p in engines.planes] == [1, 5, 2, 3]
        assert [p.log[-1] for p in engines.planes] == ["install"] * 4
        assert engines.log == ["pause:keep:recompute", "pause", "resume"]

    alone(test, engines)


BEFORE_THE_PAUSE = ["rpc prepare", "is_paused"]
FROM_THE_INSTALL_ON = ["rpc install", "set_weight_version", "judge record_step", "resume", "judge finish", "rpc finish"]
ANY_TIME = ("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache")
"""Asked for at the same time as each other."""
CLEARED = ["reset_prefix_cache", "reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"]
COSTS: dict[Mode, list[str]] = {
    "shadow": [
        "judge grant", "rpc begin",
        "judge claim", *BEFORE_THE_PAUSE,
        "judge record_step", "pause", *FROM_THE_INSTALL_ON,
    ],
    "in_place": [
        "judge grant", "rpc begin", "is_paused", "pause", "judge record_step",
        "judge claim", *BEFORE_THE_PAUSE, *CLEARED, *FROM_THE_INSTALL_ON,
    ],
}  # fmt: skip


def recorded(engines: FakeEngines, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on, every call of the engines, and every one through the judge's socket but for heartbeats."""
    ask = channel.Door.ask

    async def noted(door: channel.Door, request: dict[str, Any]) -> dict[str, Any]:
        if request["action"] != "heartbeat":
            engines.calls.append(f"judge {request['action']}")
        return await ask(door, request)

    monkeypatch.setattr(channel.Door, "ask", noted)
    engines.calls.clear()
    return engines.calls


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_what_a_push_costs(engines: FakeEngines, monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
    async def main() -> None:
        server = Server(engines, watch_s=60)
        async with running(server):
            await server.plan()
            calls = recorded(engines, monkeypatch)
            opened = await server.begin(mode)
            server.land(opened.update_id)
            done = await server.commit(opened.update_id, wait_s=20)
            assert UpdateStatus.model_validate_json(done.content).state == "done"
            await until(lambda: "rpc finish" in calls)
        assert [c for c in calls if c not in ANY_TIME] == [c for c in COSTS[mode] if c not in ANY_TIME]
        assert Counter(calls) == Counter(COSTS[mode])

    asyncio.run(main())


def test_a_plan_that_is_there_costs_one_call(engines: FakeEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        first, second = Server(engines, watch_s=60), Server(engines, watch_s=60)
        async with running(first, second):
            plans = await first.plan()
            calls = recorded(engines, monkeypatch)
            assert await first.plan() == plans
            assert calls == ["rpc plan_start"]
            calls.clear()
            assert await second.plan() == plans
            assert calls == ["rpc plan_start", "rpc plan_read"]
            assert [p.log for p in engines.planes] == [["make_plan"]] * 4

    asyncio.run(main())


def test_encoded_plans_are_kept_up_to_a_size() -> None:
    kept = Blobs(10)
    for name in ("a", "b"):
        kept.put(name, b"12345")
    assert kept.get("a") == b"12345"
    kept.put("c", b"12345")
    assert [kept.get(name) for name in "abc"] == [b"12345", None, b"12345"]
    kept.put("d", b"12345678901")
    assert [kept.get(name) for name in "abcd"] == [None] * 4


def test_an_outcome_is_told_when_the_commit_is_over_and_no_later(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        opened = await server.begin()
        server.land(opened.update_id)
        for plane in engines.planes:
            plane.block.clear()
        await server.commit(opened.update_id)
        got = await server.http.get(f"/updates/{opened.update_id}", params={"wait_s": 0.1})
        assert got.json()["state"] == "committing"
        waiting = asyncio.create_task(server.outcome(opened.update_id))
        await until(lambda: engines.paused)
        (committing,) = server.updates._tasks
        for plane in engines.planes:
            plane.block.set()
        await asyncio.wait({committing})
        assert not waiting.done()
        assert (await waiting).state == "done"

    alone(test, engines)


def test_any_api_process_serves_any_update(engines: FakeEngines) -> None:
    async def main() -> None:
        a, b = Server(engines), Server(engines)
        async with running(a, b):
            opened = await a.begin()
            with pytest.raises(errors.LeaseHeld) as held:
                await b.begin(holder="other")
            assert held.value.details["expires_in_s"] > 0
            assert (await b.outcome(opened.update_id)).state == "open"
            renewed = await b.http.post(f"/updates/{opened.update_id}/renew", json={"lease_s": 30})
            assert renewed.json() == {"update_id": opened.update_id, "lease_s": 30}
            b.land(opened.update_id)
            assert (await b.commit(opened.update_id)).status_code == 202
            assert (await a.outcome(opened.update_id)).state == "done"
            assert (await a.status()).weight_version == "v1"

    asyncio.run(main())


def test_racing_begins_on_two_api_processes_let_one_in(engines: FakeEngines) -> None:
    async def main() -> None:
        servers = [Server(engines) for _ in range(3)]
        async with running(*servers):
            for server in servers:
                await server.plan()
            got = await asyncio.gather(*(s.begin() for s in servers * 3), return_exceptions=True)
            opened = [g for g in got if isinstance(g, UpdateOpened)]
            assert len(opened) == 1
            assert all(isinstance(g, errors.LeaseHeld) for g in got if g is not opened[0])
            servers[0].land(opened[0].update_id)
            await servers[0].commit(opened[0].update_id)
            assert (await servers[0].outcome(opened[0].update_id)).state == "done"

    asyncio.run(main())


def test_repeated_commits_join_the_running_one_on_any_process(engines: FakeEngines) -> None:
    async def main() -> None:
        a, b = Server(engines), Server(engines)
        async with running(a, b):
            opened = await a.begin()
            a.land(opened.update_id)
            engines.planes[2].block.clear()
            got = [await s.commit(opened.update_id) for s in (a, b, a, b)]
            assert [g.status_code for g in got] == [202] * 4
            await until(lambda: "install" in engines.planes[0].log)
            engines.planes[2].block.set()
            assert (await b.outcome(opened.update_id)).state == "done"
            assert (await b.commit(opened.update_id)).json()["state"] == "done"
            assert [p.log.count("install") for p in engines.planes] == [1] * 4
            assert engines.log.count("pause") == 1

    asyncio.run(main())


def test_status_and_ready_answer_while_an_install_blocks_the_engines(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        opened = await server.begin()
        server.land(opened.update_id)
        for plane in engines.planes:
            plane.block.clear()
        await server.commit(opened.update_id)
        await until(lambda: engines.paused)
        async with asyncio.timeout(2):
            status = await server.status()
            assert await server.ready() == 503
        assert status.update is not None
        assert status.update.state == "committing"
        for plane in engines.planes:
            plane.block.set()
        assert (await server.outcome(opened.update_id)).state == "done"

    alone(test, engines)


def test_a_client_that_hangs_up_does_not_stop_begin_or_commit(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        await server.plan()
        engines.planes[0].block.clear()
        hung_up = asyncio.create_task(server.begin("in_place"))
        await until(lambda: "bind" in engines.planes[0].log)
        hung_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hung_up
        engines.planes[0].block.set()

        async def opened() -> bool:
            update = (await server.status()).update
            return update is not None and update.step is None and engines.paused

        await until(opened)
        update_id = (await server.status()).update.update_id  # type: ignore[union-attr]
        server.land(update_id)
        commit = asyncio.create_task(server.commit(update_id))
        await asyncio.sleep(0)
        await until(lambda: "prepare" in engines.planes[0].log)
        commit.cancel()
        assert (await server.outcome(update_id)).state == "done"

    alone(test, engines)


def test_missing_bytes_end_the_update_and_the_old_weights_serve(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        opened = await server.begin()
        server.land(opened.update_id, skip=3)
        await server.commit(opened.update_id, timeout_s=0.1)
        failed = await server.outcome(opened.update_id)
        assert failed.state == "failed"
        assert failed.error is not None
        assert (failed.error["code"], failed.error["details"]["worker"]) == ("incomplete", 3)
        assert engines.log == []
        assert (await server.status()).state == "serving"
        assert await server.ready() == 200
        assert (await server.push()).state == "done"
        assert [p.log.count("fence") for p in engines.planes] == [0] * 4

    alone(test, engines)


def test_a_pause_that_fails_ends_the_update_before_the_install(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        engines.fail["pause"] = RuntimeError("Failed to reset the KV connector cache.")
        failed = await server.push()
        assert failed.state == "failed"
        assert engines.log[-1] == "resume"
        assert [p.log.count("install") for p in engines.planes] == [0] * 4
        engines.fail.clear()
        assert (await server.push()).state == "done"

    alone(test, engines)


def test_a_pause_that_cannot_be_withdrawn_is_undone_once_it_can(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        never = asyncio.Event()

        async def pause(mode: str, kv_cache: str) -> None:
            await never.wait()

        server.updates.engine.pause = pause  # type: ignore[method-assign,assignment]
        engines.fail["resume"] = RuntimeError("resume_scheduler called while pause is still in flight")
        opened = await server.begin()
        server.land(opened.update_id)
        await server.commit(opened.update_id, timeout_s=0.2)
        await until(lambda: "resume" in engines.log)
        status = await server.status()
        assert status.update is not None
        assert (status.update.step, status.ready) == ("undoing", False)
        with pytest.raises(errors.LeaseHeld):
            await server.begin()
        engines.fail.clear()
        failed = await server.outcome(opened.update_id)
        assert (failed.state, failed.error and failed.error["code"]) == ("failed", "deadline")
        assert await server.ready() == 200
        never.set()

    alone(test, engines)


def test_an_update_that_every_worker_refuses_untouched_is_undone(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        for plane in engines.planes:
            plane.fail["install"] = errors.NeedsRestart("layers.0.w", untouched=True)
        failed = await server.push()
        assert (failed.state, failed.error and failed.error["code"]) == ("failed", "needs_restart")
        assert not engines.paused
        assert (await server.status()).weight_version == "default"

    alone(test, engines)


def test_an_obstacle_seen_by_one_worker_before_the_pause_pauses_nothing(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        engines.planes[1].fail["prepare"] = errors.NeedsRestart("layers.0.w")
        failed = await server.push()
        assert (failed.state, engines.log) == ("failed", [])

    alone(test, engines)


@pytest.mark.parametrize(
    "error", [errors.NeedsRestart("w", untouched=True), errors.InstallFailed("w"), ValueError("w")]
)
def test_one_failing_worker_tears_all_and_a_full_push_heals(engines: FakeEngines, error: Exception) -> None:
    async def test(server: Server) -> None:
        engines.planes[2].fail["install"] = error
        torn = await server.push()
        assert torn.state == "torn"
        assert torn.error is not None
        assert torn.error["details"]["worker"] == 2
        assert engines.paused
        status = await server.status()
        assert (status.state, status.torn, status.ready, status.weight_version) == ("torn", True, False, "default")
        assert (await server.http.post("/resume")).json()["error"]["code"] == "torn"
        assert engines.paused
        await server.plan(PARTIAL.model_copy(update={"weights": MANIFEST.weights * 2}))
        with pytest.raises(errors.EngineTorn):
            await server.begin()
        await server.plan()
        engines.planes[2].fail.clear()
        assert (await server.push(version="v2")).state == "done"
        assert not engines.paused
        assert engines.log.count("reset_prefix_cache") == 2
        assert await server.ready(version="v2") == 200

    alone(test, engines)


def test_a_worker_that_answers_for_another_call_fails_the_update(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        opened = await server.begin()
        server.land(opened.update_id)

        def stale(request: dict[str, Any], answer: dict[str, Any]) -> None:
            if request["action"] == "prepare":
                answer["nonce"] = "of an earlier call"

        engines.workers[1][1].spoil = stale
        await server.commit(opened.update_id)
        failed = await server.outcome(opened.update_id)
        assert (failed.state, failed.error and failed.error["code"]) == ("failed", "worker_failed")
        assert [p.log.count("install") for p in engines.planes] == [0] * 4

    alone(test, engines)


@pytest.mark.parametrize("how", ["foreign nonce", "same worker twice", "not an object"])
def test_unknown_results_of_an_install_mean_torn(engines: FakeEngines, how: str) -> None:
    async def test(server: Server) -> None:
        def spoil(request: dict[str, Any], answer: dict[str, Any]) -> None:
            if request["action"] == "install":
                answer.update({"nonce": "x"} if how == "foreign nonce" else {"worker": 0})
                if how == "not an object":
                    answer.clear()

        engines.workers[1][0].spoil = spoil
        assert (await server.push()).state == "torn"
        assert engines.paused

    alone(test, engines)


def test_workers_that_installed_different_versions_are_torn(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        def differ(request: dict[str, Any], answer: dict[str, Any]) -> None:
            if request["action"] == "install":
                answer["result"]["version"] = "other"

        engines.workers[0][1].spoil = differ
        torn = await server.push()
        assert (torn.state, torn.error and torn.error["code"]) == ("torn", "worker_failed")
        assert engines.paused
        assert await server.ready() == 503

    alone(test, engines)


def test_begin_without_memory_on_one_worker_ends_it_on_all(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        engines.planes[3].fail["bind"] = errors.InsufficientMemory("lacks 12 bytes", lacking_nbytes=12)
        for mode in ("shadow", "in_place"):
            with pytest.raises(errors.InsufficientMemory) as refused:
                await server.begin(mode)  # type: ignore[arg-type]
            assert refused.value.details == {"lacking_nbytes": 12, "worker": 3}
            await until(lambda: engines.workers[0][0].__dict__["_nixl_push_session"].judge.lease is None)
            assert (await server.status()).state == "serving"
        engines.planes[3].fail.clear()
        assert (await server.push()).state == "done"
        assert [p.log.count("fence") for p in engines.planes] == [0] * 4

    alone(test, engines)


def test_in_place_pauses_before_addresses_are_given_and_until_the_commit_is_done(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        opened = await server.begin("in_place")
        assert engines.paused
        assert engines.log == ["pause:keep:keep", "pause"]
        assert await server.ready() == 503
        assert (await server.http.post("/resume")).status_code == 409
        server.land(opened.update_id)
        await server.commit(opened.update_id)
        assert (await server.outcome(opened.update_id)).state == "done"
        assert engines.log.count("pause") == 1
        assert sorted(engines.log[2:-1]) == sorted(CLEARED)
        assert engines.log[-1] == "resume"

    alone(test, engines)


def test_an_in_place_update_whose_pause_fails_is_undone(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        engines.fail["pause"] = RuntimeError("no")
        with pytest.raises(errors.WorkerFailed):
            await server.begin("in_place")
        assert engines.log[-1] == "resume"
        assert (await server.status()).state == "serving"

    alone(test, engines)


def test_an_in_place_update_that_is_undone_leaves_a_pause_by_hand_alone(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        engines.paused = True
        engines.fail["pause"] = RuntimeError("no")
        with pytest.raises(errors.WorkerFailed):
            await server.begin("in_place")
        assert "resume" not in engines.log
        assert engines.paused

    alone(test, engines)


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_a_paused_engine_is_never_let_run_to_wait_for_its_requests(engines: FakeEngines, mode: Mode) -> None:
    async def test(server: Server) -> None:
        engines.paused = True
        opened = await server.begin(mode, pause="wait")
        server.land(opened.update_id)
        await server.commit(opened.update_id, pause="wait")
        assert (await server.outcome(opened.update_id)).state == "done"
        assert [line for line in engines.log if ":wait:" in line] == []
        assert engines.paused

    alone(test, engines)


def test_a_torn_engine_that_was_resumed_behind_our_back_is_paused_again_at_once(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        engines.planes[0].fail["install"] = errors.InstallFailed("")
        assert (await server.push()).state == "torn"
        engines.planes[0].fail.clear()
        engines.paused = False
        engines.log.clear()
        opened = await server.begin()
        server.land(opened.update_id)
        await server.commit(opened.update_id, pause="wait")
        assert (await server.outcome(opened.update_id)).state == "done"
        assert engines.log == ["pause:keep:recompute", "pause", "resume"]

    alone(test, engines)


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_an_update_that_fails_leaves_an_engine_paused_that_others_paused(engines: FakeEngines, mode: Mode) -> None:
    async def test(server: Server) -> None:
        engines.paused = True
        engines.planes[0].fail["bind"] = errors.InsufficientMemory("")
        with pytest.raises(errors.InsufficientMemory):
            await server.begin(mode)
        engines.planes[0].fail.clear()
        engines.fail["pause"] = RuntimeError("no")
        if mode == "shadow":
            assert (await server.push(mode)).state == "failed"
        else:
            with pytest.raises(errors.WorkerFailed):
                await server.begin(mode)
        assert "resume" not in engines.log
        engines.fail.clear()
        assert (await server.push(mode)).state == "done"
        assert engines.paused

    alone(test, engines)


def test_aborting_in_place_leaves_the_engine_torn_and_paused(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        opened = await server.begin("in_place")
        got = await server.http.delete(f"/updates/{opened.update_id}", params={"drained": True})
        assert got.json()["state"] == "aborted"
        assert (await server.status()).state == "torn"
        assert engines.paused
        assert (await server.push("in_place", version="v2")).state == "done"
        assert not engines.paused

    alone(test, engines)


def test_an_abort_ends_an_update_and_its_commit_is_refused(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        opened = await server.begin()
        first = opened.workers[0].incarnation
        for _ in range(2):
            got = await server.http.delete(f"/updates/{opened.update_id}")
            assert (got.status_code, got.json()["state"]) == (200, "aborted")
        assert (await server.commit(opened.update_id)).json()["error"]["code"] == "stale_update"
        again = await server.begin()
        assert again.workers[0].incarnation != first
        await server.http.delete(f"/updates/{again.update_id}", params={"drained": True})
        known = tuple(w.digest for w in again.workers)
        third = await server.begin(known_bindings=known)
        assert [w.binding for w in third.workers] == [None] * 4
        assert third.workers[0].incarnation == again.workers[0].incarnation

    alone(test, engines)


def test_an_abort_stops_a_commit_that_waits_for_bytes(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        opened = await server.begin()
        await server.commit(opened.update_id)
        got = await server.http.delete(f"/updates/{opened.update_id}")
        assert got.status_code == 200
        assert (await server.outcome(opened.update_id)).state == "aborted"
        await asyncio.sleep(0.1)
        assert engines.log == []
        assert (await server.push()).state == "done"

    alone(test, engines)


def test_a_commit_leaves_an_engine_paused_that_was_paused_by_hand(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        assert (await server.http.post("/pause", params={"mode": "abort"})).status_code == 200
        assert await server.ready() == 503
        assert (await server.push()).state == "done"
        assert engines.paused
        assert (await server.http.post("/resume")).status_code == 200
        assert not engines.paused
        assert await server.ready() == 200

    alone(test, engines)


async def claimed_by_a_dying_process(
    server: Server, update_id: str, request: CommitRequest
) -> tuple[Steps, dict[str, Any]]:
    """Stop a process's watchdog and tasks, and put a commit into its hands all the same: its steps, and their args."""
    await server.updates.stop()
    claim = (await server.updates._claim(update_id, "commit", request.model_dump()))["claim"]
    return Steps(server.updates.engine, update_id, claim, 1.0), {"update_id": update_id, "claim": claim}


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
@pytest.mark.parametrize(
    ("died_after", "pauses"),
    [
        ("claim", 1),
        ("prepare", 1),
        ("pausing", 1),
        ("pause", 2),
        ("install by the judge", 1),
        ("install by another", 1),
        ("install by the judge's engine", 1),
        ("install by another engine", 1),
        ("install", 1),
        ("resuming", 1),
        ("resume", 1),
        ("finish by another engine", 1),
    ],
)
@pytest.mark.usefixtures("soon_stale")
def test_the_watchdog_finishes_what_a_dead_process_left(
    engines: FakeEngines, died_after: str, pauses: int, mode: Mode
) -> None:
    async def main() -> None:
        dead, alive = Server(engines), Server(engines)
        async with running(dead, alive):
            opened = await dead.begin(mode)
            dead.land(opened.update_id)
            update_id, engine = opened.update_id, dead.updates.engine
            steps, mine = await claimed_by_a_dying_process(dead, update_id, CommitRequest(kv_cache="keep"))
            only = {"the judge": [0], "another": [3], "the judge's engine": [0, 1], "another engine": [2, 3]}
            for each in ("claim", "prepare", "pausing", "pause", "install", "resuming", "resume", "finish"):
                if each in ("pausing", "resuming"):
                    await steps._record(each, held=False)
                elif each == "pause":
                    await engine.pause("keep", "keep")
                elif each == "resume":
                    await engine.resume()
                elif each != "claim":
                    who = only.get(died_after.partition(" by ")[2]) if died_after.startswith(each) else None
                    await engine.call_all(each, mine | ({"timings": {}} if each == "finish" else {}), only=who)
                if died_after.startswith(each) and died_after.partition(" by ")[0] == each:
                    break
            assert (await alive.outcome(update_id)).state == "done"
            assert not engines.paused
            status = await alive.status()
            assert (status.weight_version, status.torn, status.lease, status.ready) == ("v1", False, None, True)
            assert [p.log.count("install") for p in engines.planes] == [1] * 4
            assert [p.log.count("prepare") for p in engines.planes] == [1] * 4
            sessions = [w.__dict__["_nixl_push_session"] for per in engines.workers for w in per]
            await until(lambda: all(s.update is None for s in sessions))
            assert [(s.weight_version, s.torn, s.update) for s in sessions] == [("v1", False, None)] * 4
            if mode == "shadow":
                assert engines.log.count("pause") == pauses
            with pytest.raises(errors.StaleUpdate):
                await steps._record("pausing")
            assert (await alive.push(version="v2")).state == "done" if await alive.plan() else False

    asyncio.run(main())


@pytest.mark.usefixtures("soon_stale")
def test_a_dead_process_leaves_nothing_behind_that_still_installs(engines: FakeEngines) -> None:
    """It was about to pause when its heart stopped, and its install arrives after another has undone the update."""

    async def main() -> None:
        dead, alive = Server(engines), Server(engines)
        async with running(dead, alive):
            opened = await dead.begin()
            dead.land(opened.update_id)
            update_id, engine = opened.update_id, dead.updates.engine
            request = CommitRequest(kv_cache="keep", timeout_s=0.1)
            steps, mine = await claimed_by_a_dying_process(dead, update_id, request)
            await engine.call_all("prepare", mine)
            await steps._record("pausing", held=False)
            never = asyncio.Event()

            async def pause(mode: str, kv_cache: str) -> None:
                await never.wait()

            alive.updates.engine.pause = pause  # type: ignore[method-assign,assignment]
            engines.fail["resume"] = RuntimeError("resume_scheduler called while pause is still in flight")
            await until(lambda: "resume" in engines.log)
            answers = await engine.call_all("install", mine, check=False)
            assert [a["error"]["details"].get("superseded") for a in answers] == [True] * 4
            engines.fail.clear()
            assert (await alive.outcome(update_id)).state == "failed"
            assert [p.log.count("install") for p in engines.planes] == [0] * 4
            assert (await alive.status()).weight_version == "default"
            never.set()

    asyncio.run(main())


def test_the_end_of_an_update_that_reached_only_the_judge_is_learnt_at_the_next_begin(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        opened = await server.begin()
        server.land(opened.update_id)
        await server.updates._claim(opened.update_id, "commit", {})
        mine = {"update_id": opened.update_id, "claim": 1}
        for action, only in (("prepare", None), ("install", None), ("finish", [0, 1])):
            args = mine | ({"timings": {}} if action == "finish" else {})
            await server.updates.engine.call_all(action, args, only=only)
        assert (await server.status()).weight_version == "v1"
        await server.plan(PARTIAL.model_copy(update={"weights": MANIFEST.weights * 2}))
        assert (await server.push(version="v2")).state == "done"
        sessions = [w.__dict__["_nixl_push_session"] for per in engines.workers for w in per]
        await until(lambda: all(s.update is None for s in sessions))
        assert [[h["state"] for h in s.history] for s in sessions] == [["done", "done"]] * 4
        assert [p.log.count("fence") for p in engines.planes] == [0] * 4

    alone(test, engines)


@pytest.mark.usefixtures("soon_stale")
def test_the_watchdog_resumes_an_engine_whose_in_place_begin_died_before_it_answered(engines: FakeEngines) -> None:
    async def main() -> None:
        dead, alive = Server(engines), Server(engines)
        async with running(dead, alive):
            await dead.plan()
            await dead.updates.stop()
            plans = {str(i): plan for i, plan in enumerate(dead.plans)}
            common = {"update_id": "a" * 32, "holder": "", "plans": plans}
            epoch = (await dead.updates.engine.ask_judge("grant", common | {"lease_s": 600.0}))["epoch"]
            begin = {"epoch": epoch, "version": "v1", "mode": "in_place", "known_bindings": []}
            await dead.updates.engine.call_all("begin", common | begin)
            await dead.updates.engine.pause("keep", "keep")
            await until(lambda: not engines.paused)

            async def serving() -> bool:
                status = await alive.status()
                return status.state == "serving" and status.lease is None

            await until(serving)
            assert (await alive.push()).state == "done" if await alive.plan() else False

    asyncio.run(main())


@pytest.mark.usefixtures("soon_stale")
def test_a_pause_that_comes_after_another_process_ended_the_update_is_taken_back(engines: FakeEngines) -> None:
    async def main() -> None:
        slow, quick = Server(engines, heartbeat_s=60, watch_s=60), Server(engines)
        async with running(slow, quick):
            pause, late = slow.updates.engine.pause, asyncio.Event()

            async def pause_late(mode: Any, kv_cache: Any) -> None:
                await late.wait()
                await pause(mode, kv_cache)

            slow.updates.engine.pause = pause_late  # type: ignore[method-assign]
            opened = await slow.begin()
            slow.land(opened.update_id)
            await slow.commit(opened.update_id)
            assert (await quick.outcome(opened.update_id)).state == "done"
            assert engines.log.count("resume") == 1
            late.set()
            await until(lambda: engines.log.count("resume") == 2)
            assert not engines.paused
            assert [p.log.count("install") for p in engines.planes] == [1] * 4

    asyncio.run(main())


@pytest.mark.usefixtures("soon_stale")
def test_a_living_commit_is_not_taken_over_however_long_its_install(engines: FakeEngines) -> None:
    async def main() -> None:
        a, b = Server(engines), Server(engines)
        async with running(a, b):
            opened = await a.begin()
            a.land(opened.update_id)
            for plane in engines.planes:
                plane.block.clear()
            await a.commit(opened.update_id)
            await until(lambda: engines.paused)
            await asyncio.sleep(1.5)
            held = engines.workers[0][0].__dict__["_nixl_push_session"].judge.lease
            assert (held.claim, held.claimant) == (1, a.updates.claimant)
            for plane in engines.planes:
                plane.block.set()
            assert (await b.outcome(opened.update_id)).state == "done"

    asyncio.run(main())


@pytest.mark.parametrize("field", ["torn", "weight_version"])
def test_a_worker_unlike_the_others_makes_all_count_as_torn(engines: FakeEngines, field: str) -> None:
    async def test(server: Server) -> None:
        await server.status()
        setattr(engines.workers[1][1].__dict__["_nixl_push_session"], field, True if field == "torn" else "other")
        await server.plan(PARTIAL.model_copy(update={"weights": MANIFEST.weights * 2}))
        with pytest.raises(errors.EngineTorn):
            await server.begin()
        await server.plan()
        opened = await server.begin()
        assert (await server.status()).torn
        await server.http.delete(f"/updates/{opened.update_id}")
        assert (await server.push()).state == "done"
        assert (await server.status()).state == "serving"
        await until(lambda: not engines.workers[1][1].__dict__["_nixl_push_session"].torn)

    alone(test, engines)


def test_a_killed_servers_socket_is_swept_and_a_living_ones_is_not(tmp_path: Path) -> None:
    folders = [tmp_path / f"{channel.PREFIX}{name}" for name in ("dead", "alive", "young")]
    sockets = []
    for folder in folders:
        folder.mkdir()
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].bind(str(folder / "s"))
        if folder.name.endswith("alive"):
            sockets[-1].listen()
        if not folder.name.endswith("young"):
            os.utime(folder / "s", (1, 1))
    sockets[0].close()
    channel._sweep(tmp_path)
    assert [folder.exists() for folder in folders] == [False, True, True]
    for each in sockets:
        each.close()


def test_an_api_process_that_ends_removes_the_socket_of_a_judge_that_is_gone(
    engines: FakeEngines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    at_exit: list[tuple[Any, ...]] = []
    monkeypatch.setattr("atexit.register", lambda *call, **_: at_exit.append(call))
    folder = tmp_path / f"{channel.PREFIX}x"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as judge:
        judge.bind(str(folder / "s"))
        judge.listen()
        monkeypatch.setattr(channel, "serve", lambda session: {"path": str(folder / "s")})

        async def test(server: Server) -> None:
            await server.updates.engine.start()

        asyncio.run(test(Server(engines)))
        [(remove, path, patience_s)] = set(at_exit)
        remove(path, 0.1)
        assert folder.exists()
        threading.Timer(0.2, judge.close).start()
        remove(path, patience_s)
    assert not folder.exists()


def test_the_engine_is_asked_when_the_channel_is_gone(engines: FakeEngines, tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        engine, nowhere = server.updates.engine, channel.Door(str(tmp_path / "nowhere"))
        engine.close()
        engine._channel = nowhere
        assert (await server.status()).state == "serving"
        assert engine._channel is not nowhere

        async def lost() -> None:
            engine._channel = None

        engine._learn_channel = lost  # type: ignore[method-assign]
        engine.close()
        engine._channel = nowhere
        assert (await server.push()).state == "done"

    alone(test, engines)


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("POST", "/plan", b"{}"),
        ("POST", "/plan", b"nonsense"),
        ("POST", "/updates", b'{"plans": ["x"], "version": "v", "surprise": "secret-value"}'),
        ("POST", "/updates", b'{"plans": [], "version": "v"}'),
        ("GET", "/updates/not-an-id", b""),
        ("POST", "/updates/" + "0" * 32 + "/commit", b'{"pause": "secret-value"}'),
        ("POST", "/pause?mode=secret-value", b""),
    ],
)
def test_what_is_not_understood_is_400_in_the_common_shape_without_internals(
    engines: FakeEngines, method: str, path: str, content: bytes
) -> None:
    async def test(server: Server) -> None:
        got = await server.http.request(method, path, content=content)
        assert got.status_code == 400
        assert set(got.json()["error"]) == {"code", "message", "details"}
        assert got.json()["error"]["code"] == "invalid_request"
        assert "secret-value" not in got.text
        assert "pydantic" not in got.text

    alone(test, engines)


def test_plans_for_another_number_of_workers_are_made_again(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        got = await server.http.post("/updates", json={"plans": ["x"], "version": "v"})
        assert (got.status_code, got.json()["error"]["code"]) == (409, "unknown_plan")
        assert server.updates.engine.workers[1:]

    alone(test, engines)


def test_an_unknown_failure_is_500_without_internals_and_is_logged(
    engines: FakeEngines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(server: Server) -> None:
        async def broken() -> None:
            raise ValueError("internal detail")

        monkeypatch.setattr(server.updates, "status", broken)
        with caplog.at_level(logging.ERROR, "vllm.nixl_plugin"):
            got = await server.http.get("/status")
        assert (got.status_code, got.json()["error"]["code"]) == (500, "error")
        assert "internal detail" not in got.text
        assert "internal detail" in caplog.text

    alone(test, engines)


def test_stale_and_unknown_ids_are_refused(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        for method, path in (("POST", "/renew"), ("POST", "/commit"), ("DELETE", ""), ("GET", "")):
            got = await server.http.request(method, f"/updates/{'0' * 32}{path}")
            assert (got.status_code, got.json()["error"]["code"]) == (409, "stale_update")

    alone(test, engines)


def test_plans_come_in_binary_or_readable_and_metadata_has_no_address(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        plans = await server.plan()
        assert len(plans) == 4
        assert len(set(plans)) == 2
        got = await server.http.post(
            "/plan", content=MANIFEST.model_dump_json(), headers={"Accept": "application/json"}
        )  # fmt: skip
        assert [w["worker"] for w in got.json()["workers"]] == [0, 1, 2, 3]
        summary = (await server.http.get("/plan")).json()["workers"]
        assert [(s["worker"], s["plan"], s["nbytes"]) for s in summary] == [(i, plans[i], NBYTES) for i in range(4)]
        metadata = (await server.http.get("/metadata")).json()["workers"]
        assert [m["rank"] for m in metadata] == [0, 1, 2, 3]
        assert not re.search("address|metadata", str(metadata))

    alone(test, engines)


def test_the_weights_that_a_server_started_from_are_those_of_all_its_workers(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        got = await server.http.get("/checkpoint")
        assert got.status_code == 200, got.text
        found = Checkpoint.model_validate_json(got.content).weights
        assert found[0] == MANIFEST.weights[0]
        assert [(w.name, w.shape, w.dtype) for w in found[1:]] == [
            (f"of-{p.worker}", (2, 3), "bfloat16") for p in engines.planes
        ]

    alone(test, engines)


def test_a_fingerprint_has_the_paths_of_all_workers_or_of_one_or_their_digests_alone(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        async def ask(**params: Any) -> dict[str, Any]:
            got = await server.http.get("/fingerprint", params=params)
            assert got.status_code == 200, got.text
            return dict(got.json())

        whole = await ask()
        assert [w["worker"] for w in whole["workers"]] == [0, 1, 2, 3]
        assert {w["incarnation"] for w in whole["workers"]} == {p.incarnation() for p in engines.planes}
        assert all(w["paths"] == {p: f"0 of {p}" for p in "abc"} and w["n_paths"] == 3 for w in whole["workers"])
        short = await ask(paths=False)
        assert [w["paths"] for w in short["workers"]] == [None] * 4
        assert short["digest"] == whole["digest"]
        assert (await ask(worker=2))["workers"] == [whole["workers"][2]]
        assert (await server.http.get("/fingerprint?worker=9")).status_code == 400
        await server.push(version="v7")
        again = await ask(paths=False)
        assert again["digest"] != whole["digest"]
        assert again["weight_version"] == "v7"

    alone(test, engines)


def test_a_large_fingerprint_is_compressed_where_that_is_understood(
    engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [(f"layer.{i}", "x") for i in range(999)]
    monkeypatch.setattr("fake_plane.FakePlane.fingerprint", lambda self: iter([lines]))

    async def test(server: Server) -> None:
        packed = await server.http.get("/fingerprint")
        plain = await server.http.get("/fingerprint", headers={"Accept-Encoding": "identity"})
        assert packed.headers["Content-Encoding"] == "gzip"
        assert "Content-Encoding" not in plain.headers
        assert int(packed.headers["Content-Length"]) * 5 < int(plain.headers["Content-Length"])
        assert packed.json() == plain.json()

    alone(test, engines)


def test_a_fingerprint_is_refused_where_one_worker_sleeps(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        engines.planes[3].fail["fingerprint"] = errors.EngineAsleep("asleep")
        got = await server.http.get("/fingerprint")
        assert (got.status_code, got.json()["error"]["code"]) == (409, "asleep")
        assert got.json()["error"]["details"] == {"worker": 3}
        assert (await server.http.get("/fingerprint?worker=1")).status_code == 200

    alone(test, engines)


def test_before_the_first_push_the_plan_is_that_of_the_servers_own_checkpoint(
    engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(server: Server) -> None:
        got = await server.http.get("/plan")
        assert [w["nbytes"] for w in got.json()["workers"]] == [NBYTES] * 4
        await server.http.get("/plan")
        assert [plane.log.count("make_plan") for plane in engines.planes] == [1] * 4
        got = await server.http.get("/plan", params={"digest": "ab" * 32})
        assert (got.status_code, got.json()["error"]["code"]) == (409, "unknown_plan")

    alone(test, engines)

    async def without_a_checkpoint(server: Server) -> None:
        got = await server.http.get("/plan")
        assert (got.status_code, got.json()["error"]["code"]) == (409, "unknown_plan")

    monkeypatch.setattr("fake_plane.FakePlane.checkpoint", lambda self: [])
    alone(without_a_checkpoint, FakeEngines(1, 1, monkeypatch))


def test_a_refused_plan_names_the_worker(engines: FakeEngines) -> None:
    async def test(server: Server) -> None:
        engines.planes[1].fail["make_plan"] = errors.PlanRefused("1 weight is missing", missing=["w"])
        got = await server.http.post("/plan", content=MANIFEST.model_dump_json())
        assert got.status_code == 422
        assert got.json()["error"]["details"] == {"missing": ["w"], "worker": 1}

    alone(test, engines)


def test_a_server_that_waits_for_its_first_push_is_not_ready(
    engines: FakeEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PUSH_WEIGHTS_READY_AFTER_PUSH", "1")

    async def test(server: Server) -> None:
        assert await server.ready() == 503
        await server.push()
        assert await server.ready() == 200

    alone(test, engines)


def test_the_token_is_never_logged(engines: FakeEngines, caplog: pytest.LogCaptureFixture) -> None:
    async def test(server: Server) -> None:
        with caplog.at_level(logging.DEBUG, "vllm.nixl_plugin"):
            await server.push()
            await server.http.post("/plan", content=b"nonsense")
        assert TOKEN not in caplog.text

    alone(test, engines)


class Config:
    """The part of vLLM's config that names the worker extension."""

    def __init__(self, extension: str) -> None:
        self.parallel_config = self
        self.vllm_config = self
        self.worker_extension_cls = extension


def test_the_plugin_refuses_to_ask_workers_that_lack_the_extension() -> None:
    plugin.check_extension(Config("vllm_nixl_plugin.NixlWorkerExtension"), None)
    plugin.check_extension(Config("fake_plane.FakeWorker"), None)
    for other in ("", "fake_plane.FakePlane", "fake_plane.Nothing"):
        with pytest.raises(RuntimeError, match="--worker-extension-cls"):
            plugin.check_extension(Config(other), None)


@pytest.mark.parametrize(("dev_mode", "middleware", "warned"), [
    ("1", [], True), ("1", ["other.Thing"], True), ("1", ["vllm_nixl_plugin.guard.Guard"], False), ("0", [], False),
])  # fmt: skip
def test_open_development_routes_are_warned_of(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dev_mode: str,
    middleware: list[str],
    warned: bool,
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", dev_mode)
    with caplog.at_level(logging.WARNING):
        plugin.warn_of_open_routes(SimpleNamespace(middleware=middleware))
    assert ("--middleware vllm_nixl_plugin.guard.Guard" in caplog.text) == warned


def test_the_plugin_serves_its_routes_once_vllm_has_started_it(engines: FakeEngines) -> None:
    async def main() -> None:
        app, entry = FastAPI(), plugin.EndpointPlugin()
        entry.attach_router(app)
        transport = httpx.ASGITransport(app)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://s", headers=headers) as http:
            await entry.init_state(None, app.state, None)
            assert (await http.get(f"{PREFIX}/status")).status_code == 503
            client = FakeClient(engines)
            client.vllm_config = Config("vllm_nixl_plugin.NixlWorkerExtension")  # type: ignore[attr-defined]
            await entry.init_state(client, app.state, None)
            assert (await http.get(f"{PREFIX}/status")).status_code == 200
            await app.state.nixl_push_updates.stop()

    asyncio.run(main())
