"""What ``vllm-nixl bench`` measures, part by part, on one model, one server and one trainer of one process.

    wire      bytes on the wire, beside one raw NIXL WRITE between the same processes, and a copy
    push      whole pushes, in turns with the two other ways; memory is watched meanwhile (part `memory`)
    gap       the longest wait for a token while each of the three is under way
    overhead  the first push by stage; `overhead` has what needs other models

`run` starts what the wanted parts need and returns one `Results`; each part adds its figures.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer_client.bench import memory, overhead
from trainer_client.bench.results import Results, median, paired
from trainer_client.bench.servers import Served, serving
from trainer_client.bench.shapes import Shape
from trainer_client.bench.streaming import TokenStream
from trainer_client.bench.trainer import Trainer
from vllm_nixl_plugin.errors import InvalidRequest

PARTS = ("wire", "push", "gap", "memory", "overhead", "window", "growth")
DEFAULT = tuple(part for part in PARTS if part != "growth")
"""What is measured unless parts are named; growth starts servers by the dozen."""
MODES = {"shadow": "", "in_place": "in_place_", "streamed": "streamed_"}
"""Of pushes, and how the ratios of each begin."""
WAYS = (*MODES, "disk", "broadcast")
"""Pushes in all modes, and what they are compared with."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What to measure with. ``nbytes``: about the size of the model; None: as the shape says."""

    shape: str = "dense"
    nbytes: int | None = None
    device: str = "cpu"
    tensor_parallel: int = 1
    repeat: int = 3
    many: str = "experts"
    planning: int | None = None
    folder: Path | None = None
    start_timeout_s: float = 600.0

    def model(self) -> Shape:
        """Errors: InvalidRequest."""
        shape = Shape.read(self.shape)
        return shape if self.nbytes is None else shape.of_nbytes(self.nbytes)


def check(settings: Settings, parts: Sequence[str]) -> None:
    """Errors: InvalidRequest, naming the argument."""
    if unknown := sorted(set(parts) - set(PARTS)):
        raise InvalidRequest(f"no part {', '.join(unknown)}: choose of {', '.join(PARTS)}")
    if settings.repeat < 1 or settings.tensor_parallel < 1:
        raise InvalidRequest("--repeat and --tensor-parallel are at least 1")
    if settings.nbytes is not None and settings.nbytes < 1:
        raise InvalidRequest("--bytes is at least 1")
    if settings.folder is not None and not settings.folder.is_dir():
        raise InvalidRequest(f"--folder {settings.folder} is no folder")
    settings.model()
    if settings.device != "cpu":
        import torch

        if not torch.cuda.is_available():
            raise InvalidRequest(f"--device {settings.device}: torch sees no GPU here; use cpu")


def run(settings: Settings, parts: Sequence[str], say: Say) -> Results:
    """Measure. Errors: InvalidRequest, and what servers and ranks end with."""
    check(settings, parts)
    results = Results(settings=asdict(settings) | {"parts": list(parts)})
    with tempfile.TemporaryDirectory(prefix="vllm-nixl-bench-", dir=settings.folder) as made:
        folder = Path(made)
        if {"wire", "push", "gap", "memory", "overhead"} & set(parts):
            _on_one_server(settings, parts, folder, results, say)
        if "overhead" in parts:
            overhead.measure(settings, folder, results, say)
        if "window" in parts:
            overhead.window(settings, results, say)
        if "growth" in parts:
            from trainer_client.bench import growth

            growth.measure(settings, folder, results, say)
    return results


def _on_one_server(settings: Settings, parts: Sequence[str], folder: Path, results: Results, say: Say) -> None:
    shape, token = settings.model(), secrets.token_urlsafe(32)
    results.model = {
        "shape": shape.name, "about": shape.values.get("about", ""), "layers": shape.layers, "nbytes": shape.nbytes,
        "weights": shape.n_weights,
    }  # fmt: skip
    say(f"model {shape.name}: {shape.nbytes / 1e9:.2f} GB in {shape.n_weights} weights")
    served, saved = shape.write_config(folder / "served"), shape.write_config(folder / "saved")
    with Trainer(shape, [settings.device], token, folder / "trainer.log") as trainer:
        trainer.first("save", folder=str(served))
        say("starting a server")
        with serving(
            served, token, device=settings.device, tensor_parallel=settings.tensor_parallel,
            start_timeout_s=settings.start_timeout_s,
        ) as [server]:  # fmt: skip
            bench = _Bench(settings, shape, trainer, server, saved, results, say)
            bench.first_push()
            for part in ("wire", "push", "gap"):
                if part in parts or (part == "push" and "memory" in parts):
                    getattr(bench, part)()


class _Bench:
    """The parts that share one server."""

    def __init__(
        self,
        settings: Settings,
        shape: Shape,
        trainer: Trainer,
        server: Served,
        saved: Path,
        results: Results,
        say: Say,
    ) -> None:
        self._settings, self._shape, self._results, self._say = settings, shape, results, say
        self._trainer, self._server = trainer, server
        self._warm: set[str] = set()
        self._ways: dict[str, Callable[[], Any]] = {
            **{mode: partial(trainer.first, "push", servers=[server], mode=mode) for mode in MODES},
            "disk": partial(trainer.first, "disk", servers=[server], folder=str(saved)),
            "broadcast": partial(trainer.first, "broadcast", servers=[server]),
        }

    def first_push(self) -> None:
        """The stages of a client's first push, and of its first with another mode."""
        first = self._stages(self._do("shadow"))
        self._results.stages["first push"] = first
        with self._server.http as http:
            workers = http.get("/nixl/v1/plan").json()["workers"]
        check = [worker.get("self_check") or {} for worker in workers]
        first["self_check"] = max((float(one.get("seconds", 0.0)) for one in check), default=0.0)

    def wire(self) -> None:
        """In turns: one raw write of the model's bytes, a copy of them, and a push."""
        self._say("wire: raw writes and pushes in turns")
        self._trainer.first("raw_open", server=self._server, nbytes=self._shape.nbytes)
        self._do("shadow")
        ours, raw, copies = [], [], []
        for _ in range(self._settings.repeat + 1):
            theirs = self._trainer.first("raw_write")
            stages = self._stages(self._do("shadow"))
            ours.append(stages.get("wire", 0.0) + stages.get("pack", 0.0))
            raw.append(theirs["write"])
            copies.append(theirs["copy"])
        self._trainer.first("raw_close")
        self._results.seconds |= {
            "wire (with packing)": median(ours), "raw NIXL WRITE": median(raw), "copy in memory": median(copies),
        }  # fmt: skip
        self._results.ratios |= {"wire_vs_raw": paired(ours, raw), "wire_vs_copy": paired(ours, copies)}

    def push(self) -> None:
        """All ways in turns, after each has run once."""
        self._say("push: pushes, saving and reloading, broadcasting and reloading in turns")
        self._warm_up()
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        extra: dict[str, list[int]] = {f"{side}, {way}": [] for side in ("server", "trainer") for way in WAYS}
        stages: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(self._settings.repeat):
            for way in WAYS:
                with self._watched(self._server.session) as server, self._watched(self._trainer.pids[0]) as trainer:
                    done = self._do(way)
                seconds[way].append(done["end"] - done["begin"])
                stages[way].append(self._stages(done))
                extra[f"server, {way}"].append(server.extra_nbytes)
                extra[f"trainer, {way}"].append(trainer.extra_nbytes)
        for way in WAYS:
            self._results.seconds[f"whole, {way}"] = median(seconds[way])
            self._results.stages[way] = {
                stage: median([one.get(stage, 0.0) for one in stages[way]]) for stage in stages[way][0]
            }
        self._results.extra_nbytes |= {key: max(values) for key, values in extra.items()}
        for mode, name in MODES.items():
            self._results.ratios[f"{name}push_vs_disk_reload"] = paired(seconds[mode], seconds["disk"])
            self._results.ratios[f"{name}push_vs_broadcast"] = paired(seconds[mode], seconds["broadcast"])

    def gap(self) -> None:
        """A stream of tokens for each; the longest wait between two of them."""
        self._say("gap: the same under a stream of tokens")
        self._warm_up()
        gaps: dict[str, list[float]] = {way: [] for way in (*WAYS, "no push")}
        for _ in range(self._settings.repeat):
            for way in WAYS:
                with TokenStream(self._server) as stream:
                    done = self._do(way)
                    stream.wait_for_more()
                    gaps[way].append(stream.longest_gap(done["begin"], done["end"]))
                    gaps["no push"].append(stream.longest_gap(until=done["begin"]))
        for way, found in gaps.items():
            self._results.seconds[f"longest gap, {way}"] = median(found)
        for mode, name in MODES.items():
            self._results.ratios[f"{name}gap_vs_disk_reload"] = paired(gaps[mode], gaps["disk"])
            self._results.ratios[f"{name}gap_vs_broadcast"] = paired(gaps[mode], gaps["broadcast"])

    def _watched(self, process: int) -> memory.Peak:
        return memory.watch(process, self._settings.device)

    def _warm_up(self) -> None:
        for way in WAYS:
            if way not in self._warm:
                self._do(way)

    def _do(self, way: str) -> Any:
        self._warm.add(way)
        return self._ways[way]()

    @staticmethod
    def _stages(done: Any) -> dict[str, float]:
        found = done["report"]["servers"][0]["seconds"] if "report" in done else done["seconds"]
        return {stage: float(seconds) for stage, seconds in found.items()}
