"""``vllm-nixl status``: how the servers of a fleet stand, once or again and again, as one table."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from trainer_client.commands.asking import ask_each
from trainer_client.commands.options import Json, TokenFile, Urls
from trainer_client.commands.output import console
from trainer_client.report import SERVER_STAGES

Answers = Mapping[str, Mapping[str, Any]]

COLOURS = {"serving": "green", "receiving": "cyan", "installing": "cyan", "torn": "bold red"}


def status(
    urls: Urls,
    watch: Annotated[bool, typer.Option("--watch", help="Ask again and again, until Ctrl-C.")] = False,
    interval_s: Annotated[float, typer.Option(min=0.1, help="Seconds between the questions of --watch.")] = 1.0,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds that a server may take to answer.")] = 10.0,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Tell how every server stands; exit status 0 only when all are ready.

    A server that does not answer is a line of the table. With `--watch --json`, each answer is one line of JSON.
    """
    answers = _ask(urls, token_file, timeout_s)
    try:
        if as_json:
            print(json.dumps(answers), flush=True)
            while watch:
                time.sleep(interval_s)
                answers = _ask(urls, token_file, timeout_s)
                print(json.dumps(answers), flush=True)
        elif watch:
            with Live(table(answers), console=console(), auto_refresh=False) as live:
                while True:
                    time.sleep(interval_s)
                    answers = _ask(urls, token_file, timeout_s)
                    live.update(table(answers), refresh=True)
        else:
            console().print(table(answers))
    except KeyboardInterrupt:
        pass
    if not all(answer.get("ready") for answer in answers.values()):
        raise typer.Exit(1)


def table(answers: Answers) -> Table:
    """One row for each server; ``answers`` as `asking.ask_each` gives them."""
    made = Table("server", "state", "weights", "ready", "incarnation", "lease", "last push")
    for url, answer in answers.items():
        if "error" in answer:
            error = answer["error"]
            made.add_row(
                escape(url),
                f"[red]{escape(error['code'])}[/]",
                "",
                f"[red]no:[/] {escape(error['message'])}",
                "",
                "",
                "",
            )
            continue
        state = answer["state"] + (", held" if answer["held"] else "")
        update = answer["update"]
        if update is not None and update["nbytes"]:
            state += f" {update['version']} {100 * update['arrived_nbytes'] / update['nbytes']:.0f} %"
        colour = COLOURS.get(answer["state"], "white")
        made.add_row(
            escape(url), f"[{colour}]{escape(state)}[/]", escape(answer["weight_version"]),
            "[green]yes[/]" if answer["ready"] else f"[yellow]no:[/] {escape(answer['reason'])}",
            answer["incarnation"][:8], escape(_lease(answer["lease"])), escape(_last(answer["last"])),
        )  # fmt: skip
    return made


def _ask(urls: list[str], token_file: Path | None, timeout_s: float) -> dict[str, dict[str, Any]]:
    return ask_each(urls, token_file, lambda control: control.status().model_dump(mode="json"), timeout_s=timeout_s)


def _lease(lease: Mapping[str, Any] | None) -> str:
    if lease is None:
        return ""
    left = lease["expires_in_s"]
    return f"{lease['holder'] or 'unnamed'}, " + (f"{left:.0f} s left" if left >= 0 else f"over for {-left:.0f} s")


def _last(last: Mapping[str, Any] | None) -> str:
    """Version, result and seconds by stage of the last update; its error, if it has one."""
    if last is None:
        return ""
    timings = last["timings"]
    parts = [f"{stage} {timings[name]:.3f}" for stage, name in SERVER_STAGES.items() if name in timings]
    took = f" {timings['total_s']:.3f} s" + (f" ({', '.join(parts)})" if parts else "") if "total_s" in timings else ""
    error = f": {last['error']['code']}: {last['error']['message']}" if last["error"] else ""
    return f"{last['version']} {last['state']}{took}{error}"
