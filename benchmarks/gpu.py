"""Fidelity and speed on NVIDIA GPUs, with real vLLM servers. Prints tables; exits 1 when something is not equal.

    python benchmarks/gpu.py fidelity  # dense and MoE, bf16 and online FP8, CUDA graphs captured: equal to fresh?
    python benchmarks/gpu.py speed     # a model of 16 GB: wire, pause and whole push against device copies

Both start `vllm serve` as a user does. Times are the median of the pushes after the first; rates are bytes of the
model over seconds. Needs vLLM (GPU build), nixl and transformers; writes its checkpoints to a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent))

import httpx
import torch

from harness.checkpoints import read_weights, write_checkpoint
from harness.generation import Completion, completions
from harness.server import TOKEN, EngineOptions, Server, close_launcher

PASSED_ON = {
    name: value
    for name, value in os.environ.items()
    if name.startswith(("VLLM_USE", "VLLM_ATTENTION", "UCX_", "NCCL_", "CUDA_VISIBLE", "PYTHONPATH"))
}


def server(model: Path, *args: str, plugin: bool = True, eager: bool = False, **env: str) -> Server:
    """A server as a user starts it, compiled and with CUDA graphs unless ``eager``."""
    options = EngineOptions(
        eager=eager,
        launch="exec",
        args=("--gpu-memory-utilization", "0.05", "--compilation-config", '{"cudagraph_capture_sizes":[1,2,4]}',
              "--no-enable-prefix-caching", *args),
    )  # fmt: skip
    return Server(model, options, plugin=plugin, grant_amx=False, env=PASSED_ON | env, start_timeout_s=420)


# Fidelity

CASES = [
    ("dense bf16", "qwen3-wide", ()),
    ("MoE bf16", "qwen3-moe-wide", ()),
    ("dense online FP8", "qwen3-wide", ("--quantization", "fp8")),
    ("MoE online FP8", "qwen3-moe-wide", ("--quantization", "fp8")),
]


def difference(found: Sequence[Completion], fresh: Sequence[Sequence[Completion]]) -> str:
    """"equal" to one of the fresh engines (two of them may differ: that is no push's fault), or how far from the first:
    prompts with other tokens, and the largest difference of a logprob before that."""
    if found in fresh:
        return "equal"
    worst, other = 0.0, 0
    for f, w in zip(found, fresh[0], strict=True):
        same = next((i for i, (x, y) in enumerate(zip(f.tokens, w.tokens, strict=True)) if x != y), len(f.tokens))
        other += same < len(f.tokens)
        worst = max([worst, *(abs(x - y) for x, y in zip(f.logprobs[:same], w.logprobs[:same], strict=True))])
    return f"DIFFERS(other tokens in {other} of {len(found)}, logprobs by {worst:.2g})"


def start_all(wanted: dict[tuple[str, str], Server]) -> dict[tuple[str, str], Server]:
    """Start the servers together; says which did not start, and why."""
    begin = time.monotonic()
    started = {}
    with ThreadPoolExecutor(len(wanted)) as pool:
        jobs = {key: pool.submit(made.start) for key, made in wanted.items()}
        for key, job in jobs.items():
            if error := job.exception():
                lines = [line for line in str(error).splitlines() if "EngineCore" in line]
                print("did not start:", key, "\n".join(lines[-25:]), flush=True)
            else:
                started[key] = job.result()
    print(f"{len(started)} of {len(wanted)} servers in {time.monotonic() - begin:.0f} s", flush=True)
    return started


def fidelity(folder: Path) -> bool:
    """Push B, A, B into a server on A in both modes; compare with fresh servers on B, with and without the plugin."""
    from trainer_client import WeightClient

    paths = {(m, s): write_checkpoint(folder / f"{m}-{s}", m, s) for m in {c[1] for c in CASES} for s in (1, 2)}
    roles = {"pushed": (1, True), "fresh": (2, True), "bare": (2, False)}
    wanted = {
        (name, role): server(paths[model, seed], *args, plugin=plugin)
        for name, model, args in CASES
        for role, (seed, plugin) in roles.items()
    }
    started = start_all(wanted)
    fine = len(started) == len(wanted)
    for name, model, _ in CASES:
        if any((name, role) not in started for role in roles):
            continue
        pushed = started[name, "pushed"]
        try:
            for role in roles:  # the first requests of an engine compile kernels
                completions(started[name, role].url)
            fresh = [completions(started[name, role].url) for role in ("fresh", "bare")]
            want = {2: fresh, 1: [completions(pushed.url)]}
            changed = want[1][0] not in fresh
            rows = {"same engine twice": difference(completions(pushed.url), want[1])}
            print(f"{name:16} two fresh engines: {difference(fresh[0], fresh[1:])}")
            with WeightClient([pushed.url], token=TOKEN) as client:
                for n, (seed, mode) in enumerate(((2, "shadow"), (1, "in_place"), (2, "in_place"), (1, "shadow"))):
                    weights = {k: t.cuda() for k, t in read_weights(paths[model, seed]).items()}
                    client.push_weights(weights, mode=mode)  # type: ignore[arg-type]
                    rows[f"push {n + 1} {mode}"] = difference(completions(pushed.url), want[seed])
            summary = httpx.get(
                f"{pushed.url}/nixl/v1/plan", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60
            ).json()["workers"][0]
            reasons = sorted({d["reason"] for d in summary["destinations"] if d["home"] != "live"})
            print(f"{name:16} {'changed' if changed else 'NOT CHANGED'}; homes {summary['nbytes_by_home']} {reasons}")
            for what, found in rows.items():
                print(f"{'':16} {what:20} {found}", flush=True)
            fine &= changed and set(rows.values()) == {"equal"}
        except Exception as error:  # noqa: BLE001 - the other cases are worth their table rows
            print(f"{name:16} FAILED {type(error).__name__}: {str(error)[:1500]}\n{pushed.log_tail(8)}", flush=True)
            fine = False
    for made in started.values():
        made.kill()
    return fine


# Speed


def write_config(folder: Path, layers: int) -> Path:
    """Configuration of a dense model of about 0.45 GB a layer, and a tokenizer; no weights."""
    import transformers as tf

    from harness.checkpoints import _write_tokenizer

    config = tf.Qwen3Config(
        vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096,
        tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def trainer_weights(folder: Path, device: str) -> dict[str, torch.Tensor]:
    """Random weights of the model, with their checkpoint names, on a GPU."""
    import transformers as tf

    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(tf.AutoConfig.from_pretrained(folder))
    return {
        name: (torch.randn(t.shape, dtype=torch.bfloat16, device=device) * 0.02)
        for name, t in model.state_dict().items()
    }


TARGET = """
import sys, torch, base64
from vllm_nixl_plugin.agent import NixlAgent
from vllm_nixl_plugin.fabric import Region
nbytes, device = int(sys.argv[1]), int(sys.argv[2])
memory = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
agent = NixlAgent("raw-target")
agent.register([Region.of(memory)])
print(memory.data_ptr(), base64.b64encode(agent.metadata()).decode(), flush=True)
sys.stdin.read()
"""


def raw_write_s(nbytes: int, source: torch.Tensor, target_device: int) -> float:
    """Seconds of one NIXL WRITE of so many bytes to another process, after a first one."""
    import base64

    import numpy as np

    from vllm_nixl_plugin.agent import NixlAgent
    from vllm_nixl_plugin.fabric import Descriptors, Region

    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", TARGET, str(nbytes), str(target_device)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert process.stdout
    assert process.stdin
    address, metadata = process.stdout.readline().split()
    part = 256 << 20
    starts = np.arange(0, nbytes, part, dtype=np.int64)
    sizes = np.minimum(part, nbytes - starts)
    with NixlAgent("raw-source") as agent:
        agent.register([Region.of(source)])
        remote = agent.connect(base64.b64decode(metadata))
        write = agent.prepare_write(
            remote,
            Descriptors(source.data_ptr() + starts, sizes, "VRAM", source.device.index or 0),
            Descriptors(int(address) + starts, sizes, "VRAM", target_device),
        )
        seconds = []
        for _ in range(4):
            begin = time.perf_counter()
            write.post(b"x")
            write.wait(60)
            seconds.append(time.perf_counter() - begin)
        write.release()
    process.stdin.close()
    process.wait(30)
    return statistics.median(seconds[1:])


def copy_s(source: torch.Tensor, device: str) -> float:
    """Seconds of a device copy of the tensor to a GPU."""
    target = torch.empty_like(source, device=device)
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


class Stream:
    """A client that streams tokens one by one and notes the longest gap between two of them."""

    def __init__(self, url: str) -> None:
        self.gaps: list[tuple[float, float]] = []
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Stream:
        self._thread.start()
        time.sleep(1)
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        body = {"model": "model", "prompt": [1, 2, 3], "max_tokens": 100, "ignore_eos": True, "stream": True}
        while not self._stop.is_set():
            last = 0.0
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=120) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data:"):
                        now = time.perf_counter()
                        if last:
                            self.gaps.append((now, now - last))
                        last = now

    def longest(self, since: float) -> float:
        return max((gap for at, gap in self.gaps if at >= since), default=float("nan"))


class OwnEngine:
    """vLLM's own weight-transfer engine of the same server, driven as its documentation says: pause, start, update,
    finish, resume. ``backend``: ``ipc`` (trainer on the server's GPU) or ``nccl``."""

    def __init__(self, url: str, backend: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=300)
        self._url, self._backend = url, backend
        self._group: Any = None
        if backend == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
            info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
            with ThreadPoolExecutor(1) as pool:
                joined = pool.submit(self._post, "/init_weight_transfer_engine", {"init_info": info})
                self._group = NCCLWeightTransferEngine.trainer_init(info)
                joined.result()
        else:
            self._post("/init_weight_transfer_engine", {"init_info": {}})

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        answer = self._http.post(path, json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:500]}")

    def push_s(self, weights: dict[str, torch.Tensor]) -> float:
        """Seconds from pause to serving again."""
        begin = time.perf_counter()
        self._post("/pause?mode=keep")
        self._post("/start_weight_update")
        if self._backend == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

            info = {
                "names": list(weights),
                "dtype_names": [str(t.dtype).removeprefix("torch.") for t in weights.values()],
                "shapes": [list(t.shape) for t in weights.values()],
                "packed": True,
            }
            with ThreadPoolExecutor(1) as pool:
                updated = pool.submit(self._post, "/update_weights", {"update_info": info})
                NCCLWeightTransferEngine.trainer_send_weights(
                    iter(weights.items()), {"group": self._group, "packed": True}
                )
                updated.result()
        else:
            from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

            IPCWeightTransferEngine.trainer_send_weights(
                iter(weights.items()), {"send_mode": "http", "url": self._url}
            )
        self._post("/finish_weight_update")
        self._post("/resume")
        return time.perf_counter() - begin


def nccl_broadcast_s(source: torch.Tensor, device: str) -> float:
    """Seconds of an NCCL broadcast of the tensor from its GPU to another."""
    target = torch.empty_like(source, device=device)
    seconds = []
    for _ in range(4):
        begin = time.perf_counter()
        torch.cuda.nccl.broadcast([source, target])
        for gpu in (source.device, target.device):
            torch.cuda.synchronize(gpu)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def measured(client: Any, weights: dict[str, torch.Tensor], url: str, mode: str, repeat: int) -> dict[str, float]:
    """Median seconds by stage of pushes after the first; then the longest gap in a stream of tokens during two more."""
    taken: dict[str, list[float]] = {}
    for number in range(repeat + 1):
        begin = time.perf_counter()
        report = client.push_weights(weights, mode=mode)
        seconds = dict(report.servers[0].seconds) | {"whole": time.perf_counter() - begin}
        if number == 0:
            print(f"{mode} first push:", {k: round(v * 1e3, 1) for k, v in seconds.items()}, "ms", flush=True)
            continue
        for stage, value in seconds.items():
            taken.setdefault(stage, []).append(value)
    answer = httpx.get(f"{url}/nixl/v1/status", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30).json()
    timings = {k: round(v * 1e3, 1) for k, v in answer["last"]["timings"].items()}
    print(f"{mode} server timings:", timings, "ms", flush=True)
    stages = {stage: statistics.median(values) for stage, values in taken.items()}
    with Stream(url) as stream:
        stages["gap_idle"] = stream.longest(0.0)
        begin = time.perf_counter()
        for _ in range(2):
            client.push_weights(weights, mode=mode)
            time.sleep(0.3)
        stages["gap"] = stream.longest(begin)
    return stages


def speed(folder: Path, layers: int, trainer: str, served: int, repeat: int, baseline: str, quantization: str) -> bool:
    from trainer_client import WeightClient

    path = write_config(folder / "large", layers)
    args = ["--load-format", "dummy"]
    args += ["--weight-transfer-config", json.dumps({"backend": baseline})] if baseline else []
    args += ["--quantization", quantization] if quantization else []
    env = {"CUDA_VISIBLE_DEVICES": str(served), "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    device = torch.device(trainer)
    torch.cuda.set_device(device)
    with server(path, *args, **env) as large:
        print(f"server up in {large.start_s:.0f} s", flush=True)
        weights = trainer_weights(path, trainer)
        nbytes = sum(t.nbytes for t in weights.values())
        before = torch.cuda.mem_get_info(served)[0]
        with WeightClient([large.url], token=TOKEN) as client:
            rows = {}
            for mode in ("in_place", "shadow"):
                rows[mode] = measured(client, weights, large.url, mode, repeat)
                rows[mode]["extra_bytes"] = before - torch.cuda.mem_get_info(served)[0]
        own: float | None = None
        try:
            if not baseline:
                raise LookupError("not asked for")
            engine = OwnEngine(large.url, baseline)
            own = statistics.median([engine.push_s(weights) for _ in range(3)][1:])
        except Exception as error:  # noqa: BLE001 - the rest of the table stands without it
            print(f"vLLM's own engine {baseline}: {type(error).__name__}: {str(error)[:800]}", flush=True)
        del weights
        torch.cuda.empty_cache()
        source = torch.empty(nbytes, dtype=torch.uint8, device=trainer)
        target = f"cuda:{served}"
        across = copy_s(source, target)
        local = across if trainer == target else copy_s(source, trainer)
        raw = raw_write_s(nbytes, source, served)
        nccl = None if trainer == target else nccl_broadcast_s(source, target)
    gb = nbytes / 1e9
    card = torch.cuda.get_device_name(0)
    kind = quantization or "bf16"
    print(f"\nmodel {gb:.2f} GB {kind}, trainer {trainer}, server {target}, {card}, torch {torch.__version__}")
    for name, seconds in (("copy between the two", across), ("copy on one device", local), ("raw NIXL WRITE", raw),
                          ("NCCL broadcast", nccl), (f"vLLM's own {baseline}, whole push", own)):  # fmt: skip
        if seconds is not None:
            print(f"{name:28} {seconds * 1e3:9.1f} ms {gb / seconds:8.0f} GB/s")
    for mode, s in rows.items():
        print(f"{mode:10}", "  ".join(f"{k} {v * 1e3:.1f}" for k, v in s.items() if k != "extra_bytes"), "ms")
        ratios = {
            "wire rate / copy rate": across / s["wire"],
            "wire rate / raw WRITE rate": raw / s["wire"],
            "whole / wire": s["whole"] / s["wire"],
            "(pause + install + resume) / local copy": (s["pause"] + s["install"] + s["resume"]) / local,
            "extra device bytes / model": s["extra_bytes"] / nbytes,
        }
        if own is not None:
            ratios[f"vLLM's own {baseline} / whole"] = own / s["whole"]
        print(f"{'':10}", "  ".join(f"{k} {v:.3f}" for k, v in ratios.items()))
    print(json.dumps({"nbytes": nbytes, "copy_s": across, "local_copy_s": local, "raw_s": raw, "nccl_s": nccl,
                      "own_s": own, "rows": rows}), flush=True)  # fmt: skip
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["fidelity", "speed"])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--trainer", default="cuda:0", help="device of the trainer's weights")
    parser.add_argument("--server-gpu", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--baseline", default="", help="vLLM's own engine to compare with: ipc (needs ray) or nccl")
    parser.add_argument("--quantization", default="", help="fp8: the server quantizes online")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            if args.what == "fidelity":
                fine = fidelity(Path(folder))
            else:
                fine = speed(
                    Path(folder), args.layers, args.trainer, args.server_gpu, args.repeat, args.baseline,
                    args.quantization,
                )  # fmt: skip
        finally:
            close_launcher()
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
