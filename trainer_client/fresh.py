"""A freshly started server on a checkpoint, to compare another with: ``vllm serve`` on a free port of this machine.

Needs vLLM in the environment of this process. The token of the server is made for it and known to nobody else.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from trainer_client.control import Control
from vllm_nixl_plugin.errors import DeadlineExceeded, InvalidRequest, ServerUnreachable

EXTENSION = "vllm_nixl_plugin.NixlWorkerExtension"
POLL_S = 0.2
STOP_S = 20.0
TAIL_LINES = 30


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextlib.contextmanager
def fresh_server(checkpoint: Path, arguments: Sequence[str], start_timeout_s: float) -> Iterator[Control]:
    """Serve a checkpoint with these arguments of ``vllm serve``; ends with the context.

    Errors: InvalidRequest (no vLLM here), ServerUnreachable when it does not start, DeadlineExceeded.
    """
    token = secrets.token_urlsafe(32)
    with served(checkpoint, arguments, start_timeout_s, token) as (url, _), Control(url, token=token) as control:
        yield control


@contextlib.contextmanager
def served(
    checkpoint: Path,
    arguments: Sequence[str],
    start_timeout_s: float,
    token: str,
    *,
    extension: str = EXTENSION,
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, int]]:
    """The same with a token and an environment of the caller's: its URL, and the process that leads its session."""
    if importlib.util.find_spec("vllm") is None:
        raise InvalidRequest(
            f"vLLM is not installed here, so no fresh server can be started on {checkpoint}: run this where it is, or "
            "name the URL of a server that was started on that checkpoint"
        )
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint), *arguments]
    command += ["--host", "127.0.0.1", "--port", str(port), "--worker-extension-cls", extension]
    with tempfile.NamedTemporaryFile("w+", prefix="vllm-nixl-fresh-", suffix=".log") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=_environment(token) | dict(environment or {}), start_new_session=True,
        )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(process, url, Path(log.name), time.monotonic() + start_timeout_s)
            yield url, process.pid
        finally:
            _end(process)


def _environment(token: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "PUSH_WEIGHTS_TOKEN_FILE"}
    plugins = environment.get("VLLM_PLUGINS")
    wanted = ["nixl"] if plugins is None else sorted({*plugins.split(","), "nixl"} - {""})
    return environment | {"PUSH_WEIGHTS_TOKEN": token, "VLLM_PLUGINS": ",".join(wanted)}


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path, deadline: float) -> None:
    with httpx.Client(timeout=5, trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if client.get(f"{url}/health").status_code == 200:
                    return
            if process.poll() is not None:
                raise ServerUnreachable(f"the fresh server ended with {process.returncode}:\n{_tail(log)}")
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"the fresh server did not start in time (--start-timeout-s):\n{_tail(log)}")
            time.sleep(POLL_S)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text("utf-8", errors="replace").splitlines()[-TAIL_LINES:])


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL, to all processes of the server."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
