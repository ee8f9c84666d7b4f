"""``vllm-nixl bench``: what a push costs on this machine, beside what else brings weights into a server."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainer_client.commands.options import Json
from vllm_nixl_plugin.errors import InvalidRequest

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def bench(
    parts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PART...]",
            help="What to measure: wire push gap memory overhead window growth. Default: all but growth.",
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option("--bytes", metavar="SIZE", help="Size of the model: 1GB. Default: the shape's."),
    ] = None,
    model_shape: Annotated[
        str, typer.Option(help="Kind of the model: dense, moe, experts, tiny, or a JSON file like theirs.")
    ] = "dense",
    device: Annotated[str, typer.Option(help="Of trainer and server: cpu, cuda:0; default: what torch finds.")] = "",
    tensor_parallel: Annotated[int, typer.Option(help="Workers of the server.")] = 1,
    repeat: Annotated[int, typer.Option(help="How often each is measured; medians are told.")] = 3,
    plot: Annotated[
        Path | None, typer.Option(help="Measure growth, and draw it into this folder (needs the extra bench).")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where checkpoints are saved meanwhile. Default: the system's own.")
    ] = None,
    many: Annotated[str, typer.Option(help="Shape of the model with very many weights (part overhead).")] = "experts",
    planning_layers: Annotated[
        int | None, typer.Option(help="Layers of the very large model that is planned for (part overhead).")
    ] = None,
    start_timeout_s: Annotated[float, typer.Option(help="Seconds that a server may take to start.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Measure pushes on servers that are started here, in turns with other ways to bring weights into them.

    Needs vLLM. About four minutes on two idle cores; `bench wire push --bytes 300MB` takes one.
    """
    from rich.console import Console

    from trainer_client.bench.parts import DEFAULT, Settings, check, run

    wanted = list(dict.fromkeys(parts or DEFAULT)) + (["growth"] if plot and "growth" not in (parts or ()) else [])
    settings = Settings(
        shape=model_shape, nbytes=None if size is None else parse_size(size), device=device or _found(),
        tensor_parallel=tensor_parallel, repeat=repeat, many=many, planning=planning_layers, folder=folder,
        start_timeout_s=start_timeout_s,
    )  # fmt: skip
    check(settings, wanted)
    if plot is not None:
        from trainer_client.bench import plots

        plots.check(plot)
    results = run(settings, wanted, lambda line: print(line, file=sys.stderr, flush=True))
    if plot is not None:
        for path in plots.draw(results.growth, plot):
            print(path, file=sys.stderr)
    if as_json:
        print(json.dumps(results.to_dict()))
    else:
        results.show(Console(width=None if sys.stdout.isatty() else 120))


def parse_size(text: str) -> int:
    """``300MB`` in bytes; decimal units. Errors: InvalidRequest."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip().upper())
    if found is None or not float(found[1]):
        raise InvalidRequest(f"--bytes {text!r} is no size: write 300MB or 1.5GB")
    return int(float(found[1]) * UNITS[found[2]])


def _found() -> str:
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"
