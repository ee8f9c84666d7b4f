#!/usr/bin/env python3
"""A tiny model learns a sentence while vLLM serves it. Run it with `make demo`; it takes a minute or two on two cores.

    1. write a small random model and a tokenizer into a temporary folder
    2. start `vllm serve` on it, with the plugin, on the CPU
    3. train the model here, and push its weights into the running server after every few steps, while requests stream
    4. start a fresh server from a checkpoint of the trained model: tokens and logprobs must be the same

What a trainer of your own needs is in `train_and_push`: `WeightClient(...)` and `client.push_weights(model)`.
Prints "equal" and exits with 0 if the two servers agree in every bit and no request failed; else exits with 1.
"""

import itertools
import json
import os
import secrets
import shlex
import signal
import socket
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from rich import box
from rich.console import Console
from rich.table import Table

PROMPT = "What does the server say?"
SENTENCE = " What the trainer has learned a moment ago, and not one request has failed."
PUSHES, STEPS_PER_PUSH, LEARNING_RATE = 8, 3, 2e-4
VLLM = Path(sys.executable).with_name("vllm")
console = Console(highlight=False, soft_wrap=True)


def write_model(folder: Path) -> tuple[Any, Any]:
    """A random Qwen3 of 3 million parameters, and a tokenizer for ASCII trained on the sentence."""
    import torch
    import transformers as tf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet, end = [*string.ascii_letters, *string.digits, *string.punctuation, "Ġ"], "<|endoftext|>"
    trainer = trainers.BpeTrainer(
        vocab_size=112, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )  # fmt: skip
    bpe.train_from_iterator([PROMPT + SENTENCE], trainer)
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=end, pad_token=end)

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the server needs a processor too
    model = tf.Qwen3ForCausalLM(tf.Qwen3Config(
        vocab_size=112, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256, tie_word_embeddings=False,
    ))  # fmt: skip
    tf.utils.logging.disable_progress_bar()
    save(model, tokenizer, folder)
    return model, tokenizer


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """A checkpoint that vLLM serves."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def serve(checkpoint: Path, token: str, *more: str) -> Iterator[str]:
    """Start `vllm serve` as you would, and give its URL; afterwards nothing is left of its process group."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    arguments = [
        "serve", str(checkpoint), "--worker-extension-cls", "vllm_nixl_plugin.NixlWorkerExtension",
        "--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16",
        # Quick to start: no compilation, few sequences, little cache.
        "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4", "--kv-cache-memory-bytes", "67108864",
        *more,
    ]  # fmt: skip
    settings = {"VLLM_PLUGINS": "nixl", "PUSH_WEIGHTS_TOKEN": token}
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCH_COMPILE_DISABLE": "1"}
    temporary = {"TMPDIR": str(checkpoint.parent)}  # vLLM leaves sockets there
    say(f"$ VLLM_PLUGINS=nixl PUSH_WEIGHTS_TOKEN=... vllm {shlex.join(arguments)}", style="cyan")
    log, begin = checkpoint.with_suffix(".log"), time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [VLLM, *arguments], env=os.environ | quiet | temporary | settings, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        while not healthy(url):
            if process.poll() is not None or time.monotonic() > begin + 240:
                sys.exit("\n".join([*log.read_text(errors="replace").splitlines()[-60:], "vllm serve did not start"]))
            time.sleep(0.2)
        say(f"serves after {time.monotonic() - begin:.0f} s\n", style="dim")
        yield url
    finally:
        try:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
        finally:  # also when Ctrl-C comes again
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def healthy(url: str) -> bool:
    """Whether the server answers."""
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    return False


def request(prompt: str, n_tokens: int, **options: Any) -> dict[str, Any]:
    """The arguments of a greedy completion."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
    return {"url": "/v1/completions", "json": body | options}


def complete(url: str, prompt: str, n_tokens: int) -> dict[str, Any]:
    """Its text, tokens and logprobs."""
    with httpx.Client(base_url=url, timeout=60) as client:
        answer = client.post(**request(prompt, n_tokens, logprobs=1, return_token_ids=True)).raise_for_status()
    return dict(answer.json()["choices"][0])


class Traffic(threading.Thread):
    """Streams one request after the other until `finish`; keeps from when to when each ran, and what failed."""

    def __init__(self, url: str) -> None:
        super().__init__(name="traffic", daemon=True)
        self.url = url
        self.spans: list[tuple[float, float]] = []
        self.failures: list[str] = []
        self._enough = threading.Event()

    def run(self) -> None:
        """What the thread does."""
        with httpx.Client(base_url=self.url, timeout=60) as client:
            for number in itertools.count():
                if self._enough.is_set():
                    return
                begin = time.monotonic()
                try:
                    self._stream(client, f"{number}? {PROMPT}", n_tokens=100)
                except (httpx.HTTPError, ValueError) as error:
                    self.failures.append(f"request {number}: {type(error).__name__}: {error}")
                self.spans.append((begin, time.monotonic()))

    def _stream(self, client: httpx.Client, prompt: str, n_tokens: int) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        with client.stream("POST", **request(prompt, n_tokens, **options)) as answer:
            answer.raise_for_status()
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        last = json.loads(events[-2]) if len(events) > 1 and events[-1] == "[DONE]" else {}
        if (last.get("usage") or {}).get("completion_tokens") != n_tokens:
            raise ValueError(f"the stream ended too early: {events[-2:]}")

    def finish(self) -> None:
        """Returns when the last request is over."""
        self._enough.set()
        self.join(60)


def train_and_push(model: Any, tokenizer: Any, url: str, token: str) -> list[dict[str, Any]]:
    """Teach the model the sentence; after every few steps the running server gets its weights."""
    import torch

    from trainer_client import WeightClient

    text = tokenizer(PROMPT + SENTENCE, return_tensors="pt")["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    pushes = []
    with WeightClient([url], token=token, progress=False) as client:
        for number in range(1, PUSHES + 1):
            for _ in range(STEPS_PER_PUSH):
                optimizer.zero_grad()
                loss = model(input_ids=text, labels=text).loss
                loss.backward()
                optimizer.step()
            begin = time.monotonic()
            report = client.push_weights(model)
            pushes.append({"report": report, "loss": loss.item(), "begin": begin, "end": time.monotonic()})
            tell(tokenizer, url, f"push {number}, loss {loss.item():.2f}")
    return pushes


def tell(tokenizer: Any, url: str, when: str) -> None:
    """Show what the server answers now."""
    text = complete(url, PROMPT, len(tokenizer(SENTENCE)["input_ids"]))["text"]
    say(f"{when:>17}: {text}")


def show(pushes: list[dict[str, Any]], traffic: Traffic) -> None:
    """The reports of the pushes as a table, and what the requests noticed."""
    table = Table(title="pushes", title_justify="left", box=box.SIMPLE if console.is_terminal else box.ASCII2)
    for heading in ("version", "loss", "MB", "wire ms", "pause ms", "install ms", "whole push ms"):
        table.add_column(heading, justify="right")
    for push in pushes:
        report = push["report"]
        seconds = report.servers[0].seconds
        times = [seconds["wire"], seconds["pause"], seconds["install"], report.seconds]
        sizes = [report.version, f"{push['loss']:.2f}", f"{report.nbytes / 1e6:.1f}"]
        table.add_row(*sizes, *(f"{s * 1000:.0f}" for s in times))
    console.print("", table)

    across = sum(any(b < push["end"] and push["begin"] < e for push in pushes) for b, e in traffic.spans)
    counts = f"{len(traffic.spans)} streaming requests meanwhile, {across} of them during a push"
    say(f"{counts}: {len(traffic.failures)} failed\n")
    for failure in traffic.failures[:5]:
        say(failure, style="red")


def main() -> int:
    """Exit status 0: equal, and no request failed."""
    if not VLLM.exists():
        sys.exit(f"{VLLM} is not there: run `make setup`, then `make demo`")
    token = secrets.token_urlsafe()
    with tempfile.TemporaryDirectory(prefix="nixl-demo-") as folder:
        say("1. a small random model and its tokenizer", style="bold")
        model, tokenizer = write_model(Path(folder, "model"))
        say(f"{model.num_parameters() / 1e6:.1f} million parameters in {model.dtype}\n", style="dim")

        say("2. a vLLM server on it", style="bold")
        with serve(Path(folder, "model"), token) as url:
            say(f"3. train, push, ask: {PROMPT}", style="bold")
            tell(tokenizer, url, "before")
            traffic = Traffic(url)
            traffic.start()
            pushes = train_and_push(model, tokenizer, url, token)
            traffic.finish()
            show(pushes, traffic)
            pushed = [complete(url, prompt, 48) for prompt in (PROMPT, "Something else", SENTENCE)]

        say("4. a fresh server on a checkpoint of the trained model", style="bold")
        save(model, tokenizer, Path(folder, "trained"))
        with serve(Path(folder, "trained"), token) as url:
            fresh = [complete(url, prompt, 48) for prompt in (PROMPT, "Something else", SENTENCE)]

    same = all(p[key] == f[key] for p, f in zip(pushed, fresh, strict=True) for key in ("token_ids", "logprobs"))
    n_tokens = sum(len(answer["token_ids"]) for answer in fresh)
    say(f"{'equal' if same else 'NOT equal'}: {n_tokens} tokens and logprobs of both servers", style="bold")
    return 0 if same and not traffic.failures else 1


def say(text: str, style: str = "") -> None:
    """Print a line, in colour on a terminal."""
    console.print(text, style=style, markup=False)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # end as Ctrl-C does: through every `with` and `finally`
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
