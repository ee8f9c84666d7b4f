"""Streaming requests that run while something else happens, and what their tokens should have been worth.

    streams = [Stream(server.url, prompt, 500), Stream(...)]        # each in a thread of its own, from now on
    ... streams[0].wait_for(1) ... streams[0].leave() ...           # tokens have come; the client goes away
    outputs = streams[0].result()                                   # one Output per choice

The requests go to vLLM's token-in/token-out route (`--enable-scale-out`), whose last chunk says which weight version
made which token. `scores` asks a server for the logprob of every token of a text that is there already: equal to those
that came with the tokens (but for the last bits, which depend on what shared a batch) if the same weights made them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx


@dataclass
class Output:
    """What one choice of a request has got so far. ``versions``: (name, first token, behind the last token)."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    versions: list[tuple[str, int, int]] = field(default_factory=list)


class Stream:
    """A request that is on its way. ``params``: vLLM's sampling parameters; greedy and to the full length without."""

    def __init__(self, url: str, prompt: Sequence[int], max_tokens: int, *, timeout_s: float = 240, **params: Any):
        self.prompt = tuple(prompt)
        self.max_tokens = max_tokens
        self.outputs = [Output() for _ in range(params.get("n", 1))]
        self.error: str | None = None
        self._left = False
        self._arrived = threading.Condition()
        where = urlsplit(url)
        self._connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=timeout_s)
        self._connection.connect()
        self._socket = self._connection.sock
        self._body = {
            "token_ids": list(prompt), "stream": True,
            "sampling_params": {
                "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0, **params,
            },
        }  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self._thread.start()

    @property
    def n_tokens(self) -> int:
        """Tokens so far, of the choice that has fewest."""
        return min(len(output.tokens) for output in self.outputs)

    @property
    def ended(self) -> bool:
        """The server has ended it, or it has failed, or its client has left."""
        return not self._thread.is_alive()

    def wait_for(self, n_tokens: int, timeout_s: float = 120) -> None:
        """Return when every choice has so many tokens. Errors: AssertionError when it ends before."""
        with self._arrived:
            self._arrived.wait_for(lambda: self.n_tokens >= n_tokens or self.error is not None, timeout_s)
        assert self.n_tokens >= n_tokens, f"{self.n_tokens} of {n_tokens} tokens came: {self.error}"

    def leave(self) -> None:
        """Close the connection, as a client does that goes away."""
        self._left = True
        with contextlib.suppress(OSError):  # it has just ended
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(30)

    def result(self, timeout_s: float = 240) -> list[Output]:
        """The outputs, when it has ended. Errors: AssertionError when it hangs or fails."""
        self._thread.join(timeout_s)
        assert self.ended, f"the request hangs: {self.n_tokens} of {self.max_tokens} tokens"
        assert self.error is None, self.error
        assert all(output.finish_reason for output in self.outputs), "the stream broke off"
        return self.outputs

    def _run(self) -> None:
        try:
            self._connection.request(
                "POST", "/inference/v1/generate", json.dumps(self._body), {"Content-Type": "application/json"}
            )
            response = self._connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {response.read().decode(errors='replace')}")
            for line in response:
                self._take(line.strip())
        except (OSError, http.client.HTTPException, RuntimeError, ValueError) as error:
            if not self._left:
                self.error = f"{type(error).__name__}: {error}"
        finally:
            self._connection.close()
            with self._arrived:
                self._arrived.notify_all()

    def _take(self, line: bytes) -> None:
        if not line.startswith(b"data: ") or line == b"data: [DONE]":
            return
        event = json.loads(line.removeprefix(b"data: "))
        if "choices" not in event:
            raise RuntimeError(f"the server says {event}")
        with self._arrived:
            for choice in event["choices"]:
                output = self.outputs[choice["index"]]
                output.tokens += choice["token_ids"] or []
                output.logprobs += [each["logprob"] for each in (choice["logprobs"] or {}).get("content") or []]
                output.finish_reason = choice["finish_reason"]
                spans = choice["weight_versions"] or []
                output.versions = [(span["version"], span["start"], span["end"]) for span in spans]
            self._arrived.notify_all()


def scores(url: str, prompt: Sequence[int], tokens: Sequence[int], *, timeout_s: float = 240) -> list[float]:
    """The logprob of each of ``tokens`` behind ``prompt`` and the tokens before it, by the server's weights."""
    body = {
        "model": "model", "prompt": [*prompt, *tokens], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=timeout_s)
    answer.raise_for_status()
    found = answer.json()["choices"][0]["prompt_logprobs"][len(prompt) :]
    return [by_token[str(token)]["logprob"] for token, by_token in zip(tokens, found, strict=True)]
