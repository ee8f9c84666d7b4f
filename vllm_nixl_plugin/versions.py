"""Which weights an output was made with: a header on every answer of vLLM's inference routes, with any vLLM.

    X-Weight-Version: 7            all of it
    X-Weight-Version: 7, 8         an update was installed while it was made
    : weight-version 8             a comment in a stream of events: what follows may be made with 8

vLLM 0.32 tells the spans of tokens, in its token-in token-out routes alone; vLLM 0.26 tells nothing. The plugin adds
this to the app when vLLM builds it. Versions are percent-encoded where they are not plain ASCII words.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import quote

from vllm_nixl_plugin.guard import INFERENCE

HEADER = b"x-weight-version"
PLAIN = "!#$&'*+/:=?@^`|~"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Versions:
    """ASGI middleware. Where a server has several API processes, those that do not drive an update ask the judge."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One connection or request."""
        updates = getattr(scope["app"].state, "nixl_push_updates", None) if _is_inference(scope) else None
        if updates is None:
            return await self.app(scope, receive, send)
        return await self.app(scope, receive, await _Answer.begin(updates.engine, send))


class _Answer:
    """What one answer is to say. Make it with `begin`."""

    def __init__(self, engine: Any, send: Send, last: float, version: str) -> None:
        self._engine, self._send = engine, send
        self._last, self._seen = last, [version]
        self._events, self._between = False, True

    @classmethod
    async def begin(cls, engine: Any, send: Send) -> Send:
        """The ``send`` of an answer that begins now."""
        last, versions = await engine.served()
        return cls(engine, send, last, versions[-1]).send

    async def send(self, message: Message) -> None:
        """Pass a message on, with what the client should know."""
        if message["type"] == "http.response.start":
            await self._changed()
            headers = list(message.get("headers", ()))
            self._events = any(k.lower() == b"content-type" and v.startswith(b"text/event-stream") for k, v in headers)
            told = ", ".join(map(_plain, self._seen))
            message = dict(message) | {"headers": [*headers, (HEADER, told.encode())]}
        elif self._events and (body := message.get("body", b"")):
            if self._between and await self._changed():
                message = dict(message) | {"body": f": weight-version {_plain(self._seen[-1])}\n\n".encode() + body}
            self._between = body.endswith(b"\n\n")
        await self._send(message)

    async def _changed(self) -> bool:
        before = len(self._seen)
        self._last, versions = await self._engine.served(self._last)
        for version in versions:
            if version != self._seen[-1]:
                self._seen.append(version)
        return len(self._seen) > before


def _plain(version: str) -> str:
    return quote(version, safe=PLAIN)


def _is_inference(scope: Message) -> bool:
    if scope["type"] != "http":
        return False
    path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
    return any(path.startswith(f"{each}/") for each in INFERENCE)
