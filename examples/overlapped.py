#!/usr/bin/env python3
"""Training goes on while the last step's weights fly: `push_weights_async`.

    vllm serve CHECKPOINT ...                                    # with the plugin; see docs/quickstart.md
    python examples/overlapped.py CHECKPOINT http://127.0.0.1:8000 [SAVE_TO]

A call copies the weights and returns; they may be changed at once. The next call waits until that copy is free again,
so that the server is never more than one step behind what was pushed last.
"""

import sys
import time

import torch
from transformers import AutoModelForCausalLM

from trainer_client import PushHandle, WeightClient

STEPS = 4


def main() -> None:
    """Train, start a push, train on."""
    checkpoint, url, *save_to = sys.argv[1:]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handles: list[PushHandle] = []

    with WeightClient([url]) as client:
        for step in range(1, STEPS + 1):
            tokens = torch.randint(model.config.vocab_size, (4, 16))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            begin = time.monotonic()
            handles.append(client.push_weights_async(model, version=f"step-{step}"))
            print(f"step {step}: held up for {time.monotonic() - begin:.3f} s")
        for handle in handles:  # their errors come from here
            report = handle.wait()
            print(f"{report.version}: {report.seconds:.3f} s, most of it beside the training")
    for folder in save_to:
        model.save_pretrained(folder)


if __name__ == "__main__":
    main()
