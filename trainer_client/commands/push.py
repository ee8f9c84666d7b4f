"""``vllm-nixl push``: a checkpoint to the servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from trainer_client.checkpoint import read_checkpoint
from trainer_client.client import WeightClient
from trainer_client.commands.options import Json, KvCacheOption, ModeOption, PauseOption, TokenFile, Urls
from trainer_client.environment import read_token
from vllm_nixl_plugin.errors import PushFailed


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
    with WeightClient(urls, token=read_token(token_file), timeout_s=timeout_s, interfaces=devices) as client:
        try:
            report = client.push_weights(
                weights, version=version, mode=mode.value, kv_cache=kv_cache.value, pause=pause.value, partial=partial
            )
        except PushFailed as error:
            report = error.report
    print(json.dumps(report.to_dict()) if as_json else report)
    if not report.ok:
        raise typer.Exit(1)
