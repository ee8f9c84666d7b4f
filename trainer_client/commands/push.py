"""``vllm-nixl push``: a checkpoint to the servers, or each new one of a folder as it appears."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from trainer_client.checkpoint import read_with_draft
from trainer_client.client import WeightClient
from trainer_client.commands.options import Json, KvCacheOption, ModeOption, PauseOption, TokenFile, Urls
from trainer_client.environment import read_token
from trainer_client.report import PushReport
from trainer_client.watching import Watcher
from vllm_nixl_plugin.errors import InvalidRequest, PushFailed


def push(
    checkpoint: Annotated[Path, typer.Argument(help="Folder (or file) of a safetensors checkpoint.")],
    urls: Urls,
    mode: Annotated[
        ModeOption, typer.Option(help="Where the weights land before they are installed.")
    ] = ModeOption.SHADOW,
    version: Annotated[str | None, typer.Option(help="Name of the weights (default: counts up).")] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Weights that are not sent keep their values.")] = False,
    verified: Annotated[
        bool, typer.Option("--verify", help="Compare checksums of what was sent and what arrived first.")
    ] = False,
    draft: Annotated[
        Path | None, typer.Option(help="Checkpoint of the draft model, where that has one of its own.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Push each new checkpoint that appears in the folder, until Ctrl-C.")
    ] = False,
    marker: Annotated[
        str | None, typer.Option(help="With --watch: a file that says that a checkpoint is complete.")
    ] = None,
    interval_s: Annotated[float, typer.Option(min=0.05, help="Seconds between the looks of --watch.")] = 1.0,
    kv_cache: Annotated[
        KvCacheOption, typer.Option(help="What happens to cached keys and values.")
    ] = KvCacheOption.RECOMPUTE,
    pause: Annotated[PauseOption, typer.Option(help="What happens to running requests.")] = PauseOption.KEEP,
    interfaces: Annotated[
        str | None,
        typer.Option(help="Network devices for the data, by commas. Default: PUSH_WEIGHTS_INTERFACES, else lo."),
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds that the push may take on each server.")] = 600.0,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Push a checkpoint to the servers; exit status 0 only when every server has it.

    With `--watch`, CHECKPOINT is a folder that checkpoints are written into, or renamed into: the newest is pushed,
    then each one that is complete and new, once, under the name of its folder. One that is written again is new. The
    exit status is that of the last push.
    """
    if watch and version is not None:
        raise InvalidRequest("--watch names versions after the folders of checkpoints: leave --version out")
    if marker is not None and not watch:
        raise InvalidRequest("--marker says when a checkpoint is complete that --watch has seen: give both")
    watcher = Watcher(checkpoint, marker) if watch else None
    weights = None if watch else read_with_draft(checkpoint, draft)
    devices = None if interfaces is None else [name for name in interfaces.split(",") if name]
    options: dict[str, Any] = {
        "mode": mode.value, "kv_cache": kv_cache.value, "pause": pause.value, "partial": partial,
        "verify": verified,
    }  # fmt: skip
    with WeightClient(urls, token=read_token(token_file), timeout_s=timeout_s, interfaces=devices) as client:
        if watcher is None:
            assert weights is not None
            ok = _told(_push(client, weights, options | {"version": version}), as_json=as_json)
        else:
            ok = _watch(client, watcher, draft, options, interval_s, as_json=as_json)
    if not ok:
        raise typer.Exit(1)


def _watch(
    client: WeightClient, watcher: Watcher, draft: Path | None, options: dict[str, Any], interval_s: float, *,
    as_json: bool,
) -> bool:  # fmt: skip
    """Push what appears, until Ctrl-C. Whether the last push was whole."""
    ok = True
    try:
        while True:
            for found in watcher.look():
                try:
                    weights = read_with_draft(found.path, draft)
                    ok = _told(_push(client, weights, options | {"version": found.version}), as_json=as_json)
                except InvalidRequest as error:  # of this checkpoint; the next one may be better
                    print(f"error: {error.code}: {found.path}: {error.message}", file=sys.stderr)
                    ok = False
            time.sleep(interval_s)
    except KeyboardInterrupt:
        return ok


def _push(client: WeightClient, weights: Any, options: dict[str, Any]) -> PushReport:
    try:
        return client.push_weights(weights, **options)
    except PushFailed as error:
        report: PushReport = error.report
        return report


def _told(report: PushReport, *, as_json: bool) -> bool:
    print(json.dumps(report.to_dict()) if as_json else report, flush=True)
    return report.ok
