"""The examples of sharded trainers push what a fresh server makes of their weights; run as their docstrings say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness import TOKEN, Server, completions, reference

EXAMPLES = Path(__file__).parent.parent / "examples"


def torchrun(ranks: int, example: str, *arguments: str | Path) -> str:
    """The output of the example, run on so many ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    quiet = {"OMP_NUM_THREADS": "1", "PUSH_WEIGHTS_TOKEN": TOKEN, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, EXAMPLES / example, *arguments], env=os.environ | quiet, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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
