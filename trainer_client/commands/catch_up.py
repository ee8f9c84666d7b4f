"""``vllm-nixl catch-up``: bring a server to the weights of another one, without the trainer."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from trainer_client.commands.options import Json, TokenFile
from trainer_client.control import Control
from trainer_client.environment import read_token
from trainer_client.report import format_nbytes
from vllm_nixl_plugin.errors import LeaseHeld, from_wire
from vllm_nixl_plugin.wire import CatchUpStatus

RETRY_S = 1.0


def catch_up(
    url: Annotated[str, typer.Argument(help="Base URL of the server that lacks the weights.")],
    peer: Annotated[str, typer.Option("--from", help="Base URL of the server that has them, as the first reaches it.")],
    timeout_s: Annotated[float, typer.Option(help="Seconds that it may take.")] = 600.0,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Let a server read the weights of another one that is started alike; exit status 0 when it serves them."""
    with Control(url, token=read_token(token_file)) as control:
        status = _caught_up(control, peer, timeout_s)
    if as_json:
        print(json.dumps(status.model_dump()))
    elif status.error is None:
        seconds = ", ".join(f"{step} {took:.3f}" for step, took in status.timings.items())
        print(f"{url}: weights {status.weight_version} of {peer}, {format_nbytes(status.nbytes)} (seconds: {seconds})")
        for line in status.differences:
            print(f"  differs: {line}")
    if status.error is not None:
        raise from_wire({"error": status.error})


def _caught_up(control: Control, peer: str, timeout_s: float) -> CatchUpStatus:
    """How it ended. Errors: LeaseHeld, while somebody else updates the server for longer than ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            status = control.catch_up(peer, max(deadline - time.monotonic(), RETRY_S))
        except LeaseHeld:
            if time.monotonic() >= deadline:
                raise
            time.sleep(RETRY_S)
            continue
        if status.state != "running":
            return status
