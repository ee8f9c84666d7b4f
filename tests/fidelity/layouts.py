"""What cannot run here, traced and planned: other ranks of other layouts, and models that have no CPU kernels.

For every rank the worker's view of the model is built (`view`), vLLM's loader is traced on it, a plan is made, and the
plan is compared with a real load of random data, unit by unit and all of them (`selfcheck`, mode ``full``). Then the
plans of all ranks together must read every byte of every weight, except for weights that no rank's loader uses.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fidelity.runner import ChildFailed, in_child
from vllm_nixl_plugin.view import Layout, engine_config, take_place, twin_of

TP2, TP4, PP2, ONE = Layout(tp=2), Layout(tp=4), Layout(pp=2), Layout()
EP2, EP4 = Layout(tp=2, ep=True), Layout(tp=4, ep=True)
DP2_EP2, DP2_TP2_EP4 = Layout(dp=2, ep=True), Layout(tp=2, dp=2, ep=True)
TP2_PP2 = Layout(tp=2, pp=2)

ROWS: list[tuple[str, Layout]] = [
    ("llama", TP4), ("llama", PP2), ("llama", TP2_PP2), ("qwen3-tied", TP4), ("qwen3-tied", PP2), ("phi3", TP4),
    ("gemma3", TP2_PP2), ("gpt2", TP4), ("falcon", TP4), ("falcon-new", TP2), ("cohere", TP2),
    ("qwen3-moe", EP2), ("qwen3-moe", DP2_EP2), ("qwen3-moe", DP2_TP2_EP4), ("qwen3-moe", Layout(tp=2, dp=2)),
    ("mixtral", EP4), ("deepseek-v3", EP4), ("deepseek-v3", DP2_EP2), ("deepseek-v2", TP2_PP2), ("gpt-oss", EP2),
    ("gpt-oss", DP2_TP2_EP4), ("glm4-moe", EP2), ("llama4", EP2), ("qwen3-next", EP2), ("granite-hybrid", EP2),
    ("mamba2", TP4), ("jamba", ONE), ("jamba", EP2), ("mamba", ONE), ("mamba", TP2), ("falcon-mamba", ONE),
    ("minimax-m2", ONE), ("minimax-m2", EP4), ("llama-fp8-online", ONE), ("llama-fp8-online", TP2),
    ("llama-fp8-channel", ONE), ("llama-fp8-channel", TP4), ("llama-fp8-tensor", TP2), ("llama-fp8-block", TP4),
    ("llama-fp8-kv", ONE), ("llama-fp8-kv", TP4), ("deepseek-v3-fp8-block", ONE), ("deepseek-v3-fp8-block", EP2),
    ("deepseek-v3-fp8-block", DP2_EP2), ("gpt-oss-mxfp4", ONE), ("gpt-oss-mxfp4", EP2), ("llama-awq", TP2),
    ("llama-gptq", TP2), ("llama-w4a16", TP2), ("llama-w8a8", TP4), ("qwen3-moe-w8a8", EP2),
]  # fmt: skip


@dataclass
class Traced:
    """What was found for one model in one layout. Bytes: of the model, and of the plan of the largest rank."""

    model: str
    layout: str
    result: str = ""
    seconds: float = 0.0
    details: list[str] = field(default_factory=list)
    weights: int = 0
    largest: int = 0
    fallback: list[str] = field(default_factory=list)
    demoted: list[dict[str, Any]] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return self.result == "equal"


def run(rows: list[tuple[str, Layout]], timeout_s: float = 300) -> Iterator[Traced]:
    """One row after another; checkpoints are written once per model."""
    with TemporaryDirectory(prefix="fidelity-") as folder:
        for name, layout in rows:
            yield _row(name, layout, Path(folder), timeout_s)


def _row(name: str, layout: Layout, folder: Path, timeout_s: float) -> Traced:
    from fidelity.models import write_checkpoints

    row = Traced(name, str(layout))
    begin = time.monotonic()
    path, stage = folder / name, "writing the checkpoint"
    try:
        if not path.exists():
            in_child(lambda: write_checkpoints({str(path): 1}, name), folder, timeout_s)
        ranks = []
        for rank in range(layout.ranks):
            stage = f"rank {rank}"
            blob = folder / f"plan-{rank}"
            ranks.append(in_child(lambda: _view(path, name, layout, rank, blob), folder, timeout_s))  # noqa: B023
        row.weights, row.largest = ranks[0]["weights"], max(r["nbytes"] for r in ranks)
        row.fallback = sorted({n for r in ranks for n in r["fallback"]})
        row.demoted = [d for r in ranks for d in r["demoted"]]
        unread = _unread(folder, layout)
        row.unused = sorted(unread.pop("", []))
        row.details = [f"{n}: {left} bytes are read by no rank" for n, left in unread.items()]
        row.details += [f"demoted {d['names']}: {d['reason']}" for d in row.demoted]
        row.result = "equal" if not row.details else "DIFFERENT"
    except ChildFailed as failure:
        row.result = f"FAILED: {stage}: {failure}"
        row.details = failure.log.splitlines()[-40:]
    row.seconds = time.monotonic() - begin
    return row


def _view(path: Path, name: str, layout: Layout, rank: int, blob: Path) -> dict[str, Any]:
    """Trace, plan and check one rank; in a process of its own. The plan is written to ``blob``."""
    from fidelity import fooling, odd
    from fidelity.models import ALL
    from harness.checkpoints import read_weights
    from vllm_nixl_plugin.encoding import encode_plan
    from vllm_nixl_plugin.findings import demote
    from vllm_nixl_plugin.loadtrace import trace_load
    from vllm_nixl_plugin.planning import make_plan
    from vllm_nixl_plugin.selfcheck import SelfCheck
    from vllm_nixl_plugin.wire import Manifest, WeightSpec

    odd.register()
    fooling.register()
    config = engine_config(path, layout, rank, **ALL[name].args)
    take_place(config, layout, rank)
    twin = twin_of(config)
    manifest = Manifest(
        weights=[
            WeightSpec(name=n, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
            for n, t in read_weights(path).items()
        ]
    )
    traced = trace_load(twin, manifest.weights, set()).destinations
    if _plain(trace_load(twin, manifest.weights, set(), few=0).destinations) != _plain(traced):
        raise AssertionError("a trace that leaves out what repeated blocks do not use gives other copies")
    planned = make_plan(manifest, traced, None, ())
    findings = SelfCheck(twin, "full").check(manifest.weights, traced, planned)
    if findings.demoted:
        traced = demote(traced, findings.demoted, twin)
        planned = make_plan(manifest, traced, None, ())
        if SelfCheck(twin, "full").check(manifest.weights, traced, planned).demoted:
            raise AssertionError(f"what the loader places itself differs from what it loads: {findings.demoted}")
    blob.write_bytes(encode_plan(planned.plan))
    return {
        "nbytes": planned.plan.nbytes, "fallback": list(planned.plan.fallback), "weights": _nbytes(manifest.weights),
        "demoted": findings.as_dict()["demoted"],
    }  # fmt: skip


def _plain(traced: Any) -> list[Any]:
    """Destinations without the identity of constants."""
    return [
        (d.names, d.nbytes, [(p.copy, p.program, getattr(p.root, "name", type(p.root))) for p in d.pieces])
        for d in traced
    ]


def _nbytes(weights: Any) -> int:
    return sum(torch.Size(w.shape).numel() * getattr(torch, w.dtype).itemsize for w in weights)


def _unread(folder: Path, layout: Layout) -> dict[str, Any]:
    """Bytes of each weight that no rank's plan reads; weights of which nobody reads anything below ``""``."""
    from vllm_nixl_plugin.encoding import decode_plan
    from vllm_nixl_plugin.replay import strided

    plans = [decode_plan((folder / f"plan-{rank}").read_bytes()) for rank in range(layout.ranks)]
    read = {w.name: torch.zeros(_nbytes([w]), dtype=torch.uint8) for w in plans[0].weights}
    for plan in plans:
        for c in plan.copies:
            mask, of = read[plan.weights[c.weight].name], c.copy_
            shape, strides = (*of.shape, of.src_itemsize), (*of.src_strides, 1)
            strided(mask, torch.uint8, shape, strides, of.src_offset).fill_(1)
    out: dict[str, Any] = {"": [n for n, mask in read.items() if mask.numel() and not mask.any()]}
    return out | {n: int((mask == 0).sum()) for n, mask in read.items() if mask.any() and not mask.all()}
