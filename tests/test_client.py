"""The client brings servers to the trainer's weights, or says exactly which server has what."""

import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
import torch
from torch import nn

import trainer_client
from fake_server import TOKEN, FakeServer, Servers, model
from trainer_client import PushFailed, WeightClient
from trainer_client.control import Control
from vllm_nixl_plugin import errors


def client_of(servers: Servers, **options) -> WeightClient:
    defaults = {
        "token": TOKEN,
        "progress": False,
        "direct_run_bytes": 1024,
        "send_buffer_bytes": 4096,
        "timeout_s": 20.0,
    }
    return WeightClient(
        [s.url for s in servers.all], transport=servers.transport, fabric=servers.fabric, **(defaults | options)
    )


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


def test_a_push_leaves_in_every_worker_what_its_loader_makes_of_the_weights(client, server) -> None:
    weights = model()
    report = client.push_weights(weights, version="v7")
    server.expect(weights)
    assert (report.ok, report.version, server.version) == (True, "v7", "v7")
    assert 0 < report.servers[0].packed_nbytes < report.nbytes


def test_a_second_push_plans_and_prepares_nothing_again(client, server, servers) -> None:
    weights = model()
    client.push_weights(weights)
    before = len(server.requests)
    for tensor in weights.values():
        tensor.mul_(2.0)
    client.push_weights(weights)
    server.expect(weights)
    assert [r for r in server.requests[before:] if r[1] == "/plan"] == []
    assert server.known == [0, 2]
    assert len(servers.agents) == 1


def test_new_tensors_of_the_same_shapes_are_followed_to_their_new_addresses(client, server) -> None:
    client.push_weights(model(0))
    client.push_weights(model(1))
    server.expect(model(1))
    assert [r for r in server.requests if r[1] == "/plan"] == [("POST", "/plan")]


def test_an_iterable_is_pushed_and_let_go_of(client, server) -> None:
    client.push_weights(iter(model(3).items()))
    server.expect(model(3))
    assert client._stockroom.memory is None
    client.push_weights(iter(model(4).items()))
    server.expect(model(4))


def test_a_module_is_pushed_by_the_names_of_its_state_dict(client, server) -> None:
    module = nn.Module()
    for name, tensor in model(5).items():
        module.register_parameter(name, nn.Parameter(tensor))
    client.push_weights(module)
    server.expect(model(5))


def test_trainer_dtypes_that_differ_are_cast_as_the_loader_casts(client, server) -> None:
    weights = model(6, torch.bfloat16)
    report = client.push_weights(weights)
    server.expect(weights)
    assert report.servers[0].packed_nbytes == report.nbytes


def test_a_conversion_is_composed_with_the_loader(client, server) -> None:
    weights = model(8)
    packed = {**weights, "qk": torch.cat([weights["q"], weights["k"]]).t().contiguous()}
    del packed["q"], packed["k"]

    def convert(state):
        for name, tensor in state.items():
            if name == "qk":
                yield from zip("qk", tensor.t().split([64, 32]), strict=True)
            else:
                yield name, tensor

    client.push_weights(packed, convert=convert)
    server.expect(weights)


def test_in_place_writes_the_live_weights(client, server) -> None:
    assert client.push_weights(model(9), mode="in_place").mode == "in_place"
    server.expect(model(9))


def test_a_partial_push_leaves_the_rest_as_it_is(client, server) -> None:
    client.push_weights(model(0))
    client.push_weights({"norm": model(1)["norm"]}, partial=True)
    server.expect(model(0) | {"norm": model(1)["norm"]})


def test_versions_count_up_from_what_the_servers_have(client, server) -> None:
    server.version = "41"
    assert client.push_weights(model()).version == "42"
    assert client.push_weights(model()).version == "43"


def test_a_server_that_restarted_is_planned_again_by_itself(client, server) -> None:
    client.push_weights(model(0))
    server.restart()
    assert client.push_weights(model(1)).ok
    server.expect(model(1))


def test_an_incarnation_that_changes_under_way_is_planned_again_once(client, server) -> None:
    server.fail["POST", "/updates/{id}/commit"] = [errors.IncarnationChanged("restarted")]
    assert client.push_weights(model(0)).ok
    server.expect(model(0))
    server.fail["POST", "/updates"] = [errors.UnknownPlan("no"), errors.UnknownPlan("still no")]
    with pytest.raises(PushFailed, match="unknown_plan: still no"):
        client.push_weights(model(0))


def test_one_dead_server_does_not_keep_the_others_from_the_new_version() -> None:
    servers = Servers(3)
    servers.down.add(servers.all[1].url)
    with client_of(servers) as client, pytest.raises(PushFailed) as failure:
        client.push_weights(model(), version="w")
    report = failure.value.report
    assert [s.version for s in report.servers] == ["w", None, "w"]
    assert report.servers[1].error_code == "unreachable"
    assert report.succeeded == ("http://fake-0", "http://fake-2")
    servers.all[0].expect(model())
    servers.all[2].expect(model())


def test_a_quorum_is_enough_when_the_caller_says_so() -> None:
    servers = Servers(3)
    servers.down.add(servers.all[1].url)
    with client_of(servers, require=2) as client:
        report = client.push_weights(model())
    assert not report.ok
    assert len(report.succeeded) == 2
    assert "unreachable" in str(report)


def test_a_refused_commit_aborts_the_update_as_drained(client, server) -> None:
    server.fail["POST", "/updates/{id}/commit"] = [errors.NeedsRestart("module.q changed its stride")]
    with pytest.raises(PushFailed, match=r"needs_restart: module\.q"):
        client.push_weights(model())
    assert server.aborts == [True]
    assert client.push_weights(model(2)).ok
    server.expect(model(2))


def test_bytes_that_never_arrive_fail_the_push_and_the_next_one_works(client, server, servers) -> None:
    servers.network.inject("deliver")
    with pytest.raises(PushFailed, match="incomplete"):
        client.push_weights(model())
    assert client.push_weights(model(1)).ok
    server.expect(model(1))


def test_a_failed_write_is_never_reported_as_drained(client, server, servers) -> None:
    servers.network.inject("post", errors.FabricError("the link is down"), times=1)
    with pytest.raises(PushFailed, match="fabric: the link is down"):
        client.push_weights(model())
    assert server.aborts == [False]
    assert client.push_weights(model(1)).ok
    server.expect(model(1))


def test_writes_that_stay_in_flight_end_with_the_agent_before_the_push_returns(servers, server, monkeypatch) -> None:
    monkeypatch.setattr("trainer_client.delivery.DRAIN_S", 0.1)
    with client_of(servers, timeout_s=1.0) as client:
        servers.network.freeze(server.workers[1].agent.name)
        with pytest.raises(PushFailed, match="still in flight"):
            client.push_weights(model())
        assert server.aborts == [False]
        assert not servers.agents[0]._open
        servers.network.thaw(server.workers[1].agent.name)
        assert client.push_weights(model(1)).ok
        server.expect(model(1))
        assert len(servers.agents) == 2


def test_the_lease_is_renewed_while_the_bytes_are_under_way(servers, server, monkeypatch) -> None:
    monkeypatch.setattr("trainer_client.delivery.DRAIN_S", 0.1)
    with client_of(servers, timeout_s=1.0, lease_s=0.3) as client:
        servers.network.freeze(server.workers[0].agent.name)
        with pytest.raises(PushFailed):
            client.push_weights(model())
    assert server.renewals >= 3


def test_a_lost_lease_ends_the_transfer(servers, server, monkeypatch) -> None:
    monkeypatch.setattr("trainer_client.delivery.DRAIN_S", 0.1)
    server.fail["POST", "/updates/{id}/renew"] = [errors.StaleUpdate("another update took over")]
    with client_of(servers, timeout_s=20.0, lease_s=0.3) as client:
        servers.network.freeze(server.workers[0].agent.name)
        with pytest.raises(PushFailed, match="took over"):
            client.push_weights(model())


def test_a_weight_that_no_worker_uses_is_refused_by_name(client) -> None:
    with pytest.raises(PushFailed, match=r"plan_refused.*extra"):
        client.push_weights(model() | {"extra": torch.zeros(3)})


def test_a_missing_weight_is_refused_by_name(client) -> None:
    with pytest.raises(PushFailed, match=r"plan_refused.*norm"):
        client.push_weights({k: v for k, v in model().items() if k != "norm"})


def test_a_wrong_token_says_what_to_do(servers) -> None:
    with client_of(servers, token="wrong") as client, pytest.raises(PushFailed, match="PUSH_WEIGHTS_TOKEN"):
        client.push_weights(model())


def test_the_token_comes_from_the_environment(servers, monkeypatch) -> None:
    monkeypatch.setenv("PUSH_WEIGHTS_TOKEN", TOKEN)
    with client_of(servers, token=None) as client:
        assert client.push_weights(model()).ok


def test_the_status_of_every_server_is_told_also_of_dead_ones() -> None:
    servers = Servers(2)
    servers.down.add(servers.all[1].url)
    with client_of(servers) as client:
        status = client.status()
    assert status["http://fake-0"].weight_version == "default"
    assert isinstance(status["http://fake-1"], errors.ServerUnreachable)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "sideways"}, "mode"), ({"kv_cache": "burn"}, "kv_cache"), ({"pause": "never"}, "pause"),
        ({"version": ""}, "version"),
    ],
)  # fmt: skip
def test_an_option_that_is_not_known_is_refused_before_anything_happens(client, server, options, message) -> None:
    with pytest.raises(errors.InvalidRequest, match=message):
        client.push_weights(model(), **options)
    assert server.requests == []


@pytest.mark.parametrize(
    ("servers", "options"),
    [
        ([], {}), (["ftp://x"], {}), (["localhost:8000"], {}), (["http://a", "http://a/"], {}),
        (["http://a"], {"require": 2}), (["http://a"], {"require": 0}), (["http://a"], {"timeout_s": 0}),
        (["http://a"], {"send_buffer_bytes": 15}),
    ],
)  # fmt: skip
def test_a_client_that_cannot_work_is_refused_at_once(servers, options) -> None:
    with pytest.raises(errors.InvalidRequest):
        WeightClient(servers, **options)


def test_an_unknown_option_fails() -> None:
    with pytest.raises(TypeError):
        WeightClient(["http://a"], time_out=3)


def test_a_push_of_nothing_is_refused(client) -> None:
    with pytest.raises(errors.InvalidRequest, match="no tensor to push"):
        client.push_weights({})


def test_a_closed_client_says_so(client) -> None:
    client.close()
    client.close()
    with pytest.raises(errors.InvalidRequest, match="closed"):
        client.push_weights(model())


def test_the_report_is_a_table_and_a_dictionary(client) -> None:
    report = client.push_weights(model(), version="v1")
    lines = str(report).splitlines()
    assert lines[0].startswith("version v1 (shadow): 1 of 1 servers")
    assert len(lines[1]) == len(lines[2])
    seconds = report.to_dict()["servers"][0]["seconds"]
    assert set(seconds) == set(trainer_client.report.STAGES) - {"measure", "verify"}
    assert seconds["install"] == 0.02


def test_a_server_without_the_plugin_is_told_apart_from_a_dead_one() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(404, json={"detail": "Not Found"}))
    with (
        Control("http://a", transport=transport) as control,
        pytest.raises(errors.ServerUnreachable, match="VLLM_PLUGINS"),
    ):
        control.status()


def test_an_answer_that_is_no_json_is_an_error_with_its_text() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(502, text="<html>Bad Gateway"))
    with (
        Control("http://a", transport=transport) as control,
        pytest.raises(errors.PushWeightsError, match="Bad Gateway"),
    ):
        control.status()


def test_a_broken_connection_is_tried_again(servers, server, monkeypatch) -> None:
    monkeypatch.setattr("trainer_client.control.RETRY_S", 0.0)
    broken = httpx.ReadError("reset")
    server.fail |= {("POST", "/plan"): [broken, broken], ("GET", "/status"): [broken], ("POST", "/updates"): [broken]}
    with client_of(servers) as client:
        assert client.push_weights(model()).ok
    assert server.aborts == []


def test_an_update_whose_opening_was_lost_is_ended_as_drained_and_opened_again_in_the_same_push(client, server) -> None:
    server.lose_answers = 1
    assert client.push_weights(model(1)).ok
    assert server.aborts == [True]
    server.expect(model(1))


def test_an_update_that_this_client_had_the_addresses_of_is_not_taken_for_drained(client, server) -> None:
    broken = httpx.ReadError("reset")
    server.fail |= {("POST", "/updates/{id}/commit"): [broken] * 3, ("DELETE", "/updates/{id}"): [broken] * 3}
    with pytest.raises(PushFailed, match="unreachable"):
        client.push_weights(model())
    assert client.push_weights(model(1)).ok
    assert server.aborts == [False]
    server.expect(model(1))


def test_an_update_of_somebody_else_is_left_alone(server, servers) -> None:
    broken = httpx.ReadError("reset")
    server.fail |= {("POST", "/updates/{id}/commit"): [broken] * 3, ("DELETE", "/updates/{id}"): [broken] * 3}
    with client_of(servers) as one, client_of(servers) as other:
        with pytest.raises(PushFailed):
            one.push_weights(model())
        with pytest.raises(PushFailed, match="lease_held"):
            other.push_weights(model())
    assert server.aborts == []


def test_the_public_names_are_these() -> None:
    assert trainer_client.__all__ == [
        "BlockFP8", "LocalShard", "PushFailed", "PushHandle", "PushReport", "PushWeightsError", "RankGroup", "RankLost",
        "ServerProgress", "ServerReport", "WeightClient",
    ]  # fmt: skip
    assert all(getattr(trainer_client, name).__name__ == name for name in trainer_client.__all__)
    with pytest.raises(AttributeError):
        trainer_client.nothing  # noqa: B018


def test_importing_the_package_is_cheap_and_needs_neither_vllm_nor_nixl() -> None:
    code = (
        "import sys; sys.modules['vllm'] = sys.modules['nixl'] = None\n"
        "import trainer_client; assert 'torch' not in sys.modules and 'httpx' not in sys.modules\n"
        "import trainer_client.client; assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
