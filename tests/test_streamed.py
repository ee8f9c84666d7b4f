"""Mode `streamed`: through a window of bounded size a server becomes what a fresh one is; or it is torn, and says so.

Real servers, real NIXL. The windows are the smallest that the plans allow.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from harness import TOKEN, EngineOptions, Server, completions, servers
from harness.checkpoints import random_model, read_weights, write_checkpoint
from harness.drafters import write_eagle3, write_target
from test_draft import speculating
from test_quantized_pushes import write_fp8
from trainer_client import BlockFP8, PushFailed, WeightClient
from trainer_client.control import Control
from trainers.world import World

pytestmark = pytest.mark.server


def ask(server: Server, path: str, method: str = "GET") -> httpx.Response:
    return httpx.request(
        method, f"{server.url}/nixl/v1{path}", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60
    )


def foreseen(server: Server) -> list[dict[str, Any]]:
    """What the plan says of the mode, for each worker."""
    return [worker["streamed"] for worker in ask(server, "/plan").json()["workers"]]


def readings(server: Server) -> list[dict[str, str] | None]:
    with Control(server.url, token=TOKEN) as control:
        return [worker.paths for worker in control.fingerprint().workers]


def with_budget(nbytes: int | str) -> dict[str, str]:
    return {"PUSH_WEIGHTS_SHADOW_BYTES": str(nbytes)}


@contextmanager
def pair(a: Path, b: Path, options: EngineOptions | None = None) -> Iterator[tuple[Server, Server]]:
    """A server on ``a`` with the smallest budget that its plan allows, and a fresh one on ``b``, which has told it."""
    with Server(b, options) as fresh:
        least = max(each["smallest_budget_nbytes"] for each in foreseen(fresh))
        with Server(a, options, env=with_budget(least)) as server:
            yield server, fresh


Dense = tuple[Server, Server, Path, Path]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dense]:
    """`pair` on a model whose linears vLLM packs, and the checkpoints of seeds 1 and 2."""
    root = tmp_path_factory.mktemp("dense")
    a, b = (write_checkpoint(root / str(seed), "qwen3-wide", seed) for seed in (1, 2))
    with pair(a, b) as (server, fresh):
        yield server, fresh, a, b


def test_a_budget_that_is_too_small_is_refused_by_name_before_anything_happens(tmp_path: Path):
    a = write_checkpoint(tmp_path / "1", "qwen3", 1)
    with (
        Server(a, env=with_budget("300KiB")) as server,
        WeightClient([server.url], token=TOKEN, progress=False) as client,
    ):
        [told] = foreseen(server)
        assert told["budget_nbytes"] == 300 << 10
        assert told["largest_nbytes"] == max(told["group_nbytes"]) < told["smallest_budget_nbytes"]
        assert told["lacking_nbytes"] == told["smallest_budget_nbytes"] - told["budget_nbytes"] > 0
        assert told["takes_nbytes"] is None
        before = completions(server.url)
        with pytest.raises(PushFailed, match=told["largest"][0]) as refused:
            client.push_weights(read_weights(a), mode="streamed")
        [report] = refused.value.report.servers
        assert report.error_code == "insufficient_memory"
        assert f"{told['lacking_nbytes']} are lacking. Set it to at least {told['smallest_budget_nbytes']}" in str(
            report.error
        )
        with pytest.raises(PushFailed, match="push partially with mode='shadow'"):
            client.push_weights(dict(list(read_weights(a).items())[:1]), mode="streamed", partial=True)
        assert ask(server, "/ready").status_code == 200
        assert completions(server.url) == before


def test_a_dense_model_goes_through_the_smallest_window_and_back(dense: Dense):
    server, fresh, a, b = dense
    before = readings(server), completions(server.url)
    with WeightClient([server.url], token=TOKEN, progress=False) as client:
        wanted = readings(fresh), completions(fresh.url)
        [told] = foreseen(server)
        for _ in range(2):
            report = client.push_weights(read_weights(b), mode="streamed", version="b")
            assert (readings(server), completions(server.url)) == wanted
            window = report.servers[0].window
            assert window is not None
            assert window["window_nbytes"] == told["window_nbytes"] == max(told["group_nbytes"])
            assert window["window_nbytes"] + window["working_nbytes"] == window["budget_nbytes"]
            assert "groups went through" in str(report)
            client.push_weights(read_weights(a), mode="streamed")
            assert (readings(server), completions(server.url)) == before


def test_modes_follow_each_other(dense: Dense):
    server, fresh, a, b = dense
    with WeightClient([server.url], token=TOKEN, progress=False) as client:
        wanted = readings(fresh)
        for number, mode in enumerate(("shadow", "streamed", "in_place", "streamed", "shadow")):
            client.push_weights(read_weights((b, a)[number % 2]), mode=mode)  # type: ignore[arg-type]
            assert (readings(server) == wanted) == (number % 2 == 0)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param("qwen3-moe", EngineOptions(tensor_parallel=2), id="moe-tp2"),
        pytest.param("deepseek-v2", EngineOptions(), id="mla"),
        pytest.param("qwen3-tied", EngineOptions(tensor_parallel=2), id="tied-tp2", marks=pytest.mark.thorough),
        pytest.param("mamba2", EngineOptions(), id="mamba2", marks=pytest.mark.thorough),
        pytest.param("qwen3", EngineOptions(data_parallel=2), id="dp2", marks=pytest.mark.thorough),
        pytest.param("qwen3", EngineOptions(eager=False), id="compiled", marks=pytest.mark.thorough),
    ],
)
def test_other_models_and_layouts(checkpoint: Callable[..., Path], model: str, options: EngineOptions):
    a, b = checkpoint(model, 1), checkpoint(model, 2)
    with (
        pair(a, b, options) as (server, fresh),
        WeightClient([server.url], token=TOKEN, progress=False) as client,
    ):
        client.push_weights(read_weights(b), mode="streamed")
        assert readings(server) == readings(fresh)
        assert completions(server.url) == completions(fresh.url)


@pytest.mark.thorough
def test_target_and_draft_model_go_through_one_window(tmp_path: Path):
    def offered(seed: int) -> tuple[Path, Path, dict[str, torch.Tensor]]:
        target = write_target(tmp_path / f"target-{seed}", seed)
        draft = write_eagle3(tmp_path / f"draft-{seed}", seed + 50)
        named = {f"draft:{name}": weight for name, weight in read_weights(draft).items()}
        return target, draft, read_weights(target) | named

    (target, draft, _), (new_target, new_draft, weights) = offered(1), offered(2)
    with (
        servers(speculating(target, "eagle3", draft), speculating(new_target, "eagle3", new_draft)) as (server, fresh),
        WeightClient([server.url], token=TOKEN, progress=False) as client,
    ):
        client.push_weights(weights, mode="streamed")
        assert readings(server) == readings(fresh)
        assert completions(server.url) == completions(fresh.url)


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM's CPU build multiplies block FP8 on AMX only"
)
def test_block_fp8_from_a_trainer_in_bf16(tmp_path: Path):
    a, b = (write_fp8(tmp_path / str(seed), "qwen3-moe", seed) for seed in (1, 2))
    with (
        pair(a, b) as (server, fresh),
        WeightClient([server.url], token=TOKEN, progress=False) as client,
    ):
        client.push_weights(random_model("qwen3-moe", 2), quantize=BlockFP8(), mode="streamed")
        assert readings(server) == readings(fresh)
        assert completions(server.url) == completions(fresh.url)


def test_every_rank_of_a_trainer_waits_for_its_room(checkpoint: Callable[..., Path]):
    a, b = checkpoint("qwen3", 1), checkpoint("qwen3", 2)
    with pair(a, b) as (server, fresh), World(2) as world:
        for seed in (1, 2):
            answers = world.all(
                "push", layout="declared", model="qwen3", seed=seed, servers=[server.url], mode="streamed"
            )
        assert all(0 < each["nbytes"] < each["planned"] for each in answers)
        assert readings(server) == readings(fresh)
        assert completions(server.url) == completions(fresh.url)


# When so many credits have come the trainer is killed: groups of the new weights are in place, others are not.
TRAINER = """
    import os, signal, sys
    from safetensors.torch import load_file
    from trainer_client import WeightClient, credits
    url, token, path, number = sys.argv[1:]
    take = credits.Credits._take

    def killed(self, sender, data):
        take(self, sender, data)
        if max(left for _, left in self._left.values()) >= int(number):
            print("in the middle", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    credits.Credits._take = killed
    with WeightClient([url], token=token, progress=False, lease_s=1) as client:
        client.push_weights(load_file(path), mode="streamed")
"""


def test_a_trainer_killed_between_groups_leaves_a_torn_server_that_the_next_full_push_heals(dense: Dense):
    server, fresh, a, b = dense
    with WeightClient([server.url], token=TOKEN, progress=False) as client:
        arguments = [server.url, TOKEN, str(a / "model.safetensors"), "2"]
        killed = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(TRAINER), *arguments],
            stdout=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, "in the middle\n")
        update = ask(server, "/status").json()
        update_id = (update["update"] or update["last"])["update_id"]
        ended = ask(server, f"/updates/{update_id}?wait_s=30").json()
        assert (ended["state"], ended["error"]["code"]) == ("torn", "incomplete")
        assert 0 < ended["arrived_nbytes"] < ended["nbytes"]
        assert ask(server, "/ready").json()["state"] == "torn"
        assert ask(server, "/resume", "POST").json()["error"]["code"] == "torn"
        with pytest.raises(PushFailed, match="torn"):
            client.push_weights({"model.norm.weight": read_weights(b)["model.norm.weight"]}, partial=True)
        client.push_weights(read_weights(b), mode="streamed")
        assert ask(server, "/ready").status_code == 200
        assert readings(server) == readings(fresh)
        assert completions(server.url) == completions(fresh.url)
