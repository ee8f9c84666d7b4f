#!/usr/bin/env python3
"""GRPO with TRL and a vLLM server on a CPU, weights by `WeightClient`: a random model learns to write digits.

    1. write a small random model, and start `vllm serve` on it with the plugin (or use --url and --model)
    2. `GRPOTrainer` in TRL's server mode, made inside `pushing_by(client)`; the reward is the share of digits
    3. the same weights once more, as TRL walks them, by a checkpoint on disk and vLLM's `reload_weights`

TRL's own ways need a GPU: in server mode its client refuses any other device ("needs a CUDA device"), and in mode
colocate vLLM's CPU build has packed the weights that TRL loads into. So 3 is what a push is compared with: tokens and
logprobs must be the same, and the times are printed. Exits with 0 if they are the same and the reward has risen.

Takes about two minutes on two idle cores.
"""

import argparse
import os
import secrets
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from demo import serve, write_model

from trainer_client import WeightClient

PROMPTS = ("the server", "what the trainer", "a moment ago", "one request")
N_TOKENS = 16


def is_digit(tokenizer: Any, token: int) -> bool:
    """What the model is to write."""
    text = tokenizer.decode([token])
    return bool(text) and all(character.isdigit() for character in text)


def train(folder: Path, url: str, client: WeightClient, steps: int) -> Any:
    """The trainer after its last step."""
    import transformers as tf
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from trainer_client.integrations.trl import pushing_by

    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    wanted = {token for token in range(len(tokenizer)) if is_digit(tokenizer, token)}

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [sum(token in wanted for token in ids) / max(len(ids), 1) for ids in completion_ids]

    with pushing_by(client), tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=tf.AutoModelForCausalLM.from_pretrained(folder), processing_class=tokenizer, reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": list(PROMPTS) * steps}),
            args=GRPOConfig(
                output_dir=output, use_vllm=True, vllm_mode="server", vllm_server_base_url=url, use_cpu=True,
                max_steps=steps, per_device_train_batch_size=32, num_generations=8, max_completion_length=N_TOKENS,
                learning_rate=1e-3, lr_scheduler_type="constant", beta=0.0, bf16=False, report_to="none",
                logging_steps=1, save_strategy="no", disable_tqdm=True, seed=1,
                generation_kwargs={"ignore_eos": True},
            ),
        )  # fmt: skip
        trainer.remove_callback(tf.PrinterCallback)
        trainer.train()
    return trainer


def reload_from_disk(trainer: Any, url: str, like: Path, folder: Path) -> None:
    """TRL's walk over the weights, written as a checkpoint that every worker of the server loads again."""
    from safetensors.torch import save_file

    found = {name: weight.contiguous() for name, weight in trainer.vllm_generation._iter_named_params()}
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    for path, sent in (("/pause", {}), ("/collective_rpc", body), ("/resume", {}), ("/reset_prefix_cache", {})):
        httpx.post(f"{url}{path}", json=sent, timeout=120).raise_for_status()


def answers(url: str) -> list[Any]:
    """Greedy tokens and logprobs of the server."""
    model = httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
    body = {"model": model, "max_tokens": 32, "temperature": 0, "logprobs": 1, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip
    found = []
    for prompt in PROMPTS:
        answer = httpx.post(f"{url}/v1/completions", json=body | {"prompt": prompt}, timeout=120).raise_for_status()
        [choice] = answer.json()["choices"]
        found.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
    return found


def timed(times: int, action: Callable[[], Any]) -> float:
    """The median of the seconds that ``action`` takes."""
    seconds = []
    for _ in range(times):
        begin = time.monotonic()
        action()
        seconds.append(time.monotonic() - begin)
    return statistics.median(seconds)


@contextmanager
def server(arguments: argparse.Namespace, folder: Path, token: str) -> Iterator[tuple[str, Path]]:
    """The URL of a server and the folder of its model: what the arguments name, or new ones."""
    if arguments.url:
        yield arguments.url, arguments.model
        return
    write_model(folder / "model")
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # for the comparison only: the routes that reload from disk
    with serve(folder / "model", token, "--logprobs-mode", "processed_logprobs") as url:
        yield url, folder / "model"


def main() -> int:
    """Exit status 0: equal, and the reward has risen."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM")  # it asks for an older one
    parser = argparse.ArgumentParser(description="GRPO with TRL on a CPU")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--url", help="a server that runs, with PUSH_WEIGHTS_TOKEN as here; needs --model")
    parser.add_argument("--model", type=Path, help="the folder of the checkpoint that it was started on")
    arguments = parser.parse_args()
    token = os.environ.get("PUSH_WEIGHTS_TOKEN") or secrets.token_urlsafe()
    with tempfile.TemporaryDirectory(prefix="trl-") as name, server(arguments, Path(name), token) as (url, model):
        with WeightClient([url], token=token, progress=False) as client:
            trainer = train(model, url, client, arguments.steps)
            push_s = timed(5, trainer.vllm_generation.sync_weights)
            pushed = answers(url)
        disk = Path(name, "disk")
        disk.mkdir()
        disk_s = timed(5, lambda: reload_from_disk(trainer, url, model, disk))
        reloaded = answers(url)
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    rewards = [entry["reward"] for entry in log]
    third = max(len(rewards) // 3, 1)
    first, last = statistics.mean(rewards[:third]), statistics.mean(rewards[-third:])
    print("reward by step:", *(f"{reward:.2f}" for reward in rewards))
    print(f"mean reward of the first third of the steps {first:.2f}, of the last {last:.2f}")
    apart = max(entry["sampling/sampling_logp_difference/max"] for entry in log)
    print(f"a token's logprob differs by {apart:.3f} at most between server (bfloat16) and trainer (float32)")
    print(f"push {push_s:.3f} s, checkpoint and reload {disk_s:.3f} s (medians of 5): ratio {push_s / disk_s:.2f}")
    equal = pushed == reloaded
    print(f"{'equal' if equal else 'NOT equal'}: tokens and logprobs after a push and after a reload from disk")
    return 0 if equal and last > first else 1


if __name__ == "__main__":
    sys.exit(main())
