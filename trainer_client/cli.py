"""The command line: ``vllm-nixl push | status | pause | resume``.

Each command is a call or two of the library. Results go to standard output, errors to standard error as one line, and
the exit status is 0 only when every server did what was asked. The token is read from PUSH_WEIGHTS_TOKEN or a file,
never from the command line, where other users could see it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from trainer_client.checkpoint import read_checkpoint
from trainer_client.client import WeightClient
from trainer_client.control import Control
from vllm_nixl_plugin.errors import InvalidRequest, PushFailed, PushWeightsError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Update the weights of running vLLM servers by one-sided NIXL writes.",
)  # fmt: skip


class ModeOption(StrEnum):
    """Values of ``--mode``."""

    SHADOW = "shadow"
    IN_PLACE = "in_place"


class KvCacheOption(StrEnum):
    """Values of ``--kv-cache``."""

    RECOMPUTE = "recompute"
    KEEP = "keep"


class PauseOption(StrEnum):
    """Values of ``--pause`` and of ``pause --mode``."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


Urls = Annotated[list[str], typer.Argument(metavar="URL...", help="Base URLs of the servers, http://host:port.")]
TokenFile = Annotated[Path | None, typer.Option(help="File that holds the token (default: PUSH_WEIGHTS_TOKEN).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def push(
    checkpoint: Annotated[Path, typer.Argument(help="Folder (or file) of a safetensors checkpoint.")],
    urls: Urls,
    mode: Annotated[
        ModeOption, typer.Option(help="Where the weights land before they are installed.")
    ] = ModeOption.SHADOW,
    version: Annotated[str | None, typer.Option(help="Name of the weights (default: counts up).")] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Weights that are not sent keep their values.")] = False,
    kv_cache: Annotated[
        KvCacheOption, typer.Option(help="What happens to cached keys and values.")
    ] = KvCacheOption.RECOMPUTE,
    pause: Annotated[PauseOption, typer.Option(help="What happens to running requests.")] = PauseOption.KEEP,
    interfaces: Annotated[
        str | None, typer.Option(help="Network devices for the data, by commas (default: lo).")
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds that the push may take on each server.")] = 600.0,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Push a checkpoint to the servers; exit status 0 only when every server has it."""
    weights = read_checkpoint(checkpoint)
    devices = None if interfaces is None else [name for name in interfaces.split(",") if name]
    with WeightClient(urls, token=_token(token_file), timeout_s=timeout_s, interfaces=devices) as client:
        try:
            report = client.push_weights(
                weights, version=version, mode=mode.value, kv_cache=kv_cache.value, pause=pause.value, partial=partial
            )
        except PushFailed as error:
            report = error.report
    print(json.dumps(report.to_dict()) if as_json else report)
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def status(urls: Urls, token_file: TokenFile = None, as_json: Json = False) -> None:
    """Tell how every server stands; exit status 0 only when all are ready."""
    answers = _each(urls, token_file, lambda control: control.status().model_dump(mode="json"))
    if as_json:
        print(json.dumps(answers))
    for url, answer in answers.items() if not as_json else ():
        if "error" in answer:
            print(f"{url}: {answer['error']['code']}: {answer['error']['message']}")
        else:
            ready = "ready" if answer["ready"] else f"not ready: {answer['reason']}"
            print(f"{url}: {answer['state']}, weights {answer['weight_version']}, {ready}")
    if not all(answer.get("ready") for answer in answers.values()):
        raise typer.Exit(1)


@app.command()
def pause(
    urls: Urls,
    mode: Annotated[PauseOption, typer.Option(help="What happens to running requests.")] = PauseOption.KEEP,
    kv_cache: Annotated[
        KvCacheOption, typer.Option(help="What happens to cached keys and values.")
    ] = KvCacheOption.KEEP,
    timeout_s: Annotated[float, typer.Option(help="Seconds that the pause may take.")] = 600.0,
    token_file: TokenFile = None,
) -> None:
    """Pause generation on the servers until `resume`."""
    _all(_each(urls, token_file, lambda control: control.pause(mode.value, kv_cache.value, timeout_s)), "paused")


@app.command()
def resume(urls: Urls, token_file: TokenFile = None) -> None:
    """Let the servers generate again."""
    _all(_each(urls, token_file, lambda control: control.resume()), "resumed")


def main() -> None:
    """The entry point. Errors of this project end as one line and exit status 1."""
    try:
        app()
    except PushWeightsError as error:
        print(f"error: {error.code}: {error.message}", file=sys.stderr)
        raise SystemExit(1) from None


def _token(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get("PUSH_WEIGHTS_TOKEN", "").strip() or None
    try:
        token = file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the token file {file} cannot be read ({type(error).__name__})") from None
    if not token:
        raise InvalidRequest(f"the token file {file} is empty")
    return token


def _each(urls: list[str], token_file: Path | None, ask: Callable[[Control], Any]) -> dict[str, dict[str, Any]]:
    """What every server answered, or its error object."""
    token, answers = _token(token_file), {}
    for url in urls:
        with Control(url, token=token) as control:
            try:
                answers[url] = ask(control) or {}
            except PushWeightsError as error:
                answers[url] = error.to_wire()
    return answers


def _all(answers: dict[str, dict[str, Any]], done: str) -> None:
    for url, answer in answers.items():
        print(
            f"{url}: {answer['error']['code']}: {answer['error']['message']}" if "error" in answer else f"{url}: {done}"
        )
    if any("error" in answer for answer in answers.values()):
        raise typer.Exit(1)
