"""The live page: open and without data, everything in it, nothing else let in; what it reads needs the token.

`make screenshots` drives the same page in a real browser, against a real server (scripts/screenshots.py).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from fake_plane import FakeClient, FakeEngines
from vllm_nixl_plugin import access, api, pages, ui
from vllm_nixl_plugin.engine import Engine
from vllm_nixl_plugin.guard import Guard
from vllm_nixl_plugin.session import HISTORY
from vllm_nixl_plugin.updates import Updates
from vllm_nixl_plugin.wire import PREFIX

TOKEN = "secret-of-the-test"
SCRIPTS = ["treemap.js", "ui.js"]


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PUSH_WEIGHTS_TOKEN_FILE", raising=False)
    monkeypatch.setenv("PUSH_WEIGHTS_TOKEN", TOKEN)
    monkeypatch.setattr(access, "failures", access.Failures())


def get(path: str, monkeypatch: pytest.MonkeyPatch, *, guarded: bool = False, **headers: str) -> httpx.Response:
    async def main() -> httpx.Response:
        updates = Updates(Engine(FakeClient(FakeEngines(1, 1, monkeypatch))), watch_s=3600)
        app = FastAPI()
        api.attach(app)
        await api.start(app.state, updates)
        transport = httpx.ASGITransport(Guard(app) if guarded else app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers) as http:
            answer = await http.get(path)
        await updates.stop()
        return answer

    return asyncio.run(main())


@pytest.mark.parametrize("guarded", [False, True])
def test_the_page_is_open_and_the_same_for_everybody(monkeypatch: pytest.MonkeyPatch, guarded: bool) -> None:
    answer = get(f"{PREFIX}/ui", monkeypatch, guarded=guarded)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text == ui.document()
    assert TOKEN not in answer.text


def test_the_page_is_on_an_address_of_its_own_too(monkeypatch: pytest.MonkeyPatch) -> None:
    app = api.app_for(Updates(Engine(FakeClient(FakeEngines(1, 1, monkeypatch)))))
    assert f"{PREFIX}/ui" in {getattr(route, "path", "") for route in app.routes}


def test_the_policy_lets_in_what_is_in_the_page_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = get(f"{PREFIX}/ui", monkeypatch)
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert (policy["connect-src"], policy["form-action"], policy["frame-ancestors"]) == ("'self'", "'none'", "'none'")
    for kind in ("script", "style"):
        texts = re.findall(rf"<{kind}[^>]*>(.*?)</{kind}>", answer.text, re.DOTALL)
        assert len(texts) == 2
        hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts]
        assert policy[f"{kind}-src"].split() == hashes
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_the_page_is_whole_and_refers_to_nothing_outside() -> None:
    found: list[tuple[str, dict[str, str | None]]] = []
    stack: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, dict(attrs)))
            if tag not in ("meta", "input", "br", "link", "img"):
                stack.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert stack.pop() == tag

    Reader().feed(ui.document())
    assert stack == []
    refused = {"src", "href", "action", "style", "srcset", "data"}
    for tag, attributes in found:
        assert tag not in ("link", "iframe", "object", "embed", "base", "img"), tag
        assert not refused & set(attributes), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
    ids = [attributes["id"] for _, attributes in found if "id" in attributes]
    assert len(ids) == len(set(ids))
    script = asset("ui.js")
    assert set(re.findall(r'at\("([\w-]+)"\)', script)) <= set(ids)
    assert not re.search(r"https?://|@import|url\(", ui.document())


def test_the_token_is_asked_for_in_a_field_that_nothing_remembers() -> None:
    [field] = re.findall(r'<input id="token"[^>]*>', ui.document())
    assert 'type="password"' in field
    assert 'autocomplete="off"' in field
    assert "name=" not in field  # a form that is sent without its script carries no field without a name


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_parse_and_neither_store_nor_insert_markup(name: str) -> None:
    from tree_sitter import Language, Parser
    from tree_sitter_javascript import language

    text = asset(name)
    root = Parser(Language(language())).parse(text.encode()).root_node
    assert not root.has_error, [str(node) for node in root.children if node.has_error]
    for word in (
        "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage", "sessionStorage",
        "document.cookie", "indexedDB", "XMLHttpRequest", "WebSocket", "import(",
    ):  # fmt: skip
        assert word not in text, word
    assert text.count("fetch(") == (1 if name == "ui.js" else 0)  # `read`, which goes to this server


def test_every_stage_and_class_of_the_script_has_its_colour() -> None:
    style = asset("ui.css")
    for name in ("receive", "prepare", "pause", "install", "resume", "other"):
        assert f".{name} {{ background:" in style
        assert f'["{name}", ' in asset("ui.js")


def test_the_script_reads_routes_that_there_are_and_fields_that_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    script = asset("ui.js")
    paths = set(re.findall(r'read\("(/\w+)"', script))
    assert paths == {"/status", "/history", "/plan"}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    status = get(f"{PREFIX}/status", monkeypatch, **headers).json()
    assert set(re.findall(r"\bstatus\.(\w+)", script)) <= set(status)
    for path in paths:
        assert get(PREFIX + path, monkeypatch).status_code == 401


def test_the_history_has_the_updates_that_ended_with_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_api import Server, running

    async def main() -> list[dict]:
        server = Server(FakeEngines(1, 2, monkeypatch))
        async with running(server):
            for number in range(HISTORY + 3):
                update = (await server.begin(version=f"v{number}")).update_id
                await server.http.delete(f"/updates/{update}?drained=true")
            return list((await server.http.get("/history")).json()["updates"])

    updates = asyncio.run(main())
    assert [update["version"] for update in updates] == [f"v{number}" for number in range(3, HISTORY + 3)]
    for update in updates:
        assert update["state"] == "aborted"
        assert 0 < update["begun_at"] <= update["at"]
        assert set(update) >= {"update_id", "mode", "nbytes", "arrived_nbytes", "error", "timings", "holder"}


def asset(name: str) -> str:
    own = Path(ui.__file__).parent / name
    return own.read_text("utf-8") if own.exists() else pages.asset(name)
