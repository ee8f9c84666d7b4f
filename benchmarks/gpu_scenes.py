"""Cases of `gpu.py sharded`: ranks of a trainer, servers, how both are spread over GPUs; `gpu_sharded` has the words.

`Scene.parse` reads a case, `servers_of` makes the servers that its parts need, with the checkpoints they start from.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_measure as measure
from gpu_equality import Case, write
from gpu_servers import Server, server

PARTS = ("equal", "speed", "fan", "load", "own")
Key = tuple[int, str, str, int]
"""Of a server: the number of its case; "pushed", "fresh" or "large"; the model; the number of its layout."""


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


@dataclass(frozen=True)
class Scene:
    """One case; `parse` says how it is written."""

    text: str
    ranks: tuple[int, ...]
    layouts: tuple[Layout, ...]
    parts: tuple[str, ...]
    large: str

    @classmethod
    def parse(cls, text: str) -> Scene:
        """``RANKS > SERVERS [PARTS] [dense|moe]``."""
        ranks, _, rest = text.partition(">")
        servers, *more = rest.split()
        parts = next((word.split(",") for word in more if word not in ("dense", "moe")), PARTS)
        if unknown := set(parts) - set(PARTS):
            raise SystemExit(f"case {text!r}: no such part: {unknown}")
        large = "moe" if "moe" in more else "dense"
        return cls(text, tuple(int(gpu) for gpu in ranks.split(",")), tuple(Layout.parse(servers)),
                   tuple(part for part in PARTS if part in parts), large)  # fmt: skip

    @property
    def shares_gpus(self) -> bool:
        """Whether a rank and a server are on one GPU."""
        return bool({gpu for layout in self.layouts for gpu in layout.gpus} & set(self.ranks))

    def devices(self, device: str) -> list[str]:
        """Those of the ranks."""
        return ["cpu" if device == "cpu" else f"cuda:{gpu}" for gpu in self.ranks]


def servers_of(
    args: argparse.Namespace, number: int, scene: Scene, paths: dict[tuple[str, int], Path], folder: Path
) -> dict[Key, Server]:
    wanted: dict[Key, Server] = {}
    if "equal" in scene.parts:
        for model in models_of(args, scene):
            for seed in (1, 2):
                paths[model, seed] = write(folder, Case(model, model), seed, 1024 if args.device == "cuda" else 256)
            forms: set[tuple[int, str]] = set()
            for i, layout in enumerate(scene.layouts):
                for role, seed in (("pushed", 1), ("fresh", 2)):
                    if role == "pushed" or layout.form not in forms:
                        log = folder / f"{number}-{role}-{model}-{i}.log"
                        wanted[number, role, model, i] = layout.server(paths[model, seed], args.device, log)
                forms.add(layout.form)
    if {"speed", "fan", "load", "own"} & set(scene.parts):
        moe = scene.large == "moe"
        if (scene.large, 0) not in paths:
            paths[scene.large, 0] = measure.write_config(
                folder / f"large-{scene.large}", args.moe_layers if moe else args.layers, tiny=args.tiny,
                experts=128 if moe else 0)  # fmt: skip
        more = ["--load-format", "dummy", "--max-num-seqs", "16"]
        more += ["--enable-scale-out"] if args.device == "cpu" else ["--kv-cache-memory-bytes", str(2 << 30)]
        if "own" in scene.parts and args.device == "cuda":
            more += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
        for i, layout in enumerate(scene.layouts):
            wanted[number, "large", scene.large, i] = layout.server(
                paths[scene.large, 0], args.device, folder / f"{number}-large-{i}.log", *more, memory=0.05,
                graphs=(1, 2, 4, 8, 16))  # fmt: skip
    return wanted


def models_of(args: argparse.Namespace, scene: Scene) -> list[str]:
    """Of part equal."""
    parallel = any("ep" in layout.flags or "dp" in layout.flags for layout in scene.layouts)
    return (args.models or ("moe" if parallel else "dense,moe")).split(",")
