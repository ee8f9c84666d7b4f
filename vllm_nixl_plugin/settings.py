"""Settings of the server, all from the environment and read when used, so that a token can be rotated.

    PUSH_WEIGHTS_TOKEN            the bearer token; as good as code execution in the workers
    PUSH_WEIGHTS_TOKEN_FILE       a file that holds it, read at each request; wins over PUSH_WEIGHTS_TOKEN
    PUSH_WEIGHTS_ALLOW_ANONYMOUS  "1": start without a token and let everybody in
    PUSH_WEIGHTS_READY_AFTER_PUSH "1": not ready before the first successful push
    PUSH_WEIGHTS_BACKEND          NIXL plug-in of the workers, UCX by default
    PUSH_WEIGHTS_BACKEND_PARAMS   its parameters, as name=value,name=value
    PUSH_WEIGHTS_INTERFACES       network devices it may use, comma-separated; loopback by default, "all" for any
    PUSH_WEIGHTS_NUM_THREADS      extra threads of the plug-in, 0 by default
    PUSH_WEIGHTS_SELF_CHECK       of what the trace is compared with real loads: sample (default), full or off
"""

from __future__ import annotations

import hmac
import logging
import os
from pathlib import Path

from vllm_nixl_plugin.errors import Unauthorized

logger = logging.getLogger("vllm.nixl_plugin")


class MissingToken(RuntimeError):
    """The server must not start: its weight-update routes would be open to everybody."""


def ready_after_push() -> bool:
    """Whether a server that has had no push yet counts as not ready."""
    return os.environ.get("PUSH_WEIGHTS_READY_AFTER_PUSH") == "1"


def self_check_mode() -> str:
    """How much of a trace is compared with real loads: ``sample``, ``full`` or ``off``. Errors: ValueError."""
    mode = os.environ.get("PUSH_WEIGHTS_SELF_CHECK", "sample")
    if mode not in ("sample", "full", "off"):
        raise ValueError(f"PUSH_WEIGHTS_SELF_CHECK is {mode!r}: set it to sample, full or off")
    return mode


def check_startup() -> None:
    """`check_token`, and a warning where anonymous use is allowed."""
    check_token()
    if _token() is None:
        logger.warning("PUSH_WEIGHTS_ALLOW_ANONYMOUS=1: whoever reaches this server can take over its workers")


def check_token() -> None:
    """Errors: MissingToken, when no token can be read and anonymous use is not allowed."""
    if _token() is None and not _anonymous():
        raise MissingToken(
            "weight updates need a token: set PUSH_WEIGHTS_TOKEN or PUSH_WEIGHTS_TOKEN_FILE (a non-empty file), or "
            "PUSH_WEIGHTS_ALLOW_ANONYMOUS=1 where nobody else can reach this server"
        )


def authorize(header: str | None) -> None:
    """Check an Authorization header in constant time. Errors: Unauthorized."""
    token = _token()
    if token is None and _anonymous():
        return
    scheme, _, given = (header or "").partition(" ")
    same = hmac.compare_digest(given.strip().encode(), (token or "").encode())
    if not (token and same and scheme.lower() == "bearer"):
        raise Unauthorized("the bearer token is missing or wrong: send 'Authorization: Bearer <PUSH_WEIGHTS_TOKEN>'")


def _anonymous() -> bool:
    """A configured token is required even where anonymous use is allowed; an unreadable token file lets nobody in."""
    return os.environ.get("PUSH_WEIGHTS_ALLOW_ANONYMOUS") == "1" and "PUSH_WEIGHTS_TOKEN_FILE" not in os.environ


def _token() -> str | None:
    path = os.environ.get("PUSH_WEIGHTS_TOKEN_FILE")
    if path is None:
        return os.environ.get("PUSH_WEIGHTS_TOKEN", "").strip() or None
    try:
        return Path(path).read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError) as error:
        logger.error("PUSH_WEIGHTS_TOKEN_FILE cannot be read: %s", type(error).__name__)
        return None


class WorkerSettings:
    """The fabric of a worker: NIXL plug-in, its parameters, extra threads, and the interfaces it may use."""

    def __init__(self) -> None:
        self.backend = os.environ.get("PUSH_WEIGHTS_BACKEND", "UCX")
        self.num_threads = int(os.environ.get("PUSH_WEIGHTS_NUM_THREADS", "0"))
        given = os.environ.get("PUSH_WEIGHTS_INTERFACES", "")
        self.interfaces = tuple(name for name in given.split(",") if name) or None
        params = os.environ.get("PUSH_WEIGHTS_BACKEND_PARAMS", "")
        self.backend_params = dict(item.split("=", 1) for item in params.split(",") if "=" in item)
