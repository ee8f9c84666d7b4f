"""A trainer of several ranks (FSDP2), one per GPU, and servers on the same GPUs or others.

    python benchmarks/gpu.py sharded --trainer 0,1 --servers "2,3"      # one server, tensor parallel on two GPUs
    python benchmarks/gpu.py sharded --trainer 0,1 --servers "2;3"      # two servers of one GPU each
    python benchmarks/gpu.py sharded --trainer 0,1 --servers "2,3:ep"   # expert parallel; also 2,3:dp and 2,3:dp+ep

Parts: ``equal`` (small models: tokens, logprobs and fingerprints against fresh servers, bytes against the plan, the
share of each rank), ``speed`` (a large model: stages, rates beside simultaneous copies of the same bytes, vLLM's own
``nccl`` engine, gaps in a stream of tokens), ``fan`` (all servers against the first alone) and ``load`` (pushes under
requests: what they cost, and whether outputs tell versions). All servers start together; `run` does the parts in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_measure as measure
from gpu_equality import Case, write
from gpu_load import Load
from gpu_servers import Report, Server, difference, end_of, fingerprint_difference, homes, server, start_all
from gpu_trainer import Trainer, median_of
from harness.generation import completions

PARTS = ("equal", "speed", "fan", "load")
Key = tuple[str, str, int]
"""Of a server: "pushed", "fresh" or "large"; the model; the number of its layout."""


@dataclass(frozen=True)
class Layout:
    """One server: its GPUs, and how it is parallel: "" for tensor parallel, "ep", "dp", "dp+ep"."""

    gpus: tuple[int, ...]
    flags: str = ""

    @classmethod
    def parse(cls, text: str) -> list[Layout]:
        """Those of a ``--servers``."""
        parts = [one.partition(":") for one in text.split(";")]
        return [cls(tuple(int(gpu) for gpu in gpus.split(",")), flags) for gpus, _, flags in parts]

    @property
    def form(self) -> tuple[int, str]:
        """What decides the numbers that an engine produces."""
        return len(self.gpus), self.flags

    def __str__(self) -> str:
        kind = "DP" if "dp" in self.flags else "TP"
        return f"{kind} {len(self.gpus)}{' EP' if 'ep' in self.flags else ''} on {','.join(map(str, self.gpus))}"

    def server(self, model: Path, device: str, log: Path, *args: str, **more: Any) -> Server:
        """A server of this layout."""
        parallel = {"data_parallel" if "dp" in self.flags else "tensor_parallel": len(self.gpus)}
        args += ("--enable-expert-parallel",) if "ep" in self.flags else ()
        env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        if device == "cuda":
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
        return server(model, *args, device=device, eager=device == "cpu", log=log, **parallel, **more, **env)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `gpu.py sharded`."""
    parser.add_argument("--trainer", default="0,1", help="GPUs of the ranks")
    parser.add_argument("--servers", default="2,3", help="GPUs of the servers: see above")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--models", default="dense,moe", help="of part equal")
    parser.add_argument("--large", default="dense", help="of the other parts: dense or moe")
    parser.add_argument("--layers", type=int, default=36, help="of a large model: 0.39 GB each if dense, else 1.2 GB")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--pushes", type=int, default=20, help="of part load")
    parser.add_argument("--tiny", action="store_true", help="the large model is tiny, to try the benchmark out")


def run(args: argparse.Namespace, folder: Path, report: Report) -> bool:
    """False when something is not equal, a goal is missed, or a part could not be done."""
    layouts = Layout.parse(args.servers)
    parts = [part for part in PARTS if part in args.parts.split(",")]
    report(f"trainer: {len(args.trainer.split(','))} ranks (FSDP2) on {args.trainer}; servers: "
           + "; ".join(map(str, layouts)))  # fmt: skip
    devices = ["cpu" if args.device == "cpu" else f"cuda:{gpu}" for gpu in args.trainer.split(",")]
    wanted, paths = _servers(args, layouts, parts, folder)
    started: dict[Key, Server] = {}
    fine = True
    try:
        with Trainer(devices, folder / "trainer.log") as trainer:
            started = start_all(wanted, report)
            todo = _Run(args, layouts, paths, started, trainer, report)
            for part in parts:
                try:
                    fine &= getattr(todo, part)()
                except Exception as error:  # noqa: BLE001 - the other parts are worth their tables
                    report(f"part {part}: FAILED", end_of(error, 12))
                    for key, made in started.items():
                        report.keep_log(f"{part} {key}", made.log, 20_000)
                    fine = False
    finally:
        for made in started.values():
            made.kill()
        report.keep_log("trainer", folder / "trainer.log")
    return fine and len(started) == len(wanted)


def _servers(
    args: argparse.Namespace, layouts: list[Layout], parts: list[str], folder: Path
) -> tuple[dict[Key, Server], dict[tuple[str, int], Path]]:
    wanted: dict[Key, Server] = {}
    paths: dict[tuple[str, int], Path] = {}
    if "equal" in parts:
        for model in args.models.split(","):
            for seed in (1, 2):
                paths[model, seed] = write(folder, Case(model, model), seed, 1024 if args.device == "cuda" else 256)
            forms: set[tuple[int, str]] = set()
            for i, layout in enumerate(layouts):
                for role, seed in (("pushed", 1), ("fresh", 2)):
                    if role == "pushed" or layout.form not in forms:
                        log = folder / f"{role}-{model}-{i}.log"
                        wanted[role, model, i] = layout.server(paths[model, seed], args.device, log)
                forms.add(layout.form)
    if {"speed", "fan", "load"} & set(parts):
        experts = args.experts if args.large == "moe" else 0
        paths["large", 0] = measure.write_config(folder / "large", args.layers, tiny=args.tiny, experts=experts)
        disjoint = not {g for layout in layouts for g in layout.gpus} & {int(gpu) for gpu in args.trainer.split(",")}
        more = ["--load-format", "dummy", "--max-num-seqs", "16"]
        more += ["--enable-scale-out"] if args.device == "cpu" else ["--kv-cache-memory-bytes", str(2 << 30)]
        if disjoint and args.device == "cuda":
            more += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
        for i, layout in enumerate(layouts):
            log = folder / f"large-{i}.log"
            wanted["large", args.large, i] = layout.server(
                paths["large", 0], args.device, log, *more, memory=0.05, graphs=(1, 2, 4, 8, 16)
            )
    return wanted, paths


class _Run:
    """The parts."""

    def __init__(
        self, args: argparse.Namespace, layouts: list[Layout], paths: dict[tuple[str, int], Path],
        started: dict[Key, Server], trainer: Trainer, report: Report
    ) -> None:  # fmt: skip
        self.args, self.layouts, self.paths = args, layouts, paths
        self.started, self.trainer, self.report = started, trainer, report
        self._made_large = False
        self._nbytes = 0

    def equal(self) -> bool:
        """Are pushed servers equal to fresh ones, and did each rank send its share of what the plan says?"""
        fine = True
        for model in self.args.models.split(","):
            try:
                fine &= self._equal(model)
            except Exception as error:  # noqa: BLE001 - the other model is worth its rows
                self.report(f"equal {model}: FAILED", end_of(error, 12))
                for i, _ in enumerate(self.layouts):
                    if ("pushed", model, i) in self.started:
                        self.report.keep_log(f"equal {model} {i}", self.started["pushed", model, i].log)
                fine = False
        return fine

    def _equal(self, model: str) -> bool:
        pushed = {i: self.started["pushed", model, i] for i, _ in enumerate(self.layouts)}
        fresh_of = {layout.form: self.started["fresh", model, i] for i, layout in enumerate(self.layouts)
                    if ("fresh", model, i) in self.started}  # fmt: skip
        tokens = 16 if self.args.device == "cuda" else 4
        want: dict[int, dict[int, Any]] = {1: {}, 2: {}}
        for i, layout in enumerate(self.layouts):
            for made in (pushed[i], fresh_of[layout.form]):
                completions(made.url, n_tokens=tokens)  # the first requests compile kernels
            want[1][i] = [completions(pushed[i].url, n_tokens=tokens)]
            want[2][i] = [completions(fresh_of[layout.form].url, n_tokens=tokens)]
        urls = [made.url for made in pushed.values()]
        fine = True
        for n, (seed, mode) in enumerate(((2, "shadow"), (1, "in_place"), (2, "in_place"), (1, "shadow"))):
            self.trainer.all("load", checkpoint=str(self.paths[model, seed]))
            [done] = self.trainer.all("push", servers=urls, mode=mode)[0]
            for i, layout in enumerate(self.layouts):
                server = done["servers"][i]
                planned = homes(urls[i]).get("planned", 0)
                rows = {
                    "tokens, logprobs": difference(completions(urls[i], n_tokens=tokens), want[seed][i]),
                    "bytes of the plan": "equal" if server["nbytes"] == planned else f"{server['nbytes']} of {planned}",
                }
                if seed == 2:
                    rows["fingerprint"] = fingerprint_difference(urls[i], fresh_of[layout.form].url)
                same = set(rows.values()) == {"equal"}
                fine &= same
                shown = "equal" if same else " ; ".join(f"{k}: {v}" for k, v in rows.items() if v != "equal")
                self.report(f"{model:6} {layout!s:18} push {n + 1} {mode:9} {shares(server['ranks'])} {shown}")
                self.report.record(part="equal", model=model, layout=str(layout), mode=mode, rows=rows, server=server)
        if any(want[1][i] == want[2][i] for i in want[1]):
            self.report(f"{model}: A AND B GENERATE THE SAME")
            fine = False
        self.report(f"{model:6} homes {homes(urls[0])}")
        return fine

    def _large(self) -> list[str]:
        """The URLs of the large servers, after the trainer has made its model."""
        urls = [self.started["large", self.args.large, i].url for i, _ in enumerate(self.layouts)]
        if not self._made_large:
            held = self.trainer.all("random", config=str(self.paths["large", 0]))
            self._nbytes = held[0]["whole_nbytes"]
            self._made_large = True
            self.report(f"\nlarge {self.args.large} model {self._nbytes / 1e9:.2f} GB, ranks hold "
                        + ", ".join(f"{rank['nbytes'] / 1e9:.2f}" for rank in held))  # fmt: skip
        return urls

    def speed(self) -> bool:
        """Stages and rates beside copies of the same bytes, and beside vLLM's own engine."""
        urls = self._large()
        found: dict[str, Any] = {}
        for mode in ("in_place", "shadow"):
            pushes = self.trainer.all("push", servers=urls, mode=mode, times=self.args.repeat + 1)[0]
            self.report(f"{mode:9} first push {pushes[0]['end'] - pushes[0]['begin']:.2f} s")
            found[mode] = self._rates(mode, pushes[1:])
            found[mode] |= self._gaps(mode, urls)
        copies = self._copies()
        fine = True
        own = self._own(urls)
        for mode, rates in found.items():
            for name, seconds in copies.items():
                self.report(f"{mode:9} wire rate / rate of {name} copies: {seconds / rates['wire']:.3f}")
            if own is not None:
                self.report(f"{mode:9} vLLM's own nccl / whole: {own / rates['whole']:.2f}")
        best = copies.get("crossed", float("nan")) / min(rates["wire"] for rates in found.values())
        fine &= _goal(self.report, "wire rate / rate of crossed copies", best, 0.85)
        if own is not None:
            fine &= _goal(self.report, "vLLM's own nccl / whole", own / found["in_place"]["whole"], 3.0)
        large = self.args.large
        self.report.record(part="speed", large=large, nbytes=self._nbytes, found=found, copies=copies, own=own)
        return fine

    def _rates(self, mode: str, pushes: list[dict[str, Any]]) -> dict[str, float]:
        stages = ("begin", "pack", "wire", "prepare", "pause", "install", "resume", "whole")
        rates = {stage: median_of(pushes, stage) for stage in stages}
        last = pushes[-1]
        shown = "  ".join(f"{stage} {seconds * 1e3:.1f}" for stage, seconds in rates.items())
        sent = last["nbytes"] / 1e9
        packed = sum(server["packed_nbytes"] for server in last["servers"]) / 1e9
        planned = sum(homes(server["server"]).get("planned", 0) for server in last["servers"]) / 1e9
        self.report(
            f"{mode:9} {shown}  ms",
            f"{'':9} {sent:.3f} GB sent, {planned:.3f} planned, {packed:.3f} packed; {sent / rates['wire']:.0f} GB/s "
            f"on the wire, {sent / (rates['wire'] + rates['pack']):.0f} with packing; ranks: {shares(last['ranks'])}",
        )
        return rates

    def _gaps(self, mode: str, urls: list[str]) -> dict[str, float]:
        streams = [measure.Stream(url) for url in urls]
        for stream in streams:
            stream.__enter__()
        try:
            self.trainer.all("push", servers=urls, mode=mode)  # what the engine recomputes compiles kernels once
            begin = time.perf_counter()
            time.sleep(1)
            idle = max(stream.longest(begin) for stream in streams)
            pushes = self.trainer.all("push", servers=urls, mode=mode, times=self.args.repeat, every_s=0.6)[0]
        finally:
            for stream in streams:
                stream.__exit__()
        gaps = [max(s.longest(push["begin"], push["end"] + 0.3) for s in streams) for push in pushes]
        errors = [error for stream in streams for error in stream.errors]
        self.report(
            f"{mode:9} longest gap in a stream of tokens: {statistics.median(gaps) * 1e3:.1f} ms (most "
            f"{max(gaps) * 1e3:.1f}), without pushes {idle * 1e3:.1f}; {len(errors)} errors {errors[:1]}"
        )
        return {"gap": statistics.median(gaps), "gap_max": max(gaps), "gap_idle": idle}

    def _copies(self) -> dict[str, float]:
        """Seconds of copies of as many bytes from all ranks at once, each rank an equal part for every server."""
        ranks = len(self.trainer.devices)
        seconds = {}
        for name, shift in (("straight", 0), ("crossed", 1)):
            arguments = [
                {"nbytes": self._nbytes // ranks,
                 "targets": [self._device(layout.gpus[(rank + shift) % len(layout.gpus)]) for layout in self.layouts]}
                for rank in range(ranks)
            ]  # fmt: skip
            try:
                seconds[name] = max(self.trainer.each("copies", arguments))
                rate = self._nbytes * len(self.layouts) / 1e9 / seconds[name]
                where = ", ".join(f"{d}->{'+'.join(a['targets'])}"
                                  for d, a in zip(self.trainer.devices, arguments, strict=True))  # fmt: skip
                self.report(f"{name} copies at once ({where}): {seconds[name] * 1e3:.1f} ms, {rate:.0f} GB/s")
            except Exception as error:  # noqa: BLE001 - the rest of the table stands without them
                self.report(f"{name} copies: FAILED", end_of(error))
        return seconds

    def _device(self, gpu: int) -> str:
        return "cpu" if self.args.device == "cpu" else f"cuda:{gpu}"

    def _own(self, urls: list[str]) -> float | None:
        gpus = {gpu for layout in self.layouts for gpu in layout.gpus}
        if self.args.device == "cpu" or gpus & {int(gpu) for gpu in self.args.trainer.split(",")}:
            self.report("vLLM's own nccl: not possible, its ranks need a GPU each")
            return None
        if self.args.large != "dense":
            self.report("vLLM's own nccl: not tried, the trainer's experts have no checkpoint names")
            return None
        try:
            n_workers = sum(len(layout.gpus) for layout in self.layouts)
            seconds = self.trainer.all("own_engine", servers=urls, n_workers=n_workers, times=4)[0]
            own = statistics.median(seconds[1:])
            self.report(f"vLLM's own nccl, gathered by FSDP2 and sent by rank 0: whole push {own * 1e3:.1f} ms")
            return own
        except Exception as error:  # noqa: BLE001 - the rest of the table stands without it
            self.report("vLLM's own nccl: FAILED", end_of(error, 10))
            return None

    def fan(self) -> bool:
        """All servers at once against the first of them alone."""
        if len(self.layouts) < 2:
            return True
        urls = self._large()
        for mode in ("in_place", "shadow"):
            seconds = {}
            for some in (urls[:1], urls):
                pushes = self.trainer.all("push", servers=some, mode=mode, times=self.args.repeat + 1)[0][1:]
                seconds[len(some)] = (median_of(pushes, "wire"), median_of(pushes, "whole"))
            (wire, whole), (wires, wholes) = seconds[1], seconds[len(urls)]
            self.report(f"fan {mode:9} {len(urls)} servers against one: wire {wires * 1e3:.1f} / {wire * 1e3:.1f} ms, "
                        f"whole {wholes * 1e3:.1f} / {whole * 1e3:.1f} ms = {wholes / whole:.2f}")  # fmt: skip
            self.report.record(part="fan", mode=mode, seconds=seconds)
        return True

    def load(self) -> bool:
        """Pushes while requests run on all servers."""
        urls = self._large()
        self.trainer.all("push", servers=urls, mode="shadow")
        loads = [Load(url, clients=8) for url in urls]
        fine = True
        try:
            time.sleep(3)
            begin = time.perf_counter()
            time.sleep(6)
            idle = sum(load.rate(begin, time.perf_counter()) for load in loads)
            for mode in ("shadow", "in_place"):
                pushes = self.trainer.all(
                    "push", servers=urls, mode=mode, times=self.args.pushes, every_s=0.5, versions=f"{mode}-"
                )[0]
                first, last = pushes[0]["begin"], pushes[-1]["end"]
                rate = sum(load.rate(first, last) for load in loads)
                lost = 1 - rate / idle
                each = lost * (last - first) / len(pushes)
                failed = [error for load in loads for error in load.errors]
                fine &= not failed and all(push["ok"] for push in pushes)
                self.report(
                    f"load {mode:9} {len(pushes)} pushes in {last - first:.1f} s: {rate:.0f} tokens/s, without pushes "
                    f"{idle:.0f}: {lost:.1%} lost, {each * 1e3:.0f} ms a push; whole "
                    f"{median_of(pushes, 'whole') * 1e3:.1f} ms; {len(failed)} requests failed {failed[:1]}"
                )
                self.report.record(part="load", mode=mode, idle=idle, rate=rate, each_s=each, failed=len(failed))
        finally:
            for load in loads:
                load.stop()
        for load in loads:
            fine &= load.versions_told(self.report)
        return fine


def shares(ranks: list[dict[str, Any]]) -> str:
    """What each rank sent, and its part of the whole."""
    total = sum(rank["nbytes"] for rank in ranks) or 1
    return ", ".join(f"{rank['nbytes'] / 1e6:.2f} MB ({rank['nbytes'] / total:.1%})" for rank in ranks)


def _goal(report: Callable[..., None], name: str, value: float, goal: float) -> bool:
    met = value >= goal
    report(f"goal  {name:44} {value:9.3f}  at least {goal}  {'met' if met else 'MISSED'}")
    return met
