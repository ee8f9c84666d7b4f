#!/usr/bin/env python3
"""A server follows a folder of checkpoints: the trainer only saves, `vllm-nixl push --watch` does the rest.

    vllm serve CHECKPOINT ...                                    # with the plugin; see docs/quickstart.md
    python examples/hot_reload.py CHECKPOINT http://127.0.0.1:8000 [SAVE_TO]

This starts the watcher beside a trainer that knows nothing of it, as a trainer of a framework may not. A checkpoint is
written under another name and renamed when it is complete, so that nobody sees half of one.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from trainer_client import WeightClient

STEPS = 2


def main() -> None:
    """Save checkpoints into a folder that is watched."""
    checkpoint, url, *save_to = sys.argv[1:]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder, WeightClient([url]) as client:
        command = [Path(sys.executable).with_name("vllm-nixl"), "push", "--watch", folder, url, "--interval-s", "0.2"]
        with subprocess.Popen(command) as watcher:
            try:
                for step in range(1, STEPS + 1):
                    with torch.no_grad():
                        model.lm_head.weight.mul_(1.5)
                    model.save_pretrained(Path(folder, f".step-{step}"))
                    Path(folder, f".step-{step}").rename(Path(folder, f"step-{step}"))
                    deadline = time.monotonic() + 120
                    while client.status()[url].weight_version != f"step-{step}":
                        assert watcher.poll() is None, "the watcher has ended"
                        assert time.monotonic() < deadline, f"step-{step} was not pushed"
                        time.sleep(0.1)
                    print(f"the server has step-{step}")
            finally:
                watcher.terminate()
    for folder in save_to:
        model.save_pretrained(folder)


if __name__ == "__main__":
    main()
