"""What a push costs beside its bytes when nothing but the values has changed, by stage, on a CPU with a real server.

    python benchmarks/repush.py control   # a tiny model: nothing but control, with what is left beside the stages
    python benchmarks/repush.py tensors   # 40,000 tensors in 40,000 pieces of memory: many small experts
    python benchmarks/repush.py sharded   # 2 ranks (FSDP2) with 620 DTensors each, to a server of tensor parallel 2

``control`` is the whole push but for pack, wire and install; ``process``, a part of prepare, is vLLM's own loading and
processing of weights and the comparison with what serves: work of the install too, done ahead of it. ``rest`` is
what no stage explains, ``cpu`` the processor time of the trainer's process. Each push is measured on an idle server, or
with ``--busy`` on one that generates for a client; the table has the median, the least and the most of each stage: on a
machine that is shared, the least is what the work takes. ``--profile`` prints where rank 0 spends the time of a push.
Exits 1 above ``--goal``.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

import gpu_measure as measure
from gpu_load import Load
from gpu_servers import get, server
from gpu_trainer import Trainer
from harness.server import TOKEN, close_launcher
from trainer_client import WeightClient
from trainer_client.report import STAGES

PAYLOAD = ("pack", "wire", "install", "process")
PREPARED = ("fill", "process", "compare")
"""What the server calls the work of an install that it does ahead of it."""


def experts_config(folder: Path, layers: int, experts: int) -> Path:
    """A MoE whose experts are as small as vLLM's kernels let them be."""
    import transformers as tf

    config = tf.Qwen3MoeConfig(
        vocab_size=512, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, head_dim=32, max_position_embeddings=512, num_experts=experts,
        num_experts_per_tok=2, tie_word_embeddings=False, architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    measure._write_tokenizer(folder)
    return folder


def state_dict(config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Checkpoint names, each with memory of its own."""

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16) * 0.02

    hidden, width = config.hidden_size, config.moe_intermediate_size
    heads = config.num_attention_heads * config.head_dim
    yield "model.embed_tokens.weight", make(config.vocab_size, hidden)
    for number in range(config.num_hidden_layers):
        layer = f"model.layers.{number}"
        for name in ("q_proj", "k_proj", "v_proj"):
            yield f"{layer}.self_attn.{name}.weight", make(heads, hidden)
        yield f"{layer}.self_attn.o_proj.weight", make(hidden, heads)
        for name in ("q_norm", "k_norm"):
            yield f"{layer}.self_attn.{name}.weight", make(config.head_dim)
        yield f"{layer}.mlp.gate.weight", make(config.num_experts, hidden)
        for expert in range(config.num_experts):
            for name in ("gate_proj", "up_proj"):
                yield f"{layer}.mlp.experts.{expert}.{name}.weight", make(width, hidden)
            yield f"{layer}.mlp.experts.{expert}.down_proj.weight", make(hidden, width)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{name}.weight", make(hidden)
    yield "model.norm.weight", make(hidden)
    yield "lm_head.weight", make(config.vocab_size, hidden)


def table(title: str, pushes: list[dict[str, float]]) -> float:
    """Print how long each stage took; the median of ``control`` in ms."""
    for push in pushes:
        push["control"] = push["total"] - sum(push.get(stage, 0.0) for stage in PAYLOAD)
        push["rest"] = push["total"] - sum(push.get(stage, 0.0) for stage in STAGES[:-1])
    print(f"\n{title}: median of {len(pushes)} pushes, ms")
    for stage in (*STAGES, "process", "control", "rest", "cpu"):
        values = sorted(push.get(stage, 0.0) * 1e3 for push in pushes)
        print(f"  {stage:14} {statistics.median(values):9.2f}   (least {values[0]:.2f}, most {values[-1]:.2f})")
    return statistics.median(push["control"] for push in pushes) * 1e3


def processing_s(url: str) -> float:
    """Seconds that the workers processed weights ahead of the last install."""
    timings = get(url, "/status")["last"]["timings"]
    return sum(timings.get(f"install.{stage}", 0.0) for stage in PREPARED)


def tensors(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """One process with a state dict of many tensors."""
    return state_dicts(args, folder, args.layers or 52, args.experts or 256)


def tiny(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """One process with next to nothing to send."""
    return state_dicts(args, folder, args.layers or 2, args.experts or 4)


def state_dicts(args: argparse.Namespace, folder: Path, layers: int, experts: int) -> dict[str, float]:
    """The same state dict again and again, in each mode."""
    import transformers as tf

    path = experts_config(folder / "experts", layers, experts)
    state = dict(state_dict(tf.AutoConfig.from_pretrained(path)))
    print(f"{len(state)} tensors, {sum(t.nbytes for t in state.values()) / 1e6:.0f} MB", flush=True)
    found = {}
    log = Path(args.log) if args.log else folder / "server.log"
    made = server(path, "--load-format", "dummy", device="cpu", eager=True, log=log)
    with made, WeightClient([made.url], token=TOKEN, progress=False) as client:
        load = Load(made.url, 1, 100) if args.busy else None
        for mode in args.modes.split(","):
            begin = time.monotonic()
            first = client.push_weights(state, mode=mode)
            print(f"\n{mode}: first push {time.monotonic() - begin:.1f} s\n{first}", flush=True)
            pushes = []
            profile = cProfile.Profile() if args.profile else None
            for _ in range(args.repeat):
                gc.collect()
                if load is not None:
                    time.sleep(0.1)  # a server that generates again
                if profile is not None:
                    profile.enable()
                begin, cpu = time.monotonic(), time.process_time()
                report = client.push_weights(state, mode=mode)
                called = {"total": time.monotonic() - begin, "cpu": time.process_time() - cpu}
                if profile is not None:
                    profile.disable()
                pushes.append(dict(report.servers[0].seconds) | called | {"process": processing_s(made.url)})
            found[mode] = table(f"{len(state)} tensors, {mode}{', generating' if load else ''}", pushes)
            if profile is not None:
                pstats.Stats(profile).sort_stats("cumulative").print_stats(45)
        if load is not None:
            load.stop()
            print(*load.errors, sep="\n")
    return found


def sharded(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Two ranks, each in a process of its own."""
    path = measure.write_config(folder / "dense", args.dense_layers, tiny=True)
    found = {}
    log = Path(args.log) if args.log else folder / "server.log"
    made = server(path, "--load-format", "dummy", device="cpu", eager=True, log=log, tensor_parallel=args.tp)
    with made, Trainer(["cpu"] * 2, folder / "trainer.log") as trainer:
        trainer.wait()
        held = trainer.all("random", config=str(path))
        print(f"{held[0]['whole_nbytes'] / 1e6:.0f} MB", flush=True)
        for mode in args.modes.split(","):
            done = []
            for _ in range(args.repeat + 1):
                done += trainer.all("push", servers=[made.url], mode=mode)[0]
                done[-1]["process"] = processing_s(made.url)
            print(f"\n{mode}: first push {done[0]['end'] - done[0]['begin']:.1f} s", flush=True)
            pushes = []
            for push in done[1:]:
                pushes.append(dict(push["servers"][0]["seconds"]))
                pushes[-1]["total"] = push["end"] - push["begin"]
                pushes[-1]["process"] = push["process"]
            found[mode] = table(f"2 ranks, {mode} (total: of the call)", pushes)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["control", "tensors", "sharded"])
    parser.add_argument("--layers", type=int)
    parser.add_argument("--experts", type=int)
    parser.add_argument("--dense-layers", type=int, default=56)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--modes", default="in_place,shadow")
    parser.add_argument("--goal", type=float, default=50.0, help="ms")
    parser.add_argument("--busy", action="store_true", help="push while the server generates")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--log", help="of the server")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = {"control": tiny, "tensors": tensors, "sharded": sharded}[args.what](args, Path(folder))
        finally:
            close_launcher()
    fine = True
    for mode, control in found.items():
        fine &= control <= args.goal
        print(f"goal  control overhead, {mode:9} {control:8.1f} ms  at most {args.goal:g}  "
              f"{'met' if control <= args.goal else 'MISSED'}")  # fmt: skip
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
