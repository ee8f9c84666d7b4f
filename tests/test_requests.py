"""Requests that are on their way when weights change: each ends as the pause mode promises, and no token is made up of
weights that it does not name.

Every token comes with its logprob, and every output says which version made which token. A fresh server without our
plugin scores the same text with the weights of that version: stale weights, stale KV and a wrong label all show.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from harness import TOKEN, EngineOptions, Server, completions, reference
from harness.checkpoints import read_weights, write_checkpoint
from harness.streams import Output, Stream, scores
from trainer_client import WeightClient

pytestmark = pytest.mark.server

LENGTH = 1536
OPTIONS = EngineOptions(
    args=(
        "--enable-scale-out", "--enable-prompt-tokens-details", "--enable-prefix-caching",
        "--enable-chunked-prefill", "--max-num-batched-tokens", "64", "--max-model-len", str(LENGTH),
        "--max-num-seqs", "16", "--hf-overrides", json.dumps({"max_position_embeddings": LENGTH}),
    )
)  # fmt: skip
BLOCK = 128
"""Tokens in a block of KV cache on CPU."""
LONG = 400
"""Tokens of an answer that takes seconds, much longer than a push."""
TOLERANCE = 0.2
"""By how much a logprob may differ with what shares a batch. Other weights: 1.4 on average."""
POLICIES = [
    pytest.param(*how, id="-".join(how), marks=[] if how[2] == "shadow" else pytest.mark.thorough)
    for how in itertools.product(("keep", "wait", "abort"), ("recompute", "keep"), ("shadow", "in_place"))
]


@dataclass
class World:
    """A server, and fresh ones with the weights of either seed by the first letter of a version: a1, b2, a3 …"""

    server: Server
    fresh: dict[str, Server]
    checkpoints: dict[str, Path]
    client: WeightClient
    number: int = 0

    def push(self, letter: str, **how: str) -> str:
        """Push the weights of that letter; the version."""
        self.number += 1
        version = f"{letter}{self.number}"
        self.client.push_weights(read_weights(self.checkpoints[letter]), version=version, **how)
        return version

    def status(self) -> dict:
        return dict(ask(self.server, "GET", "/status").json())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("requests")
    paths = {letter: write_checkpoint(root / letter, "qwen3", seed) for letter, seed in (("a", 1), ("b", 2))}
    with ExitStack() as stack:
        server = stack.enter_context(Server(paths["a"], OPTIONS))
        fresh = {of: stack.enter_context(Server(path, OPTIONS, plugin=False)) for of, path in paths.items()}
        client = stack.enter_context(WeightClient([server.url], token=TOKEN, timeout_s=120, progress=False))
        yield World(server, fresh, paths, client)


def ask(server: Server, method: str, path: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.request(method, f"{server.url}/nixl/v1{path}", headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 500) for _ in range(length)]


def start_streams(server: Server) -> dict[str, Stream]:
    """Requests of every kind, all of which have tokens already."""
    url = server.url
    streams = {
        "greedy": Stream(url, prompt(5, 1), LONG),
        "long prompt": Stream(url, prompt(700, 2), LONG),
        "cached prompt": Stream(url, prompt(700, 2), LONG),
        "three choices": Stream(url, prompt(20, 3), LONG, n=3, temperature=1.0),
        "digits": Stream(url, prompt(9, 4), LONG, structured_outputs={"regex": f"[0-9]{{{LONG}}}"}),
    }
    for stream in streams.values():
        stream.wait_for(1)
    return streams


def check_versions(outputs: Sequence[Output], order: Sequence[str]) -> None:
    """Every token has a version, and versions only go forward."""
    for output in outputs:
        spans = output.versions
        assert len(output.logprobs) == len(output.tokens)
        assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])][: len(spans)]
        assert (spans[-1][2] if spans else 0) == len(output.tokens)
        ranks = [order.index(version) for version, _, _ in spans]
        assert ranks == sorted(set(ranks)), spans


def check_made_by(world: World, stream: Stream, outputs: Sequence[Output], *, first_only: bool = False) -> None:
    """Fresh servers with the weights that each token names give it the logprob that came with it.

    first_only: tokens of later versions are made with KV of earlier ones, which no fresh server has.
    """
    for output in outputs:
        for version, start, end in output.versions[: 1 if first_only else None]:
            before, tokens = output.tokens[:start], output.tokens[start:end]
            found = scores(world.fresh[version[0]].url, [*stream.prompt, *before], tokens)
            worst = max(abs(a - b) for a, b in zip(output.logprobs[start:end], found, strict=True))
            assert worst < TOLERANCE, (version, start, end, worst)


def check_digits(world: World, stream: Stream, output: Output, *, first_only: bool = False) -> None:
    """`check_made_by` at some tokens of a greedy answer in digits, whose logprobs are relative to what is allowed."""
    for version, start, end in output.versions[: 1 if first_only else None]:
        for position in {start, end - 1, *range(start, end, 40)}:
            before = [*stream.prompt, *output.tokens[:position]]
            [found] = Stream(world.fresh[version[0]].url, before, 1, structured_outputs={"regex": "[0-9]"}).result()
            assert abs(found.logprobs[0] - output.logprobs[position]) < TOLERANCE, (version, position)
    text = Tokenizer.from_file(str(world.checkpoints["a"] / "tokenizer.json")).decode(output.tokens)
    assert text
    assert text.isdecimal()


def check_idle(server: Server) -> None:
    """No request is left in the engine."""
    wanted = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    deadline = time.monotonic() + 30
    while True:
        lines = httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines()
        found = [line for line in lines if line.startswith(wanted)]
        assert found
        if all(float(line.rsplit(" ", 1)[1]) == 0 for line in found):
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def finish(world: World, streams: dict[str, Stream], order: Sequence[str], *, kept: bool) -> dict[str, list[Output]]:
    """Let all streams end and check that every token is what its version makes of it. ``kept``: so was their KV."""
    outputs = {name: stream.result() for name, stream in streams.items()}
    for name, of in outputs.items():
        check_versions(of, order)
        assert all(output.versions[0][0] == order[0] for output in of)
        if name == "digits":
            check_digits(world, streams[name], of[0], first_only=kept)
        else:
            check_made_by(world, streams[name], of, first_only=kept)
    return outputs


@pytest.mark.parametrize(("pause", "kv_cache", "mode"), POLICIES)
def test_running_requests_end_as_the_pause_mode_promises(world, pause, kv_cache, mode):
    server = world.server
    versions = [world.push("a")]
    streams = start_streams(server)
    leaving = Stream(server.url, prompt(30, 5), LONG)
    leaving.wait_for(1)

    def push() -> None:
        """Keep: again and again, so that they meet many of them. The others end what is running."""
        for letter in "bababa" if pause == "keep" else "b":
            versions.append(world.push(letter, pause=pause, kv_cache=kv_cache, mode=mode))
            if all(stream.ended for stream in streams.values()):
                break

    with ThreadPoolExecutor() as pool:
        pushing = pool.submit(push)
        leaving.leave()
        newcomers = []
        while not pushing.done():  # with long prompts, so that some are in the middle of theirs
            newcomers.append(Stream(server.url, prompt(300, 100 + len(newcomers)), 8))
            wait([pushing], 0.2)
        pushing.result()
    outputs = finish(world, streams, versions, kept=kv_cache == "keep")
    arrived = [stream.result() for stream in newcomers]

    every = [output for of in outputs.values() for output in of]
    assert all(output.finish_reason == "abort" or len(output.tokens) == LONG for output in every)
    if pause == "abort":
        assert any(output.finish_reason == "abort" for output in every), "all had ended before the install"
    else:
        assert all(output.finish_reason == "length" for output in every)
    if pause == "keep":
        assert any(len(output.versions) > 1 for output in every), "no request was running during an install"
    else:
        assert all(len(output.versions) == 1 for output in every)
    for stream, of in zip(newcomers, arrived, strict=True):
        check_versions(of, versions)
        assert pause == "abort" or all(len(output.tokens) == 8 for output in of)
        if kv_cache == "recompute":
            check_made_by(world, stream, of)
    check_idle(server)
    last = world.push(versions[-1][0])
    assert completions(server.url) == reference(world.checkpoints[last[0]], options=OPTIONS)


def test_requests_that_come_while_an_update_waits_for_others_get_the_new_weights(world):
    before = world.push("a")
    streams = start_streams(world.server)
    with ThreadPoolExecutor() as pool:
        pushing = pool.submit(world.push, "b", pause="wait")
        while not pushing.done() and (world.status()["update"] or {}).get("step") != "pausing":
            time.sleep(0.01)
        newcomers = [Stream(world.server.url, prompt(300, 50 + number), 20) for number in range(3)]
        after = pushing.result()
    finish(world, streams, (before, after), kept=False)
    for stream in newcomers:
        [output] = stream.result()
        assert output.versions == [(after, 0, 20)]
        check_made_by(world, stream, [output])


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_a_pause_by_hand_outlasts_pushes_and_requests_cross_it_or_wait_behind_it(world, mode):
    server = world.server
    before = world.push("a")
    streams = start_streams(server)
    leaving = [Stream(server.url, prompt(length, 5), LONG) for length in (30, 700)]
    leaving[0].wait_for(1)
    ask(server, "POST", "/pause?mode=keep&kv_cache=keep")
    newcomers = [Stream(server.url, prompt(length, 60 + length), 20) for length in (3, 300)]
    leaving[0].leave()
    never = world.push("b", mode=mode)
    late = Stream(server.url, prompt(300, 80), LONG)
    after = world.push("b", mode=mode)
    leaving[1].leave()
    assert world.status()["held"]
    ask(server, "POST", "/resume")
    outputs = finish(world, streams, (before, after), kept=False)
    every = [output for of in outputs.values() for output in of]
    assert all(len(output.tokens) == LONG for output in every)
    assert any(len(output.versions) == 2 for output in every), "no request was running at the pause"
    for stream in (*newcomers, late):
        [output] = stream.result()
        assert output.versions == [(after, 0, stream.max_tokens)], never
        check_made_by(world, stream, [output])
    check_idle(server)
    assert completions(server.url) == reference(world.checkpoints["b"], options=OPTIONS)


def greedy(url: str, tokens: Sequence[int], **more: str) -> tuple[list[int], list[float], int]:
    """The answer, its logprobs, and how many tokens of the prompt came from the prefix cache."""
    body = {
        "model": "model", "prompt": list(tokens), "max_tokens": 16, "temperature": 0, "ignore_eos": True, "logprobs": 0,
        "return_token_ids": True, **more,
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
    [choice] = answer["choices"]
    cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], cached


@pytest.mark.parametrize("held", [False, True], ids=["serving", "paused by hand"])
@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_the_prefix_cache_serves_no_block_of_old_weights_unless_it_is_to_be_kept(world, mode, held):
    text = prompt(BLOCK * 5 + 9, 90 + 2 * held + (mode == "shadow"))
    url = world.server.url
    fresh = {letter: greedy(server.url, text, cache_salt=f"{mode}{held}") for letter, server in world.fresh.items()}
    assert fresh["a"][:2] != fresh["b"][:2]
    world.push("a")
    for before, after in ("ab", "ba"):
        assert greedy(url, text)[:2] == fresh[before][:2]
        assert greedy(url, text)[2] == BLOCK * 5
        if held:
            ask(world.server, "POST", "/pause?mode=keep&kv_cache=keep")
        world.push(after, mode=mode, kv_cache="recompute")
        if held:
            ask(world.server, "POST", "/resume")
        assert greedy(url, text) == fresh[after]
    world.push("b", mode=mode, kv_cache="keep")
    assert greedy(url, text)[2] == BLOCK * 5
    world.push("b", mode=mode, kv_cache="recompute")
    assert greedy(url, text) == fresh["b"]


@pytest.mark.parametrize("pauses", [["keep"], pytest.param(["wait", "abort"], marks=pytest.mark.thorough)])
def test_data_parallel_ranks_that_step_together_pause_and_go_on_together(tmp_path, pauses):
    a, b = (write_checkpoint(tmp_path / letter, "deepseek-v2-dense", seed) for letter, seed in (("a", 1), ("b", 2)))
    options = OPTIONS.with_(data_parallel=2)
    with Server(a, options) as server, WeightClient([server.url], token=TOKEN, timeout_s=60, progress=False) as client:
        client.push_weights(read_weights(a), version="0")
        number = 0
        for pause, n_streams in itertools.product(pauses, (1, 4, 0)):  # one: the other rank is idle
            streams = [Stream(server.url, prompt(200 * each + 3, each), LONG) for each in range(n_streams)]
            for stream in streams:
                stream.wait_for(1)
            first = number
            for path in (b, a):
                number += 1
                client.push_weights(read_weights(path), version=str(number), pause=pause)
            order = [str(each) for each in range(first, number + 1)]
            for stream in streams:
                outputs = stream.result()
                check_versions(outputs, order)
                assert outputs[0].versions[0][0] == order[0]
                assert outputs[0].finish_reason == ("abort" if pause == "abort" else "length")
                assert pause == "keep" or len(outputs[0].versions) == 1
            check_idle(server)
        assert completions(server.url) == reference(a, options=options)
