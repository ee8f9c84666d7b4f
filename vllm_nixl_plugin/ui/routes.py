"""The route of the live page; `api.attach` adds it. It is the only route that is open: there is no data in it."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from vllm_nixl_plugin import ui
from vllm_nixl_plugin.wire import PREFIX

router = APIRouter(prefix=PREFIX)


@router.get("/ui", response_class=HTMLResponse)
async def page() -> HTMLResponse:
    """The live page, for a browser."""
    return HTMLResponse(ui.document(), headers=dict(ui.headers()))
