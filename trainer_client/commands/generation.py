"""``vllm-nixl pause`` and ``resume``: generation by hand."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from trainer_client.commands.asking import any_failed, ask_each, error_line
from trainer_client.commands.options import Json, KvCacheOption, PauseOption, TokenFile, Urls


def pause(
    urls: Urls,
    mode: Annotated[PauseOption, typer.Option(help="What happens to running requests.")] = PauseOption.KEEP,
    kv_cache: Annotated[
        KvCacheOption, typer.Option(help="What happens to cached keys and values.")
    ] = KvCacheOption.KEEP,
    timeout_s: Annotated[float, typer.Option(help="Seconds that the pause may take.")] = 600.0,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Pause generation on the servers until `resume`."""
    answers = ask_each(urls, token_file, lambda control: control.pause(mode.value, kv_cache.value, timeout_s))
    _tell(answers, "paused", as_json=as_json)


def resume(urls: Urls, token_file: TokenFile = None, as_json: Json = False) -> None:
    """Let the servers generate again."""
    _tell(ask_each(urls, token_file, lambda control: control.resume()), "resumed", as_json=as_json)


def _tell(answers: dict[str, dict[str, Any]], done: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({url: answer or {"done": done} for url, answer in answers.items()}))
    for url, answer in answers.items() if not as_json else ():
        print(error_line(url, answer) if "error" in answer else f"{url}: {done}")
    if any_failed(answers):
        raise typer.Exit(1)
