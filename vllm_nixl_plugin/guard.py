"""Close vLLM's own administrative routes to those without the token; see docs/security.md.

    vllm serve MODEL --middleware vllm_nixl_plugin.guard.Guard

vLLM's ``--api-key`` guards some prefixes only. With this, every route that is neither one of those, nor a probe, nor
ours (which check by themselves) needs our bearer token: what is not known is closed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vllm_nixl_plugin import access
from vllm_nixl_plugin.errors import PushWeightsError
from vllm_nixl_plugin.wire import PREFIX

INFERENCE = ("/v1", "/v2", "/inference", "/cohere")
"""What ``--api-key`` guards, where it is given."""
PROBES = ("/health", "/ping", "/metrics", "/version", "/load")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Guard:
    """ASGI middleware."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection or request."""
        if scope["type"] in ("http", "websocket") and not _is_open(scope):
            headers = {name.lower(): value for name, value in scope.get("headers", ())}
            authorization = headers.get(b"authorization")
            try:
                access.check(
                    authorization.decode("latin-1") if authorization is not None else None,
                    (scope.get("client") or ("",))[0],
                )
            except PushWeightsError as error:
                await _refuse(scope["type"], error, send)
                return
        await self.app(scope, receive, send)


def headers_of(error: PushWeightsError) -> dict[str, str]:
    """Headers of an answer that refuses: who did not show a token does not get to send its body either."""
    if error.http_status == 401:
        return {"WWW-Authenticate": "Bearer", "Connection": "close"}
    if error.http_status == 429:
        return {"Retry-After": str(math.ceil(error.details.get("retry_after_s", 1.0))), "Connection": "close"}
    return {}


def _is_open(scope: Scope) -> bool:
    path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
    return any(path == each or path.startswith(f"{each}/") for each in (*INFERENCE, *PROBES, PREFIX))


async def _refuse(kind: str, error: PushWeightsError, send: Send) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    body = json.dumps(error.to_wire()).encode()
    headers = headers_of(error) | {"Content-Type": "application/json", "Content-Length": str(len(body))}
    await send({
        "type": "http.response.start", "status": error.http_status,
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    })  # fmt: skip
    await send({"type": "http.response.body", "body": body})
