"""The parts of a case of `gpu.py sharded`, with the servers and the trainer of that case; `gpu_sharded` calls them."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_measure as measure
from gpu_load import Load
from gpu_scenes import Scene, models_of
from gpu_servers import Report, Server, difference, end_of, fingerprint_difference, homes
from gpu_trainer import Trainer, median_of
from harness.generation import completions


class Parts:
    """The parts."""

    def __init__(
        self, args: argparse.Namespace, scene: Scene, paths: dict[tuple[str, int], Path],
        started: dict[tuple[str, str, int], Server], trainer: Trainer, report: Report,
    ) -> None:  # fmt: skip
        self.args, self.scene, self.layouts, self.paths = args, scene, scene.layouts, paths
        self.started, self.trainer, self.report = started, trainer, report
        self._made_large = False
        self._nbytes = 0
        self._whole: dict[str, float] = {}

    def equal(self) -> bool:
        """Are pushed servers equal to fresh ones, and did each rank send its share of what the plan says?"""
        fine = True
        for model in models_of(self.args, self.scene):
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
                self.report.record(
                    part="equal",
                    case=self.scene.text,
                    model=model,
                    layout=str(layout),
                    mode=mode,
                    rows=rows,
                    server=server,
                )
        if any(want[1][i] == want[2][i] for i in want[1]):
            self.report(f"{model}: A AND B GENERATE THE SAME")
            fine = False
        self.report(f"{model:6} homes {homes(urls[0])}")
        return fine

    def _large(self) -> list[str]:
        """The URLs of the large servers, after the trainer has made its model."""
        urls = [self.started["large", self.scene.large, i].url for i, _ in enumerate(self.layouts)]
        if not self._made_large:
            held = self.trainer.all("random", config=str(self.paths[self.scene.large, 0]))
            self._nbytes = held[0]["whole_nbytes"]
            self._made_large = True
            self.report(f"\nlarge {self.scene.large} model {self._nbytes / 1e9:.2f} GB, ranks hold "
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
        for mode, rates in found.items():
            self._whole[mode] = rates["whole"]
            for name, seconds in copies.items():
                self.report(f"{mode:9} wire rate / rate of {name} copies: {seconds / rates['wire']:.3f}")
        best = copies.get("crossed", float("nan")) / min(rates["wire"] for rates in found.values())
        self.report.record(part="speed", case=self.scene.text, nbytes=self._nbytes, found=found, copies=copies)
        return _goal(self.report, "wire rate / rate of crossed copies", best, 0.85)

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
                stream.__exit__()  # waits for its last request
        ends = [push["begin"] for push in pushes[1:]] + [pushes[-1]["end"] + 1]
        gaps = [
            max((gap for s in streams if (gap := s.longest(push["begin"], end)) == gap), default=0.0)
            for push, end in zip(pushes, ends, strict=True)
        ]
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
            targets = [
                [self._device(rank, layout.gpus[(rank + shift) % len(layout.gpus)]) for layout in self.layouts]
                for rank in range(ranks)
            ]
            arguments = [{"nbytes": self._nbytes // ranks, "targets": some} for some in targets]
            try:
                seconds[name] = max(self.trainer.each("copies", arguments))
                rate = self._nbytes * len(self.layouts) / 1e9 / seconds[name]
                ways = zip(self.trainer.devices, targets, strict=True)
                where = ", ".join(f"{device}->{'+'.join(some)}" for device, some in ways)
                self.report(f"{name} copies at once ({where}): {seconds[name] * 1e3:.1f} ms, {rate:.0f} GB/s")
            except Exception as error:  # noqa: BLE001 - the rest of the table stands without them
                self.report(f"{name} copies: FAILED", end_of(error))
        return seconds

    def _device(self, rank: int, gpu: int) -> str:
        return "cpu" if self.args.device == "cpu" else self.trainer.seen_by(rank, f"cuda:{gpu}")

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
            self.report.record(part="fan", case=self.scene.text, mode=mode, seconds=seconds)
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
                self.report.record(
                    part="load", case=self.scene.text, mode=mode, idle=idle, rate=rate, each_s=each, failed=len(failed)
                )
        finally:
            for load in loads:
                load.stop()
        for load in loads:
            fine &= load.versions_told(self.report)
        return fine

    def own(self) -> bool:
        """vLLM's own engine on the same servers. Last, because a broken process group breaks the trainer."""
        if self.args.device == "cpu" or self.scene.shares_gpus or self.scene.large != "dense":
            self.report("vLLM's own nccl: not tried; its ranks need a GPU each, and checkpoint names")
            return True
        urls = self._large()
        n_workers = sum(len(layout.gpus) for layout in self.layouts)
        seconds = self.trainer.all("own_engine", timeout_s=150, servers=urls, n_workers=n_workers, times=4)[0]
        own = statistics.median(seconds[1:])
        self.report(f"vLLM's own nccl, gathered by FSDP2 and sent by rank 0: whole push {own * 1e3:.1f} ms")
        self.report.record(part="own", case=self.scene.text, own=own, whole=self._whole)
        fine = True
        for mode, whole in self._whole.items():
            fine &= _goal(self.report, f"vLLM's own nccl / whole ({mode})", own / whole, 3.0)
        return fine


def shares(ranks: list[dict[str, Any]]) -> str:
    """What each rank sent, and its part of the whole."""
    total = sum(rank["nbytes"] for rank in ranks) or 1
    return ", ".join(f"{rank['nbytes'] / 1e6:.2f} MB ({rank['nbytes'] / total:.1%})" for rank in ranks)


def _goal(report: Callable[..., None], name: str, value: float, goal: float) -> bool:
    met = value >= goal
    report(f"goal  {name:44} {value:9.3f}  at least {goal}  {'met' if met else 'MISSED'}")
    return met
