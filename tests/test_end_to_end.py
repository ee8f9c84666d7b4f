"""Real servers, real NIXL, real HTTP: after a push, a server generates what a fresh one with its weights generates."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from harness import TOKEN, EngineOptions, Server, completions, reference, servers
from harness.checkpoints import read_weights
from trainer_client import WeightClient
from trainer_client.checkpoint import read_checkpoint

pytestmark = pytest.mark.server

Checkpoints = Callable[..., Path]


def push_from_disk(checkpoint: Path, *urls: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """`vllm-nixl push`, as a user runs it."""
    command = [str(Path(sys.executable).parent / "vllm-nixl"), "push", str(checkpoint), *urls, *options]
    return subprocess.run(
        command,
        env=os.environ | {"PUSH_WEIGHTS_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def status(server: Server) -> dict[str, object]:
    answer = httpx.get(f"{server.url}/nixl/v1/status", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


MORE = [pytest.mark.slow, pytest.mark.thorough]
LAYOUTS = [
    pytest.param("qwen3", EngineOptions(), id="qwen3"),
    pytest.param("qwen3-tied", EngineOptions(), id="qwen3-tied"),
    pytest.param("llama", EngineOptions(), id="llama"),
    pytest.param("qwen3-moe", EngineOptions(), id="qwen3-moe"),
    pytest.param("qwen3-wide", EngineOptions(), id="qwen3-wide"),
    pytest.param("deepseek-v2", EngineOptions(), id="deepseek-v2"),
    pytest.param("mamba2", EngineOptions(), id="mamba2"),
    pytest.param("qwen3", EngineOptions(tensor_parallel=2), id="qwen3-tp2"),
    pytest.param("qwen3-moe", EngineOptions(tensor_parallel=2), id="qwen3-moe-tp2"),
    pytest.param("qwen3-tied", EngineOptions(tensor_parallel=2), id="qwen3-tied-tp2", marks=pytest.mark.thorough),
    pytest.param("qwen3", EngineOptions(data_parallel=2), id="qwen3-dp2"),
    pytest.param("qwen3", EngineOptions(api_servers=2), id="qwen3-api2"),
    pytest.param("qwen3", EngineOptions(eager=False), id="qwen3-compiled", marks=pytest.mark.slow),
    pytest.param("qwen3-tied", EngineOptions(eager=False), id="qwen3-tied-compiled", marks=MORE),
    pytest.param("llama", EngineOptions(eager=False), id="llama-compiled", marks=MORE),
    pytest.param("qwen3-moe", EngineOptions(eager=False), id="qwen3-moe-compiled", marks=MORE),
    pytest.param("qwen3-wide", EngineOptions(eager=False), id="qwen3-wide-compiled", marks=MORE),
    pytest.param(
        "qwen3", EngineOptions(eager=False, tensor_parallel=2), id="qwen3-compiled-tp2", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("model", "options"), LAYOUTS)
def test_a_pushed_server_equals_a_fresh_one_three_times_in_a_row_and_back(
    checkpoint: Checkpoints, model: str, options: EngineOptions
):
    a, b = checkpoint(model, 1), checkpoint(model, 2)
    want = {path: reference(path, options=options) for path in (a, b)}
    assert want[a] != want[b]
    with Server(a, options) as server, WeightClient([server.url], token=TOKEN) as client:
        assert completions(server.url) == want[a]
        for number, (target, mode) in enumerate([(b, "shadow"), (a, "in_place"), (b, "shadow"), (a, "shadow")], 1):
            if options == EngineOptions() and model == "qwen3":  # each time another process, which knows nothing
                done = push_from_disk(target, server.url, options=("--version", f"v{number}", "--mode", mode))
                assert done.returncode == 0, done.stdout + done.stderr
            else:
                client.push_weights(read_checkpoint(target), version=f"v{number}", mode=mode)
            assert completions(server.url) == want[target], f"push {number}"
            assert status(server)["weight_version"] == f"v{number}"


def test_two_servers_are_pushed_at_once(checkpoint: Checkpoints):
    a, b = checkpoint("qwen3", 1), checkpoint("qwen3", 2)
    with servers(Server(a), Server(a, EngineOptions(tensor_parallel=2))) as both:
        done = push_from_disk(b, *(s.url for s in both))
        assert done.returncode == 0, done.stdout + done.stderr
        for server in both:
            assert completions(server.url) == reference(b, options=server.options)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path, Path]]:
    """A server on Qwen3 of seed 1, and the checkpoints of seeds 1 and 2."""
    from harness.checkpoints import write_checkpoint

    root = tmp_path_factory.mktemp("served")
    a, b = (write_checkpoint(root / f"qwen3-{seed}", "qwen3", seed) for seed in (1, 2))
    with Server(a) as server:
        yield server, a, b


def test_a_module_a_state_dict_and_named_tensors_give_the_same(served):
    import transformers

    server, a, b = served
    model = transformers.AutoModelForCausalLM.from_pretrained(b, dtype="bfloat16")
    with WeightClient([server.url], token=TOKEN) as client:
        for offered in (model, model.state_dict(), list(read_weights(b).items())):
            client.push_weights(read_weights(a))
            assert completions(server.url) == reference(a)
            report = client.push_weights(offered)
            assert completions(server.url) == reference(b)
            assert report.nbytes > 0


def test_fp32_masters_are_cast_as_a_checkpoint_of_them_is_loaded(served):
    server, _, b = served
    masters = {name: tensor.float() + 1e-4 for name, tensor in read_weights(b).items()}
    with WeightClient([server.url], token=TOKEN) as client:
        client.push_weights(masters)
        fp32 = completions(server.url)
        client.push_weights({name: tensor.bfloat16() for name, tensor in masters.items()})
        assert completions(server.url) == fp32
