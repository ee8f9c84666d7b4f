"""Servers join, leave, restart and fail between pushes, and the client goes on with those that are there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fake_server import TOKEN, Servers, model
from trainer_client import PushFailed, WeightClient
from vllm_nixl_plugin import errors
from vllm_nixl_plugin.addresses import listed


@pytest.fixture
def servers() -> Servers:
    return Servers(3)


def client_of(servers: Servers, given, **options) -> WeightClient:
    return WeightClient(
        given, token=TOKEN, progress=False, timeout_s=20, transport=servers.transport, fabric=servers.fabric, **options
    )


@pytest.fixture
def client(servers: Servers) -> Iterator[WeightClient]:
    """Of the first server alone."""
    with client_of(servers, [servers.all[0].url]) as made:
        yield made


def served(servers: Servers) -> list[str]:
    return [server.version for server in servers.all]


def test_servers_are_added_and_removed_between_pushes(client, servers) -> None:
    weights = model()
    client.push_weights(weights, version="1")
    client.add_server(servers.all[1].url + "/")
    client.push_weights(weights, version="2")
    assert served(servers) == ["2", "2", "default"]
    client.remove_server(servers.all[0].url)
    client.add_server(servers.all[2].url)
    report = client.push_weights(model(seed=1), version="3")
    assert served(servers) == ["2", "3", "3"]
    assert report.succeeded == tuple(server.url for server in servers.all[1:])
    servers.all[0].expect(weights)
    servers.all[2].expect(model(seed=1))
    assert list(client.status()) == list(report.succeeded)


def test_a_server_that_stays_is_not_planned_for_again(client, servers) -> None:
    weights = model()
    client.push_weights(weights)
    before = len(servers.all[0].requests)
    client.add_server(servers.all[1].url)
    client.push_weights(weights)
    assert ("POST", "/plan") not in servers.all[0].requests[before:]


def test_a_removed_server_leaves_nothing_with_the_agent_and_may_come_back(client, servers) -> None:
    first, second = (server.url for server in servers.all[:2])
    weights = model()
    client.add_server(second)
    client.push_weights(weights)
    client.remove_server(second)
    client.push_weights(weights)
    fabric = client._stockroom.fabric
    assert fabric is not None
    assert set(fabric._remotes) == {worker.agent.name for worker in servers.all[0].workers}
    assert {write.remote for write in fabric._writes} == set(fabric._remotes)
    client.add_server(second)
    assert client.push_weights(model(seed=2)).succeeded == (first, second)
    servers.all[1].expect(model(seed=2))


def test_a_server_that_is_not_known_cannot_be_removed_nor_what_is_no_url_be_added(client) -> None:
    with pytest.raises(errors.InvalidRequest, match="no server of this client"):
        client.remove_server("http://elsewhere")
    with pytest.raises(errors.InvalidRequest, match="expected http://host:port"):
        client.add_server("elsewhere:8000")


def test_a_list_in_a_file_is_read_at_each_push(servers, tmp_path: Path) -> None:
    file = tmp_path / "servers"
    file.write_text(f"# the fleet\n{servers.all[0].url}\n\n{servers.all[1].url}  # the second\n")
    with client_of(servers, str(file)) as client:
        client.push_weights(model(), version="1")
        assert served(servers) == ["1", "1", "default"]
        file.write_text(f"{servers.all[2].url}\n{servers.all[1].url}/\n")
        client.push_weights(model(), version="2")
        assert served(servers) == ["1", "2", "2"]
        file.unlink()  # whoever writes it may be at work: the list of the last push
        client.push_weights(model(), version="3")
        assert served(servers) == ["1", "3", "3"]
        file.write_text("")
        with pytest.raises(errors.InvalidRequest, match="the list is empty"):
            client.push_weights(model())


def test_a_function_lists_them_at_each_push(servers) -> None:
    now = [servers.all[0].url]
    with client_of(servers, lambda: now) as client:
        client.push_weights(model(), version="1")
        now.append(servers.all[2].url)
        client.push_weights(model(), version="2")
        assert served(servers) == ["2", "default", "2"]
        client.remove_server(servers.all[0].url)
        client.push_weights(model(), version="3")
        assert served(servers) == ["2", "default", "3"]


def test_a_list_that_was_never_there_fails_the_push(servers, tmp_path: Path) -> None:
    missing = pytest.raises(errors.ServerUnreachable, match="cannot be read")
    with client_of(servers, str(tmp_path / "nothing")) as client, missing:
        client.push_weights(model())


def test_a_name_stands_for_all_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, 1, 6, "", (host, 8000)) for host in ("10.0.0.2", "10.0.0.1", "10.0.0.2")]
    found.append((socket.AF_INET6, 1, 6, "", ("fd00::1", 8000, 0, 0)))
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port, **_: found)
    assert listed(["dns+http://fleet.local:8000"]) == (
        "http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000",
    )  # fmt: skip


def test_this_machine_resolves_its_own_name() -> None:
    assert "http://127.0.0.1:81" in listed(["dns+http://localhost:81"])
    with pytest.raises(errors.ServerUnreachable, match="has no address"):
        listed(["dns+http://no-such-host.invalid:81"])


def test_a_server_that_comes_back_with_another_number_of_workers_is_planned_for_again(client, servers) -> None:
    weights = model()
    client.push_weights(weights)
    servers.all[0].size = 1
    servers.all[0].restart()
    assert client.push_weights(model(seed=3)).ok
    servers.all[0].expect(model(seed=3))


def test_a_share_of_the_servers_is_enough_and_who_failed_gets_the_next_push(servers) -> None:
    urls = [server.url for server in servers.all]
    with client_of(servers, urls, require=0.6) as client:
        client.push_weights(model(), version="1")
        servers.all[1].fail[("POST", "/updates")] = [errors.InsufficientMemory("no room")]
        report = client.push_weights(model(seed=1), version="2")
        assert not report.ok
        assert {s.server: (s.version, s.error_code) for s in report.servers} == {
            urls[0]: ("2", None), urls[1]: ("1", "insufficient_memory"), urls[2]: ("2", None),
        }  # fmt: skip
        assert client.push_weights(model(seed=2), version="3").ok
        for server in servers.all:
            server.expect(model(seed=2))
        for server in servers.all[:2]:
            server.fail[("POST", "/updates")] = [errors.InsufficientMemory("no room")]
        with pytest.raises(PushFailed, match="1 of 3 servers have version 4, required are 2"):
            client.push_weights(model(), version="4")


def test_the_share_is_of_those_that_are_listed_now(servers) -> None:
    now = [server.url for server in servers.all]
    with client_of(servers, lambda: now, require=0.6) as client:
        now.pop()
        servers.all[0].fail[("POST", "/updates")] = [errors.InsufficientMemory("no room")]
        with pytest.raises(PushFailed, match="1 of 2 servers have version 1, required are 2"):
            client.push_weights(model(), version="1")


@pytest.mark.parametrize("require", [0, 3, 0.0, 1.5, "most", True])
def test_a_requirement_that_cannot_be_met_is_refused(servers, require) -> None:
    with pytest.raises(errors.InvalidRequest, match="require is"):
        client_of(servers, [server.url for server in servers.all[:2]], require=require)


def test_a_push_waits_for_a_server_that_is_catching_up(client, servers) -> None:
    held = errors.LeaseHeld("busy", holder="a catch-up from http://peer", expires_in_s=0.2, update_id="0" * 32)
    servers.all[0].fail[("POST", "/updates")] = [held, held]
    assert client.push_weights(model(seed=1), version="1").ok
    servers.all[0].expect(model(seed=1))


def test_another_trainer_goes_on_where_one_was_restarted(servers) -> None:
    for seed in range(2):  # with other addresses, another agent, another process
        with client_of(servers, [server.url for server in servers.all]) as client:
            assert client.push_weights({name: t.clone() for name, t in model(seed).items()}).version == str(seed + 1)
    for server in servers.all:
        server.expect(model(1))


def test_a_push_that_runs_is_not_disturbed_by_a_server_that_is_added(client, servers) -> None:
    def join() -> None:
        client.add_server(servers.all[1].url)

    servers.all[0].before_commit = join
    report = client.push_weights_async(model(), version="1").wait()
    servers.all[0].before_commit = lambda: None
    assert report.succeeded == (servers.all[0].url,)
    assert client.push_weights(model(), version="2").succeeded == (servers.all[0].url, servers.all[1].url)
    assert torch.equal(servers.all[1].workers[0].params["norm"], model()["norm"])


