"""``push_weights(verify=True)`` finds what has changed on its way, names it, and installs nothing."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fake_server import TOKEN as FAKE_TOKEN
from fake_server import Servers, model
from harness import TOKEN, Server, completions
from harness.checkpoints import read_weights
from ranks import Trainer
from trainer_client import LocalShard, PushFailed, WeightClient
from vllm_nixl_plugin import checksums as module
from vllm_nixl_plugin import errors
from vllm_nixl_plugin.checksums import checksums, written
from vllm_nixl_plugin.layout import Copy

# The checksum


@pytest.fixture
def short_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that small memory reaches over its end."""
    monkeypatch.setattr(module, "CHUNK_WORDS", 64)
    module._table.cache_clear()
    yield
    module._table.cache_clear()


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("short_table")
def test_the_sum_of_the_parts_is_that_of_the_whole_however_it_is_cut() -> None:
    data, draw = random_bytes(5003), random.Random(0)
    whole = checksums([(data, 0)])
    for _ in range(200):
        ends = [0, *sorted(draw.sample(range(1, 5003), draw.randint(0, 12))), 5003]
        parts = [(data[a:b].clone() if draw.random() < 0.5 else data[a:b], a) for a, b in itertools.pairwise(ends)]
        assert checksums(draw.sample(parts, len(parts))) == whole


@pytest.mark.usefixtures("short_table")
def test_every_changed_byte_and_words_that_changed_places_are_seen() -> None:
    data = random_bytes(4096)
    whole = checksums([(data, 0)])
    for index in range(0, 4096, 3):
        other = data.clone()
        other[index] ^= 1 << (index % 8)
        assert checksums([(other, 0)]) != whole
    words = data.view(-1, 8)
    for first in range(510):
        other = words.clone()
        other[[first, first + 1]] = other[[first + 1, first]]
        assert checksums([(other.view(-1), 0)]) != whole


def test_bytes_that_nobody_writes_do_not_count() -> None:
    copies = [Copy((3, 2), 0, (4, 2), 2, 10, (16, 2), 2)]  # three rows of four bytes, from byte 10 on
    data, other = random_bytes(100, seed=1), random_bytes(100, seed=2)
    for start in (10, 26, 42):
        other[start : start + 4] = data[start : start + 4]
    assert not torch.equal(data, other)
    assert checksums([(written(data, copies), 0)]) == checksums([(written(other, copies), 0)])
    parts = [(data[start : start + 4], start) for start in (10, 26, 42)]
    assert checksums(parts) == checksums([(written(data[:], copies), 0)])
    sliced = torch.cat((random_bytes(9), data))[9:]
    assert checksums([(written(sliced, copies), 0)]) == checksums(parts)


# The client


@pytest.fixture
def servers() -> Servers:
    return Servers(2)


@pytest.fixture
def client(servers: Servers) -> Iterator[WeightClient]:
    with WeightClient(
        [server.url for server in servers.all], token=FAKE_TOKEN, progress=False, timeout_s=20, direct_run_bytes=1024,
        send_buffer_bytes=4096, transport=servers.transport, fabric=servers.fabric,
    ) as made:  # fmt: skip
        yield made


@pytest.mark.parametrize("mode", ["shadow", "in_place"])
def test_what_arrived_as_it_was_sent_is_installed(client, servers, mode) -> None:
    for seed in range(2):  # packed, converted and direct
        weights = model(seed)
        report = client.push_weights(weights, verify=True, mode=mode)
        assert report.servers[0].packed_nbytes > 0
        assert report.servers[0].nbytes > report.servers[0].packed_nbytes
        assert report.servers[0].seconds["verify"] > 0
        for server in servers.all:
            server.expect(weights)
    assert client.push_weights({"q": model(4)["q"]}, verify=True, partial=True).ok


@pytest.mark.parametrize("name", ["norm", "qk", "scale", "down"])
def test_one_flipped_bit_fails_the_push_to_that_server_by_name_and_the_old_weights_serve(client, servers, name) -> None:
    client.push_weights(model(0))
    faulty = servers.all[0].workers[1]

    def flip() -> None:
        faulty.shadow[name].view(-1).view(torch.uint8)[5] ^= 16

    servers.all[0].before_verify = flip
    with pytest.raises(PushFailed) as failed:
        client.push_weights(model(1), version="bad", verify=True)
    first, second = failed.value.report.servers
    assert (first.error_code, first.version, second.ok) == ("corrupted", "1", True)
    assert name in first.error
    assert ("POST", "/updates/{id}/commit") not in servers.all[0].requests[-3:]
    assert servers.all[0].aborts == [True]
    servers.all[0].expect(model(0))
    servers.all[0].before_verify = lambda: None
    assert client.push_weights(model(1), verify=True).ok
    servers.all[0].expect(model(1))


def test_bytes_that_were_lost_on_the_way_are_found(client, servers) -> None:
    client.push_weights(model(0))
    servers.network.inject("copy", agent=servers.agents[0].name)
    with pytest.raises(PushFailed, match="corrupted"):
        client.push_weights(model(1), verify=True)


def test_the_sums_of_all_ranks_are_those_of_the_whole(servers) -> None:
    trainer = Trainer(servers, 3)
    try:
        parts: list[dict] = [{}, {}, {}]
        for name, weight in model(1).items():
            at = 0
            for part, chunk in zip(parts, weight.tensor_split(3), strict=True):
                part[name] = LocalShard(chunk.clone(), tuple(weight.shape), (at, *([0] * (weight.dim() - 1))))
                at += chunk.shape[0]
        assert all(report.ok for report in trainer.push(parts, verify=True))
        for server in servers.all:
            server.expect(model(1))
        servers.network.inject("copy", agent=servers.agents[1].name)
        for shard in (shard for part in parts for shard in part.values()):
            shard.tensor.add_(1)  # whichever copy is lost on the way is not what is there already
        failed = [str(error) for error in trainer.push(parts, verify=True)]
        assert all("corrupted" in error for error in failed), failed
    finally:
        trainer.close()


def test_streamed_pushes_cannot_be_verified(client) -> None:
    with pytest.raises(errors.InvalidRequest, match="vllm-nixl verify"):
        client.push_weights(model(), mode="streamed", verify=True)


# A real server

TENSOR = "model.layers.1.mlp.gate_up_proj.weight"


@pytest.mark.server
def test_a_real_server_installs_nothing_that_was_not_sent(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    first, second = (checkpoint("qwen3", seed) for seed in (1, 2))
    fault = tmp_path / "fault"
    extension = ["--worker-extension-cls", "flipping.FlippingWorkerExtension"]
    with (
        Server(first, args=extension, env={"FLIP_FILE": str(fault)}) as server,
        WeightClient([server.url], token=TOKEN, progress=False) as client,
    ):
        expected = [completions(server.url)]
        assert client.push_weights(read_weights(second), version="1", verify=True).servers[0].seconds["verify"] > 0
        expected.append(completions(server.url))
        assert expected[0] != expected[1]
        fault.write_text(TENSOR)
        with pytest.raises(PushFailed, match=f"corrupted.*{TENSOR}"):
            client.push_weights(read_weights(first), version="2", verify=True)
        assert completions(server.url) == expected[1]
        [status] = client.status().values()
        assert (status.weight_version, status.torn) == ("1", False)
        with pytest.raises(PushFailed, match=f"corrupted.*{TENSOR}"):
            client.push_weights(read_weights(first), version="3", verify=True, mode="in_place")
        [status] = client.status().values()
        assert status.torn
        fault.unlink()
        client.push_weights(read_weights(first), version="4", verify=True, mode="in_place")
        assert completions(server.url) == expected[0]
