"""Arguments and options that commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

Urls = Annotated[list[str], typer.Argument(metavar="URL...", help="Base URLs of the servers, http://host:port.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="File that holds the token. Default: PUSH_WEIGHTS_TOKEN_FILE, else PUSH_WEIGHTS_TOKEN."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class ModeOption(StrEnum):
    """Values of ``--mode``."""

    SHADOW = "shadow"
    IN_PLACE = "in_place"
    STREAMED = "streamed"


class KvCacheOption(StrEnum):
    """Values of ``--kv-cache``."""

    RECOMPUTE = "recompute"
    KEEP = "keep"


class PauseOption(StrEnum):
    """Values of ``--pause`` and of ``pause --mode``."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"
