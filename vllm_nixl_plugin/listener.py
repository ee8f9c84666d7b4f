"""Our routes on an address of their own (``PUSH_WEIGHTS_ADDRESS``), and no longer on the port that serves inference.

`plugin` starts it in every API process; they share the address, and any of them answers for any update. TLS is that of
the server. The listener ends with the process's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

BACKLOG = 128
_tasks: set[asyncio.Task[None]] = set()


async def listen(app: Any, address: tuple[str, int], args: Any) -> None:
    """Serve the app there from now on. ``args``: vLLM's, for its TLS. Errors: OSError, when the address is taken."""
    bound = _bind(*address)
    config = uvicorn.Config(
        app, lifespan="off", log_level="warning", access_log=False,
        ssl_keyfile=getattr(args, "ssl_keyfile", None), ssl_certfile=getattr(args, "ssl_certfile", None),
        ssl_ca_certs=getattr(args, "ssl_ca_certs", None), ssl_cert_reqs=getattr(args, "ssl_cert_reqs", None) or 0,
    )  # fmt: skip
    task = asyncio.create_task(_Server(config).serve(sockets=[bound]), name="nixl-listener")
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for the server that serves inference."""
        yield


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except OSError as error:
        raise OSError(f"PUSH_WEIGHTS_ADDRESS: {host}:{port} cannot be listened on: {error}") from error
    return bound
