"""The command line: ``vllm-nixl push | status | pause | resume | fingerprint | verify``.

Each command is a call or two of the library. Results go to standard output, errors to standard error as one line, and
the exit status is 0 only when every server did what was asked (`verify`: 0 equal, 1 different, 2 not compared). The
token is read from PUSH_WEIGHTS_TOKEN or a file, never from the command line, where other users could see it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainer_client.checkpoint import read_checkpoint
from trainer_client.client import WeightClient
from trainer_client.control import Control
from trainer_client.fresh import fresh_server
from trainer_client.verification import SHOWN, Verification, compare
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


@app.command()
def fingerprint(
    urls: Urls,
    worker: Annotated[int | None, typer.Option(help="Only this worker.")] = None,
    paths: Annotated[bool, typer.Option("--paths", help="Print every path with its checksum.")] = False,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Tell what the engines of the servers can read, by worker; equal digests mean equal engines."""
    answers = _each(
        urls, token_file, lambda control: control.fingerprint(worker, paths=paths).model_dump(exclude_none=True)
    )
    if as_json:
        print(json.dumps(answers))
    for url, answer in answers.items() if not as_json else ():
        if "error" in answer:
            print(f"{url}: {answer['error']['code']}: {answer['error']['message']}")
            continue
        for each in answer["workers"]:
            what = f"{each['n_paths']} paths, weights {each['weight_version']}"
            print(f"{url} worker {each['worker']}: {each['digest']} ({what})")
            for path, line in each.get("paths", {}).items():
                print(f"  {path}: {line}")
    if any("error" in answer for answer in answers.values()):
        raise typer.Exit(1)


@app.command(context_settings={"allow_extra_args": True})
def verify(
    context: typer.Context,
    url: Annotated[str, typer.Argument(help="Base URL of the server to check.")],
    reference: Annotated[
        str, typer.Argument(help="Another server's URL, or a checkpoint folder: a fresh server is started on it here.")
    ],
    outputs: Annotated[
        bool, typer.Option("--outputs/--no-outputs", help="Also compare greedy tokens and logprobs (idle servers).")
    ] = True,
    start_timeout_s: Annotated[float, typer.Option(help="Seconds that a fresh server may take to start.")] = 900.0,
    token_file: TokenFile = None,
    reference_token_file: Annotated[
        Path | None, typer.Option(help="File with the token of the reference, where that is another.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare a server with another one, or with a fresh one on a checkpoint (its arguments behind ``--``).

    Exit status: 0 equal, 1 different, 2 they could not be compared.
    """
    with _not_compared(), Control(url, token=_token(token_file)) as first:
        if reference.startswith(("http://", "https://")):
            if context.args:
                raise InvalidRequest(f"{context.args}: arguments are for a fresh server, and {reference} is a URL")
            with Control(reference, token=_token(reference_token_file or token_file)) as second:
                found = compare(first, second, outputs=outputs)
        else:
            if not Path(reference).is_dir():
                raise InvalidRequest(f"{reference} is neither a URL (http://host:port) nor a folder with a checkpoint")
            first.status()
            print(f"starting a fresh server on {reference}", file=sys.stderr)
            with fresh_server(Path(reference), context.args, start_timeout_s) as second:
                found = compare(first, second, outputs=outputs)
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        _print_verification(found)
    if not found.equal:
        raise typer.Exit(1)


@contextmanager
def _not_compared() -> Iterator[None]:
    try:
        yield
    except PushWeightsError as error:
        print(f"not compared: {error.code}: {error.message}", file=sys.stderr)
        raise typer.Exit(2) from None


def _print_verification(found: Verification) -> None:
    table = Table("worker", "tensors and numbers", "equal", "first differing paths")
    for row in found.workers:
        paths = "\n".join(row.differences[:SHOWN])
        more = len(row.differences) - SHOWN
        table.add_row(
            str(row.worker), str(row.n_paths), "yes" if row.equal else "no",
            escape(paths + (f"\n... and {more} more" if more > 0 else "")),
        )  # fmt: skip
    for server, version in zip(found.servers, found.versions, strict=True):
        print(f"{server}: weights {version}")
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    outputs = found.outputs
    verdict = {True: "equal", False: f"different ({outputs.reason})", None: outputs.reason}[outputs.equal]
    print(f"outputs of {outputs.n_prompts} prompts: {verdict}" if outputs.n_prompts else f"outputs: {verdict}")
    if outputs.equal is False and all(worker.equal for worker in found.workers):
        print("what the engines can read is equal: compare idle servers, started with the same options")
    print("equal" if found.equal else "DIFFERENT")


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
        token = next((line.strip() for line in file.read_text("utf-8").splitlines() if line.strip()), "")
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
