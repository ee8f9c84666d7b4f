"""Arguments and options that commands share, and where the token comes from."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vllm_nixl_plugin.errors import InvalidRequest

Urls = Annotated[list[str], typer.Argument(metavar="URL...", help="Base URLs of the servers, http://host:port.")]
TokenFile = Annotated[Path | None, typer.Option(help="File that holds the token (default: PUSH_WEIGHTS_TOKEN).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


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


def read_token(file: Path | None) -> str | None:
    """The token in ``file``, or that of the environment. Errors: InvalidRequest, for a file without one."""
    if file is None:
        return os.environ.get("PUSH_WEIGHTS_TOKEN", "").strip() or None
    try:
        token = next((line.strip() for line in file.read_text("utf-8").splitlines() if line.strip()), "")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the token file {file} cannot be read ({type(error).__name__})") from None
    if not token:
        raise InvalidRequest(f"the token file {file} is empty")
    return token
