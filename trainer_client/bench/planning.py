"""How long one of the workers of a very large model takes to plan, and how large its plan is.

    python -m trainer_client.bench.planning [--layers N] [--ep 32] [--rank 3] [--self-check] [--profile STAGE]

The real configuration (``very_large.json``), block FP8, experts spread over data-parallel workers; one worker's view
of the model, with tensors on meta, in one process without the others (`vllm_nixl_plugin.view`). The last line printed
is an object of JSON. No GPU, no weights, about 2 GB of memory. `overhead` starts it.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

MODEL = Path(__file__).parent / "very_large.json"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1", "VLLM_PLUGINS": ""}
DIRECT_RUN_NBYTES, BUFFER_NBYTES = 16 << 10, 64 << 20

_R = TypeVar("_R")


def weights(values: dict[str, Any], n_layers: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of every tensor of the checkpoint."""
    for name, (shape, dtype) in values["outer"].items():
        yield name, tuple(shape), dtype
    for layer in range(n_layers):
        for block in values["blocks"]:
            if block["layers"][0] <= layer < block["layers"][1]:
                for copy in range(block["copies"]):
                    prefix = block["prefix"].format(layer=layer, copy=copy)
                    for name, (shape, dtype) in block["weights"].items():
                        yield prefix + name, tuple(shape), dtype


class Clock:
    """Seconds by stage, and those that this thread had of a processor: other programs slow the former down."""

    def __init__(self, profiled: str | None) -> None:
        self.seconds: dict[str, float] = {}
        self.spent: dict[str, float] = {}
        self._profiled = profiled

    def __call__(self, stage: str, function: Callable[[], _R]) -> _R:
        """Run a stage."""
        profile = cProfile.Profile() if stage == self._profiled else None
        start, spent = time.perf_counter(), time.thread_time()
        result = function() if profile is None else profile.runcall(function)
        self.seconds[stage], self.spent[stage] = time.perf_counter() - start, time.thread_time() - spent
        if profile is not None:
            pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
        return result

    def add(self, name: str, *stages: str) -> None:
        """The sum of stages."""
        for found in (self.seconds, self.spent):
            found[name] = sum(found[stage] for stage in stages)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds by stage, and sizes."""
    import torch

    torch.cpu._init_amx()
    from trainer_client.conversion import convert_shards
    from trainer_client.routing import Offer, compute_route
    from trainer_client.sources import Shard
    from vllm_nixl_plugin.encoding import decode_plan, encode_plan
    from vllm_nixl_plugin.layout import contiguous_strides
    from vllm_nixl_plugin.loadtrace import trace_load
    from vllm_nixl_plugin.planning import make_plan
    from vllm_nixl_plugin.selfcheck import SelfCheck
    from vllm_nixl_plugin.view import Layout, engine_config, take_place, twin_of
    from vllm_nixl_plugin.wire import Manifest, WeightSpec

    values = json.loads(MODEL.read_text("utf-8"))
    n_layers = options.layers or values["config"]["num_hidden_layers"]
    clock, layout = Clock(options.profile), Layout(dp=options.ep, ep=True)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(values["config"] | {"num_hidden_layers": n_layers}))
        config = engine_config(folder, layout, options.rank)
    take_place(config, layout, options.rank)
    twin = clock("build the view", lambda: twin_of(config))
    manifest = Manifest(weights=tuple(WeightSpec(name=n, shape=s, dtype=d) for n, s, d in weights(values, n_layers)))
    traced = clock("trace", lambda: trace_load(twin, manifest.weights, set()).destinations)
    planned = clock("plan", lambda: make_plan(manifest, traced, None, ()))
    if options.self_check:
        check = SelfCheck(twin, "sample")
        clock("self-check", lambda: check.check(manifest.weights, traced, planned))
    blob = clock("encode", lambda: encode_plan(planned.plan))
    plan = clock("decode", lambda: decode_plan(blob))

    def offer() -> Any:
        sizes = {dtype: getattr(torch, dtype).itemsize for dtype in {spec.dtype for spec in manifest.weights}}
        shards = [
            Shard(s.name, s.dtype, sizes[s.dtype], s.shape, (0,) * len(s.shape), s.shape, i, 0,
                  contiguous_strides(s.shape, sizes[s.dtype]))
            for i, s in enumerate(manifest.weights)
        ]  # fmt: skip
        return Offer(shards, ["cuda:0"] * len(shards), convert_shards(shards, None))

    offered = clock("describe what a trainer has", offer)
    route = clock("route", lambda: compute_route(
        offered, plan, direct_run_bytes=DIRECT_RUN_NBYTES, buffer_bytes=BUFFER_NBYTES))  # fmt: skip
    assert route.nbytes == planned.plan.nbytes
    clock.add("trace + plan + route", "trace", "plan", "route")
    return {
        "layout": str(layout), "layers": n_layers, "weights": len(manifest.weights), "copies": len(plan.copies),
        "plan_nbytes": plan.nbytes, "encoded_nbytes": len(blob), "seconds": clock.seconds,
        "processor_seconds": clock.spent,
    }  # fmt: skip


def main() -> None:
    """Measure, and print the object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--ep", type=int, default=32, help="workers that the experts are spread over")
    parser.add_argument("--rank", type=int, default=3)
    parser.add_argument("--self-check", action="store_true", help="compare the trace with real loads, too")
    parser.add_argument("--profile", help="show where this stage spends its time")
    os.environ |= ENVIRONMENT
    sys.stdout.write(json.dumps(measure(parser.parse_args())) + "\n")
    sys.stdout.flush()
    os._exit(0)  # an orderly end makes Triton's bindings complain about leaks


if __name__ == "__main__":
    main()
