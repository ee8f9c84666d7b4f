"""A server that must not start is told so at once, not when it has loaded its model."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import EngineOptions, Server
from vllm_nixl_plugin import plugin, settings

SERVE = ["/usr/bin/vllm", "serve", "model"]


@pytest.mark.server
def test_a_server_without_a_token_ends_before_it_loads_its_model(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(RuntimeError, match="ended with 1") as refused, Server(checkpoint("qwen3"), token=""):
        raise AssertionError("it started")
    assert "MissingToken: weight updates need a token: set PUSH_WEIGHTS_TOKEN" in str(refused.value)
    assert "Loading safetensors" not in str(refused.value)


@pytest.mark.server
def test_a_server_that_ends_leaves_no_socket_behind(checkpoint: Callable[..., Path]) -> None:
    with tempfile.TemporaryDirectory(prefix="s") as folder:  # a short path: sockets have no long ones
        options = EngineOptions(launch="exec")  # forked servers end without exit handlers
        with Server(checkpoint("qwen3"), options, env={"TMPDIR": folder}):
            assert len(list(Path(folder).glob("nixl-push-*/s"))) == 1
        assert not list(Path(folder).glob("nixl-push-*"))


@pytest.mark.parametrize(
    ("argv", "plugins", "refused"),
    [
        (SERVE, "nixl", True),
        (SERVE, "other,nixl", True),
        (["/site-packages/vllm/entrypoints/openai/api_server.py", "--model", "m"], "nixl", True),
        (SERVE, "other", False),
        (SERVE, "", False),
        ([*SERVE, "--headless"], "nixl", False),
        (["/usr/bin/vllm", "bench"], "nixl", False),
        (["train.py", "serve"], "nixl", False),
    ],
)
def test_only_processes_that_will_serve_our_routes_need_a_token(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], plugins: str, refused: bool
) -> None:
    for name in ("PUSH_WEIGHTS_TOKEN", "PUSH_WEIGHTS_TOKEN_FILE", "PUSH_WEIGHTS_ALLOW_ANONYMOUS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    monkeypatch.setattr(sys, "argv", argv)
    if refused:
        with pytest.raises(settings.MissingToken):
            plugin._refuse_early()
    else:
        plugin._refuse_early()
    monkeypatch.setenv("PUSH_WEIGHTS_TOKEN", "x")
    plugin._refuse_early()
