"""Real servers for the GPU benchmarks, on GPUs as a user starts them or on a CPU for trying the benchmarks out.

`server` makes one, `start_all` starts several at once and says of each that does not start why; `difference` compares
what two engines generated, and `Report` prints lines as they come and keeps them in a file, so that a run that is cut
off has lost nothing. Used by `gpu_equality`, `gpu_speed` and `gpu_sharded`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import tempfile
import threading
import time
import tomllib
import traceback
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent))

import httpx

from harness.generation import Completion
from harness.server import TOKEN, EngineOptions, Server

ROOT = Path(__file__).parent.parent
K = TypeVar("K", bound=Hashable)

PASSED_ON = ("VLLM_USE", "VLLM_CACHE", "UCX_", "NCCL_", "NVSHMEM_", "TORCH_SYMM", "CUDA_VISIBLE", "OMP_")
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
_plugin_paths: list[str] | None = None


def python_path() -> str:
    """Where servers and trainers import from: as here, and with the entry points of the plugin where it is not
    installed."""
    global _plugin_paths  # noqa: PLW0603 - written once
    if _plugin_paths is None:
        _plugin_paths = [str(ROOT)]
        try:
            importlib.metadata.distribution("vllm-nixl-plugin")
        except importlib.metadata.PackageNotFoundError:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            info = Path(tempfile.mkdtemp(prefix="entry-points-")) / "vllm_nixl_plugin-0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
            (info / "entry_points.txt").write_text("".join(
                f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in points.items())
                for group, points in project["entry-points"].items()))  # fmt: skip
            _plugin_paths.append(str(info.parent))
    return os.pathsep.join([*_plugin_paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def server(
    model: Path,
    *args: str,
    device: str = "cuda",
    plugin: bool = True,
    eager: bool = False,
    memory: float = 0.03,
    log: Path | None = None,
    tensor_parallel: int = 1,
    data_parallel: int = 1,
    graphs: tuple[int, ...] = (1, 2, 4),
    **env: str,
) -> Server:
    """A server on GPUs, as a user starts it, compiled and with CUDA graphs unless ``eager``; or on a CPU.

    ``memory``: the part of the GPU's memory that must be free at the start; the KV cache is 64 MiB in any case;
    ``graphs``: the batches that CUDA graphs are captured for.
    """
    env = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)} | env
    parallel: dict[str, Any] = {"tensor_parallel": tensor_parallel, "data_parallel": data_parallel}
    if device == "cpu":
        return Server(model, EngineOptions(eager=eager, args=args, **parallel), plugin=plugin, env=env, log=log)
    # More threads are of no use to layers of this size, and many servers start at once.
    env = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4", "PYTHONPATH": python_path()} | env
    if not eager:
        args = ("--compilation-config", json.dumps({"cudagraph_capture_sizes": graphs}), *args)
    args = ("--gpu-memory-utilization", str(memory), "--no-enable-prefix-caching", *args)
    options = EngineOptions(eager=eager, launch="exec", args=args, **parallel)
    return Server(model, options, plugin=plugin, grant_amx=False, env=env, log=log, start_timeout_s=360)


def start_all(wanted: dict[K, Server], report: Report, title: str = "") -> dict[K, Server]:
    """Start servers together; the report says, behind the title, which did not start, and why."""
    begin = time.monotonic()
    started, told = {}, [""]
    with ThreadPoolExecutor(len(wanted)) as pool:
        jobs = {key: pool.submit(made.start) for key, made in wanted.items()}
        for key, job in jobs.items():
            if job.exception():
                cause = root_cause(wanted[key].log)
                report(f"{title}did not start: {key}", *(cause if cause[-1:] != told else ["the same"]))
                told = cause[-1:]
                report.keep_log(f"{title}{key}", wanted[key].log)
            else:
                started[key] = job.result()
    report(f"{title}{len(started)} of {len(wanted)} servers in {time.monotonic() - begin:.0f} s")
    return started


def root_cause(log: Path, lines: int = 14) -> list[str]:
    """The lines of a server's output that are most likely to say why it ended: the first traceback's end."""
    text = log.read_text(errors="replace").splitlines() if log.exists() else []
    errors = [
        i for i, line in enumerate(text)
        if re.search(r"\b\w*(Error|Exception|Killed|Refused)\b(:|$)", line) and not re.search(r" (INFO|WARNING) ", line)
    ]  # fmt: skip
    inner = [i for i in errors if re.search(r"EngineCore|Worker|_TP\d|_DP\d|_EP\d", text[i])] or errors
    if not inner:
        return [line[:240] for line in text[-lines:]]
    found = text[max(0, inner[0] - lines + 1) : inner[0] + 1]
    return [re.sub(r"^\(.*?pid=\d+\)\s*(ERROR)?\s*([\d-]+ [\d:]+)?\s*(\[[^\]]*\])?", "", line)[:240] for line in found]


def end_of(error: BaseException, lines: int = 6) -> str:
    """The last lines of an error, with where it was raised."""
    text = "".join(traceback.format_exception(error)[-2:]).strip().splitlines()
    return "\n".join(f"    {line[:300]}" for line in text[-lines:])


def get(url: str, path: str, timeout_s: float = 120) -> Any:
    """The JSON answer of one of the plugin's routes; None where the server does not know it."""
    answer = httpx.get(f"{url}/nixl/v1{path}", headers=AUTHORIZED, timeout=timeout_s)
    if answer.status_code == 404:
        return None
    answer.raise_for_status()
    return answer.json()


def homes(url: str) -> dict[str, int]:
    """Bytes by home of the plan that the server used last, all workers together; ``planned``: what is sent for it."""
    sums: dict[str, int] = {}
    for worker in get(url, "/plan")["workers"]:
        for home, nbytes in (worker["nbytes_by_home"] | {"planned": worker.get("nbytes", 0)}).items():
            sums[home] = sums.get(home, 0) + nbytes
    return sums


def fingerprint_difference(url: str, fresh: str) -> str:
    """Equal, or on which paths the fingerprints of two servers differ."""
    from vllm_nixl_plugin.fingerprint import differences

    found = [get(one, "/fingerprint") for one in (url, fresh)]
    if None in found:
        return "no such route"
    lines = [
        line
        for ours, theirs in zip(found[0]["workers"], found[1]["workers"], strict=True)
        for line in differences(ours["paths"], theirs["paths"])
    ]
    n_paths = sum(len(worker["paths"]) for worker in found[0]["workers"])
    return "equal" if not lines else f"{len(lines)} of {n_paths} paths differ: " + " ; ".join(lines[:3])[:600]


def difference(found: Sequence[Completion], fresh: Sequence[Sequence[Completion]]) -> str:
    """Equal to one of the fresh engines (two of them may differ: that is no push's fault), or how far from the first:
    prompts with other tokens, and the largest difference of a logprob before that."""
    if found in fresh:
        return "equal"
    worst, other = 0.0, 0
    for f, w in zip(found, fresh[0], strict=True):
        same = next((i for i, (x, y) in enumerate(zip(f.tokens, w.tokens, strict=True)) if x != y), len(f.tokens))
        other += same < len(f.tokens)
        worst = max([worst, *(abs(x - y) for x, y in zip(f.logprobs[:same], w.logprobs[:same], strict=True))])
    return f"DIFFERS(other tokens in {other} of {len(found)}, logprobs by {worst:.2g})"


class Report:
    """Prints lines at once, from any thread, and keeps them and the ends of failed servers' logs in a folder."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._begin = time.monotonic()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._begin

    def __call__(self, *lines: str) -> None:
        with self._lock:
            print(*lines, sep="\n", flush=True)
            self._append("report.txt", "\n".join(lines) + "\n")

    def record(self, **values: Any) -> None:
        """One object of results.jsonl."""
        with self._lock:
            self._append("results.jsonl", json.dumps(values) + "\n")

    def keep_log(self, name: str, log: Path, nbytes: int = 60_000) -> None:
        """Keep the end of a server's output in logs.txt."""
        if log.exists():
            with self._lock:
                self._append("logs.txt", f"===== {name}\n{log.read_bytes()[-nbytes:].decode(errors='replace')}\n")

    def _append(self, name: str, text: str) -> None:
        if self._folder is not None:
            with (self._folder / name).open("a") as file:
                file.write(text)
