"""How much memory a push in mode `streamed` takes, against what it was allowed: the smallest window of the plan.

    python benchmarks/window.py [--layers 12] [--hidden 2048] [--launch fork] [--json]

A model of equal layers is served on a CPU, where vLLM packs every linear, so that nothing of them is live. Its server
is started with the smallest budget that its plan allows (PUSH_WEIGHTS_SHADOW_BYTES), gets other weights, its own again
and the others, and has to be equal to a server that was started from those: fingerprints, tokens and logprobs.

What is measured is the resident memory of the worker's process: the kernel's own high-water mark (VmHWM, reset before a
push) less what was resident then (VmRSS). The peak is that of the second push, and the window, which is resident from
the first on: all that a push takes for weights. The first push by itself is told too; it has what a process takes once,
for libraries and connections. The plan was made before, and its self-check is off; freed memory goes back to the kernel
at once (MALLOC_MMAP_THRESHOLD_; TCMALLOC_AGGRESSIVE_DECOMMIT where vLLM loads tcmalloc), so that nothing hides in what
an allocator keeps, and no holes are counted. `measure` gives the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(256 << 10), "TCMALLOC_AGGRESSIVE_DECOMMIT": "true"}
MODEL = "window"
TOKENS = 4
"""Compared for each prompt; the fingerprint has all the rest."""


def measure(layers: int = 12, hidden: int = 2048, launch: str = "exec") -> dict[str, Any]:
    """``peak_vs_budget`` (1.0: all of the budget was taken), and what it was worked out from: bytes, and ``equal``.

    ``launch``: ``exec`` starts servers as users do; ``fork`` is faster, in a process that has started none yet.
    """
    os.environ.update(ALLOCATOR)
    sys.path.insert(0, str(ROOT / "tests"))
    from harness import TOKEN, EngineOptions, Server, completions
    from harness.checkpoints import read_weights, write_checkpoint
    from trainer_client import WeightClient
    from trainer_client.control import Control

    _define(layers, hidden)
    options = EngineOptions(launch=launch)

    def plan_of(server: Server) -> dict[str, Any]:
        """Planned for the checkpoint of the server, as it will be for the push: nothing of it is counted."""
        with Control(server.url, token=TOKEN) as control:
            [told] = control.plan_summary()
        return told

    def readings(server: Server) -> tuple[Any, ...]:
        with Control(server.url, token=TOKEN) as control:
            return control.fingerprint().digest, completions(server.url, n_tokens=TOKENS)

    with tempfile.TemporaryDirectory() as folder:
        old, new = (write_checkpoint(Path(folder) / str(seed), MODEL, seed) for seed in (1, 2))
        with Server(new, options) as fresh:
            wanted = readings(fresh)
            foreseen = plan_of(fresh)["streamed"]
        budget = foreseen["smallest_budget_nbytes"]
        environment = ALLOCATOR | {"PUSH_WEIGHTS_SHADOW_BYTES": str(budget), "PUSH_WEIGHTS_SELF_CHECK": "off"}
        with Server(old, options, env=environment, start_timeout_s=600) as server:
            plan_of(server)
            with Control(server.url, token=TOKEN) as control:
                pid = int(control.status().server["pid"])
            peaks, weights = [], [read_weights(new), read_weights(old)]
            with WeightClient([server.url], token=TOKEN, progress=False) as client:
                for number in range(3):
                    before = _reset(pid)
                    report = client.push_weights(weights[number % 2], mode="streamed")
                    peaks.append(_memory(pid, "VmHWM") - before)
            window = dict(report.servers[0].window or {})
            peak = peaks[1] + (window["window_nbytes"] or 0)
            equal = readings(server) == wanted
    nbytes = sum(weight.nbytes for weight in weights[0].values())
    return {
        "peak_vs_budget": peak / budget, "peak_nbytes": peak, "budget_nbytes": budget, "model_nbytes": nbytes,
        "budget_vs_model": budget / nbytes, "groups": foreseen["groups"], "largest_nbytes": foreseen["largest_nbytes"],
        "first_push_nbytes": peaks[0], "window": window, "seconds": report.seconds, "equal": equal,
    }  # fmt: skip


def _define(layers: int, hidden: int) -> None:
    import transformers as tf

    from harness import checkpoints

    heads = max(hidden // 128, 1)
    config = {
        "vocab_size": 512, "hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": max(heads // 2, 1), "head_dim": 128,
        "max_position_embeddings": 512, "tie_word_embeddings": False,
    }  # fmt: skip
    checkpoints.MODELS[MODEL] = lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**config))


def _reset(pid: int) -> int:
    """Bytes that are resident now; the high-water mark begins there."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _memory(pid, "VmRSS")


def _memory(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--launch", choices=["exec", "fork"], default="exec", help="how servers are started")
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args()
    found = measure(wanted.layers, wanted.hidden, wanted.launch)
    if wanted.json:
        print(json.dumps(found))
    else:
        mib = {name: f"{found[f'{name}_nbytes'] / 2**20:.1f} MiB" for name in ("model", "budget", "peak", "largest")}
        print(f"model        {mib['model']} in {wanted.layers} equal layers, {found['groups']} groups")
        part = f"{found['budget_vs_model']:.1%} of the model, largest group {mib['largest']}"
        print(f"budget       {mib['budget']}, the smallest that the plan allows ({part})")
        first = f"{found['first_push_nbytes'] / 2**20:.1f} MiB"
        print(f"peak         {mib['peak']} (VmHWM), {found['peak_vs_budget']:.1%} of the budget; first push {first}")
        print(f"push         {found['seconds']:.2f} s, equal to a fresh server: {'yes' if found['equal'] else 'NO'}")
    from harness import close_launcher

    close_launcher()
    sys.exit(not found["equal"])


if __name__ == "__main__":
    main()
