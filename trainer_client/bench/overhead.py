"""What a push costs beside its bytes: with very many tensors, a very large model, and the window of streamed mode.

    repush    many small tensors whose values alone have changed: the whole push without its payload
    planning  trace, plan and route for one worker of a model of 671 billion parameters, in a process of its own
    window    the memory that a streamed push takes at most, against what it was allowed
"""

from __future__ import annotations

import importlib.util
import json
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_client.bench.results import Results, median
from trainer_client.bench.servers import Served, serving
from trainer_client.bench.shapes import Shape
from trainer_client.bench.trainer import Trainer

if TYPE_CHECKING:
    from trainer_client.bench.parts import Settings

PAYLOAD = ("pack", "wire", "install")
AHEAD = ("install.fill", "install.process", "install.compare")
"""Work of an install that ``prepare`` has done before: vLLM's loading and processing, and the comparison."""
PLANNING_S = 600.0
WINDOW = Path(__file__).parents[2] / "benchmarks" / "window.py"

Say = Callable[[str], None]


def measure(settings: Settings, folder: Path, results: Results, say: Say) -> None:
    """Both parts that need models of their own."""
    _repush(settings, folder, results, say)
    _planning(settings, results, say)


def control_s(report: dict[str, Any], timings: dict[str, float]) -> float:
    """Seconds of a push without its payload: the bytes, and vLLM's own processing of them."""
    [server] = report["servers"]
    ahead = sum(timings.get(stage, 0.0) for stage in AHEAD)
    return float(report["seconds"] - ahead - sum(server["seconds"].get(stage, 0.0) for stage in PAYLOAD))


def _repush(settings: Settings, folder: Path, results: Results, say: Say) -> None:
    shape, token = Shape.read(settings.many), secrets.token_urlsafe(32)
    say(f"overhead: pushes of {shape.n_weights} weights ({shape.nbytes / 1e6:.0f} MB)")
    served = shape.write_config(folder / "many")
    with Trainer(shape, [settings.device], token, folder / "many.log") as trainer, serving(
        served, token, device=settings.device, arguments=["--load-format", "dummy"],
        start_timeout_s=settings.start_timeout_s,
    ) as [server]:  # fmt: skip
        for mode in ("in_place", "shadow"):
            trainer.first("push", servers=[server], mode=mode)
            trainer.first("push", servers=[server], mode=mode)
            found = []
            for _ in range(max(settings.repeat, 2)):
                done = trainer.first("push", servers=[server], mode=mode)
                found.append(control_s(done["report"], _timings(server)) * 1e3)
            results.overhead[f"repush_overhead_{mode}_ms"] = median(found)
    results.overhead["repush_overhead_ms"] = max(
        results.overhead[f"repush_overhead_{mode}_ms"] for mode in ("in_place", "shadow")
    )
    results.overhead["repush_weights"] = shape.n_weights


def _timings(server: Served) -> dict[str, float]:
    with server.http as http:
        return dict(http.get("/nixl/v1/status").json()["last"]["timings"])


def _planning(settings: Settings, results: Results, say: Say) -> None:
    say("overhead: planning for a very large model")
    command = [sys.executable, "-m", "trainer_client.bench.planning"]
    command += [] if settings.planning is None else ["--layers", str(settings.planning)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PLANNING_S, check=True)
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        tail = "; ".join(str(getattr(error, "stderr", "") or "").strip().splitlines()[-2:])
        results.not_measured["plan_seconds"] = f"planning failed ({type(error).__name__}): {tail[:500]}"
        return
    results.overhead["plan_seconds"] = found["seconds"]["trace + plan + route"]
    results.overhead["plan_processor_seconds"] = found["processor_seconds"]["trace + plan + route"]
    results.stages["planning, a very large model"] = found["seconds"]
    results.overhead |= {f"plan_{key}": found[key] for key in ("weights", "copies", "encoded_nbytes")}


def window(settings: Settings, results: Results, say: Say) -> None:
    """The figure of ``benchmarks/window.py``, where this runs from a checkout that has it."""
    say("window: a streamed push within its budget")
    if not WINDOW.exists():
        results.not_measured["window_peak_vs_budget"] = "benchmarks/window.py is not here: run from a checkout"
        return
    spec = importlib.util.spec_from_file_location("window", WINDOW)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        found = module.measure()
    except Exception as error:  # noqa: BLE001 - the other figures stand without it
        results.not_measured["window_peak_vs_budget"] = f"{type(error).__name__}: {str(error)[:300]}"
        return
    results.ratios["window_peak_vs_budget"] = float(found["peak_vs_budget"])
    results.window = {key: value for key, value in found.items() if isinstance(value, int | float | bool)}
