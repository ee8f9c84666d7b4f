#!/usr/bin/env python3
"""A trainer under FSDP2: every rank pushes its shards from where they lie, and no rank ever has the model.

    vllm serve CHECKPOINT ...                                    # with the plugin; see docs/quickstart.md
    torchrun --nproc-per-node 2 examples/fsdp2.py CHECKPOINT http://127.0.0.1:8000 [SAVE_TO]

Any transformers model will do. With SAVE_TO, and only then, the model is gathered on rank 0 and saved.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from trainer_client import WeightClient

STEPS = 2


def main() -> None:
    """Train and push, step by step, on all ranks."""
    checkpoint, url, *save_to = sys.argv[1:]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to(device)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())  # each rank has other data

    with WeightClient([url]) as client:  # on every rank; rank 0 speaks with the server
        for step in range(1, STEPS + 1):
            tokens = torch.randint(model.config.vocab_size, (4, 16), device=device)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = client.push_weights(model, version=f"step-{step}")  # on every rank
    if dist.get_rank() == 0:
        print(report)
    for folder in save_to:
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).save_pretrained(
                folder, state_dict=whole
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
