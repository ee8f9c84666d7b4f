"""Settings of the server, all from the environment and read when used, so that a token can be rotated.

    PUSH_WEIGHTS_TOKEN            the bearer token; as good as code execution in the workers
    PUSH_WEIGHTS_TOKEN_FILE       a file that holds it, read at each request; wins over PUSH_WEIGHTS_TOKEN. Each line is
                                  a token, so that a new one can be put before the old while clients change over
    PUSH_WEIGHTS_ADDRESS          host:port on which our routes are served, and then there only; by default vLLM's own
    PUSH_WEIGHTS_ALLOW_ANONYMOUS  "1": start without a token and let everybody in
    PUSH_WEIGHTS_READY_AFTER_PUSH "1": not ready before the first successful push
    PUSH_WEIGHTS_BACKEND          NIXL plug-in of the workers, UCX by default
    PUSH_WEIGHTS_BACKEND_PARAMS   its parameters, as name=value,name=value
    PUSH_WEIGHTS_INTERFACES       network devices it may use, comma-separated; loopback by default, "all" for any
    PUSH_WEIGHTS_NUM_THREADS      extra threads of the plug-in, 0 by default
    PUSH_WEIGHTS_SHADOW           where shadows of a GPU are: device, host, or auto (default): host if they do not fit
    PUSH_WEIGHTS_SELF_CHECK       of what the trace is compared with real loads: sample (default), full or off
"""

from __future__ import annotations

import hmac
import logging
import os
from pathlib import Path
from typing import Literal

from vllm_nixl_plugin.errors import Unauthorized

logger = logging.getLogger("vllm.nixl_plugin")

MIN_TOKEN = 16
MAX_TOKEN_FILE = 64 << 10

Shadow = Literal["auto", "device", "host"]


class MissingToken(RuntimeError):
    """The server must not start: its weight-update routes would be open to everybody."""


def ready_after_push() -> bool:
    """Whether a server that has had no push yet counts as not ready."""
    return os.environ.get("PUSH_WEIGHTS_READY_AFTER_PUSH") == "1"


def address() -> tuple[str, int] | None:
    """Where the routes have an address of their own. Errors: ValueError."""
    given = os.environ.get("PUSH_WEIGHTS_ADDRESS", "")
    host, _, port = given.rpartition(":")
    if given and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(f"PUSH_WEIGHTS_ADDRESS is {given!r}; expected host:port, such as 10.0.0.5:8100 or [::1]:8100")
    return (host.strip("[]"), int(port)) if given else None


def self_check_mode() -> str:
    """How much of a trace is compared with real loads: ``sample``, ``full`` or ``off``. Errors: ValueError."""
    mode = os.environ.get("PUSH_WEIGHTS_SELF_CHECK", "sample")
    if mode not in ("sample", "full", "off"):
        raise ValueError(f"PUSH_WEIGHTS_SELF_CHECK is {mode!r}: set it to sample, full or off")
    return mode


def check_startup() -> None:
    """`check_token`, and a warning where anonymous use is allowed."""
    check_token()
    if any(len(token) < MIN_TOKEN for token in _tokens()):
        logger.warning("the token has less than %d characters: take a random one (openssl rand -hex 32)", MIN_TOKEN)
    if not _tokens():
        logger.warning("PUSH_WEIGHTS_ALLOW_ANONYMOUS=1: whoever reaches this server can take over its workers")


def check_token() -> None:
    """Errors: MissingToken, when no token can be read and anonymous use is not allowed."""
    if not _tokens() and not _anonymous():
        raise MissingToken(
            "weight updates need a token: set PUSH_WEIGHTS_TOKEN or PUSH_WEIGHTS_TOKEN_FILE (a non-empty file), or "
            "PUSH_WEIGHTS_ALLOW_ANONYMOUS=1 where nobody else can reach this server"
        )


def authorize(header: str | None) -> None:
    """Check an Authorization header in constant time. Errors: Unauthorized."""
    tokens = _tokens()
    if not tokens and _anonymous():
        return
    scheme, _, given = (header or "").partition(" ")
    same = [hmac.compare_digest(given.strip().encode(), token.encode()) for token in tokens]
    if not (any(same) and scheme.lower() == "bearer"):
        raise Unauthorized("the bearer token is missing or wrong: send 'Authorization: Bearer <PUSH_WEIGHTS_TOKEN>'")


def _anonymous() -> bool:
    """A configured token is required even where anonymous use is allowed; an unreadable token file lets nobody in."""
    return os.environ.get("PUSH_WEIGHTS_ALLOW_ANONYMOUS") == "1" and "PUSH_WEIGHTS_TOKEN_FILE" not in os.environ


def _tokens() -> list[str]:
    """Every token that is good now."""
    path = os.environ.get("PUSH_WEIGHTS_TOKEN_FILE")
    text = os.environ.get("PUSH_WEIGHTS_TOKEN", "")
    if path is not None:
        try:
            with Path(path).open(encoding="utf-8") as file:
                text = file.read(MAX_TOKEN_FILE)
        except (OSError, UnicodeDecodeError) as error:
            logger.error("PUSH_WEIGHTS_TOKEN_FILE cannot be read: %s", type(error).__name__)
            return []
    return [line.strip() for line in text.splitlines() if line.strip()]


class WorkerSettings:
    """The fabric of a worker (NIXL plug-in, its parameters, extra threads, the interfaces it may use), and its shadows.

    Errors: ValueError.
    """

    def __init__(self) -> None:
        shadow = os.environ.get("PUSH_WEIGHTS_SHADOW", "auto")
        if shadow not in ("auto", "device", "host"):
            raise ValueError(f"PUSH_WEIGHTS_SHADOW is {shadow!r}: set it to auto, device or host")
        self.shadow: Shadow = shadow  # type: ignore[assignment]
        self.backend = os.environ.get("PUSH_WEIGHTS_BACKEND", "UCX")
        self.num_threads = int(os.environ.get("PUSH_WEIGHTS_NUM_THREADS", "0"))
        given = os.environ.get("PUSH_WEIGHTS_INTERFACES", "")
        self.interfaces = tuple(name for name in given.split(",") if name) or None
        params = os.environ.get("PUSH_WEIGHTS_BACKEND_PARAMS", "")
        self.backend_params = dict(item.split("=", 1) for item in params.split(",") if "=" in item)
