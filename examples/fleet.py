#!/usr/bin/env python3
"""A fleet whose servers come and go: one joins late, one is lost, and the pushes go on.

    vllm serve CHECKPOINT --port 8000 ...                        # with the plugin; see docs/quickstart.md
    vllm serve CHECKPOINT --port 8001 ...
    python examples/fleet.py CHECKPOINT http://127.0.0.1:8000 http://127.0.0.1:8001 [SAVE_TO]

The first server is there from the beginning, the second joins after a push. A third, at an address where nobody
answers, shows what becomes of the others: with `require=0.5`, half of the fleet is enough. (A server can also join by
itself: with PUSH_WEIGHTS_PEERS it reads the weights from its neighbours before it says that it is ready.)
"""

import sys

import torch
from transformers import AutoModelForCausalLM

from trainer_client import WeightClient

NOBODY = "http://127.0.0.1:9"


def main() -> None:
    """Push to a growing fleet."""
    checkpoint, first, late, *save_to = sys.argv[1:]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)

    def train() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.01 * torch.randn(()).item())

    with WeightClient([first], require=0.5) as client:
        train()
        print(client.push_weights(model, version="alone"))

        client.add_server(late)  # planned for at its first push, by itself
        train()
        report = client.push_weights(model, version="both")
        print(report)
        assert report.succeeded == (first, late)

        client.add_server(NOBODY)
        train()
        report = client.push_weights(model, version="without the lost one")
        print(report)
        assert report.succeeded == (first, late), report

        client.remove_server(NOBODY)
        assert client.push_weights(model, version="both again").ok
        for url, status in client.status().items():
            print(url, status.weight_version)
    for folder in save_to:
        model.save_pretrained(folder)


if __name__ == "__main__":
    main()
