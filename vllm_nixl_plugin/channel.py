"""A side door to the judge: status, lease, claim, steps and heartbeat without the engine's loop, which a decode step
keeps waiting and an install blocks.

One JSON object per line over a Unix socket in a directory that only this user can enter; the server also checks that
the peer has the same user id. The path is learnt by RPC. Nothing is pickled, lines are capped, no wait is unbounded.
Connections are kept: a new one costs the engine's process a thread. Every request may come twice.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import os
import shutil
import socket
import socketserver
import struct
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from vllm_nixl_plugin.session import WorkerSession
from vllm_nixl_plugin.worker import CHANNEL_ACTIONS, answer

logger = logging.getLogger("vllm.nixl_plugin")

PREFIX = "nixl-push-"
SWEEP_AGE_S = 5.0
MAX_REQUEST_BYTES = 16 << 10
MAX_ANSWER_BYTES = 4 << 20
IDLE_S = 30.0
"""After so long without a request a connection is closed."""
MAX_FOLDER = 80
"""Where the path of the socket would get longer, it is made in /tmp: an address holds 108 bytes."""


class _Handler(socketserver.StreamRequestHandler):
    timeout = IDLE_S

    def handle(self) -> None:
        """One answer for each request, until there is none or one that is not understood."""
        peer = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", peer)[1] != os.geteuid():
            return
        session: WorkerSession = self.server.session  # type: ignore[attr-defined]
        while True:
            try:
                request = json.loads(self.rfile.readline(MAX_REQUEST_BYTES))
            except (OSError, ValueError):
                return
            if not isinstance(request, dict):
                return
            self.wfile.write(json.dumps(answer(session, request, CHANNEL_ACTIONS)).encode() + b"\n")


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that hung up is no news."""


_paths: weakref.WeakKeyDictionary[WorkerSession, str] = weakref.WeakKeyDictionary()


def serve(session: WorkerSession) -> dict[str, str] | None:
    """Serve this session from a daemon thread, once per session; ``{"path": of the socket}``.

    None where no socket can be made (the disk is full, say): the judge is asked by RPC then, in line with other calls.
    """
    try:
        return {"path": _path_of(session)}
    except OSError as error:
        logger.warning("no socket for the judge of weight updates, which is asked by RPC instead: %s", error)
        return None


def _path_of(session: WorkerSession) -> str:
    path = _paths.get(session)
    if path is None:
        where = tempfile.gettempdir() if len(tempfile.gettempdir()) < MAX_FOLDER else "/tmp"
        _sweep(Path(where))
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=where)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        path = f"{folder}/s"
        server = _Server(path, _Handler)
        server.session = session  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, name="nixl-channel", daemon=True).start()
        _paths[session] = path
    return path


def _sweep(where: Path) -> None:
    """Remove what killed servers left: vLLM kills its engines at shutdown, without their exit handlers."""
    for path in where.glob(f"{PREFIX}*/s"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > SWEEP_AGE_S:
                remove_dead(str(path))


def remove_dead(path: str, patience_s: float = 0.0) -> None:
    """Remove a socket of ours with its folder, if nobody listens there any more, or after ``patience_s`` at most."""
    deadline = time.monotonic() + patience_s
    with contextlib.suppress(OSError):
        while Path(path).stat().st_uid == os.geteuid() and Path(path).parent.name.startswith(PREFIX):
            try:
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.settimeout(1)
                    probe.connect(path)
            except ConnectionRefusedError:
                shutil.rmtree(Path(path).parent, ignore_errors=True)
            if time.monotonic() >= deadline:
                return
            time.sleep(0.05)


class ChannelClosed(Exception):
    """No answer through the socket: the worker is gone, restarted, or on another host."""


class Door:
    """Asks the judge that listens at ``path``. Keeps its connections, and belongs to one event loop."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, request: dict[str, Any], timeout_s: float = 2.0) -> dict[str, Any]:
        """Send one request and read its answer. Errors: ChannelClosed."""
        try:
            async with asyncio.timeout(timeout_s):
                answered = json.loads(await self._answer(json.dumps(request).encode() + b"\n"))
        except (OSError, ValueError, TimeoutError) as error:
            raise ChannelClosed(f"{self.path}: {type(error).__name__}: {error}") from None
        if not isinstance(answered, dict):
            raise ChannelClosed(f"{self.path}: the answer is not an object")
        return answered

    def close(self) -> None:
        """Close the connections that are idle. The next request opens another."""
        while self._idle:
            self._idle.pop()[1].close()

    async def _answer(self, line: bytes) -> bytes:
        """By a kept connection, if one still works."""
        while self._idle:
            reader, writer = self._idle.pop()
            with contextlib.suppress(OSError):
                if answered := await self._through(reader, writer, line):
                    return answered
        return await self._through(*await asyncio.open_unix_connection(self.path, limit=MAX_ANSWER_BYTES), line)

    async def _through(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: bytes) -> bytes:
        """Nothing, when the other side has closed. A connection whose answer may still come is not used again."""
        answered = b""
        try:
            if not reader.at_eof():
                writer.write(line)
                answered = await reader.readline()
        finally:
            if answered.endswith(b"\n"):
                self._idle.append((reader, writer))
            else:
                writer.close()
        return answered
