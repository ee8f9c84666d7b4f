"""Clients that keep a server busy while weights are pushed to it: tokens, failures, and versions of outputs.

The clients ask at /v1/completions, whose answers tell their versions in a header
(vllm_nixl_plugin/versions.py). `gpu_sharded` makes one `Load` for each server.
"""

from __future__ import annotations

import threading
import time

import httpx

from gpu_servers import Report


class Load:
    """Clients that keep a server busy; they note tokens, failures, and the versions that outputs tell."""

    def __init__(self, url: str, clients: int, n_tokens: int = 32) -> None:
        self.errors: list[str] = []
        self._url, self._n_tokens = url, n_tokens
        self._done: list[tuple[float, float, int]] = []
        self._versions: list[list[str]] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, http: httpx.Client) -> list[str]:
        """One request; the versions of its output. Errors: HTTPError."""
        body = {
            "model": "model", "prompt": [5, 6, 7], "max_tokens": self._n_tokens, "ignore_eos": True, "temperature": 0,
        }  # fmt: skip
        answer = http.post(f"{self._url}/v1/completions", json=body)
        answer.raise_for_status()
        told = answer.headers.get("x-weight-version", "")
        return told.split(", ") if told else []

    def _run(self) -> None:
        with httpx.Client(timeout=120) as http:
            while not self._stop.is_set():
                begin = time.perf_counter()
                try:
                    self._versions.append(self._ask(http))
                    self._done.append((begin, time.perf_counter(), self._n_tokens))
                except httpx.HTTPError as error:
                    self.errors.append(repr(error)[:200])
                    time.sleep(0.2)

    def rate(self, begin: float, end: float) -> float:
        """Tokens a second between two times; those of a request count evenly from its beginning to its end."""
        time.sleep(0.5)  # requests that were running then have ended
        parts = [n * max(0.0, min(end, b) - max(begin, a)) / (b - a) for a, b, n in self._done]
        return sum(parts) / (end - begin)

    def stop(self) -> None:
        """No further requests."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def versions_told(self, report: Report) -> bool:
        """Whether every output told its versions."""
        without = sum(not versions for versions in self._versions)
        seen = {version for versions in self._versions for version in versions}
        crossing = sum(len(versions) > 1 for versions in self._versions)
        report(f"load: {len(self._versions)} outputs, {without} without versions, {len(seen)} versions seen, "
               f"{crossing} outputs of several")  # fmt: skip
        return without == 0
