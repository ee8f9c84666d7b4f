"""What pushes are measured against, and with: device copies, raw NIXL WRITEs, vLLM's own engines, a streaming client.

All take the device of the trainer's tensors, "cuda:0" or "cpu", and work on both but for NCCL and vLLM's own engines.
"""

from __future__ import annotations

import base64
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from gpu_servers import python_path
from harness.checkpoints import _write_tokenizer
from trainer_client.fresh import free_port


def write_config(folder: Path, layers: int, *, tiny: bool = False, experts: int = 0) -> Path:
    """Configuration and tokenizer of a model, no weights: dense of 0.39 GB a layer, or with experts of 1 MB."""
    import transformers as tf

    sizes: dict[str, Any] = {
        "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": layers,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    more = {"num_experts": experts, "num_experts_per_tok": min(8, experts), "moe_intermediate_size": 768}
    if experts:
        sizes |= {"hidden_size": 2048, "num_key_value_heads": 4}
    if tiny:
        sizes |= {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8,
                  "num_key_value_heads": 4, "head_dim": 32}  # fmt: skip
        more |= {"num_experts": min(8, experts), "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    kind = "Qwen3Moe" if experts else "Qwen3"
    config = getattr(tf, f"{kind}Config")(**sizes, **(more if experts else {}), architectures=[f"{kind}ForCausalLM"])
    config.save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def synchronize(device: str | torch.device) -> None:
    """Wait for the device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def median_s(action: Callable[[], None], times: int = 4, before: Callable[[], Any] = lambda: None) -> float:
    """Median seconds of an action, after a first one. ``before``: what comes first each time, and is not counted."""
    seconds = []
    for _ in range(times):
        before()
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def copy_s(source: torch.Tensor, device: str) -> float:
    """Seconds of a device copy of the tensor to a device."""
    target = torch.empty_like(source, device=device)

    def copy() -> None:
        target.copy_(source)
        synchronize(source.device)
        synchronize(device)

    synchronize(source.device)
    return median_s(copy)


def copies_s(pairs: list[tuple[torch.Tensor, str]], before: Callable[[], Any] = lambda: None) -> float:
    """Seconds of copies at the same time, each of a tensor to a device, on streams of their own. ``before``: see
    `median_s`; a barrier there makes copies of several processes simultaneous."""
    targets = [torch.empty_like(source, device=device) for source, device in pairs]
    streams = [torch.cuda.Stream(source.device) if source.is_cuda else None for source, _ in pairs]

    def copy() -> None:
        for (source, _), target, stream in zip(pairs, targets, streams, strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for source, device in pairs:
            synchronize(source.device)
            synchronize(device)

    for source, device in pairs:
        synchronize(source.device)
        synchronize(device)
    return median_s(copy, before=before)


def nccl_broadcast_s(source: torch.Tensor, device: str) -> float:
    """Seconds of an NCCL broadcast of the tensor from its GPU to another."""
    target = torch.empty_like(source, device=device)

    def broadcast() -> None:
        torch.cuda.nccl.broadcast([source, target])
        synchronize(source.device)
        synchronize(device)

    return median_s(broadcast)


TARGET = """
import sys, torch, base64
from vllm_nixl_plugin.agent import NixlAgent
from vllm_nixl_plugin.fabric import Region
memory = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device=sys.argv[2])
agent = NixlAgent("raw-target")
agent.register([Region.of(memory)])
print(memory.data_ptr(), base64.b64encode(agent.metadata()).decode(), flush=True)
sys.stdin.read()
"""


def raw_write_s(source: torch.Tensor, target_device: str) -> float:
    """Seconds of one NIXL WRITE of the tensor's bytes to another process, after a first one."""
    from vllm_nixl_plugin.agent import NixlAgent
    from vllm_nixl_plugin.fabric import Descriptors, Region

    process = subprocess.Popen(
        [sys.executable, "-c", TARGET, str(source.nbytes), target_device],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": python_path()},
    )  # fmt: skip
    assert process.stdin
    assert process.stdout
    address, metadata = process.stdout.readline().split()
    kind = "VRAM" if source.is_cuda else "DRAM"
    part = 256 << 20
    starts = np.arange(0, source.nbytes, part, dtype=np.int64)
    sizes = np.minimum(part, source.nbytes - starts)
    with NixlAgent("raw-source") as agent:
        agent.register([Region.of(source)])
        remote = agent.connect(base64.b64decode(metadata))
        write = agent.prepare_write(
            remote,
            Descriptors(source.data_ptr() + starts, sizes, kind, source.device.index or 0),
            Descriptors(int(address) + starts, sizes, kind, torch.device(target_device).index or 0),
        )

        def post() -> None:
            write.post(b"x")
            write.wait(60)

        seconds = median_s(post)
        write.release()
    process.stdin.close()
    process.wait(30)
    return seconds


class Stream:
    """A client that streams tokens one by one and notes the gaps between them."""

    def __init__(self, url: str) -> None:
        self.gaps: list[tuple[float, float]] = []
        self.n_tokens, self.errors = 0, []  # type: ignore[var-annotated]
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Stream:
        self._thread.start()
        time.sleep(1)
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        body = {"model": "model", "prompt": [1, 2, 3], "max_tokens": 100, "ignore_eos": True, "stream": True}
        while not self._stop.is_set():
            last = 0.0
            try:
                with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=120) as answer:
                    answer.raise_for_status()
                    for line in answer.iter_lines():
                        if line.startswith("data:") and "[DONE]" not in line:
                            now = time.perf_counter()
                            if last:
                                self.gaps.append((now, now - last))
                            last = now
                            self.n_tokens += 1
            except httpx.HTTPError as error:
                self.errors.append(repr(error))
                time.sleep(0.2)

    def longest(self, since: float = 0.0, until: float = float("inf")) -> float:
        """The longest gap, in seconds, that ended between two times of `time.perf_counter`."""
        return max((gap for at, gap in self.gaps if since <= at <= until), default=float("nan"))


@functools.cache
def stand_in_for_ray() -> str:
    """A folder with an empty module of ray's name, for machines without it: vLLM's ``ipc`` engine imports ray, and
    calls nothing of it when it is driven over HTTP. "" where ray is installed."""
    try:
        import ray  # noqa: F401
    except ImportError:
        folder = Path(tempfile.mkdtemp(prefix="ray-"))
        (folder / "ray.py").write_text("")
        sys.modules["ray"] = types.ModuleType("ray")
        return str(folder)
    return ""


class OwnEngine:
    """vLLM's own weight-transfer engine of the same servers, driven as its documentation says: pause, start, update,
    finish, resume. ``backend``: ``ipc`` (trainer on the server's GPU) or ``nccl``, with ``n_workers`` in all servers
    together."""

    def __init__(self, urls: list[str], backend: str, n_workers: int = 1) -> None:
        self._http = [httpx.Client(base_url=url, timeout=300) for url in urls]
        self._urls, self._backend = urls, backend
        self._group: Any = None
        if backend == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

            port = free_port()
            each = n_workers // len(urls)
            infos = [
                {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1 + i * each,
                 "world_size": n_workers + 1}
                for i in range(len(urls))
            ]  # fmt: skip
            with ThreadPoolExecutor(len(urls)) as pool:
                joined = [
                    pool.submit(self._post_one, http, "/init_weight_transfer_engine", {"init_info": info})
                    for http, info in zip(self._http, infos, strict=True)
                ]
                self._group = NCCLWeightTransferEngine.trainer_init(infos[0])
                for job in joined:
                    job.result()
        else:
            self._post("/init_weight_transfer_engine", {"init_info": {}})

    @staticmethod
    def _post_one(http: httpx.Client, path: str, body: dict[str, Any] | None = None) -> None:
        answer = http.post(path, json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:500]}")

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        with ThreadPoolExecutor(len(self._http)) as pool:
            list(pool.map(lambda http: self._post_one(http, path, body), self._http))

    def push_s(self, weights: Weights) -> float:
        """Seconds from pause to serving again."""
        begin = time.perf_counter()
        self._post("/pause?mode=keep")
        self._post("/start_weight_update")
        if self._backend == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

            info = {
                "names": list(weights.shapes),
                "dtype_names": [weights.dtype] * len(weights.shapes),
                "shapes": list(weights.shapes.values()),
                "packed": True,
            }
            with ThreadPoolExecutor(1) as pool:
                updated = pool.submit(self._post, "/update_weights", {"update_info": info})
                NCCLWeightTransferEngine.trainer_send_weights(weights.tensors(), {"group": self._group, "packed": True})
                updated.result()
        else:
            from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

            IPCWeightTransferEngine.trainer_send_weights(weights.tensors(), {"send_mode": "http", "url": self._urls[0]})
        self._post("/finish_weight_update")
        self._post("/resume")
        return time.perf_counter() - begin


@dataclass(frozen=True)
class Weights:
    """Whole weights, for vLLM's own engines: shapes by name, their one dtype, and the tensors, one after the other."""

    shapes: dict[str, list[int]]
    dtype: str
    tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]]

    @classmethod
    def of(cls, weights: dict[str, torch.Tensor]) -> Weights:
        """Those of a dict."""
        [dtype] = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}
        return cls({name: list(t.shape) for name, t in weights.items()}, dtype, lambda: iter(weights.items()))
