"""Trainers of other projects bring their weights to real servers through the adapters."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness import TOKEN, EngineOptions, Server

ROOT = Path(__file__).parent.parent


@pytest.mark.server
@pytest.mark.slow
def test_trl_trains_a_toy_by_grpo_and_its_server_equals_one_that_reloads_from_disk(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    from demo import write_model

    threads = torch.get_num_threads()
    write_model(tmp_path / "model")
    torch.set_num_threads(threads)
    options = EngineOptions(args=("--logprobs-mode", "processed_logprobs"), env=(("VLLM_SERVER_DEV_MODE", "1"),))
    with Server(tmp_path / "model", options) as server:
        command = [sys.executable, ROOT / "examples/trl_grpo.py", "--steps", "6", "--url", server.url]
        ran = subprocess.run(
            [*command, "--model", tmp_path / "model"], env=os.environ | {"PUSH_WEIGHTS_TOKEN": TOKEN},
            capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "\nequal: " in ran.stdout
    assert re.search(r"ratio \d+\.\d\d", ran.stdout)
    [apart] = re.findall(r"differs by ([\d.]+)", ran.stdout)
    assert float(apart) < 0.1, "the server did not sample from the trainer's weights"
