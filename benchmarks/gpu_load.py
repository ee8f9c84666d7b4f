"""Clients that keep a server busy while weights are pushed to it: tokens, failures, and versions of outputs.

Where the server has vLLM's token-in token-out route and its outputs tell their weight versions, the clients ask there;
else at /v1/completions. `gpu_sharded` makes one `Load` for each server.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx

from gpu_servers import Report


class Load:
    """Clients that keep a server busy; they note tokens, failures, and the versions that outputs tell."""

    def __init__(self, url: str, clients: int, n_tokens: int = 32) -> None:
        self.errors: list[str] = []
        self._url, self._n_tokens = url, n_tokens
        self._done: list[tuple[float, float, int]] = []
        self._spans: list[list[dict[str, Any]] | None] = []
        self._stop = threading.Event()
        self._tells = self._ask(httpx.Client(timeout=60), spans=True) is not None
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, http: httpx.Client, *, spans: bool) -> list[dict[str, Any]] | None:
        """One request; the versions of its output, if the server tells them. Errors: HTTPError."""
        path, sampling = "/v1/completions", {"max_tokens": self._n_tokens, "ignore_eos": True, "temperature": 0}
        body: dict[str, Any] = {"model": "model", "prompt": [5, 6, 7], **sampling}
        if spans:
            path, body = "/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": sampling}
        answer = http.post(f"{self._url}{path}", json=body)
        if answer.status_code in (404, 422) and spans:
            return None
        answer.raise_for_status()
        found: list[dict[str, Any]] | None = answer.json()["choices"][0].get("weight_versions")
        return found

    def _run(self) -> None:
        with httpx.Client(timeout=120) as http:
            while not self._stop.is_set():
                begin = time.perf_counter()
                try:
                    self._spans.append(self._ask(http, spans=self._tells))
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
        """Whether every output told its versions; True where this vLLM tells none."""
        if not self._tells:
            report("load: outputs of this vLLM tell no weight versions")
            return True
        without = sum(not spans for spans in self._spans)
        seen = {span["version"] for spans in self._spans for span in spans or ()}
        crossing = sum(len(spans or ()) > 1 for spans in self._spans)
        report(f"load: {len(self._spans)} outputs, {without} without versions, {len(seen)} versions seen, {crossing} "
               "outputs of several")  # fmt: skip
        return without == 0
