"""Whether two servers are equal: what their engines can read, worker by worker, and what they generate.

    fingerprints (digests; paths of the workers that differ) -> greedy continuations of a few prompts

`compare` asks both servers and returns a `Verification`; `vllm-nixl verify` prints it. The prompts are token ids that
both vocabularies have, asked for one after the other with a cache salt of their own, so that neither the batch nor a
cached prefix decides about the last bits. Other requests can: under load, compare fingerprints only.
"""

from __future__ import annotations

import os
import random
import uuid
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from trainer_client.control import Control, tls
from vllm_nixl_plugin.errors import InvalidRequest, ServerUnreachable
from vllm_nixl_plugin.wire import ServerStatus

PROMPT_LENGTHS = (1, 3, 33, 8)
N_TOKENS = 16
N_LOGPROBS = 5
REQUEST_S = 120.0
SHOWN = 5


@dataclass(frozen=True)
class WorkerRow:
    """One worker of both servers. ``differences``: ``path: checksum of the first | of the second``, all of them."""

    worker: int
    n_paths: int
    equal: bool
    differences: tuple[str, ...] = ()


@dataclass(frozen=True)
class OutputsRow:
    """``equal`` is None when the outputs were not compared, and ``reason`` says why; else where they first differ."""

    n_prompts: int
    equal: bool | None
    reason: str = ""


@dataclass(frozen=True)
class Verification:
    """The result for two servers; ``versions`` are the names that they give their weights."""

    servers: tuple[str, str]
    versions: tuple[str, str]
    workers: tuple[WorkerRow, ...]
    outputs: OutputsRow

    @property
    def equal(self) -> bool:
        """Nothing that was compared differs."""
        return all(row.equal for row in self.workers) and self.outputs.equal is not False

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"equal": self.equal}


def compare(first: Control, second: Control, *, outputs: bool = True) -> Verification:
    """Compare two servers. Errors: InvalidRequest when their layouts differ; those of `Control.fingerprint`."""
    statuses = first.status(), second.status()
    workers = _workers(first, second)
    row = _outputs((first.server, second.server), statuses) if outputs else OutputsRow(0, None, "not asked for")
    versions = (statuses[0].weight_version, statuses[1].weight_version)
    return Verification((first.server, second.server), versions, workers, row)


def _workers(first: Control, second: Control) -> tuple[WorkerRow, ...]:
    a, b = (control.fingerprint(paths=False) for control in (first, second))
    if [w.worker for w in a.workers] != [w.worker for w in b.workers]:
        raise InvalidRequest(
            f"{first.server} has {len(a.workers)} workers and {second.server} {len(b.workers)}: only servers of the "
            "same parallel layout can be compared worker by worker"
        )
    rows = []
    for one, other in zip(a.workers, b.workers, strict=True):
        if one.digest == other.digest:
            rows.append(WorkerRow(one.worker, one.n_paths, equal=True))
            continue
        lines = [control.fingerprint(one.worker).workers[0].paths or {} for control in (first, second)]
        rows.append(WorkerRow(one.worker, len(lines[0]), equal=False, differences=differences(*lines)))
    return tuple(rows)


def differences(a: dict[str, str], b: dict[str, str]) -> tuple[str, ...]:
    """One line for each path on which two fingerprints differ."""
    unlike = [path for path in sorted(a.keys() | b.keys()) if a.get(path) != b.get(path)]
    return tuple(f"{path}: {a.get(path, 'absent')} | {b.get(path, 'absent')}" for path in unlike)


def prompts_for(vocab_size: int) -> list[list[int]]:
    """The same few prompts for the same vocabulary: short, long, without control tokens where possible."""
    low = 1000 if vocab_size > 2000 else min(3, vocab_size - 1)
    draw = random.Random(0)
    return [[draw.randrange(low, min(vocab_size, 20_000)) for _ in range(length)] for length in PROMPT_LENGTHS]


def _outputs(urls: tuple[str, str], statuses: tuple[ServerStatus, ServerStatus]) -> OutputsRow:
    said = [status.server for status in statuses]
    if any(server.get("runner") != "generate" for server in said):
        return OutputsRow(0, None, "a server does not generate: only fingerprints were compared")
    prompts = prompts_for(min(int(server["vocab_size"]) for server in said))
    clients = [_Completions(url) for url in urls]
    try:
        for number, prompt in enumerate(prompts):
            one, other = (client.greedy(prompt) for client in clients)
            if one is None or other is None:
                return OutputsRow(0, None, "a server has no /v1/completions: only fingerprints were compared")
            if one != other:
                return OutputsRow(len(prompts), False, f"prompt {number}: {_first_difference(one, other)}")
    finally:
        for client in clients:
            client.close()
    return OutputsRow(len(prompts), True)


def _first_difference(one: list[Any], other: list[Any]) -> str:
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            what = "token" if a[0] != b[0] else "logprob"
            return f"{what} at position {position}: {a[:2]} | {b[:2]}"
    return f"{len(one)} tokens | {len(other)} tokens"


class _Completions:
    """vLLM's own route; its API key is taken from VLLM_API_KEY, as vLLM takes it."""

    def __init__(self, url: str) -> None:
        key = os.environ.get("VLLM_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=REQUEST_S, trust_env=False, verify=tls())
        self._model: str | None = None

    def close(self) -> None:
        self._http.close()

    def greedy(self, prompt: list[int]) -> list[Any] | None:
        """Token, its logprob and the best alternatives at every position; None when the server has no such route."""
        if self._model is None:
            models = self._ask("GET", "/v1/models")
            if models.status_code == 404:
                return None
            self._model = str(models.json()["data"][0]["id"])
        answer = self._ask("POST", "/v1/completions", {
            "model": self._model, "prompt": prompt, "max_tokens": N_TOKENS, "temperature": 0, "ignore_eos": True,
            "logprobs": N_LOGPROBS, "return_token_ids": True, "return_tokens_as_token_ids": True, "seed": 0,
            "cache_salt": uuid.uuid4().hex,
        })  # fmt: skip
        if answer.status_code in (404, 405, 501):
            return None
        if answer.status_code != 200:
            raise ServerUnreachable(
                f"{self._http.base_url} does not generate (status {answer.status_code}: {answer.text[:200]}): set "
                "VLLM_API_KEY if it has one, or compare fingerprints only (--no-outputs)"
            )
        [choice] = answer.json()["choices"]
        found = choice["logprobs"]
        top = [sorted(position.items()) for position in found["top_logprobs"]]
        return [list(each) for each in zip(choice["token_ids"], found["token_logprobs"], top, strict=True)]

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            answer = self._http.request(method, path, json=body)
            if method == "GET" and answer.status_code != 404:
                answer.raise_for_status()
            return answer
        except httpx.HTTPError as error:
            raise ServerUnreachable(f"{self._http.base_url}{path}: {type(error).__name__}: {error}") from error
