"""Trainers of other projects bring their weights to real servers through the adapters."""

import abc
import asyncio
import copy
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import fake_server
from harness import TOKEN, EngineOptions, Server, completions, reference
from vllm_nixl_plugin.errors import InvalidRequest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def servers() -> fake_server.Servers:
    return fake_server.Servers(2)


def options(servers: fake_server.Servers) -> dict:
    """For a client of these servers."""
    return {"token": fake_server.TOKEN, "transport": servers.transport, "fabric": servers.fabric, "progress": False,
            "timeout_s": 20.0}  # fmt: skip


def module(seed: int) -> nn.Module:
    """The toy model of the servers."""
    made = nn.Module()
    for name, tensor in fake_server.model(seed).items():
        made.register_parameter(name, nn.Parameter(tensor))
    return made


def change(made: nn.Module) -> dict[str, torch.Tensor]:
    """Train a little; the weights after it."""
    with torch.no_grad():
        for param in made.parameters():
            param.mul_(1.5)
    return {name: param.detach() for name, param in made.named_parameters()}


@pytest.mark.server
@pytest.mark.slow
def test_trl_trains_a_toy_by_grpo_and_its_server_equals_one_that_reloads_from_disk(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    from demo import write_model

    threads = torch.get_num_threads()
    write_model(tmp_path / "model")
    torch.set_num_threads(threads)
    how = EngineOptions(args=("--logprobs-mode", "processed_logprobs"), env=(("VLLM_SERVER_DEV_MODE", "1"),))
    with Server(tmp_path / "model", how) as server:
        command = [sys.executable, ROOT / "examples/trl_grpo.py", "--steps", "5", "--url", server.url]
        ran = subprocess.run(
            [*command, "--model", tmp_path / "model"], env=os.environ | {"PUSH_WEIGHTS_TOKEN": TOKEN},
            capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "\nequal: " in ran.stdout
    assert re.search(r"ratio \d+\.\d\d", ran.stdout)
    [apart] = re.findall(r"differs by ([\d.]+)", ran.stdout)
    assert float(apart) < 0.1, "the server did not sample from the trainer's weights"


@pytest.mark.filterwarnings("ignore")  # importing TRL imports all of vLLM, and both warn
def test_trl_in_one_process_with_vllm_is_refused() -> None:
    from accelerate import Accelerator
    from trl.generation.vllm_generation import VLLMGeneration

    from trainer_client.integrations.trl import pushing_by

    with pushing_by(None), pytest.raises(InvalidRequest, match="vllm_mode is 'colocate'"):
        VLLMGeneration(nn.Linear(2, 2), Accelerator(cpu=True), None, mode="colocate")
    assert VLLMGeneration._init_vllm.__qualname__ == "VLLMGeneration._init_vllm"


@pytest.mark.server
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("adapters", [False, True])
def test_trls_generation_leaves_its_server_equal_to_a_fresh_engine(checkpoint, tmp_path, adapters) -> None:
    import peft
    import transformers as tf
    from accelerate import Accelerator
    from trl.generation.vllm_generation import VLLMGeneration

    from harness.checkpoints import write_weights
    from trainer_client import WeightClient
    from trainer_client.integrations.trl import pushing_by

    made = tf.AutoModelForCausalLM.from_pretrained(checkpoint("qwen3", seed=1), dtype=torch.float32)
    change(made)
    if adapters:
        wanted = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        made = peft.get_peft_model(made, wanted)
    plain = copy.deepcopy(made).merge_and_unload() if adapters else made
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in plain.state_dict().items()}
    path = write_weights(tmp_path / "merged", weights, like=checkpoint("qwen3", seed=1))
    with (
        Server(checkpoint("qwen3", seed=1)) as server,
        WeightClient([server.url], token=TOKEN, progress=False) as client,
    ):
        with pushing_by(client, version="by TRL"):
            generation = VLLMGeneration(
                made, Accelerator(cpu=True), None, mode="server", server_base_url=server.url, temperature=0.0
            )
        generation.sync_weights()
        pushed = completions(server.url)
        prompt = [1, 2, 3]
        [ids], [generated], _, _ = generation.generate([prompt], None, num_generations=1)
    assert [report.version for report in generation.reports] == ["by TRL"]
    assert pushed == reference(path, options=server.options)
    assert ids == prompt
    assert tuple(generated) == reference(path, options=server.options)[0].tokens[: len(generated)]


# vLLM's weight-transfer API: the real factory


class NeverCalled:
    """A `VLLMWeightSyncClient` for engines that have no use for it."""

    def __getattr__(self, name: str) -> None:
        raise AssertionError(f"{name} was called")


@pytest.mark.parametrize("gathered", [True, False])
def test_vllms_trainer_factory_makes_an_engine_that_pushes(servers, gathered) -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from trainer_client.integrations.vllm import NixlPushInitInfo, register

    register()
    register()
    made = module(5)
    init_info = NixlPushInitInfo(
        [s.url for s in servers.all], client_options=options(servers), push_options={"mode": "in_place"}, rank=0
    )
    source = ModuleSource(made) if gathered else made
    engine = WeightTransferTrainerFactory.trainer_init(init_info, client=NeverCalled(), source=source)
    for _ in range(2):
        weights = change(made)
        engine.send_weights()
        for server in servers.all:
            server.expect(weights)
    assert (engine.report.mode, engine.report.version) == ("in_place", "2")
    assert len(servers.agents) == 1
    engine.shutdown()


def test_a_rank_of_vllms_api_that_is_not_the_sender_takes_part_in_the_gathering_only(servers) -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource

    from trainer_client.integrations.vllm import NixlPushInitInfo, NixlPushTrainerEngine

    drawn = []

    class Source(ModuleSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in super().__iter__():
                drawn.append(name)
                yield name, tensor

    init_info = NixlPushInitInfo([s.url for s in servers.all], client_options=options(servers), rank=1)
    engine = NixlPushTrainerEngine.trainer_init(init_info, client=NeverCalled(), source=Source(module(5)))
    engine.send_weights()
    engine.shutdown()
    assert drawn == [*fake_server.model()]
    assert (engine.report, servers.agents) == (None, [])


def test_vllms_engine_wants_a_source(servers) -> None:
    from trainer_client.integrations.vllm import NixlPushInitInfo, NixlPushTrainerEngine

    with pytest.raises(InvalidRequest, match="source is None"):
        NixlPushTrainerEngine.trainer_init(NixlPushInitInfo(["http://a"], rank=0), client=None)


# SkyRL: the keywords that its workers use, and its FSDP source's two properties


@pytest.mark.parametrize("fsdp", [True, False])
def test_skyrls_workers_get_an_engine_that_pushes(servers, fsdp) -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource

    from trainer_client.integrations.skyrl import build_trainer_engine

    made, asked = module(6), []

    class FsdpSource(ModuleSource):
        model, weight_prefix = made, ""

    def source_factory(dtype: torch.dtype, backend: str) -> ModuleSource:
        asked.append(dtype)
        return (FsdpSource if fsdp else ModuleSource)(made)

    engine = build_trainer_engine(
        ie_cfg=types.SimpleNamespace(model_dtype="bfloat16", weight_sync_backend="nccl"), colocate_all=False, rank=0,
        inference_world_size=2, source_factory=source_factory, server_urls=[s.url for s in servers.all],
        data_parallel_size=1, base_model_path=None, client_options=options(servers),
    )  # fmt: skip
    for _ in range(2):
        weights = change(made)
        engine.send_weights()
        servers.all[1].expect(weights)
    assert asked == [torch.bfloat16]
    assert engine.skyrl_handles_prefix_cache_reset
    engine.shutdown()


def test_skyrl_on_shared_gpus_is_refused() -> None:
    from trainer_client.integrations.skyrl import build_trainer_engine

    with pytest.raises(InvalidRequest, match="colocate_all"):
        build_trainer_engine(
            ie_cfg=None, colocate_all=True, rank=0, inference_world_size=1, source_factory=lambda dtype, backend: None,
            server_urls=["http://a"], data_parallel_size=1,
        )  # fmt: skip


# verl: its interface, written down from its documentation


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The part of ``verl.checkpoint_engine.base`` that a backend meets."""
    base = types.ModuleType("verl.checkpoint_engine.base")

    class Registry:
        backends: dict[str, type] = {}  # noqa: RUF012

        @staticmethod
        def register(backend: str):
            return lambda cls: Registry.backends.setdefault(backend, cls)

    class CheckpointEngine(abc.ABC):
        wire_format = "named_tensors"

        @abc.abstractmethod
        def prepare(self) -> dict: ...

        @classmethod
        @abc.abstractmethod
        def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]) -> tuple: ...

        @abc.abstractmethod
        def init_process_group(self, **kwargs) -> None: ...

        @abc.abstractmethod
        def finalize(self) -> None: ...

        @abc.abstractmethod
        async def send_weights(self, weights, global_steps: int | None = None) -> None: ...

        @abc.abstractmethod
        async def receive_weights(self, global_steps: int | None = None): ...

    base.CheckpointEngine, base.CheckpointEngineRegistry = CheckpointEngine, Registry
    for name in ("verl", "verl.checkpoint_engine"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, "trainer_client.integrations.verl", raising=False)
    import trainer_client.integrations.verl  # noqa: F401 - custom_backend_module: importing it registers the backend

    monkeypatch.delitem(sys.modules, "trainer_client.integrations.verl")
    return base


def test_verls_manager_updates_its_rollouts(servers, verl) -> None:
    made = module(7)
    backend = verl.CheckpointEngineRegistry.backends["nixl_push"]
    kwargs = {"servers": [s.url for s in servers.all], "gather_to": "cpu", "client_options": options(servers)}
    actors = [backend(is_master=rank == 0, bucket_size=1 << 20, **kwargs) for rank in range(2)]
    rollouts = [backend(bucket_size=1 << 20, **kwargs) for _ in range(3)]
    drawn = []

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        reused = torch.empty(1 << 20)
        for name, param in made.named_parameters():
            drawn.append(name)
            yield name, reused[: param.numel()].view(param.shape).copy_(param.detach())

    async def update(step: int) -> list:
        metadata = [engine.prepare() for engine in (*actors, *rollouts)]
        for engines, topology in zip((actors, rollouts), backend.build_topology(2, 3, metadata), strict=True):
            for number, engine in enumerate(engines):
                engine.init_process_group(**{key: values[number] for key, values in topology.items()})
        for actor in actors:
            await actor.send_weights(gather(), global_steps=step)
        received = [pair for engine in rollouts async for pair in engine.receive_weights(global_steps=step)]
        for engine in (*actors, *rollouts):
            engine.finalize()
        return received

    for step in (10, 11):
        weights = change(made)
        assert asyncio.run(update(step)) == []
        for server in servers.all:
            server.expect(weights)
            assert server.version == str(step)
    assert drawn == [*fake_server.model()] * 4  # every rank takes part in every gathering
    assert len(servers.agents) == 1
    assert [r for r in servers.all[0].requests if r[1] == "/plan"] == [("POST", "/plan")]
