"""Every layout against every kind of server: push, compare with a fresh server, and count what was sent by whom.

    python -m trainers          (`make trainers`)

One world of ranks per size and one server per model and size serve all cases, one after the other; each case pushes
another seed than the one before it, so that a push that does nothing is seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import EngineOptions, Server, completions, reference
from harness.checkpoints import write_checkpoint
from trainers.world import World

MODELS = {"dense": "qwen3", "MoE": "qwen3-moe"}
LAYOUTS: Mapping[int, tuple[str, ...]] = {
    2: ("fsdp1", "fsdp2", "tp", "ep", "pp", "declared"),
    4: ("fsdp1", "fsdp2", "fsdp2-fp32", "hsdp", "tp", "tp+fsdp2", "ep", "pp", "declared"),
}
"""By number of ranks."""
SEEDS = (2, 3)


@dataclass(frozen=True)
class Row:
    """One case. ``sent`` and ``needed`` in bytes; ``share``: the largest of any rank's bytes by its fair share."""

    model: str
    server_tp: int
    ranks: int
    layout: str
    equal: bool
    sent: int
    needed: int
    share: float
    collectives: int
    seconds: float

    @property
    def good(self) -> bool:
        """Whether the case shows what it has to."""
        return self.equal and self.sent == self.needed and self.share <= 1.1 and self.collectives == 0

    def __str__(self) -> str:
        verdict = "equal" if self.equal else "DIFFERENT"
        return (
            f"{self.model:6} {self.server_tp:9} {self.ranks:5}  {self.layout:10} {verdict:9} {self.sent:12,} "
            f"{self.needed:12,} {self.share:9.3f} {self.collectives:11} {self.seconds:8.2f}"
        )


HEAD = "model  server TP ranks  layout     result           sent       needed  max share collectives  seconds"


def run(
    folder: Path,
    worlds: Sequence[World],
    layouts: Mapping[int, Sequence[str]],
    models: Sequence[str],
    server_tps: Sequence[int],
) -> Iterator[Row]:
    """The rows of all cases. ``folder``: where checkpoints are written."""
    for model in models:
        name = MODELS[model]
        checkpoints = {seed: write_checkpoint(folder / f"{name}-{seed}", name, seed) for seed in (1, *SEEDS)}
        for server_tp in server_tps:
            with Server(checkpoints[1], EngineOptions(tensor_parallel=server_tp)) as server:
                cases = [(world, layout) for world in worlds for layout in layouts[len(world.ranks)]]
                for (world, layout), seed in zip(cases, itertools.cycle(SEEDS), strict=False):
                    yield _case(world, server, model, layout, seed, checkpoints[seed])


def _case(world: World, server: Server, model: str, layout: str, seed: int, expected: Path) -> Row:
    answers = world.all(
        "push", layout=layout, model=MODELS[model], seed=seed, servers=[server.url], options={"timeout_s": 120}
    )
    return Row(
        model, server.options.tensor_parallel, len(world.ranks), layout,
        equal=completions(server.url) == reference(expected, options=server.options),
        sent=sum(answer["nbytes"] for answer in answers), needed=answers[0]["planned"],
        share=max(a["nbytes"] / a["fair"] if a["fair"] else 1.0 + a["nbytes"] for a in answers),
        collectives=sum(answer["collectives"] for answer in answers), seconds=answers[0]["report"]["seconds"],
    )  # fmt: skip
