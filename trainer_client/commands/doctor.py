"""``vllm-nixl doctor``: what of this machine fits together, what does not, and what to do (`trainer_client.diagnosis`).

Servers that are named are asked, too: whether they answer, are ready, and run the same version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from trainer_client.commands.asking import ask_each
from trainer_client.commands.options import Json, TokenFile
from trainer_client.commands.output import console
from trainer_client.diagnosis.environment import environment
from trainer_client.diagnosis.finding import Finding, Level
from trainer_client.diagnosis.machine import gpus, machine
from trainer_client.diagnosis.transports import NBYTES, transports
from trainer_client.diagnosis.versions import versions
from vllm_nixl_plugin import __version__

MARKS = {
    Level.OK: "[green]ok  [/]",
    Level.NOTE: "[cyan]note[/]",
    Level.WARNING: "[yellow]warn[/]",
    Level.BAD: "[bold red]BAD [/]",
}


def doctor(
    urls: Annotated[list[str] | None, typer.Argument(metavar="[URL]...", help="Servers to look at, too.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Write between two processes and measure it.")
    ] = True,
    nbytes: Annotated[int, typer.Option(min=1, help="Bytes of each write that is measured.")] = NBYTES,
    interfaces: Annotated[
        str | None, typer.Option(help="Network devices for that, by commas. Default: PUSH_WEIGHTS_INTERFACES, else lo.")
    ] = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Look at this machine: versions, transports, devices, memory, settings; exit status 1 when something is bad.

    Nothing is changed. For the most part it takes the seconds that the writes take; on a host with vLLM, run it in the
    environment that the server gets.
    """
    devices = [name for name in (interfaces or "").split(",") if name]
    found: list[Finding] = []
    section = ""
    out = console()
    for finding in _findings(urls or [], token_file, devices, nbytes if measure else 0):
        found.append(finding)
        if as_json:
            continue
        if finding.section != section:
            section = finding.section
            out.print(f"[bold]{section}[/]")
        out.print(f"  {MARKS[finding.level]} {escape(finding.what)}: {escape(finding.found)}", soft_wrap=True)
        if finding.remedy:
            out.print(f"       [dim]-> {escape(finding.remedy)}[/]", soft_wrap=True)
    bad = sum(finding.level == Level.BAD for finding in found)
    warnings = sum(finding.level == Level.WARNING for finding in found)
    if as_json:
        print(json.dumps({"ok": not bad, "findings": [finding.to_dict() for finding in found]}))
    else:
        out.print(f"{bad} bad, {warnings} warnings")
    if bad:
        raise typer.Exit(1)


def _findings(urls: list[str], token_file: Path | None, interfaces: list[str], nbytes: int) -> Iterator[Finding]:
    yield from versions()
    devices = gpus()
    yield from environment(has_gpu=bool(devices))
    yield from machine(devices)
    if nbytes:
        yield from transports(len(devices), nbytes, interfaces or None)
    if urls:
        yield from _servers(urls, token_file)


def _servers(urls: list[str], token_file: Path | None) -> Iterator[Finding]:
    for url, answer in ask_each(urls, token_file, lambda control: control.status().model_dump(mode="json")).items():
        if "error" in answer:
            error = answer["error"]
            yield Finding("servers", url, error["message"], Level.BAD, f"{error['code']}: docs/troubleshooting.md")
            continue
        told = f"{answer['state']}, weights {answer['weight_version']}, plugin {answer['plugin']}"
        if not answer["ready"]:
            yield Finding("servers", url, f"{told}, not ready", Level.WARNING, answer["reason"])
        elif answer["plugin"] != __version__:
            yield Finding(
                "servers", url, told, Level.WARNING, f"this is {__version__}: run the same version on both sides"
            )
        else:
            yield Finding("servers", url, told)
