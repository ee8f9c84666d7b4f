#!/usr/bin/env python3
"""Make docs/cli.md, docs/configuration.md and docs/metrics.md from the code: commands, settings, metrics.

usage: python scripts/make_docs.py [--check]    (`make docs`; --check writes nothing, and fails if they are old)
"""

from __future__ import annotations

import inspect
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import SecretStr
from typer.models import ArgumentInfo

from trainer_client.cli import app
from vllm_nixl_plugin.metrics import metrics
from vllm_nixl_plugin.settings import ServerSettings, TrainerSettings, WorkerSettings, variables

DOCS = Path(__file__).resolve().parent.parent / "docs"
CONFIGURATION = """# Configuration

<!-- Made by scripts/make_docs.py (make docs). Change the code instead. -->

All settings are environment variables. A name that does not exist, a value that is not understood, and settings that
contradict each other end the start of a server, and are `invalid_request` in a trainer; the message names the variable
and the closest valid name. An empty variable counts as not set. What is set here, and whether it is valid:

```bash
vllm-nixl doctor --no-measure
```
"""
METRICS = """# Metrics

<!-- Made by scripts/make_docs.py (make docs). Change the code instead. -->

## The server

vLLM's own `/metrics` has these, too, also with several API servers. They are renewed once a second, beside the path of
updates. Stages are those of [reports](quickstart.md), and `install.copy` and such within the install.

TABLE

## The trainer

A trainer that has imported `prometheus_client` counts its pushes in the default registry: `vllm_nixl_pushes_total`
(`server`, `result`: `ok` or an error code), `vllm_nixl_push_bytes_total` (`server`), and the histogram
`vllm_nixl_push_seconds` (`stage`). Where it has set a tracer provider of OpenTelemetry, each push is a span, with one
for each server and stage below. `WeightClient(..., on_report=call)` calls a function with the report of each push.

## A dashboard

[grafana.json](grafana.json) is a dashboard for Grafana: import it, and choose a Prometheus data source that scrapes the
servers, and the trainers if they have metrics.
"""
SERVER = """In the environment of `vllm serve`. With Ray as vLLM's executor, its workers get them when
`VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY=PUSH_WEIGHTS_` is set."""
TRAINER = "For the trainer's process and for `vllm-nixl`; arguments win over them."
COMMAND_LINE = """# Command line

<!-- Made by scripts/make_docs.py (make docs). Change the code instead. -->

`vllm-nixl` is installed with the package, also where vLLM is not. Results go to standard output, errors to standard
error as one line that begins with a code of the [list](troubleshooting.md#error-codes). The token comes from
`PUSH_WEIGHTS_TOKEN` or a file, never from the command line, where other users could see it; other variables are in
[Configuration](configuration.md). `vllm-nixl --install-completion` makes the shell complete commands and options.
"""


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """A table of Markdown, and an empty line."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)] + [""]


def shown(value: Any) -> str:
    """A default for people; nothing where the variable is simply not set."""
    if isinstance(value, SecretStr) or value in (None, {}, "", inspect.Parameter.empty):
        return ""
    return f"`{int(value) if isinstance(value, bool) else value}`"


def configuration() -> str:
    """docs/configuration.md."""
    lines = [CONFIGURATION]
    workers = variables(WorkerSettings)
    for title, text, kind in (
        ("Settings of the server", SERVER, ServerSettings),
        ("Settings of the trainer", TRAINER, TrainerSettings),
    ):
        fields = variables(kind)
        if kind is ServerSettings:  # what is the server's alone comes first
            fields = {name: field for name, field in fields.items() if name not in workers} | workers
        rows = [(f"`{name}`", shown(field.default), field.description or "") for name, field in fields.items()]
        lines += [f"## {title}", "", text, "", *table(("Variable", "Default", "Meaning"), rows)]
    return "\n".join(lines[:-1]) + "\n"


def command_line() -> str:
    """docs/cli.md."""
    commands = {info.name or info.callback.__name__: info.callback for info in app.registered_commands}
    lines = [
        COMMAND_LINE,
        *table(("Command", "What it does"), [(f"[`{name}`](#{name})", brief(call)) for name, call in commands.items()]),
    ]
    for name, call in commands.items():
        given = [argument(parameter) for parameter in parameters(call)]
        words = [shape for shape, *_ in given if not shape.startswith("-")]
        lines += [f"## {name}", "", "```text", " ".join(["vllm-nixl", name, "[OPTIONS]", *words]), "```", ""]
        lines += [inspect.cleandoc(call.__doc__ or "").replace("``", "`"), ""]
        lines += table(("Argument", "Default", "Meaning"), [(f"`{shape}`", *rest) for shape, *rest in given])
    return "\n".join(lines[:-1]) + "\n"


def metric_page() -> str:
    """docs/metrics.md."""
    rows = []
    for metric in vars(metrics()).values():
        if hasattr(metric, "describe"):
            [about] = metric.describe()
            name = about.name + ("_total" if about.type == "counter" else "")
            labels = ", ".join(f"`{label}`" for label in metric._labelnames)
            rows.append((f"`{name}`", about.type, labels, about.documentation.rstrip(".")))
    return METRICS.replace("TABLE", "\n".join(table(("Metric", "Type", "Labels", "Meaning"), rows)).rstrip())


def brief(call: Any) -> str:
    """The first sentence of a command's help."""
    return inspect.cleandoc(call.__doc__ or "").split("\n\n")[0].split(";")[0].replace("``", "`").rstrip(".")


def parameters(call: Any) -> list[tuple[str, Any, Any, Any]]:
    """Name, type, typer's info and default of every argument and option."""
    hints = get_type_hints(call, include_extras=True)
    return [
        (name, get_args(hints[name])[0], get_args(hints[name])[1], parameter.default)
        for name, parameter in inspect.signature(call).parameters.items()
        if get_origin(hints[name]) is Annotated
    ]


def argument(parameter: tuple[str, Any, Any, Any]) -> tuple[str, str, str]:
    """How it is written, its default, and its meaning."""
    name, kind, info, value = parameter
    kinds = [each for each in (get_args(kind) or (kind,)) if each is not type(None)]
    choices = list(kinds[0]) if isinstance(kinds[0], type) and issubclass(kinds[0], Enum) else []
    meaning = (info.help or "").rstrip(".")
    if choices:
        meaning += f": {', '.join(f'`{choice.value}`' for choice in choices)}"
    if isinstance(info, ArgumentInfo):
        return info.metavar or name.upper(), "", meaning
    named = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str) and each[:1] == "-"]
    written = ", ".join(named) or f"--{name.replace('_', '-')}"
    if kinds[0] is not bool:
        written += f" {'MODE' if choices else {int: 'N', float: 'SECONDS', Path: 'FILE'}.get(kinds[0], 'TEXT')}"
    elif "/" in written:
        value = None
    return written, shown(getattr(value, "value", value or None)), meaning


def main() -> None:
    """Write the pages, or compare them."""
    pages = {"cli.md": command_line(), "configuration.md": configuration(), "metrics.md": metric_page()}
    old = [name for name, text in pages.items() if not (DOCS / name).exists() or (DOCS / name).read_text() != text]
    if "--check" in sys.argv[1:]:
        sys.exit(f"make docs: {', '.join(old)} are not what the code says" if old else 0)
    for name in old:
        (DOCS / name).write_text(pages[name])
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
