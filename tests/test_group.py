"""The ranks of a trainer act as one: the same report or error on all, no hang, and the next push works."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, TCPStore

from fake_server import Servers, model
from ranks import Trainer, groups_of, on_all
from trainer_client import LocalShard, PushFailed, PushReport, PushWeightsError, RankGroup, transfer
from trainer_client.exchange import Exchange
from trainer_client.group import PART_NBYTES
from vllm_nixl_plugin import errors

SIZE = 3


def rows(weights: dict[str, Tensor], size: int = SIZE) -> list[dict]:
    """Each rank has a part of the rows of each matrix, as evenly as they can be cut, and all vectors."""
    parts: list[dict] = [{} for _ in range(size)]
    for name, weight in weights.items():
        at = 0
        for part, chunk in zip(parts, weight.tensor_split(size), strict=True):
            part[name] = weight if weight.dim() < 2 else LocalShard(chunk.clone(), tuple(weight.shape), (at, 0))
            at += chunk.shape[0]
    return parts


@pytest.fixture
def servers() -> Servers:
    return Servers(2)


@pytest.fixture
def trainer(servers: Servers) -> Iterator[Trainer]:
    made = Trainer(servers, SIZE)
    yield made
    made.close()


def expect(servers: Servers, weights: dict[str, Tensor]) -> None:
    for server in servers.all:
        server.expect(weights)


def the_error(found: list) -> PushWeightsError:
    """That of all ranks."""
    assert all(isinstance(error, PushWeightsError) for error in found), found
    assert len({(type(error), error.code, error.message) for error in found}) == 1, found
    return found[0]


def test_all_ranks_together_send_every_byte_once_and_return_the_same_report(trainer, servers) -> None:
    reports = trainer.push(rows(model(1)), version="v1")
    expect(servers, model(1))
    assert all(isinstance(report, PushReport) for report in reports), reports
    assert len({str(report.to_dict()) for report in reports}) == 1
    report = reports[0]
    assert report.ok
    planned = sum(worker.planned.nbytes for server in servers.all for worker in server.workers)
    assert report.nbytes == sum(rank.nbytes for rank in report.ranks) == planned
    assert [rank.rank for rank in report.ranks] == [0, 1, 2]
    assert "3 ranks sent" in str(report)


def test_only_rank_0_speaks_http_and_names_all_writers(trainer, servers) -> None:
    begun = []
    server = servers.all[0]
    begin = server._begin
    server._begin = lambda request: (begun.append(request), begin(request))[1]
    trainer.push(rows(model(1)))
    assert [len(request.writers) for request in begun] == [SIZE]
    kinds = [kind for _, kind in server.requests]
    assert kinds.count("/plan") == kinds.count("/updates") == 1


def test_a_second_push_lays_out_and_plans_nothing_again(trainer, servers, monkeypatch) -> None:
    parts = rows(model(1))
    trainer.push(parts)
    offerings = [client._offered for client in trainer.clients]
    requests = len(servers.all[0].requests)
    said: list[dict] = []
    say = Exchange.say
    monkeypatch.setattr(Exchange, "say", lambda self, entry: (said.append(entry), say(self, entry)))
    for part in parts:
        for value in part.values():
            (value.tensor if isinstance(value, LocalShard) else value).mul_(2)
    trainer.push(parts)
    expect(servers, {name: weight * 2 if weight.dim() == 2 else weight * 8 for name, weight in model(1).items()})
    assert [client._offered for client in trainer.clients] == offerings
    assert all(client._offered is before for client, before in zip(trainer.clients, offerings, strict=True))
    assert "/plan" not in [kind for _, kind in servers.all[0].requests[requests:]]
    assert sorted(entry.get("order", "") for entry in said) == ["", "", "send", "send"]


def test_when_the_layout_of_one_rank_changes_all_lay_out_again(trainer, servers) -> None:
    trainer.push(rows(model(1)))
    parts = rows(model(2))
    parts[1]["norm"] = torch.cat([torch.zeros(1), model(2)["norm"]])[1:]
    assert trainer.push(parts)[2].ok
    expect(servers, model(2))


def test_a_rank_that_has_nothing_takes_part(trainer, servers) -> None:
    weights = model(3)
    names = list(weights)
    parts = [{n: weights[n] for n in names[:2]}, {}, {n: weights[n] for n in names[2:]}]
    report = trainer.push(parts)[1]
    expect(servers, weights)
    assert report.ranks[1].nbytes == 0


def test_a_bad_tensor_on_one_rank_is_the_error_of_all_and_the_next_push_works(trainer, servers) -> None:
    parts = rows(model(1))
    parts[2]["norm"] = torch.empty(4, device="meta")
    error = the_error(trainer.push(parts))
    assert isinstance(error, errors.InvalidRequest)
    assert error.message.startswith("rank 2: norm is on the meta device")
    assert servers.all[0].requests == []
    assert trainer.push(rows(model(1)))[0].ok
    expect(servers, model(1))


def test_a_bug_on_one_rank_is_the_error_of_all(trainer, servers) -> None:
    def convert(state: dict) -> dict:
        raise ZeroDivisionError("by one rank")

    error = the_error(trainer.push(rows(model(1)), convert=[dict, dict, convert]))
    assert "rank 2" in error.message
    assert "by one rank" in error.message
    assert trainer.push(rows(model(1)))[0].ok


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": ["shadow", "in_place", "shadow"]}, "rank 1.*mode='in_place'.*rank 0.*mode='shadow'"),
        ({"version": ["a", "a", "b"]}, "rank 2.*version='b'"),
        ({"partial": [False, False, True]}, "rank 2.*partial=True"),
        ({"convert": [None, dict, None]}, "rank 1.*convert=True"),
    ],
)
def test_options_that_differ_are_refused_by_name(trainer, servers, options, message) -> None:
    error = the_error(trainer.push(rows(model(1)), **options))
    assert isinstance(error, errors.InvalidRequest)
    assert re.search(message, error.message), error.message
    assert trainer.push(rows(model(1)))[1].ok


def test_a_name_that_means_two_tensors_is_refused_naming_both_ranks(trainer) -> None:
    parts = rows(model(1))
    parts[1]["q"] = parts[1]["q"].tensor
    error = the_error(trainer.push(parts))
    assert "rank 0" in error.message
    assert "rank 1" in error.message
    assert "q is float32[64, 64] on rank 0" in error.message


def test_converters_that_differ_are_refused(trainer) -> None:
    def renamed(state: dict) -> dict:
        return {f"x{name}": tensor for name, tensor in state.items()}

    error = the_error(trainer.push(rows(model(1)), convert=[dict, renamed, dict]))
    assert "other checkpoint weights" in error.message


def test_a_rank_that_does_not_come_is_named(servers) -> None:
    trainer = Trainer(servers, SIZE, timeout_s=0.5)
    parts = rows(model(1))
    found = on_all(
        [lambda: trainer.clients[0].push_weights(parts[0]), lambda: trainer.clients[2].push_weights(parts[2])]
    )
    error = the_error(found)
    assert isinstance(error, errors.DeadlineExceeded)
    assert "rank 1 of 3" in error.message
    with pytest.raises(errors.DeadlineExceeded, match="rank 1 of 3"):
        trainer.clients[1].push_weights(parts[1])
    assert trainer.push(parts)[1].ok


def test_one_dead_server_fails_for_all_ranks_alike_and_the_others_have_the_weights(trainer, servers) -> None:
    servers.down.add(servers.all[1].url)
    found = trainer.push(rows(model(1)), version="w")
    error = the_error(found)
    assert isinstance(error, PushFailed)
    assert all(failure.report.to_dict() == error.report.to_dict() for failure in found)
    assert [server.version for server in error.report.servers] == ["w", None]
    servers.all[0].expect(model(1))


def test_a_write_that_fails_on_one_rank_aborts_on_that_server_for_all(trainer, servers) -> None:
    trainer.push(rows(model(0)))
    agent = trainer.clients[1]._stockroom.fabric
    assert agent is not None
    prepare = agent.prepare_write
    refused = {worker.agent.name for worker in servers.all[0].workers}

    def refusing(remote: str, *details: object) -> object:
        if remote in refused:
            raise errors.FabricError("no way to there")
        return prepare(remote, *details)

    agent.prepare_write = refusing
    error = the_error(trainer.push(rows(model(1)), version="w"))
    assert "no way to there" in error.message
    assert [server.ok for server in error.report.servers] == [False, True]
    assert servers.all[0].aborts == [True]
    servers.all[0].expect(model(0))
    servers.all[1].expect(model(1))
    agent.prepare_write = prepare
    assert trainer.push(rows(model(2)))[2].ok
    expect(servers, model(2))


def test_a_server_that_restarted_is_planned_again_with_all_ranks(trainer, servers) -> None:
    trainer.push(rows(model(0)))
    servers.all[0].restart()
    assert all(report.ok for report in trainer.push(rows(model(1))))
    expect(servers, model(1))


def test_a_rank_that_falls_silent_ends_the_push_on_the_others(servers, monkeypatch) -> None:
    trainer = Trainer(servers, SIZE, rank_timeout_s=0.5)
    over = threading.Event()
    beat = Exchange._beat
    monkeypatch.setattr(Exchange, "_beat", lambda self: None if self.rank == 2 else beat(self))
    run = transfer.Transfer.run

    def stuck(self: transfer.Transfer, *arguments: object, **more: object) -> object:
        if self._fabric is trainer.clients[2]._stockroom.fabric:
            over.wait(30)
        return run(self, *arguments, **more)

    monkeypatch.setattr(transfer.Transfer, "run", stuck)
    monkeypatch.setattr("trainer_client.team.DRAIN_S", 0.2)
    begin = time.monotonic()
    parts = rows(model(1))
    found: list = []
    others = threading.Thread(target=lambda: found.extend(on_all(
        [lambda: trainer.clients[0].push_weights(parts[0]), lambda: trainer.clients[1].push_weights(parts[1])]
    )))  # fmt: skip
    lost = threading.Thread(target=lambda: on_all([lambda: trainer.clients[2].push_weights(parts[2])]))
    lost.start()
    others.start()
    others.join(30)
    error = the_error(found)
    assert isinstance(error, errors.RankLost)
    assert error.details["rank"] == 2
    assert time.monotonic() - begin < 10
    assert all(server.aborts == [False] for server in servers.all)
    over.set()
    lost.join(30)


def test_nothing_grows_on_the_board(trainer, servers) -> None:
    """Ranks take old messages down behind a push, while what follows goes on."""
    store = trainer.groups[0].board._store

    def settled() -> int:
        n_keys, same_since = store.num_keys(), time.monotonic()
        while time.monotonic() < same_since + 0.5:
            time.sleep(0.02)
            if store.num_keys() != n_keys:
                n_keys, same_since = store.num_keys(), time.monotonic()
        return n_keys

    counts = []
    for seed in range(5):
        trainer.push(rows(model(seed)))
        counts.append(settled())
    servers.all[0].restart()
    for seed in range(5):
        trainer.push(rows(model(seed)))
    assert len(set(counts[1:])) == 1
    assert settled() == counts[-1]


# The board and the exchange by themselves


def stores() -> list[Callable[[], object]]:
    def tcp() -> object:
        return PrefixStore("p/", TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))

    return [HashStore, tcp]


@pytest.mark.parametrize("store", stores())
def test_messages_of_any_length_are_there_as_they_were(store) -> None:
    board = RankGroup(store(), 0, 2).board
    long = bytes(range(256)) * (3 * PART_NBYTES // 256) + b"end"
    keys = [key for name, data in (("long", long), ("empty", b"")) for key in board.set(name, data)]
    assert board.has(["long", "empty"])
    assert not board.has(["long", "other"])
    assert board.get(["long", "empty"]) == [long, b""]
    assert board.claim("first", "one") == board.claim("first", "two") == board.read("first") == "one"
    board.delete(keys)
    assert not board.has(["long"])
    board.close()


def test_a_store_that_does_not_answer_is_a_lost_rank(monkeypatch) -> None:
    class Silent:
        def check(self, keys: list[str]) -> bool:
            time.sleep(5)
            return True

    board = RankGroup(Silent(), 0, 2).board
    board.patience_s = 0.1
    for _ in range(2):
        with pytest.raises(errors.RankLost, match=r"no answer for 0\.1 s"):
            board.has(["x"])


def test_what_a_rank_keeps_is_there_until_it_is_replaced() -> None:
    one, two = groups_of(2)
    first = one.keep("plans", b"first")
    assert two.fetch(first) == b"first"
    assert one.keep("plans", b"first") == first
    second = one.keep("plans", b"second")
    assert two.fetch(first) == b"first"
    one.sweep()
    assert two.fetch(second) == b"second"
    assert not two.board.has([f"kept/{first}"])


def test_the_first_error_is_that_of_all() -> None:
    exchanges = [Exchange(group, timeout_s=5, rank_timeout_s=5) for group in groups_of(2)]
    first = exchanges[0].fail(errors.NeedsRestart("a"))
    assert exchanges[1].fail(ValueError("b")).message == first.message == "rank 0: a"
    with pytest.raises(errors.NeedsRestart, match="rank 0: a"):
        exchanges[1].check()


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_group_is_refused(rank, size) -> None:
    with pytest.raises(errors.InvalidRequest):
        RankGroup(HashStore(), rank, size)


def test_without_torch_distributed_a_process_is_a_group_of_one() -> None:
    group = RankGroup.find(None)
    assert (group.rank, group.size) == (0, 1)
