"""The header and the comments that tell which weights an output was made with; real outputs: test_pushes.py."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, StreamingResponse
from fastapi.testclient import TestClient

from vllm_nixl_plugin.engine import Engine
from vllm_nixl_plugin.versions import Versions


@pytest.fixture
def engine() -> Engine:
    """Serves version 1."""
    made = Engine(SimpleNamespace(), alone=True)
    asyncio.run(made.set_weight_version("1"))
    return made


@pytest.fixture
def http(engine: Engine) -> TestClient:
    """An app of the routes below; ``engine`` is behind it."""
    app = FastAPI()
    app.add_middleware(Versions)
    app.state.nixl_push_updates = SimpleNamespace(engine=engine)

    @app.get("/v1/quiet")
    async def quiet() -> PlainTextResponse:
        return PlainTextResponse("x")

    @app.get("/v1/crossing")
    async def crossing() -> PlainTextResponse:
        await engine.set_weight_version("2")
        await engine.set_weight_version("two words, é")
        return PlainTextResponse("x")

    @app.get("/v1/events")
    async def events() -> StreamingResponse:
        async def body():
            yield b"data: a\n\n"
            await engine.set_weight_version("2")
            yield b"data: half an "
            await engine.set_weight_version("3")
            yield b"event\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(body(), media_type="text/event-stream")

    @app.get("/health")
    async def health() -> PlainTextResponse:
        return PlainTextResponse("x")

    return TestClient(app)


def test_an_answer_says_which_weights_made_it(http: TestClient) -> None:
    assert http.get("/v1/quiet").headers["x-weight-version"] == "1"


def test_an_answer_that_an_update_crossed_says_all_of_them(http: TestClient) -> None:
    assert http.get("/v1/crossing").headers["x-weight-version"] == "1, 2, two%20words%2C%20%C3%A9"


def test_a_stream_says_it_between_events_only(http: TestClient) -> None:
    answer = http.get("/v1/events")
    assert answer.headers["x-weight-version"] == "1"
    assert answer.text == (
        "data: a\n\n"
        ": weight-version 2\n\ndata: half an event\n\n"
        ": weight-version 3\n\ndata: [DONE]\n\n"
    )  # fmt: skip


def test_other_routes_say_nothing(http: TestClient) -> None:
    assert "x-weight-version" not in http.get("/health").headers


def test_before_the_server_has_started_nothing_is_said(http: TestClient) -> None:
    http.app.state.nixl_push_updates = None  # type: ignore[attr-defined]
    assert "x-weight-version" not in http.get("/v1/quiet").headers


def test_a_process_that_is_not_alone_asks_the_judge() -> None:
    class Asking(Engine):
        async def ask_judge(self, action: str, args: dict | None = None) -> dict:
            assert action == "status"
            return judge

    judge = {"weight_version": "1", "history": []}
    engine = Asking(SimpleNamespace())
    last, versions = asyncio.run(engine.served())
    assert versions[-1] == "1"
    judge["history"] = [
        {"clock": 5.0, "version": "2", "state": "done"},
        {"clock": 6.0, "version": "lost", "state": "aborted"},
        {"clock": 7.0, "version": "3", "state": "done"},
    ]
    judge["weight_version"] = "4"  # installed, and not yet over
    last, versions = asyncio.run(engine.served(last))
    assert versions == ["2", "3", "4"]
    assert asyncio.run(engine.served(last)) == (7.0, ["4"])
