"""`vllm-nixl verify` and `fingerprint` against real servers: equal after a push, different after another, and why."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import TOKEN, EngineOptions, Server, completions, servers
from harness.checkpoints import read_weights
from trainer_client import WeightClient
from trainer_client.cli import main
from trainer_client.verification import prompts_for

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def vllm_nixl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line; exit status, standard output, standard error."""
    monkeypatch.setenv("PUSH_WEIGHTS_TOKEN", TOKEN)

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vllm-nixl", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


@pytest.fixture(scope="module")
def pair(checkpoint: Callable[..., Path]) -> Iterator[tuple[Server, Server]]:
    """Two servers that started from the checkpoints of seeds 1 and 2."""
    with servers(*(Server(checkpoint("qwen3", seed=seed)) for seed in (1, 2))) as both:
        yield both[0], both[1]


@pytest.mark.server
def test_a_pushed_server_equals_a_fresh_one_and_another_push_is_named(
    pair: tuple[Server, Server], vllm_nixl: Run, checkpoint: Callable[..., Path]
) -> None:
    pushed, fresh = pair
    with WeightClient([pushed.url], token=TOKEN) as client:
        client.push_weights(read_weights(checkpoint("qwen3", seed=2)), version="two")
        code, out, err = vllm_nixl("verify", pushed.url, fresh.url)
        assert (code, err) == (0, ""), out
        assert "weights two" in out
        assert "outputs of 4 prompts: equal" in out
        one = read_weights(checkpoint("qwen3", seed=2)) | {
            name: weight + 1
            for name, weight in read_weights(checkpoint("qwen3", seed=2)).items()
            if name in ("model.layers.1.mlp.down_proj.weight", "model.norm.weight")
        }
        client.push_weights(one, version="three")
    code, out, _ = vllm_nixl("verify", pushed.url, fresh.url)
    assert code == 1
    assert "model.layers.1.mlp.down_proj" in out
    assert "DIFFERENT" in out
    code, out, _ = vllm_nixl("verify", pushed.url, fresh.url, "--json", "--no-outputs")
    found = json.loads(out)
    assert (code, found["equal"], found["outputs"]["equal"]) == (1, False, None)
    [row] = found["workers"]
    assert all(line.startswith(("model.layers.1.mlp.down_proj", "model.norm.weight")) for line in row["differences"])
    assert len(row["differences"]) >= 2


@pytest.mark.server
def test_fingerprints_are_read_while_requests_are_served_and_change_with_a_push(
    pair: tuple[Server, Server], vllm_nixl: Run, checkpoint: Callable[..., Path]
) -> None:
    first, second = pair
    with WeightClient([first.url, second.url], token=TOKEN) as client:
        client.push_weights(read_weights(checkpoint("qwen3", seed=1)), version="one")
    code, out, _ = vllm_nixl("fingerprint", first.url, second.url, "--json")
    answers = json.loads(out)
    assert code == 0
    assert answers[first.url]["digest"] == answers[second.url]["digest"]
    assert "paths" not in answers[first.url]["workers"][0]
    completions(first.url)
    code, out, _ = vllm_nixl("fingerprint", first.url, "--paths")
    assert answers[first.url]["workers"][0]["digest"] in out
    assert "  model.norm.weight: bfloat16[256][1] " in out


@pytest.mark.server
def test_a_server_equals_a_fresh_one_on_a_checkpoint_folder(
    pair: tuple[Server, Server], vllm_nixl: Run, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = pair[0]
    for name, value in server.environment.items():
        if name.startswith(("VLLM_", "TORCH", "HF_", "PYTHONPATH")) and name != "VLLM_PLUGINS":
            monkeypatch.setenv(name, value)
    with WeightClient([server.url], token=TOKEN) as client:
        client.push_weights(read_weights(checkpoint("qwen3", seed=2)))
    folder = checkpoint("qwen3", seed=2)
    code, out, err = vllm_nixl("verify", server.url, folder, "--", *EngineOptions().arguments)
    assert (code, "outputs of 4 prompts: equal" in out) == (0, True), out + err
    code, out, err = vllm_nixl("verify", server.url, folder, "--", "--no-such-argument")
    assert code == 2
    assert "the fresh server ended with 2" in err
    assert "no-such-argument" in err


@pytest.mark.server
def test_pooling_servers_are_compared_by_their_fingerprints_alone(
    vllm_nixl: Run, checkpoint: Callable[..., Path]
) -> None:
    with Server(checkpoint("qwen3"), args=["--runner", "pooling", "--convert", "embed"]) as server:
        code, out, err = vllm_nixl("verify", server.url, server.url)
        assert (code, err) == (0, "")
        assert "outputs: a server does not generate: only fingerprints were compared" in out
        code, out, _ = vllm_nixl("verify", server.url, server.url, "--json")
        assert json.loads(out)["outputs"] == {
            "n_prompts": 0, "equal": None, "reason": "a server does not generate: only fingerprints were compared",
        }  # fmt: skip


@pytest.mark.server
def test_a_server_without_the_plugin_cannot_be_compared(vllm_nixl: Run, checkpoint: Callable[..., Path]) -> None:
    with Server(checkpoint("qwen3"), plugin=False) as server:
        code, out, err = vllm_nixl("verify", server.url, server.url)
        assert (code, out) == (2, "")
        assert "has no route /nixl/v1/status" in err


def test_what_cannot_be_compared_has_status_two(vllm_nixl: Run, tmp_path: Path) -> None:
    code, out, err = vllm_nixl("verify", "http://127.0.0.1:9", tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith("not compared: unreachable: ")
    code, _, err = vllm_nixl("verify", "http://127.0.0.1:9", "nowhere")
    assert (code, "neither a URL" in err) == (2, True)
    code, _, err = vllm_nixl("verify", "http://127.0.0.1:9", "http://127.0.0.1:9", "--", "--dtype", "bfloat16")
    assert (code, "a fresh server" in err) == (2, True)


@pytest.mark.parametrize("vocab_size", [4, 512, 2001, 150_000])
def test_prompts_are_the_same_each_time_and_within_the_vocabulary(vocab_size: int) -> None:
    prompts = prompts_for(vocab_size)
    assert prompts == prompts_for(vocab_size)
    assert [len(prompt) for prompt in prompts] == [1, 3, 33, 8]
    assert all(0 <= token < vocab_size for prompt in prompts for token in prompt)
