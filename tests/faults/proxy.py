"""A proxy between a trainer and a server that loses answers, or sends requests twice."""

from __future__ import annotations

import http.client
import re
import socket
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal, Self

Mishap = Literal["answer lost", "sent twice"]


class Proxy:
    """A context manager. ``mishaps``: what befalls the next request of a method and kind of path, each once."""

    def __init__(self, port: int) -> None:
        self.mishaps: dict[tuple[str, str], Mishap] = {}
        self.seen: Counter[tuple[str, str]] = Counter()
        self._port = port
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                proxy._answer(self)

            do_GET = do_POST = do_DELETE = answer  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                """Silence."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        """Where the trainer finds it."""
        return f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("content-length", 0)))
        path = handler.path.partition("?")[0].removeprefix("/nixl/v1")
        kind = (handler.command, re.sub(r"[0-9a-f]{32}", "{id}", path))
        self.seen[kind] += 1
        mishap = self.mishaps.pop(kind, None)
        for _ in range(2 if mishap == "sent twice" else 1):
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            connection.request(handler.command, handler.path, body, dict(handler.headers))
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
        if mishap == "answer lost":  # the server has acted
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        handler.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() in ("content-type", "content-encoding", "retry-after"):
                handler.send_header(name, value)
        handler.send_header("content-length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)
