"""A client that streams tokens, and notes how long it waits for each."""

from __future__ import annotations

import itertools
import json
import threading
import time
from types import TracebackType
from typing import Self

import httpx

from trainer_client.bench.servers import CONTEXT, NAME, Served
from vllm_nixl_plugin.errors import DeadlineExceeded, ServerUnreachable

PROMPT = [1, 2, 3]
FIRST_TOKENS = 4
FIRST_S = 60.0


class TokenStream:
    """One request after another, from entering to leaving the context. Times are those of `time.perf_counter`.

    Entering waits for the first tokens. Errors: DeadlineExceeded; at the end ServerUnreachable, if a request failed.
    """

    def __init__(self, server: Served) -> None:
        self.tokens: list[float] = []
        self._server = server
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = time.monotonic() + FIRST_S
        while len(self.tokens) < FIRST_TOKENS and self._failure is None:
            if time.monotonic() > deadline:
                self._stop.set()
                raise DeadlineExceeded(f"{self._server.url} made no tokens within {FIRST_S:.0f} s")
            time.sleep(0.02)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(FIRST_S)
        if self._failure is not None and error is None:
            raise ServerUnreachable(f"a stream of tokens from {self._server.url} broke: {self._failure!r}")

    def wait_for_more(self, count: int = 2) -> None:
        """Until so many more tokens have come: the longest gap may be an open one. Errors: DeadlineExceeded."""
        wanted, deadline = len(self.tokens) + count, time.monotonic() + FIRST_S
        while len(self.tokens) < wanted and self._failure is None:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{self._server.url} made no more tokens within {FIRST_S:.0f} s")
            time.sleep(0.02)

    def longest_gap(self, since: float = 0.0, until: float = float("inf")) -> float:
        """Seconds of the longest wait for a token that overlaps the time between the two; the first token of a request
        is waited for, too: generation may stand still between two requests."""
        gaps = [b - a for a, b in itertools.pairwise(self.tokens) if b >= since and a <= until]
        return max(gaps, default=float("nan"))

    def _run(self) -> None:
        body = {
            "model": NAME, "prompt": PROMPT, "max_tokens": CONTEXT - len(PROMPT) - 1, "ignore_eos": True,
            "stream": True, "temperature": 0, "return_token_ids": True,
        }  # fmt: skip
        try:
            with self._server.http as http:
                while not self._stop.is_set():
                    with http.stream("POST", "/v1/completions", json=body) as answer:
                        answer.raise_for_status()
                        for line in answer.iter_lines():
                            if self._stop.is_set():
                                return
                            if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                                self.tokens.append(time.perf_counter())
        except httpx.HTTPError as error:
            self._failure = error
