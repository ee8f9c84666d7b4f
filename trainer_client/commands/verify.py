"""``vllm-nixl verify``: a server against another one, or against a fresh one on a checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainer_client.commands.options import Json, TokenFile
from trainer_client.control import Control
from trainer_client.environment import read_token
from trainer_client.fresh import fresh_server
from trainer_client.verification import SHOWN, Verification, compare
from vllm_nixl_plugin.errors import InvalidRequest, PushWeightsError


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
    with _not_compared(), Control(url, token=read_token(token_file)) as first:
        if reference.startswith(("http://", "https://")):
            if context.args:
                raise InvalidRequest(f"{context.args}: arguments are for a fresh server, and {reference} is a URL")
            with Control(reference, token=read_token(reference_token_file or token_file)) as second:
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
