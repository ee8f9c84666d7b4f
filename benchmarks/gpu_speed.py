"""How fast is a push, and what bounds it? One large model, each figure beside what the hardware does with its bytes.

For each kind of quantization asked for ("none" is bf16 in the server too) a server is started; then pushes in both
modes are timed by stage, streams of tokens watched during some, device memory compared, and vLLM's own weight-transfer
engine timed on the same server; last, copies of the same bytes. `gpu.py speed` calls `run`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gpu_measure as measure
from gpu_servers import TOKEN, Report, Server, end_of, get, homes, server, start_all
from trainer_client import WeightClient

GOALS = {
    "wire rate / copy rate": (0.90, "at least"),
    "in-place whole - 1.25 x wire, ms": (30.0, "at most"),
    "shadow pause - 1.5 x local copy, ms": (10.0, "at most"),
    "in-place extra memory / model": (0.01, "at most"),
    "vLLM's own / whole": (1.0, "at least"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `gpu.py speed`."""
    parser.add_argument("--layers", type=int, default=36, help="0.39 GB each, and 2.5 GB")
    parser.add_argument("--trainer", default="cuda:0", help="device of the trainer's weights")
    parser.add_argument("--server-gpu", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--baseline", default="", help="vLLM's own engine to compare with: ipc or nccl")
    parser.add_argument("--quantization", default="none", help="of the server, comma-separated: none, fp8 (online)")
    parser.add_argument("--tiny", action="store_true", help="a model of some MB, to try the benchmark out")


def run(args: argparse.Namespace, folder: Path, report: Report) -> bool:
    """False when a goal is missed or something could not be measured."""
    cuda = args.device == "cuda"
    trainer = args.trainer if cuda else "cpu"
    target = f"cuda:{args.server_gpu}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(trainer)
    path = measure.write_config(folder / "large", args.layers, tiny=args.tiny)
    kinds = args.quantization.split(",")
    started = start_all({kind: _server(args, path, kind, folder / f"{kind}.log") for kind in kinds}, report)
    fine = len(started) == len(kinds)
    try:
        weights = trainer_weights(path, trainer)
        nbytes = sum(t.nbytes for t in weights.values())
        seconds = _floor(nbytes, trainer, target, report)
        for kind in kinds:
            if kind in started:
                try:
                    found = _pushes(args, started[kind], weights, report)
                    report(f"\nmodel {nbytes / 1e9:.2f} GB, server {kind} on {target}, trainer on {trainer}")
                    fine &= _table(found, seconds, nbytes, args.baseline, quantized=kind != "none", report=report)
                    report.record(what="speed", kind=kind, nbytes=nbytes, copies=seconds, found=found)
                except Exception as error:  # noqa: BLE001 - the other servers are worth their tables
                    report(f"{kind}: FAILED", end_of(error))
                    report.keep_log(kind, started[kind].log)
                    fine = False
    finally:
        for made in started.values():
            made.kill()
    return fine


def _server(args: argparse.Namespace, path: Path, kind: str, log: Path) -> Server:
    more = ["--load-format", "dummy"]
    more += ["--weight-transfer-config", json.dumps({"backend": args.baseline})] if args.baseline else []
    more += ["--quantization", kind] if kind != "none" else []
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    if args.device == "cuda":
        env["CUDA_VISIBLE_DEVICES"] = str(args.server_gpu)
    if args.baseline == "ipc" and (stand_in := measure.stand_in_for_ray()):
        env["PYTHONPATH"] = f"{measure.python_path()}:{stand_in}"
    return server(path, *more, device=args.device, memory=0.05, eager=args.device == "cpu", log=log, **env)


def trainer_weights(folder: Path, device: str) -> dict[str, torch.Tensor]:
    """Random weights of the model, with their checkpoint names."""
    import transformers as tf

    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(tf.AutoConfig.from_pretrained(folder))
    return {
        name: torch.empty(t.shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
        for name, t in model.state_dict().items()
    }


def _floor(nbytes: int, trainer: str, target: str, report: Report) -> dict[str, float]:
    """Seconds that copies of the model's bytes take."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=trainer)
    ways: list[tuple[str, Callable[..., float], tuple[Any, ...]]] = [
        ("copy between the two", measure.copy_s, (source, target)),
        ("copy on one device", measure.copy_s, (source, trainer)),
        ("raw NIXL WRITE", measure.raw_write_s, (source, target)),
    ]
    if trainer != target:
        ways.append(("NCCL broadcast", measure.nccl_broadcast_s, (source, target)))
    seconds = {}
    for name, way, given in ways:
        try:
            seconds[name] = way(*given)
            report(f"{name:28} {seconds[name] * 1e3:9.1f} ms {nbytes / 1e9 / seconds[name]:8.0f} GB/s")
        except Exception as error:  # noqa: BLE001 - the rest of the table stands without it
            report(f"{name}: FAILED", end_of(error))
    del source, ways, given
    gc.collect()
    if trainer != "cpu":
        torch.cuda.empty_cache()
    return seconds


def _free(args: argparse.Namespace) -> int:
    return int(torch.cuda.mem_get_info(args.server_gpu)[0]) if args.device == "cuda" else 0


def _reserved(args: argparse.Namespace) -> int:
    return int(torch.cuda.memory_reserved(args.trainer)) if args.device == "cuda" else 0


def _pushes(args: argparse.Namespace, made: Server, weights: dict[str, torch.Tensor], report: Report) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with measure.Stream(made.url):  # what the engine itself takes for its first requests
        time.sleep(2)
    before, own = _free(args), _reserved(args)
    with WeightClient([made.url], token=TOKEN, timeout_s=120) as client:
        for mode in ("in_place", "shadow"):
            found[mode] = measured(client, weights, made.url, mode, args.repeat, report)
            found[mode]["extra_bytes"] = before - _free(args)
            more, ours = found[mode]["extra_bytes"] / 1e6, (_reserved(args) - own) / 1e6
            report(f"{mode}: {more:.0f} MB more are used on the device, {ours:.0f} of them by the trainer's torch")
        found["homes"] = homes(made.url)
    if args.baseline:
        try:
            engine = measure.OwnEngine([made.url], args.baseline)
            whole = measure.Weights.of(weights)
            found["own"] = statistics.median([engine.push_s(whole) for _ in range(4)][1:])
            with measure.Stream(made.url) as stream:
                engine.push_s(whole)
                begin = time.perf_counter()
                engine.push_s(whole)
                time.sleep(0.3)
                found["own_gap"] = stream.longest(begin)
        except Exception as error:  # noqa: BLE001 - the rest of the table stands without it
            report(f"vLLM's own engine {args.baseline}: FAILED", end_of(error))
            report.keep_log(f"own {args.baseline}", made.log)
    return found


def measured(client: Any, weights: Any, url: str, mode: str, repeat: int, report: Report) -> dict[str, float]:
    """Median seconds by stage of pushes after the first; then gaps in a stream of tokens, without and with pushes."""
    taken: dict[str, list[float]] = {}
    for number in range(repeat + 1):
        begin = time.perf_counter()
        pushed = client.push_weights(weights, mode=mode)
        seconds = dict(pushed.servers[0].seconds) | {"whole": time.perf_counter() - begin}
        if number == 0:
            report(f"{mode} first push: {milliseconds(seconds)}")
            continue
        for stage, value in seconds.items():
            taken.setdefault(stage, []).append(value)
    report(f"{mode} server's timings: {milliseconds(get(url, '/status')['last']['timings'])}")
    stages = {stage: statistics.median(values) for stage, values in taken.items()}
    stages["whole_max"] = max(taken["whole"])
    with measure.Stream(url) as stream:
        client.push_weights(weights, mode=mode)  # what the engine recomputes compiles kernels once
        time.sleep(0.5)
        begin = time.perf_counter()
        time.sleep(0.5)
        stages["gap_idle"] = stream.longest(begin)
        gaps = []
        for _ in range(repeat):
            begin = time.perf_counter()
            client.push_weights(weights, mode=mode)
            time.sleep(0.3)
            gaps.append(stream.longest(begin))
        stages |= {"gap": statistics.median(gaps), "gap_max": max(gaps)}
    return stages


def milliseconds(seconds: dict[str, float]) -> str:
    """Stages in a line."""
    return "  ".join(f"{name.removesuffix('_s')} {value * 1e3:.1f}" for name, value in seconds.items()) + "  ms"


def _table(
    found: dict[str, Any], seconds: dict[str, float], nbytes: int, baseline: str, *, quantized: bool, report: Report
) -> bool:
    across, local = (seconds.get(name, float("nan")) for name in ("copy between the two", "copy on one device"))
    raw = seconds.get("raw NIXL WRITE", float("nan"))
    values: dict[str, float] = {}
    for mode in ("in_place", "shadow"):
        s = found[mode]
        report(f"{mode:10} {milliseconds({k: v for k, v in s.items() if k != 'extra_bytes'})}")
        paused = s["pause"] + s["install"] + s["resume"]
        ratios = {
            "wire rate / copy rate": across / s["wire"],
            "(wire + pack) rate / copy rate": across / (s["wire"] + s["pack"]),
            "wire rate / raw WRITE rate": raw / s["wire"],
            "whole / wire": s["whole"] / s["wire"],
            "(pause + install + resume) / local copy": paused / local,
            "extra memory / model": s["extra_bytes"] / nbytes,
        }
        if "own" in found:
            ratios[f"vLLM's own {baseline} / whole"] = found["own"] / s["whole"]
            values[f"vLLM's own / whole ({mode})"] = found["own"] / s["whole"]
        report(f"{'':10} " + "  ".join(f"{k} {v:.3f}" for k, v in ratios.items()))
        values[f"wire rate / copy rate ({mode})"] = across / s["wire"]
        if mode == "in_place" and not quantized:
            values["in-place whole - 1.25 x wire, ms"] = (s["whole"] - 1.25 * s["wire"]) * 1e3
            values["in-place extra memory / model"] = s["extra_bytes"] / nbytes
        if mode == "shadow":
            values["shadow pause - 1.5 x local copy, ms"] = (paused - 1.5 * local) * 1e3
    if "own" in found:
        own, gap = found["own"] * 1e3, found.get("own_gap", float("nan")) * 1e3
        report(f"vLLM's own {baseline}: whole push {own:.1f} ms, longest gap in a stream {gap:.1f} ms")
    report(f"homes {found['homes']}")
    fine = True
    for name, value in values.items():
        goal, side = GOALS[name.partition(" (")[0]]
        met = value >= goal if side == "at least" else value <= goal
        fine &= met
        report(f"goal  {name:44} {value:9.3f}  {side} {goal}  {'met' if met else 'MISSED'}")
    return fine
