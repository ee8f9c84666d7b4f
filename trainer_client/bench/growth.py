"""How the time of a push grows: with the bytes of the model, the number of weights, of servers, and of trainer ranks.

`measure` adds a row for each case: what it varies (``by``), its value (``x``), and medians of shadow pushes in seconds:
the whole, the bytes (``pack`` and ``wire``), the server's work (``prepare`` to ``resume``), and the rest, ``control``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_client.bench.results import Results, median
from trainer_client.bench.servers import Served, serving
from trainer_client.bench.shapes import Shape
from trainer_client.bench.trainer import Trainer

if TYPE_CHECKING:
    from trainer_client.bench.parts import Settings

PARTS_OF_BYTES = (0.125, 0.25, 0.5)
"""Of the wanted size; the first is that of the cases with more servers and ranks."""
PARTS_OF_WEIGHTS = (0.125, 0.5)
MOST_SERVERS = 2
RANKS = (1, 2, 4)
WIRE, SERVER = ("pack", "wire"), ("prepare", "pause", "install", "resume")

Say = Callable[[str], None]


def measure(settings: Settings, folder: Path, results: Results, say: Say) -> None:
    """All cases, each with servers of its own."""
    model, many = settings.model(), Shape.read(settings.many)
    for number, part in enumerate(PARTS_OF_BYTES):
        shape = model.of_nbytes(round(model.nbytes * part))
        say(f"growth: {shape.nbytes / 1e9:.2f} GB")
        cases = [("bytes", shape.nbytes, 1, 1)]
        if number == 0:
            cases += [("servers", n, n, 1) for n in range(1, MOST_SERVERS + 1)] + [("ranks", n, 1, n) for n in RANKS]
        results.growth += _rows(settings, folder / f"bytes-{number}", shape, cases)
    for number, part in enumerate(PARTS_OF_WEIGHTS):
        shape = many.of_nbytes(round(many.nbytes * part))
        say(f"growth: {shape.n_weights} weights")
        results.growth += _rows(settings, folder / f"weights-{number}", shape, [("weights", shape.n_weights, 1, 1)])


def _rows(
    settings: Settings, folder: Path, shape: Shape, cases: Sequence[tuple[str, int, int, int]]
) -> list[dict[str, Any]]:
    rows, token = [], secrets.token_urlsafe(32)
    with serving(
        shape.write_config(folder), token, device=settings.device, count=max(n for _, _, n, _ in cases),
        arguments=["--load-format", "dummy"], start_timeout_s=settings.start_timeout_s,
    ) as servers:  # fmt: skip
        for by, x, n_servers, n_ranks in cases:
            with Trainer(shape, [settings.device] * n_ranks, token, folder / "trainer.log") as trainer:
                seconds = _pushes(trainer, servers[:n_servers], settings.repeat)
            counts = {"nbytes": shape.nbytes, "weights": shape.n_weights, "servers": n_servers, "ranks": n_ranks}
            rows.append({"by": by, "x": x} | counts | seconds)
    return rows


def _pushes(trainer: Trainer, servers: Sequence[Served], repeat: int) -> dict[str, float]:
    """Medians over pushes, after two; of several servers the slowest counts."""
    found: dict[str, list[float]] = {"whole": [], "bytes_s": [], "server_s": [], "control_s": []}
    for number in range(repeat + 2):
        done = trainer.first("push", servers=servers, mode="shadow")
        if number < 2:
            continue
        stages = [server["seconds"] for server in done["report"]["servers"]]
        sums = [max(sum(one.get(s, 0.0) for s in names) for one in stages) for names in (WIRE, SERVER)]
        whole = done["end"] - done["begin"]
        for values, value in zip(found.values(), (whole, *sums, max(whole - sum(sums), 0.0)), strict=True):
            values.append(value)
    return {name: median(values) for name, values in found.items()}
