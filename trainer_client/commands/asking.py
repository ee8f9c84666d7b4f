"""One question to every server at once: what each answered, or why it did not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trainer_client.control import Control
from trainer_client.environment import read_token
from vllm_nixl_plugin.errors import PushWeightsError

AT_ONCE = 32


def ask_each(
    urls: Sequence[str], token_file: Path | None, ask: Callable[[Control], Any], *, timeout_s: float = 60.0
) -> dict[str, dict[str, Any]]:
    """What every server answered, by URL and in their order, or its error object (key ``error``).

    ``timeout_s``: for requests that wait for nothing. Errors: InvalidRequest, for a URL.
    """
    token = read_token(token_file)

    def answer(control: Control) -> dict[str, Any]:
        try:
            return ask(control) or {}
        except PushWeightsError as error:
            return error.to_wire()

    with ExitStack() as stack, ThreadPoolExecutor(AT_ONCE) as threads:
        controls = [stack.enter_context(Control(url, token=token, timeout_s=timeout_s)) for url in urls]
        return dict(zip(urls, threads.map(answer, controls), strict=True))


def error_line(url: str, answer: Mapping[str, Any]) -> str:
    """The line for a server that answered with an error."""
    return f"{url}: {answer['error']['code']}: {answer['error']['message']}"


def any_failed(answers: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether some server answered with an error."""
    return any("error" in answer for answer in answers.values())
