"""The HTTP routes of the plugin, below /nixl/v1. docs/protocol.md lists them with their bodies.

The token is checked before anything else of a request is read (`Route`), and every error leaves as
``{"error": {"code", "message", "details"}}`` with the status of its class; an unknown one without its internals.
Handlers that change something run in tasks of their own: a client that hangs up does not stop them half-way.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import logging
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, ValidationError

from vllm_nixl_plugin import access, errors, publish
from vllm_nixl_plugin.encoding import encode_plans
from vllm_nixl_plugin.guard import headers_of
from vllm_nixl_plugin.updates import Updates
from vllm_nixl_plugin.wire import (
    MAX_MANIFEST_BYTES,
    PREFIX,
    BeginRequest,
    CommitRequest,
    KvCachePolicy,
    Manifest,
    PauseMode,
    Record,
    Seconds,
    SumsRequest,
)

logger = logging.getLogger("vllm.nixl_plugin")

BINARY = "application/octet-stream"
BEGIN_BODY_BYTES = 32 << 20
SMALL_BODY_BYTES = 64 << 10
MAX_WAIT_S = 60.0

T = TypeVar("T")
R = TypeVar("R", bound=BaseModel)
UpdateId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class RenewRequest(Record):
    """Hold the update for another ``lease_s``."""

    lease_s: Seconds = 60.0


def _takes(record: type[BaseModel]) -> dict[str, Any]:
    """The body of a route for the OpenAPI schema: the routes read it themselves, once the token is checked."""
    schema = record.model_json_schema()
    inner = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return inlined(inner[node["$ref"].rpartition("/")[2]])
            return {key: inlined(value) for key, value in node.items()}
        return [inlined(each) for each in node] if isinstance(node, list) else node

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined(schema)}}}}


class Route(APIRoute):
    """Authorizes first, and translates errors last."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own handler, guarded."""
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                access.check(request.headers.get("authorization"), request.client.host if request.client else None)
                return await handle(request)
            except errors.PushWeightsError as error:
                return _refusal(error)
            except RequestValidationError as error:
                return _refusal(_invalid(error.errors()))
            except Exception:
                logger.exception("%s %s failed", request.method, request.url.path)
                return _refusal(errors.PushWeightsError("unexpected error: see the server's log"))

        return guarded


router = APIRouter(prefix=PREFIX, route_class=Route)


def attach(app: FastAPI) -> None:
    """Add the routes to an app, and the live page."""
    from vllm_nixl_plugin import peer_routes
    from vllm_nixl_plugin.ui import routes

    app.include_router(router)
    app.include_router(peer_routes.router)
    app.include_router(routes.router)


def app_for(updates: Updates) -> FastAPI:
    """An app of the routes alone, for an address of their own."""
    app = FastAPI(openapi_url=None)
    attach(app)
    app.state.nixl_push_updates = updates
    return app


async def start(state: Any, updates: Updates) -> None:
    """Make the routes of the app with this state answer. Errors: those of `Updates.start`."""
    await updates.start()
    state.nixl_push_updates = updates


@router.get("/status")
async def status(request: Request) -> Response:
    """How the server stands."""
    return _json(await _updates(request).status())


@router.get("/ready")
async def ready(request: Request, version: Annotated[str | None, Query(max_length=256)] = None) -> Response:
    """200 when the server generates, with the weights of ``version`` if that is given; 503 otherwise."""
    now = await _updates(request).status()
    reason = now.reason
    if not reason and version is not None and version != now.weight_version:
        reason = f"the server has weights {now.weight_version!r}, not {version!r}"
    body = {"ready": not reason, "reason": reason, "weight_version": now.weight_version, "state": now.state}
    return JSONResponse(body, 503 if reason else 200)


@router.get("/history")
async def history(request: Request) -> Response:
    """The last updates that have ended, in their order; a bounded number."""
    return JSONResponse({"updates": await _updates(request).history()})


@router.get("/metadata")
async def metadata(request: Request) -> Response:
    """What every worker says of itself."""
    return JSONResponse({"workers": await publish.metadata(_updates(request).engine)})


@router.get("/plan")
async def plan_summary(request: Request, digest: Annotated[str | None, Query(max_length=64)] = None) -> Response:
    """A plan for people: the one used last (at first, for the server's own checkpoint), or that of ``digest``."""
    return JSONResponse({"workers": await publish.summaries(_updates(request).engine, digest)})


@router.post("/plan", openapi_extra=_takes(Manifest))
async def plan(request: Request, timeout_s: Annotated[float, Query(gt=0, le=86_400)] = 600.0) -> Response:
    """Plan for the manifest in the body; the plans in binary, or a summary where JSON is asked for."""
    engine, kept = _updates(request).engine, _updates(request).plans
    manifest = await asyncio.to_thread(_parse, Manifest, await _body(request, MAX_MANIFEST_BYTES))
    canonical = manifest.model_dump_json().encode()
    digest = hashlib.sha256(canonical).hexdigest()
    workers, blobs = await publish.make_plans(engine, kept, digest, canonical, timeout_s)
    if "application/json" not in request.headers.get("accept", ""):
        return Response(encode_plans(workers, blobs), media_type=BINARY)
    plans = [item for d in blobs for item in await publish.summaries(engine, d)]
    return JSONResponse({"manifest": digest, "workers": [w.model_dump() for w in workers], "plans": plans})


@router.get("/checkpoint")
async def checkpoint(request: Request) -> Response:
    """The weights that the server started from: names, shapes, dtypes."""
    found = await publish.checkpoint(_updates(request).engine)
    return await asyncio.to_thread(_compressed, found.model_dump_json().encode(), request)


@router.get("/fingerprint")
async def fingerprint(
    request: Request, worker: Annotated[int | None, Query(ge=0, lt=1 << 31)] = None, paths: bool = True
) -> Response:
    """Checksums of everything that the engine can read, by worker and path; without ``paths`` their digests only."""
    updates = _updates(request)
    async with updates.reading:
        found = await publish.fingerprint(updates.engine, worker, paths=paths)
    return await asyncio.to_thread(_compressed, found.model_dump_json().encode(), request)


@router.post("/updates", openapi_extra=_takes(BeginRequest))
async def begin(request: Request) -> Response:
    """Open an update."""
    body = _parse(BeginRequest, await _body(request, BEGIN_BODY_BYTES))
    return _json(await _whole(_updates(request).begin(body)))


@router.get("/updates/{update_id}")
async def update_status(
    request: Request, update_id: UpdateId, wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0
) -> Response:
    """How an update stands; with ``wait_s``, once its commit is over or that time has passed."""
    return _json(await _updates(request).update_status(update_id, wait_s))


@router.post("/updates/{update_id}/renew", openapi_extra=_takes(RenewRequest))
async def renew(request: Request, update_id: UpdateId) -> Response:
    """Extend the lease from now."""
    body = _parse(RenewRequest, await _body(request, SMALL_BODY_BYTES) or b"{}")
    return JSONResponse(await _updates(request).renew(update_id, body.lease_s) | {"update_id": update_id})


@router.post("/updates/{update_id}/verify", openapi_extra=_takes(SumsRequest))
async def verify(request: Request, update_id: UpdateId) -> Response:
    """Compare what has arrived with what was sent, before the commit."""
    body = await asyncio.to_thread(_parse, SumsRequest, await _body(request, BEGIN_BODY_BYTES))
    return JSONResponse(await _updates(request).verify(update_id, body))


@router.post("/updates/{update_id}/commit", openapi_extra=_takes(CommitRequest))
async def commit(
    request: Request, update_id: UpdateId, wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0
) -> Response:
    """Start or join the install; with ``wait_s``, answer once it is over or that time has passed."""
    body = _parse(CommitRequest, await _body(request, SMALL_BODY_BYTES) or b"{}")
    return _json(await _whole(_updates(request).commit(update_id, body, wait_s)), 202)


@router.delete("/updates/{update_id}")
async def abort(request: Request, update_id: UpdateId, drained: bool = False) -> Response:
    """End an update without installing it."""
    return _json(await _whole(_updates(request).abort(update_id, drained=drained)))


@router.post("/pause")
async def pause(request: Request, mode: PauseMode = "keep", kv_cache: KvCachePolicy = "keep") -> Response:
    """Pause generation by hand."""
    await _whole(_updates(request).pause(mode, kv_cache))
    return JSONResponse({"paused": True})


@router.post("/resume")
async def resume(request: Request) -> Response:
    """Resume it."""
    await _whole(_updates(request).resume())
    return JSONResponse({"paused": False})


def _updates(request: Request) -> Updates:
    updates = getattr(request.app.state, "nixl_push_updates", None)
    if updates is None:
        raise errors.ServerUnreachable("the server has not started yet")
    return updates  # type: ignore[no-any-return]


async def _whole(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end, even when the request is cancelled."""
    task = asyncio.ensure_future(work)
    _running.add(task)
    task.add_done_callback(_forget)
    return await asyncio.shield(task)


_running: set[asyncio.Future[Any]] = set()


def _forget(task: asyncio.Future[Any]) -> None:
    _running.discard(task)
    if not task.cancelled():
        task.exception()


async def _body(request: Request, cap: int) -> bytes:
    data, announced = bytearray(), request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > cap:
        raise errors.InvalidRequest(f"the body has more than {cap} bytes")
    async for piece in request.stream():
        data += piece
        if len(data) > cap:
            raise errors.InvalidRequest(f"the body has more than {cap} bytes")
    return bytes(data)


def _parse(record: type[R], data: bytes) -> R:
    try:
        return record.model_validate_json(data)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False, include_context=False, include_input=False)) from None


def _invalid(problems: Any) -> errors.InvalidRequest:
    """The first problems by field, without the values that were sent."""
    found = [f"{'.'.join(str(p) for p in e.get('loc', ()))}: {e.get('msg', '')}" for e in list(problems)[:10]]
    return errors.InvalidRequest("the request is not understood: " + "; ".join(found), problems=found)


def _refusal(error: errors.PushWeightsError) -> JSONResponse:
    return JSONResponse(json.loads(json.dumps(error.to_wire(), default=str)), error.http_status, headers_of(error))


def _compressed(text: bytes, request: Request) -> Response:
    headers = {"Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", "") and len(text) > 1024:
        text, headers["Content-Encoding"] = gzip.compress(text, 1), "gzip"
    return Response(text, headers=headers, media_type="application/json")


def _json(record: BaseModel, status_code: int = 200) -> Response:
    return Response(record.model_dump_json(), status_code, media_type="application/json")
