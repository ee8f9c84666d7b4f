#!/usr/bin/env python3
"""The least there is: train a little, push, ask the server. One process, one server.

    vllm serve CHECKPOINT ...                                    # with the plugin; see docs/quickstart.md
    python examples/minimal.py CHECKPOINT http://127.0.0.1:8000 [SAVE_TO]

The token is read from PUSH_WEIGHTS_TOKEN. With SAVE_TO the trained model is saved as a checkpoint at the end, so that
`vllm-nixl verify http://127.0.0.1:8000 SAVE_TO` can compare the server with a fresh one.
"""

import sys

import torch
from transformers import AutoModelForCausalLM

from trainer_client import WeightClient

STEPS = 3


def main() -> None:
    """Train and push, step by step."""
    checkpoint, url, *save_to = sys.argv[1:]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with WeightClient([url]) as client:  # make it once and keep it: later pushes prepare nothing again
        for step in range(1, STEPS + 1):
            tokens = torch.randint(model.config.vocab_size, (4, 16))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = client.push_weights(model, version=f"step-{step}")
            print(f"step {step}: loss {loss.item():.3f}, {report.nbytes:,} bytes in {report.seconds:.3f} s")
        print(report)
        print(f"the server has {client.status()[url].weight_version}")
    for folder in save_to:
        model.save_pretrained(folder)


if __name__ == "__main__":
    main()
