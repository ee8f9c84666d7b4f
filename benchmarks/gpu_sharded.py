"""A trainer of several ranks (FSDP2), one per GPU, and servers on the same GPUs or others.

    python benchmarks/gpu.py sharded "0,1 > 2,3"                     # one server, tensor parallel on two GPUs
    python benchmarks/gpu.py sharded "0,1 > 2;3" "0 > 1 speed,own"   # two servers of one GPU each; then another case
    python benchmarks/gpu.py sharded "0,1 > 2,3:ep equal moe"        # expert parallel; also 2,3:dp and 2,3:dp+ep

A case is GPUs of ranks > GPUs of servers, then its parts (all by default) and the kind of its large model (dense or
moe). Parts: ``equal`` (small models: tokens, logprobs and fingerprints against fresh servers, bytes against the plan,
the share of each rank), ``speed`` (a large model: stages, rates beside simultaneous copies of the same bytes, gaps in a
stream of tokens), ``fan`` (all servers against the first alone), ``load`` (pushes under requests: what they cost, and
whether outputs tell versions) and ``own`` (vLLM's own ``nccl`` engine). The servers and trainers of all cases start
together; `run` does the cases in turn.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gpu_parts import Parts
from gpu_scenes import Key, Scene, servers_of
from gpu_servers import Report, Server, end_of, start_all
from gpu_trainer import Trainer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `gpu.py sharded`."""
    parser.add_argument("cases", nargs="+", help="see gpu_sharded.py")
    parser.add_argument(
        "--models", default="", help="of part equal: dense, moe; default: both if tensor parallel, else moe"
    )
    parser.add_argument("--layers", type=int, default=36, help="of a large dense model: 0.39 GB each, and 2.5 GB")
    parser.add_argument("--moe-layers", type=int, default=13, help="of a large MoE: 1.2 GB each, and 1.2 GB")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--pushes", type=int, default=20, help="of part load")
    parser.add_argument("--own-first", action="store_true", help="each rank sees its own GPU as number 0")
    parser.add_argument("--tiny", action="store_true", help="large models are tiny, to try the benchmark out")


def run(args: argparse.Namespace, folder: Path, report: Report) -> bool:
    """False when something is not equal, a goal is missed, or a part could not be done."""
    scenes = [Scene.parse(text) for text in args.cases]
    paths: dict[tuple[str, int], Path] = {}
    wanted: dict[Key, Server] = {}
    for number, scene in enumerate(scenes):
        wanted |= servers_of(args, number, scene, paths, folder)
    trainers: list[Trainer] = []
    started: dict[Key, Server] = {}
    fine = True
    try:
        for number, scene in enumerate(scenes):
            log = folder / f"trainer-{number}.log"
            trainers.append(Trainer(scene.devices(args.device), log, own_first=args.own_first))
        started = start_all(wanted, report)
        for number, scene in enumerate(scenes):
            ours = {key[1:]: made for key, made in started.items() if key[0] == number}
            report(f"\n=== {scene.text}: {len(scene.ranks)} ranks (FSDP2); " + "; ".join(map(str, scene.layouts)))
            try:
                with trainers[number]:
                    fine &= _one(args, scene, paths, ours, trainers[number], report)
            except Exception as error:  # noqa: BLE001 - the other cases are worth their tables
                report(f"{scene.text}: FAILED", end_of(error, 12))
                fine = False
            report.keep_log(f"trainer {scene.text}", folder / f"trainer-{number}.log", 20_000)
            for made in ours.values():
                made.kill()
    finally:
        for trainer in trainers:
            trainer.close()
        for made in started.values():
            made.kill()
    return fine and len(started) == len(wanted)


def _one(
    args: argparse.Namespace, scene: Scene, paths: dict[tuple[str, int], Path],
    started: dict[tuple[str, str, int], Server], trainer: Trainer, report: Report,
) -> bool:  # fmt: skip
    trainer.wait()
    todo = Parts(args, scene, paths, started, trainer, report)
    fine = True
    for part in scene.parts:
        try:
            fine &= getattr(todo, part)()
        except Exception as error:  # noqa: BLE001 - the other parts are worth their tables
            report(f"part {part}: FAILED", end_of(error, 12))
            for key, made in started.items():
                report.keep_log(f"{scene.text} {part} {key}", made.log, 20_000)
            fine = False
    return fine
