"""One question to every server: what each answered, or why it did not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_client.control import Control
from trainer_client.environment import read_token
from vllm_nixl_plugin.errors import PushWeightsError


def ask_each(urls: Sequence[str], token_file: Path | None, ask: Callable[[Control], Any]) -> dict[str, dict[str, Any]]:
    """What every server answered, by URL, or its error object (key ``error``). Errors: InvalidRequest, for a URL."""
    token, answers = read_token(token_file), {}
    for url in urls:
        with Control(url, token=token) as control:
            try:
                answers[url] = ask(control) or {}
            except PushWeightsError as error:
                answers[url] = error.to_wire()
    return answers


def error_line(url: str, answer: Mapping[str, Any]) -> str:
    """The line for a server that answered with an error."""
    return f"{url}: {answer['error']['code']}: {answer['error']['message']}"


def any_failed(answers: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether some server answered with an error."""
    return any("error" in answer for answer in answers.values())
