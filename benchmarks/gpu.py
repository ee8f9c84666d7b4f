"""Fidelity and speed on NVIDIA GPUs, with real vLLM servers. Prints tables; exits 1 when something is not equal.

    python benchmarks/gpu.py fidelity   # dense and MoE, bf16 and online FP8, CUDA graphs captured: equal to fresh?
    python benchmarks/gpu.py quantized  # quantized checkpoints, adapters, sleep mode: equal to fresh?
    python benchmarks/gpu.py speed      # a model of 16 GB: wire, pause and whole push against device copies
    python benchmarks/gpu.py sharded    # a trainer of several ranks: equal, and how fast (options: gpu_sharded.py)

All start `vllm serve` as a user does. `--device cpu` tries them out where there is no GPU. Needs vLLM, nixl and
transformers; writes its checkpoints to a temporary folder, and what it prints to `--out` too, line by line.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent))

import gpu_equality
import gpu_sharded
import gpu_speed
from gpu_servers import Report
from harness.launcher import kill_session
from harness.server import Server, close_launcher


def give_up(report: Report, why: str) -> None:
    """End at once, with all servers: they lead sessions of their own and would stay."""
    report(f"CUT OFF after {report.seconds:.0f} s: {why}")
    for made in list(Server.running):
        kill_session(made.pid)
    os._exit(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True)
    both = argparse.ArgumentParser(add_help=False)
    both.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    both.add_argument("--out", type=Path, help="a folder for what is printed, results.jsonl, and logs of what failed")
    both.add_argument("--budget", type=float, default=1e9, help="seconds after which no other case begins")
    both.add_argument("--limit", type=float, default=3600, help="seconds after which all is cut off")
    for name in ("fidelity", "quantized"):
        equal = what.add_parser(name, parents=[both])
        equal.add_argument("--only", default="", help="cases whose names contain one of these words, comma-separated")
        equal.add_argument("--mode", choices=["shadow", "in_place", "streamed"], help="of all pushes, not in turns")
        equal.add_argument("--slots", type=int, default=16, help="servers at once")
    gpu_speed.add_arguments(what.add_parser("speed", parents=[both]))
    gpu_sharded.add_arguments(what.add_parser("sharded", parents=[both]))
    args = parser.parse_args()
    report = Report(args.out)
    signal.signal(signal.SIGTERM, lambda *_: give_up(report, "terminated"))
    limit = threading.Timer(args.limit, give_up, (report, "--limit"))
    limit.daemon = True
    limit.start()
    with tempfile.TemporaryDirectory() as folder:
        try:
            if args.what == "speed":
                fine = gpu_speed.run(args, Path(folder), report)
            elif args.what == "sharded":
                fine = gpu_sharded.run(args, Path(folder), report)
            else:
                cases = gpu_equality.FIDELITY if args.what == "fidelity" else gpu_equality.QUANTIZED
                words = [word.strip().lower() for word in args.only.split(",") if word.strip()]
                cases = [c for c in cases if not words or any(word in c.name.lower() for word in words)]
                if args.mode is not None:
                    cases = [replace(case, modes=(args.mode,) * 4) for case in cases]
                fine = gpu_equality.run(cases, Path(folder), report, args.device, args.slots, args.budget)
        finally:
            close_launcher()
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
