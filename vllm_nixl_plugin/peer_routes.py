"""Routes for servers among themselves: what this one lets its peers read, and catching up from one by hand.

Included by `api`, whose token guards them. An offer is the right to read and write the memory of the workers.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from vllm_nixl_plugin import catch_up
from vllm_nixl_plugin.api import (
    MAX_WAIT_S,
    SMALL_BODY_BYTES,
    Route,
    _body,
    _compressed,
    _json,
    _parse,
    _takes,
    _updates,
)
from vllm_nixl_plugin.wire import PREFIX, CatchUpRequest

router = APIRouter(prefix=PREFIX, route_class=Route)


@router.get("/offer")
async def offer(request: Request) -> Response:
    """Where peers may read the weights that serve, in the layout of the last full push."""
    found = await catch_up.offer(_updates(request).engine)
    return await asyncio.to_thread(_compressed, found.model_dump_json().encode(), request)


@router.post("/catch-up", openapi_extra=_takes(CatchUpRequest))
async def catch_up_from(
    request: Request, wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0
) -> Response:
    """Begin to catch up from a peer, or join what runs; how it stands, at the latest after ``wait_s``."""
    body = _parse(CatchUpRequest, await _body(request, SMALL_BODY_BYTES))
    return _json(await _updates(request).catch_up.run(body, wait_s), 202)
