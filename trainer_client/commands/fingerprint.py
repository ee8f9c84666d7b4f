"""``vllm-nixl fingerprint``: checksums of what the engines can read."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from trainer_client.commands.asking import any_failed, ask_each, error_line
from trainer_client.commands.options import Json, TokenFile, Urls


def fingerprint(
    urls: Urls,
    worker: Annotated[int | None, typer.Option(help="Only this worker.")] = None,
    paths: Annotated[bool, typer.Option("--paths", help="Print every path with its checksum.")] = False,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Tell what the engines of the servers can read, by worker; equal digests mean equal engines."""
    answers = ask_each(
        urls, token_file, lambda control: control.fingerprint(worker, paths=paths).model_dump(exclude_none=True)
    )
    if as_json:
        print(json.dumps(answers))
    for url, answer in answers.items() if not as_json else ():
        if "error" in answer:
            print(error_line(url, answer))
            continue
        for each in answer["workers"]:
            what = f"{each['n_paths']} paths, weights {each['weight_version']}"
            print(f"{url} worker {each['worker']}: {each['digest']} ({what})")
            for path, line in each.get("paths", {}).items():
                print(f"  {path}: {line}")
    if any_failed(answers):
        raise typer.Exit(1)
