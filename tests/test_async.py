"""Pushes that run beside training: consistent snapshots, in the order of the calls, errors where they are awaited."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import harness
from fake_server import TOKEN, FakeServer, Servers, model
from harness import Server, completions, reference
from trainer_client import LocalShard, PushFailed, PushReport, RankGroup, ServerProgress, WeightClient
from trainer_client.asynchronous import Snapshot, _fits, queued
from trainer_client.sources import collect
from vllm_nixl_plugin import errors

PATIENCE_S = 60


class Gate:
    """Holds every begin at a server until `open` is called: till then no byte of a push has been read."""

    def __init__(self, server: FakeServer) -> None:
        self._begin, self._opened = server._begin, threading.Event()
        self.reached = threading.Event()
        self.versions: list[str] = []
        server._begin = self._held

    def open(self) -> None:
        self._opened.set()

    def _held(self, request):
        self.versions.append(request.version)
        self.reached.set()
        assert self._opened.wait(PATIENCE_S)
        return self._begin(request)


@pytest.fixture
def servers() -> Servers:
    return Servers(1)


@pytest.fixture
def server(servers: Servers) -> FakeServer:
    return servers.all[0]


@pytest.fixture
def client(servers: Servers) -> Iterator[WeightClient]:
    with client_of(servers) as made:
        yield made


def client_of(servers: Servers, group: RankGroup | None = None) -> WeightClient:
    return WeightClient(
        [s.url for s in servers.all], token=TOKEN, progress=False, direct_run_bytes=1024, send_buffer_bytes=4096,
        timeout_s=PATIENCE_S, group=group, transport=servers.transport, fabric=servers.fabric,
    )  # fmt: skip


def copied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def train(weights: dict[str, Tensor]) -> None:
    """Write over every weight, in place."""
    for tensor in weights.values():
        tensor.mul_(-1.5)


def test_a_snapshot_is_what_the_weights_were_at_the_call(client, server) -> None:
    weights, gate = model(1), Gate(server)
    before = copied(weights)
    handle = client.push_weights_async(weights, version="one")
    assert gate.reached.wait(PATIENCE_S)
    assert not handle.done()
    train(weights)
    gate.open()
    report = handle.wait()
    assert handle.done()
    assert (report.version, report.ok) == ("one", True)
    server.expect(before)
    assert handle.wait() is report


def test_without_a_snapshot_the_weights_are_sent_from_where_they_lie(client, server) -> None:
    weights, gate = model(1), Gate(server)
    handle = client.push_weights_async(weights, snapshot=False)
    assert gate.reached.wait(PATIENCE_S)
    train(weights)  # what the caller promised not to do shows that nothing was copied
    gate.open()
    handle.wait()
    server.expect(weights)


def test_overlapping_pushes_come_in_the_order_of_the_calls_and_are_never_mixed(client, server) -> None:
    weights, gate = model(1), Gate(server)
    installed: list[tuple[str, Tensor]] = []
    commit = server._commit

    def watched(update_id, request):
        answer = commit(update_id, request)
        installed.append((server.version, server.workers[0].params["norm"].clone()))
        return answer

    server._commit = watched
    expected, handles = [], []
    threading.Timer(0.3, gate.open).start()
    for version in ("1", "2", "3"):
        expected.append((version, weights["norm"].clone()))
        handles.append(client.push_weights_async(weights))
        train(weights)
    final = client.push_weights(weights)
    assert all(handle.done() for handle in handles)
    assert [handle.wait().version for handle in handles] == ["1", "2", "3"]
    assert (final.version, gate.versions) == ("4", ["1", "2", "3", "4"])
    for (version, norm), (got_version, got_norm) in zip(expected, installed, strict=False):
        assert version == got_version
        assert torch.equal(norm, got_norm)
    server.expect(weights)


def test_a_second_push_uses_the_memory_of_the_first_and_prepares_nothing(client, server, servers) -> None:
    weights = model(1)
    client.push_weights_async(weights).wait()
    [agent] = servers.agents
    requests, owners = len(server.requests), client._stockroom.memory.sources.owners
    agent.register = agent.prepare_write = None  # whoever calls it fails
    train(weights)
    before = copied(weights)
    handle = client.push_weights_async(weights)
    train(weights)
    handle.wait()
    server.expect(before)
    assert client._stockroom.memory.sources.owners is owners
    assert ("POST", "/plan") not in server.requests[requests:]


def test_an_iterable_of_passing_tensors_is_prepared_once_too(client, server) -> None:
    for seed in (1, 2):
        client.push_weights_async(iter(model(seed).items())).wait()
        server.expect(model(seed))
    assert server.requests.count(("POST", "/plan")) == 1


def test_other_shapes_get_other_memory(client, server) -> None:
    client.push_weights_async(model(1)).wait()
    client.push_weights_async({"norm": model(2)["norm"]}, partial=True).wait()
    server.expect(model(1) | {"norm": model(2)["norm"]})


def test_views_of_one_storage_are_copied_once_and_stay_views() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    sources = collect({"row": whole[1], "column": whole[:, 2], "all": whole})
    taken = Snapshot().take(sources)
    whole.zero_()
    assert taken.geometry() == sources.geometry()
    assert len(taken.owners) == 1
    assert taken.places() != sources.places()
    data = torch.empty(0).set_(taken.owners[0], 0, (3, 4))
    assert torch.equal(data, torch.arange(12.0).reshape(3, 4))


def test_an_error_comes_where_the_push_is_awaited_and_the_next_push_works(client, server) -> None:
    server.fail["POST", "/updates/{id}/commit"] = [errors.InstallFailed("no")]
    handle = client.push_weights_async(model(1))
    with pytest.raises(PushFailed, match="no") as failed:
        handle.wait()
    assert failed.value.report.succeeded == ()
    assert handle.done()
    client.push_weights_async(model(2)).wait()
    server.expect(model(2))


def test_what_is_wrong_with_the_call_comes_there_too(client) -> None:
    handle = client.push_weights_async({"norm": torch.zeros(4, device="meta")})
    with pytest.raises(errors.InvalidRequest, match="norm"):
        handle.wait()
    handle = client.push_weights_async(model(1), mode="sideways")
    with pytest.raises(errors.InvalidRequest, match="sideways"):
        handle.wait()


def test_progress_counts_to_the_end(client, server) -> None:
    gate = Gate(server)
    handle = client.push_weights_async(model(1))
    assert gate.reached.wait(PATIENCE_S)
    assert handle.progress() == {server.url: ServerProgress("begin", 0, 0)}
    gate.open()
    report = handle.wait()
    assert handle.progress() == {server.url: ServerProgress("done", report.nbytes, report.nbytes)}


def test_waiting_may_end_before_the_push_does(client, server) -> None:
    gate = Gate(server)
    handle = client.push_weights_async(model(1))
    with pytest.raises(errors.DeadlineExceeded, match="still running"):
        handle.wait(timeout_s=0.05)
    gate.open()
    assert handle.wait(PATIENCE_S).ok


def test_a_handle_is_awaited_by_leaving_its_block(client, server) -> None:
    weights = model(1)
    before = copied(weights)
    with client.push_weights_async(weights) as handle:
        train(weights)
    assert handle.done()
    server.expect(before)
    server.fail["POST", "/updates"] = [errors.InsufficientMemory("full")]
    with pytest.raises(PushFailed, match="full"), client.push_weights_async(weights):
        pass
    server.fail["POST", "/updates"] = [errors.InsufficientMemory("full")]
    with pytest.raises(ZeroDivisionError), client.push_weights_async(weights):
        1 / 0  # noqa: B018


def test_closing_waits_for_what_was_started(servers, server) -> None:
    with client_of(servers) as client:
        handle = client.push_weights_async(model(1))
    assert handle.done()
    server.expect(model(1))
    with pytest.raises(errors.InvalidRequest, match="closed"):
        client.push_weights_async(model(1))


def test_an_error_in_the_trainer_ends_what_was_started(servers, server) -> None:
    gate = Gate(server)
    with pytest.raises(ZeroDivisionError), client_of(servers) as client:  # noqa: PT012 - what is tested is the leaving
        handle = client.push_weights_async(model(1))
        assert gate.reached.wait(PATIENCE_S)
        threading.Timer(0.2, gate.open).start()
        1 / 0  # noqa: B018
    with pytest.raises(PushFailed, match="interrupted"):
        handle.wait()
    assert server.version == "default"
    assert server.open is None


def test_ranks_of_a_trainer_push_their_snapshots_together(servers, server) -> None:
    import torch.distributed as dist

    store, whole = dist.HashStore(), model(1)
    parts = [{name: tensor.tensor_split(2)[rank].clone() for name, tensor in whole.items()} for rank in range(2)]
    trained = threading.Barrier(2)

    def rank(number: int) -> list[PushReport]:
        mine = parts[number]
        starts = {name: number * parts[0][name].shape[0] for name in whole}
        shards = {
            name: LocalShard(tensor, whole[name].shape, (starts[name],) + (0,) * (tensor.dim() - 1))
            for name, tensor in mine.items()
        }
        with client_of(servers, RankGroup(store, number, 2)) as client:
            handles = []
            for _ in range(3):
                handles.append(client.push_weights_async(shards))
                train(mine)
                trained.wait(PATIENCE_S)
            return [handle.wait() for handle in handles]

    with ThreadPoolExecutor(2) as threads:
        reports = list(threads.map(rank, range(2)))
    assert [[report.version for report in of_rank] for of_rank in reports] == [["1", "2", "3"]] * 2
    for _ in range(2):
        train(whole)
    server.expect(whole)
    assert len(servers.agents) == 2


def on_gpu(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, as the result of kernels that have hardly begun."""
    moved = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in weights.items()}
    torch.cuda._sleep(1 << 28)
    for name, tensor in weights.items():
        moved[name].copy_(tensor)
    return moved


@pytest.mark.gpu
def test_a_snapshot_on_a_gpu_is_taken_between_what_was_queued_before_and_after() -> None:
    before = model(1)
    weights, snapshot = on_gpu(before), Snapshot()
    torch.cuda._sleep(1 << 28)
    sources = collect(weights)
    taken = snapshot.take(sources)
    ready = queued(storage.device for storage in sources.storages)
    train(weights)
    ready()
    with torch.cuda.stream(torch.cuda.Stream()):  # one that waits for nothing
        for shard, owner in zip(taken.shards, taken.owners, strict=True):
            found = torch.empty(0, device="cuda").set_(owner, 0, shard.shape)
            assert torch.equal(found.cpu(), before[shard.name]), shard.name
    assert taken.geometry() == sources.geometry()
    assert snapshot.take(sources).places() == taken.places()


@pytest.mark.gpu
def test_a_snapshot_that_does_not_fit_on_the_gpu_lies_in_pinned_memory(client, server, monkeypatch) -> None:
    assert _fits("cuda:0", 1 << 20)
    assert not _fits("cuda:0", torch.cuda.mem_get_info()[0])
    monkeypatch.setattr("trainer_client.asynchronous._fits", lambda device, nbytes: False)
    for seed in (1, 2):
        weights = on_gpu(model(seed))
        handle = client.push_weights_async(weights)
        train(weights)
        handle.wait()
        server.expect(model(seed))
    assert {storage.device for storage in client._stockroom.memory.sources.storages} == {"cpu"}
    assert all(torch.empty(0, dtype=torch.uint8).set_(o).is_pinned() for o in client._stockroom.memory.sources.owners)


@pytest.mark.server
def test_training_goes_on_while_a_real_server_gets_what_was_there_at_the_call(tmp_path, checkpoint) -> None:
    import transformers as tf

    from harness.checkpoints import write_weights

    module = tf.AutoModelForCausalLM.from_pretrained(checkpoint("qwen3", seed=1), dtype=torch.float32)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    tokens = torch.arange(64).reshape(2, 32)

    def step() -> None:
        optimizer.zero_grad()
        module(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    with (
        Server(checkpoint("qwen3", seed=1)) as server,
        WeightClient([server.url], token=harness.TOKEN, progress=False, timeout_s=120) as client,
    ):
        for number in range(2):
            step()
            path = tmp_path / str(number)
            weights = {name: tensor.to(torch.bfloat16) for name, tensor in module.state_dict().items()}
            write_weights(path, weights, like=checkpoint("qwen3", seed=1))
            handle = client.push_weights_async(module)
            steps = 0
            while not handle.done():
                step()
                steps += 1
            assert handle.wait().version == str(number + 1)
            assert steps > 0
            assert completions(server.url) == reference(path, options=server.options)
