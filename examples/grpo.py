#!/usr/bin/env python3
"""GRPO in a hundred lines, without a framework: the server samples, the trainer learns, every step is pushed.

    vllm serve CHECKPOINT ...                                    # with the plugin; see docs/quickstart.md
    python examples/grpo.py CHECKPOINT http://127.0.0.1:8000 [SAVE_TO]

The task needs no data: a token is rewarded when its number is even, so a random model begins at about 0.5. What it
shows is the loop of an RL trainer around `push_weights`, and that answers say which weights made them: the header
X-Weight-Version is looked at, and what older weights have made is not trained on. `examples/trl_grpo.py` does the same
with TRL.
"""

import sys

import httpx
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from trainer_client import WeightClient

STEPS, PROMPTS, SAMPLES, TOKENS, LEARNING_RATE = 6, 4, 8, 12, 2e-2


def sample(http: httpx.Client, model: str, prompt: list[int], seed: int) -> tuple[list[list[int]], str]:
    """Some continuations of a prompt of token ids, and the version of the weights that made them."""
    body = {
        "model": model, "prompt": prompt, "n": SAMPLES, "max_tokens": TOKENS, "temperature": 1.0, "seed": seed,
        "ignore_eos": True, "return_token_ids": True, "logprobs": 0, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    answer = http.post("/v1/completions", json=body).raise_for_status()
    return [choice["token_ids"] for choice in answer.json()["choices"]], answer.headers["X-Weight-Version"]


def reward(tokens: Tensor) -> Tensor:
    """The share of even tokens, of each row."""
    return (tokens % 2 == 0).float().mean(-1)


def loss_of(model: torch.nn.Module, prompt: list[int], samples: Tensor, advantages: Tensor) -> Tensor:
    """The policy gradient, for samples of the present policy: the ratio of GRPO is 1."""
    rows = torch.cat([torch.tensor(prompt).expand(len(samples), -1), samples], 1)
    logits = model(input_ids=rows).logits[:, len(prompt) - 1 : -1]
    logprobs = logits.float().log_softmax(-1).gather(-1, samples[..., None])[..., 0]
    return -(advantages[:, None] * logprobs).mean()


def main() -> None:
    """Sample, learn, push."""
    checkpoint, url, *save_to = sys.argv[1:]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)  # the server casts as a start would
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    rewards: list[float] = []

    with WeightClient([url]) as client, httpx.Client(base_url=url, timeout=120) as http:
        served = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        version = client.push_weights(model, version="step-0").version
        for step in range(1, STEPS + 1):
            total = 0.0
            for number in range(PROMPTS):
                prompt = torch.randint(model.config.vocab_size, (4,)).tolist()
                tokens, made_by = sample(http, served, prompt, seed=step * PROMPTS + number)
                if made_by != version:
                    continue  # cannot happen in a loop as strict as this one
                samples = torch.tensor(tokens)
                scores = reward(samples)
                total += scores.mean().item() / PROMPTS
                advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
                loss_of(model, prompt, samples, advantages / PROMPTS).backward()
            optimizer.step()
            optimizer.zero_grad()
            report = client.push_weights(model, version=f"step-{step}")
            version = report.version
            rewards.append(total)
            print(f"{version}: reward {total:.2f}, push {report.seconds:.3f} s", flush=True)
    print("reward by step:", *(f"{value:.2f}" for value in rewards))
    for folder in save_to:
        model.to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main()
