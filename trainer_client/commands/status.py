"""``vllm-nixl status``: how the servers of a fleet stand."""

from __future__ import annotations

import json

import typer

from trainer_client.commands.asking import ask_each, error_line
from trainer_client.commands.options import Json, TokenFile, Urls


def status(urls: Urls, token_file: TokenFile = None, as_json: Json = False) -> None:
    """Tell how every server stands; exit status 0 only when all are ready."""
    answers = ask_each(urls, token_file, lambda control: control.status().model_dump(mode="json"))
    if as_json:
        print(json.dumps(answers))
    for url, answer in answers.items() if not as_json else ():
        if "error" in answer:
            print(error_line(url, answer))
        else:
            ready = "ready" if answer["ready"] else f"not ready: {answer['reason']}"
            print(f"{url}: {answer['state']}, weights {answer['weight_version']}, {ready}")
    if not all(answer.get("ready") for answer in answers.values()):
        raise typer.Exit(1)
