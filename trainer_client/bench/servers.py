"""Real ``vllm serve`` processes to measure with, and vLLM's own routes of its development mode.

Started as a user starts them, but eager on a CPU (compilation would take longer than all the rest), with our `Guard` in
front of what the development mode opens. Each server has the same random token.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from trainer_client.fresh import served
from vllm_nixl_plugin.errors import WorkerFailed

EXTENSION = "trainer_client.bench.extension.BenchExtension"
GUARD = "vllm_nixl_plugin.guard.Guard"
NAME = "model"
"""What servers call the model."""
CONTEXT = 1024
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 33), "MALLOC_TRIM_THRESHOLD_": str(1 << 36)}
"""For servers on a CPU: glibc keeps freed memory. Otherwise each update, in any of the ways, has the kernel zero new
pages for all packed weights, which takes as long as packing them (docs/tuning.md)."""


@dataclass(frozen=True)
class Served:
    """A running server. ``session``: the process that leads the session of all of its processes."""

    url: str
    token: str
    session: int
    n_workers: int = 1

    @property
    def http(self) -> httpx.Client:
        """A client with the token; close it."""
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=300, trust_env=False)

    def post(self, path: str, body: Any = None) -> Any:
        """One of vLLM's own routes. Errors: WorkerFailed."""
        with self.http as http:
            answer = http.post(path, json=body)
        if answer.status_code != 200:
            raise WorkerFailed(f"{self.url}{path} answered {answer.status_code}: {answer.text[:500]}")
        return answer.json() if answer.content else None

    def call(self, method: str, **arguments: str) -> list[Any]:
        """A method of all workers, by vLLM's ``/collective_rpc``. Errors: WorkerFailed."""
        answer = self.post("/collective_rpc", {"method": method, "kwargs": arguments})
        return list(answer["results"]) if answer else []

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Generation stands still, with what it has cached dropped, as our own pushes do it."""
        self.post("/pause?mode=keep")
        try:
            yield
        finally:
            self.post("/resume")


@contextlib.contextmanager
def serving(
    checkpoint: Path,
    token: str,
    *,
    device: str,
    count: int = 1,
    tensor_parallel: int = 1,
    arguments: Sequence[str] = (),
    start_timeout_s: float = 600.0,
) -> Iterator[list[Served]]:
    """So many servers of a checkpoint; they end with the context.

    Errors: InvalidRequest (no vLLM here), ServerUnreachable, DeadlineExceeded.
    """
    given = ["--served-model-name", NAME, "--max-model-len", str(CONTEXT), "--max-num-seqs", "4", "--seed", "0"]
    given += ["--kv-cache-memory-bytes", str(256 << 20), "--no-enable-prefix-caching", "--middleware", GUARD]
    given += ["--tensor-parallel-size", str(tensor_parallel), *_of_device(device), *arguments]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if device == "cpu":
        environment |= {name: os.environ.get(name, value) for name, value in ALLOCATOR.items()}
    if device == "cpu" and tensor_parallel > 1:
        cores = os.cpu_count() or 1
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % cores) for rank in range(tensor_parallel))

    def start(stack: contextlib.ExitStack) -> Served:
        context = served(checkpoint, given, start_timeout_s, token, extension=EXTENSION, environment=environment)
        url, session = stack.enter_context(context)
        return Served(url, token, session, tensor_parallel)

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(count) as pool:
        stacks = [stack.enter_context(contextlib.ExitStack()) for _ in range(count)]
        yield list(pool.map(start, stacks))


def _of_device(device: str) -> list[str]:
    if device == "cpu":
        return ["--dtype", "bfloat16", "--enforce-eager"]
    sizes = '{"cudagraph_capture_sizes": [1, 2, 4]}'
    return ["--dtype", "bfloat16", "--gpu-memory-utilization", "0.3", "--compilation-config", sizes]
