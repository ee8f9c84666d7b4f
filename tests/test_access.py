"""Who gets in: wrong tokens are counted by address, and the guard closes what vLLM's own key leaves open."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness import TOKEN, EngineOptions, Server, completions, reference
from harness.checkpoints import read_weights
from trainer_client import WeightClient
from vllm_nixl_plugin import access, errors, settings
from vllm_nixl_plugin.guard import Guard


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUSH_WEIGHTS_TOKEN", TOKEN)
    monkeypatch.delenv("PUSH_WEIGHTS_TOKEN_FILE", raising=False)
    monkeypatch.setattr(access, "failures", access.Failures())


def refused(failures: access.Failures, address: str) -> float | None:
    """After how many seconds to come again, if that was one too many."""
    try:
        failures.note(address)
    except errors.TooManyRequests as error:
        return float(error.details["retry_after_s"])
    return None


def test_an_address_is_refused_over_the_limit_until_its_window_is_over() -> None:
    clock = Clock()
    failures = access.Failures(clock)
    assert [refused(failures, "a") for _ in range(access.LIMIT)] == [None] * access.LIMIT
    clock.now = 4
    assert refused(failures, "a") == access.WINDOW_S - 4
    assert refused(failures, "b") is None
    clock.now = access.WINDOW_S
    assert refused(failures, "a") is None


def test_many_addresses_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "MAX_ADDRESSES", 10)
    failures = access.Failures(Clock())
    for number in range(1000):
        failures.note(str(number))
    assert len(failures._windows) == 10


@pytest.mark.parametrize(("value", "warned"), [("short", True), ("0123456789abcdef", False)])
def test_a_short_token_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str, warned: bool
) -> None:
    monkeypatch.setenv("PUSH_WEIGHTS_TOKEN", value)
    with caplog.at_level(logging.WARNING):
        settings.check_startup()
    assert ("characters" in caplog.text) == warned
    assert value not in caplog.text


async def through_the_guard(scope: dict[str, Any]) -> list[dict[str, Any]]:
    """What a client gets; an app behind the guard answers 204."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message)

    await Guard(app)(scope, None, send)  # type: ignore[arg-type]
    return sent


@pytest.mark.parametrize(
    ("path", "is_open"),
    [
        ("/v1/completions", True), ("/inference/v1/generate", True), ("/health", True), ("/metrics/", True),
        ("/nixl/v1/status", True), ("/collective_rpc", False), ("/v1collective_rpc", False), ("/", False),
        ("/healthy", False), ("/pause", False), ("/update_weights", False), ("/docs", False), ("", False),
        ("//collective_rpc", False), ("/nixl/v2/status", False),
    ],
)  # fmt: skip
def test_the_guard_leaves_open_what_others_check_and_probes_alone(path: str, is_open: bool) -> None:
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "client": ("1.2.3.4", 5)}
    assert asyncio.run(through_the_guard(scope))[0]["status"] == (204 if is_open else 401)
    scope["headers"] = [(b"Authorization", f"Bearer {TOKEN}".encode())]
    assert asyncio.run(through_the_guard(scope))[0]["status"] == 204
    scope |= {"root_path": "/api", "path": f"/api{path}", "headers": [(b"authorization", b"Bearer \xff")]}
    assert asyncio.run(through_the_guard(scope))[0]["status"] == (204 if is_open else 401)


def test_the_guard_closes_websockets_and_lets_the_start_of_the_app_pass() -> None:
    socket = {"type": "websocket", "path": "/admin", "headers": [], "client": None}
    assert asyncio.run(through_the_guard(socket)) == [{"type": "websocket.close", "code": 1008}]
    assert asyncio.run(through_the_guard({"type": "lifespan"}))[0]["status"] == 204


@pytest.mark.server
def test_the_routes_on_an_address_of_their_own_are_there_alone(checkpoint: Callable[..., Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    options = EngineOptions(api_servers=2)
    with Server(checkpoint("qwen3", 1), options, env={"PUSH_WEIGHTS_ADDRESS": f"127.0.0.1:{port}"}) as server:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert httpx.get(f"{server.url}/nixl/v1/status", headers=headers).status_code == 404
        assert httpx.get(f"{url}/nixl/v1/status").status_code == 401
        assert [httpx.get(f"{url}{path}", headers=headers).status_code for path in ("/v1/models", "/docs")] == [404] * 2
        with WeightClient([url], token=TOKEN) as client:
            client.push_weights(read_weights(checkpoint("qwen3", 2)), version="two")
        statuses = [httpx.get(f"{url}/nixl/v1/status", headers=headers).json() for _ in range(8)]
        assert {status["weight_version"] for status in statuses} == {"two"}
        assert completions(server.url) == reference(checkpoint("qwen3", 2), options=server.options)


@pytest.mark.parametrize(
    ("given", "found"),
    [("", None), ("10.0.0.5:8100", ("10.0.0.5", 8100)), ("[::1]:81", ("::1", 81)), ("localhost:1", ("localhost", 1))],
)
def test_the_address_is_a_host_and_a_port(
    monkeypatch: pytest.MonkeyPatch, given: str, found: tuple[str, int] | None
) -> None:
    monkeypatch.setenv("PUSH_WEIGHTS_ADDRESS", given)
    assert settings.address() == found
    for wrong in ("8100", ":8100", "host:", "host:x", "host:70000"):
        monkeypatch.setenv("PUSH_WEIGHTS_ADDRESS", wrong)
        with pytest.raises(ValueError, match="PUSH_WEIGHTS_ADDRESS"):
            settings.address()


@pytest.mark.server
def test_vllms_own_routes_are_open_without_the_guard_and_closed_with_it(checkpoint: Callable[..., Path]) -> None:
    """What docs/security.md says: ``--api-key`` alone leaves the development routes open to everybody."""
    api_key = ["--api-key", "inference-key"]
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    ours, theirs = {"Authorization": f"Bearer {TOKEN}"}, {"Authorization": "Bearer inference-key"}
    call = {"method": "nixl_push_rpc", "args": [{"action": "status"}]}
    with Server(checkpoint("qwen3"), args=api_key, env=env) as server, httpx.Client(base_url=server.url) as http:
        assert http.get("/v1/models").status_code == 401
        assert http.get("/v1/models", headers=theirs).status_code == 200
        for headers in ({}, theirs):
            assert http.get("/nixl/v1/status", headers=headers).status_code == 401
        assert http.post("/collective_rpc", json=call).status_code == 200
        assert http.post("/pause").status_code == 200
        assert http.post("/tokenize", json={"model": "model", "prompt": "x"}).status_code == 200
        assert http.post("/invocations", json={}).status_code not in (401, 404)
        assert http.get("/server_info").status_code == 200
    guard = ["--middleware", "vllm_nixl_plugin.guard.Guard"]
    guarded = Server(checkpoint("qwen3"), args=api_key + guard, env=env)
    with guarded as server, httpx.Client(base_url=server.url) as http:
        assert http.get("/v1/models", headers=theirs).status_code == 200
        assert http.get("/health").status_code == 200
        for headers in ({}, theirs):
            for path in ("/collective_rpc", "/pause", "/sleep", "/update_weights", "/invocations", "/tokenize"):
                assert http.post(path, json=call, headers=headers).status_code == 401, path
            for path in ("/openapi.json", "/docs", "/server_info", "/nixl/v1/status"):
                assert http.get(path, headers=headers).status_code == 401, path
        assert http.post("/collective_rpc", json=call, headers=ours).status_code == 200
        assert http.get("/nixl/v1/status", headers=ours).status_code == 200
        for _ in range(access.LIMIT):
            last = http.post("/pause")
        assert last.status_code == 429
        assert http.post("/pause", headers=ours).status_code == 200
