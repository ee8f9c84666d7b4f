"""What nobody would send: every decoder and every door of the control plane takes it or refuses it, and lives on.

One short round of each in `make test`; `make fuzz MINUTES=5` goes on for so long, with other inputs each time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import random
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fake_plane import MANIFEST, NBYTES, FakeClient, FakeEngines, FakePlane, plan_of
from harness import TOKEN, Server
from trainer_client.credits import Credits
from vllm_nixl_plugin import access, api, channel
from vllm_nixl_plugin.encoding import (
    decode_credit,
    decode_landed,
    decode_plan,
    decode_plans,
    encode_credit,
    encode_landed,
    encode_plan,
    encode_plans,
    plan_digest,
)
from vllm_nixl_plugin.engine import Engine
from vllm_nixl_plugin.errors import InvalidRequest
from vllm_nixl_plugin.session import WorkerSession
from vllm_nixl_plugin.updates import Updates
from vllm_nixl_plugin.wire import PREFIX, BeginRequest, CommitRequest, Credit, Landed, PlannedWorker
from vllm_nixl_plugin.worker import ACTIONS, answer, plain

MINUTES = float(os.environ.get("FUZZ_MINUTES", "0"))
TARGETS = 8
ROUND = 100

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)


def fuzz(check: Callable[..., None], **given_: st.SearchStrategy[Any]) -> None:
    """Call ``check`` with random arguments: one round, or rounds for this target's share of the minutes."""
    end, n = time.monotonic() + MINUTES * 60 / TARGETS, 0

    def counted(**arguments: Any) -> None:
        nonlocal n
        n += 1
        check(**arguments)

    quiet = settings(max_examples=ROUND, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    while True:
        seed = random.getrandbits(64) if MINUTES else 0
        hypothesis.seed(seed)(quiet(given(**given_)(counted)))()
        if time.monotonic() >= end:
            break
    print(f"{n} inputs")


# Bytes


def edited(original: bytes) -> st.SearchStrategy[bytes]:
    """These bytes with a few places changed, cut out, doubled or filled in; or any bytes at all."""
    at = st.integers(0, len(original))
    edit = st.tuples(st.sampled_from(["change", "cut", "fill", "double"]), at, at, st.binary(max_size=12))

    def apply(edits: list[tuple[str, int, int, bytes]]) -> bytes:
        data = original
        for how, a, b, new in edits:
            a, b = min(a, b), max(a, b)
            data = data[:a] + {"change": new + data[a + len(new) :], "cut": data[b:], "fill": new + data[a:],
                               "double": data[a:b] + data[a:]}[how]  # fmt: skip
        return data

    return st.lists(edit, min_size=1, max_size=4).map(apply) | st.binary(max_size=200)


LANDED = encode_landed(Landed(update_id="0" * 32, sequence=1, nbytes=NBYTES, plan="0" * 16))
PLAN = encode_plan(plan_of(MANIFEST, 0))
HEAD = struct.Struct("<4sBIQ")
class FakeInbox:
    """An agent, as far as credits are read from it."""

    def __init__(self) -> None:
        self.inbox: list[tuple[str, bytes]] = []

    def notifications(self) -> list[tuple[str, bytes]]:
        got, self.inbox = self.inbox, []
        return got


wild_numbers = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-2, 70)


@st.composite
def forged_plans(draw: st.DrawFn) -> bytes:
    """Plans whose head is well packed and whose numbers are well counted, with anything in them."""
    magic, version, head_nbytes, n_copies = HEAD.unpack_from(PLAN)
    head = json.loads(zlib.decompress(PLAN[HEAD.size : HEAD.size + head_nbytes]))
    numbers = list(struct.unpack(f"<{(len(PLAN) - HEAD.size - head_nbytes) // 8}q", PLAN[HEAD.size + head_nbytes :]))
    for key in draw(st.lists(st.sampled_from([*sorted(head), "stale", "copies", "groups", "other"]), max_size=2)):
        head[key] = draw(json_values)
    text = json.dumps(head).encode()
    if draw(st.integers(0, 9)) == 0:
        odd = [b"[" * 200_000, b'{"a":' * 50_000, b"null", b"9" * 5000, b"\xff", bytes(10_000_000)]
        text = draw(st.sampled_from(odd))
    for _ in range(draw(st.integers(0, 3))):
        numbers[draw(st.integers(0, len(numbers) - 1))] = draw(wild_numbers)
    numbers += draw(st.lists(wild_numbers, max_size=3))
    n_copies = draw(st.sampled_from([n_copies, 0, 2, 1 << 40]))
    packed = zlib.compress(text) + draw(st.sampled_from([b"", b"\0"]))
    return HEAD.pack(magic, version, len(packed), n_copies) + packed + struct.pack(f"<{len(numbers)}q", *numbers)


def accept(data: bytes) -> None:
    """A plan that is taken is sound, and the same after another trip."""
    try:
        plan = decode_plan(data)
    except InvalidRequest:
        return
    assert decode_plan(encode_plan(plan)) == plan
    for c in plan.copies:
        destination, weight = plan.destinations[c.destination], plan.weights[c.weight]
        assert c.copy_.dst_offset >= 0
        assert c.copy_.src_offset >= 0
        if c.copy_.numel and 0 not in c.copy_.dst_strides:
            assert c.copy_.dst_nbytes <= destination.nbytes * c.copy_.dst_itemsize
            last = sum((n - 1) * s for n, s in zip(c.copy_.shape, c.copy_.src_strides, strict=True))
            assert c.copy_.src_offset + last < 16 * math.prod(weight.shape)


def test_a_plan_of_any_bytes_is_taken_or_refused() -> None:
    fuzz(accept, data=edited(PLAN) | forged_plans())


def test_an_answer_with_plans_of_any_bytes_is_taken_or_refused() -> None:
    workers = (PlannedWorker(worker=0, plan=plan_digest(plan_of(MANIFEST, 0)), incarnation="i"),)
    whole = encode_plans(workers, {workers[0].plan: PLAN})

    def check(data: bytes, head: Any, blob: bytes) -> None:
        forged = json.dumps(head).encode()
        named = json.dumps({"workers": [], "plans": [[hashlib.sha256(blob).hexdigest(), len(blob)]]}).encode()
        for each in (
            data,
            struct.pack("<4sBI", b"NXPS", 1, len(forged)) + forged + blob,
            struct.pack("<4sBI", b"NXPS", 1, len(named)) + named + blob,
        ):
            try:
                found, plans = decode_plans(each)
            except InvalidRequest:
                continue
            assert {w.plan for w in found} <= set(plans)

    sizes = st.lists(json_values | st.tuples(st.text(max_size=64), json_values), max_size=3)
    heads = json_values | st.fixed_dictionaries({"workers": st.lists(json_values, max_size=3), "plans": sizes})
    fuzz(check, data=edited(whole), head=heads, blob=edited(PLAN))


def test_a_notification_of_any_bytes_is_taken_or_refused() -> None:
    def check(data: bytes) -> None:
        try:
            message = decode_landed(data)
        except InvalidRequest:
            return
        assert encode_landed(message) == data

    grouped = encode_landed(decode_landed(LANDED).model_copy(update={"group": 3}))
    of_any = st.binary(min_size=45, max_size=45)
    fuzz(check, data=edited(LANDED) | of_any.map(lambda rest: b"NXLD\x01" + rest[5:41]))
    fuzz(check, data=edited(grouped) | of_any.map(lambda rest: b"NXLG\x01" + rest[5:]))


def test_a_credit_of_any_bytes_is_taken_or_refused() -> None:
    """By the decoder, and by what reads an agent's inbox: there it counts for the update and the worker it is of."""
    credit = Credit(update_id="0" * 32, group=3, plan="0" * 16)

    def check(data: bytes) -> None:
        trainer, worker = FakeInbox(), "w"
        trainer.inbox = [(worker, data), ("other", encode_credit(credit))]
        found = Credits(trainer)  # type: ignore[arg-type]
        with found.expect(credit.update_id, [(worker, "0" * 64)]):
            last = found.look(credit.update_id, worker)
        try:
            message = decode_credit(data)
        except InvalidRequest:
            assert last == -1
            return
        assert encode_credit(message) == data
        mine = (message.update_id, message.plan) == (credit.update_id, credit.plan)
        assert last == (message.group if mine else -1)

    of_any = st.binary(min_size=33, max_size=33)
    fuzz(check, data=edited(encode_credit(credit)) | of_any.map(lambda rest: b"NXCR\x01" + rest[5:]))


# The worker


def session_with_a_plan() -> tuple[WorkerSession, str]:
    session = WorkerSession(FakePlane(0))
    session.plans.start(MANIFEST.digest(), MANIFEST.model_dump_json().encode())
    while (made := session.plans.poll(MANIFEST.digest())) is None:
        time.sleep(0.001)
    return session, made.digest


def test_a_worker_counts_each_notification_once_whoever_sends_what() -> None:
    session, plan = session_with_a_plan()

    def check(messages: list[tuple[str, bytes | tuple[int, int]]]) -> None:
        update_id = hashlib.sha256(os.urandom(8)).hexdigest()[:32]
        session.begin(update_id, session.epoch + 1, "v", "shadow", "t", plan, [])
        good: dict[tuple[str, int], int] = {}
        for agent, message in messages:
            if isinstance(message, bytes):
                session.plane.inbox.append((agent, message))  # type: ignore[attr-defined]
            else:
                session.plane.land(update_id, plan, nbytes=message[1], sequence=message[0], agent=agent)  # type: ignore[attr-defined]
                good.setdefault((agent, message[0]), message[1])
        arrived = sum(good.values())
        try:
            got = session.prepare(update_id, 1)
        except InvalidRequest:
            assert arrived > NBYTES
        else:
            assert got["arrived_nbytes"] == arrived
        session.abort(update_id, 1, drained=True)

    numbered = st.tuples(st.integers(0, 3), st.integers(0, 40))
    messages = st.lists(st.tuples(st.sampled_from(["a", "b", "\n"]), edited(LANDED) | numbered), max_size=8)
    fuzz(check, messages=messages)


def test_a_worker_answers_every_request_and_lives_on() -> None:
    session, plan = session_with_a_plan()
    names = ["update_id", "epoch", "version", "mode", "holder", "plans", "known_bindings", "writers", "claim", "step",
             "held", "ticket", "start", "paths", "purpose", "claimant", "request", "options", "lease_s", "plan",
             "digest", "manifest", "reads", "timings", "drained", "contacts", "install"]  # fmt: skip
    args = st.dictionaries(
        st.sampled_from(names), json_values | st.just({"0": plan}) | st.just(plan) | st.just("0" * 32), max_size=8
    )

    def check(action: Any, args: Any, judge: Any, only: Any) -> None:
        got = answer(session, {"nonce": 1, "action": action, "args": args, "judge": judge, "only": only})
        assert got["nonce"] == 1
        assert plain(got) == got or "nan" in repr(got)

    fuzz(
        check,
        action=st.sampled_from(sorted(ACTIONS - {"channel"})) | json_values,
        args=args | json_values,
        judge=st.sampled_from([0, 1, None]) | json_values,
        only=st.none() | st.just([0]) | json_values,
    )
    assert answer(session, {"action": "status"})["ok"]


def test_the_judges_socket_takes_any_line_and_goes_on_answering() -> None:
    session, _ = session_with_a_plan()
    path = channel.serve(session)["path"]

    async def asked(path: str) -> dict[str, Any]:
        door = channel.Door(path)
        answers = [await door.ask({"nonce": 7, "action": "status"}, timeout_s=20) for _ in range(2)]
        door.close()
        return answers[1]

    def check(line: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(20)
            peer.connect(path)
            peer.sendall(line + b"\n")
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(1 << 16):
                pass
        got = asyncio.run(asked(path))
        assert (got["ok"], got["nonce"]) == (True, 7)

    actions = st.sampled_from(sorted(ACTIONS))
    requests = st.fixed_dictionaries({"action": actions, "judge": st.just(0), "args": json_values}) | json_values
    fuzz(check, line=st.binary(max_size=300) | requests.map(lambda value: json.dumps(value).encode()))


# HTTP

REFUSALS = {400, 401, 404, 405, 409, 422, 429, 503, 504}
"""504: the time that the request itself gave."""


@pytest.fixture
def with_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PUSH_WEIGHTS_TOKEN", TOKEN)
    monkeypatch.delenv("PUSH_WEIGHTS_TOKEN_FILE", raising=False)
    monkeypatch.setattr(access, "failures", access.Failures())


@pytest.mark.usefixtures("with_token")
def test_every_route_answers_any_body_and_query(monkeypatch: pytest.MonkeyPatch) -> None:
    app = FastAPI()
    api.attach(app)
    routes = [(m, r.path) for r in api.router.routes for m in sorted(r.methods)]  # type: ignore[attr-defined]
    plans = [plan_digest(plan_of(MANIFEST, worker)) for worker in (0, 1)]
    begin = BeginRequest(plans=tuple(plans), version="v").model_dump(mode="json")
    commit = CommitRequest(timeout_s=0.01).model_dump(mode="json")

    def near(body: dict[str, Any]) -> st.SearchStrategy[Any]:
        return st.dictionaries(st.sampled_from([*body, "other"]), json_values, max_size=2).map(lambda new: body | new)

    bodies = json_values | near(begin) | near(commit) | near({"lease_s": 1.0}) | near(MANIFEST.model_dump(mode="json"))
    queries = st.dictionaries(
        st.sampled_from(["wait_s", "worker", "paths", "digest", "timeout_s", "mode", "kv_cache", "drained", "version"]),
        st.text(max_size=8) | st.integers().map(str) | st.sampled_from(["keep", "true", "nan", "-1", "inf"]),
        max_size=3,
    )
    known = ["0" * 32]
    with asyncio.Runner() as runner:
        updates = Updates(Engine(FakeClient(FakeEngines(1, 2, monkeypatch))), watch_s=3600)
        runner.run(api.start(app.state, updates))
        http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://server", headers={"Authorization": f"Bearer {TOKEN}"}
        )

        def check(route: tuple[str, str], number: int, text: bytes | None, body: Any, query: dict[str, str]) -> None:
            method, path = route
            wait = {"wait_s": "0"} if method == "GET" else {}
            got = runner.run(
                http.request(
                    method, path.replace("{update_id}", known[number % len(known)]), params=query | wait,
                    content=text if text is not None else json.dumps(body).encode(),
                )
            )  # fmt: skip
            if got.status_code in (200, 202):
                found = got.json() if "json" in got.headers["content-type"] else {}
                known[:] = [*known[-3:], found.get("update_id", known[-1])]
            else:
                assert got.status_code in REFUSALS, (method, path, got.text)
                error = got.json()
                assert path.endswith("ready") or set(error["error"]) == {"code", "message", "details"}

        fuzz(
            check, route=st.sampled_from(routes), number=st.integers(0, 3), text=st.none() | st.binary(max_size=40),
            body=bodies, query=queries,
        )  # fmt: skip
        assert runner.run(http.get(f"{PREFIX}/status")).status_code == 200
        runner.run(updates.stop())
        runner.run(http.aclose())


@pytest.fixture(scope="module")
def server(checkpoint: Callable[..., Path]) -> Iterator[Server]:
    with Server(checkpoint("qwen3")) as server:
        yield server


@pytest.mark.server
def test_a_real_server_never_fails_at_what_its_openapi_schema_allows(server: Server) -> None:
    spec = httpx.get(f"{server.url}/openapi.json", timeout=30).json()
    spec["paths"] = {path: item for path, item in spec["paths"].items() if path.startswith(PREFIX)}
    schema = schemathesis.openapi.from_dict(spec)
    cases = st.one_of([operation.ok().as_strategy() for operation in schema.get_all_operations()])
    assert {"BeginRequest", "Manifest"} <= {
        item["post"]["requestBody"]["content"]["application/json"]["schema"]["title"]
        for item in spec["paths"].values()
        if "requestBody" in item.get("post", {})
    }
    headers = {"Authorization": f"Bearer {TOKEN}"}

    def check(case: Any) -> None:
        case.query = {name: value for name, value in (case.query or {}).items() if name != "wait_s"}
        got = case.call(base_url=server.url, headers=headers, timeout=120)
        assert got.status_code in {200, 202} | REFUSALS, (case.method, case.path, got.text)
        if got.status_code == 503:
            assert case.path.endswith("/ready")
        httpx.post(f"{server.url}{PREFIX}/resume", headers=headers, timeout=30)

    fuzz(check, case=cases)
    assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
    status = httpx.get(f"{server.url}{PREFIX}/status", headers=headers, timeout=30).json()
    assert (status["weight_version"], status["torn"]) == ("default", False)
