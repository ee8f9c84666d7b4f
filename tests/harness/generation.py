"""What an engine generates, in a form that compares, and what a fresh engine would have generated."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from harness.server import EngineOptions, Server

PROMPTS: tuple[tuple[int, ...], ...] = ((1, 2, 3), (7,), tuple(range(40, 73)), (300, 17, 300, 17, 300))
"""Token ids; short, long, repeating."""


@dataclass(frozen=True)
class Completion:
    """The greedy continuation of one prompt. Equal means equal in every bit."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the tokens."""
    top: tuple[tuple[tuple[str, float], ...], ...]
    """The most probable tokens at each position, with their logprobs."""


def completions(
    url: str,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    n_tokens: int = 16,
    logprobs: int = 5,
    *,
    model: str = "model",
    timeout_s: float = 120,
) -> tuple[Completion, ...]:
    """The greedy continuations of the prompts through /v1/completions. ``model``: the served name, or an adapter's.

    One request after the other: which requests share a batch would otherwise be a matter of chance, and so would the
    last bits of the logprobs.
    """
    with httpx.Client(base_url=url, timeout=timeout_s) as client:
        return tuple(_completion(client, model, prompt, n_tokens, logprobs) for prompt in prompts)


def _completion(
    client: httpx.Client, model: str, prompt: Sequence[int], n_tokens: int, logprobs: int
) -> Completion:
    answer = client.post(
        "/v1/completions",
        json={
            "model": model,
            "prompt": list(prompt),
            "max_tokens": n_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # several tokens are the same text
        },
    )
    if answer.status_code != 200:
        raise RuntimeError(f"/v1/completions answered {answer.status_code}: {answer.text}")
    [choice] = answer.json()["choices"]
    found = choice["logprobs"]
    return Completion(
        tokens=tuple(choice["token_ids"]),
        logprobs=tuple(found["token_logprobs"]),
        top=tuple(tuple(sorted(position.items())) for position in found["top_logprobs"]),
    )


_references: dict[object, tuple[Completion, ...]] = {}


def _digest(checkpoint: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(checkpoint.iterdir()):
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def reference(
    checkpoint: Path,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    n_tokens: int = 16,
    logprobs: int = 5,
    *,
    options: EngineOptions | None = None,
) -> tuple[Completion, ...]:
    """What a freshly started engine without our plugin generates from a checkpoint; kept for the session.

    options: those of the server under test, as `server.options`: compiled, tensor-parallel and eager engines differ in
    the last bits. Checkpoints with the same files are one, wherever they are.
    """
    options = options or EngineOptions()
    key = (_digest(checkpoint), tuple(map(tuple, prompts)), n_tokens, logprobs, options)
    if key not in _references:
        with Server(checkpoint, options, plugin=False) as server:
            _references[key] = completions(server.url, prompts, n_tokens, logprobs)
    return _references[key]
