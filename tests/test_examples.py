"""The examples push what a fresh server makes of their weights; run as their docstrings say."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from harness import TOKEN, Server, completions, reference, servers

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def fleet(checkpoint) -> Iterator[tuple[Server, ...]]:
    """Two servers for all examples that take any transformers model."""
    with servers(Server(checkpoint("qwen3", 1)), Server(checkpoint("qwen3", 1))) as both:
        yield both


def alone(example: str, *arguments: str | Path) -> str:
    """The output of the example, run by itself."""
    return output_of([sys.executable, EXAMPLES / example, *arguments], HF_HUB_OFFLINE="1")


def torchrun(ranks: int, example: str, *arguments: str | Path) -> str:
    """The output of the example, run on so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return output_of([*command, EXAMPLES / example, *arguments], GLOO_SOCKET_IFNAME="lo")


def output_of(command: list[str | Path], **environment: str) -> str:
    """What a command prints that has to succeed."""
    quiet = {"OMP_NUM_THREADS": "1", "PUSH_WEIGHTS_TOKEN": TOKEN, **environment}
    done = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize(("example", "said", "version"), [
    ("minimal.py", "the server has step-3", "step-3"),
    ("overlapped.py", "step-4: ", "step-4"),
    ("hot_reload.py", "the server has step-2", "step-2"),
])  # fmt: skip
def test_an_example_with_one_server_leaves_it_with_what_it_has_trained(
    checkpoint, fleet, tmp_path: Path, example: str, said: str, version: str
) -> None:
    server, trained = fleet[0], tmp_path / "trained"
    assert said in alone(example, checkpoint("qwen3", 1), server.url, trained)
    assert served(server) == version
    assert completions(server.url) == reference(trained)


@pytest.mark.server
@pytest.mark.slow
def test_a_fleet_goes_on_while_servers_join_and_leave(checkpoint, fleet, tmp_path: Path) -> None:
    trained = tmp_path / "trained"
    said = alone("fleet.py", checkpoint("qwen3", 1), *(server.url for server in fleet), trained)
    assert "unreachable" in said
    assert [served(server) for server in fleet] == ["both again"] * 2
    assert [completions(server.url) for server in fleet] == [reference(trained)] * 2


@pytest.mark.server
@pytest.mark.slow
def test_the_reward_of_grpo_without_a_framework_rises(checkpoint, fleet, tmp_path: Path) -> None:
    trained = tmp_path / "trained"
    said = alone("grpo.py", checkpoint("qwen3", 1), fleet[0].url, trained)
    rewards = [float(word) for word in said.split("reward by step: ")[1].split()]
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1, rewards
    assert completions(fleet[0].url) == reference(trained)


@pytest.mark.server
@pytest.mark.slow
def test_two_ranks_of_fsdp2_bring_what_they_have_trained(checkpoint, fleet, tmp_path: Path) -> None:
    trained = tmp_path / "trained"
    assert "2 ranks sent" in torchrun(2, "fsdp2.py", checkpoint("qwen3", 1), fleet[0].url, trained)
    assert completions(fleet[0].url) == reference(trained)


def served(server: Server) -> str:
    """The version of its weights."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.get(f"{server.url}/nixl/v1/status", headers=headers, timeout=30)
    return str(answer.json()["weight_version"])


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_ranks_in_the_style_of_megatron_bring_their_checkpoint(checkpoint, ranks: int) -> None:
    with Server(checkpoint("qwen3", 1)) as server:
        print(torchrun(ranks, "megatron_style.py", checkpoint("qwen3", 2), server.url))
        assert completions(server.url) == reference(checkpoint("qwen3", 2))


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_a_trainer_in_the_style_of_torchtitan_brings_what_it_has_trained(checkpoint, tmp_path, ranks: int) -> None:
    start, trained = checkpoint("llama", 1), tmp_path / "trained"
    with Server(start) as server:
        print(torchrun(ranks, "torchtitan_style.py", start, server.url, trained))
        assert completions(server.url) == reference(trained)


def test_the_conversion_of_the_torchtitan_example_is_that_of_llama(checkpoint, monkeypatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.syspath_prepend(EXAMPLES)
    from torchtitan_style import Transformer, to_checkpoint

    folder = checkpoint("llama", 1)
    config = json.loads((folder / "config.json").read_text())
    torch.manual_seed(1)
    ours = Transformer(config)
    theirs = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).float()
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    theirs.load_state_dict(dict(to_checkpoint(ours.state_dict(), *heads)))
    tokens = torch.randint(config["vocab_size"], (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
