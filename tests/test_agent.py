from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fabric import Pair, ProcessTarget, collect, ranges, region_of
from vllm_nixl_plugin.agent import REMEDIES, NixlAgent, load_nixl, nixl_errors
from vllm_nixl_plugin.errors import DeadlineExceeded, FabricError, RegistrationFailed
from vllm_nixl_plugin.fabric import Descriptors, Region, wait_all
from vllm_nixl_plugin.memory_fabric import MemoryFabric, MemoryNetwork

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}  # as /proc/net/tcp writes 127.0.0.1 and ::1
TIMEOUT_S = 10


@pytest.fixture(params=["nixl", "memory"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with contextlib.closing(Pair(request.param)) as pair:
        yield pair


@pytest.fixture
def memory() -> Iterator[Pair]:
    with contextlib.closing(Pair("memory")) as pair:
        yield pair


# --- writes and notifications, on both fabrics ---------------------------------------------------------------------


def test_a_write_puts_the_bytes_there_and_tells_the_target_which_never_heard_of_the_initiator(pair: Pair) -> None:
    source, target = pair.buffer(1 << 16), pair.target("target-1", 1 << 16)
    assert pair.initiator.connect(target.metadata) == "target-1"
    write = pair.initiator.prepare_write(
        "target-1", ranges(source.ctypes.data, [0], 50_000), ranges(target.address, [8], 50_000)
    )
    assert write.nbytes == 50_000
    write.post(b"update 1")
    write.wait(TIMEOUT_S)
    assert collect(target, 1) == [("initiator-1", b"update 1")]
    assert target.ask("read") == bytes(8) + source[:50_000].tobytes() + bytes((1 << 16) - 50_008)


def test_ten_thousand_scattered_ranges_land_each_in_its_place(pair: Pair) -> None:
    count, nbytes = 10_000, 8192
    source, target = pair.buffer(count * nbytes), pair.target("target-1", count * nbytes)
    pair.initiator.connect(target.metadata)
    origin, place = np.random.default_rng(1).permutation(count), np.random.default_rng(2).permutation(count)
    write = pair.initiator.prepare_write(
        "target-1", ranges(source.ctypes.data, origin * nbytes, nbytes), ranges(target.address, place * nbytes, nbytes)
    )
    write.post(b"all")
    write.wait(TIMEOUT_S)
    assert collect(target, 1) == [("initiator-1", b"all")]
    expected = np.empty((count, nbytes), dtype=np.uint8)
    expected[place] = source.reshape(count, nbytes)[origin]
    assert target.ask("read") == expected.tobytes()


def test_a_write_is_posted_again_with_new_bytes_and_a_new_message_each_time(pair: Pair) -> None:
    source, target = pair.buffer(1 << 18), pair.target("target-1", 1 << 18)
    pair.initiator.connect(target.metadata)
    write = pair.initiator.prepare_write(
        "target-1", ranges(source.ctypes.data, [0], 1 << 18), ranges(target.address, [0], 1 << 18)
    )
    for sequence in range(30):
        source[:] = sequence
        target.expect_witness()
        write.post(b"sequence %d" % sequence)
        write.wait(TIMEOUT_S)
        assert target.witness() == ([("initiator-1", b"sequence %d" % sequence)], {sequence})
    assert target.ask("notifications") == []


def test_several_writes_of_different_sizes_are_awaited_together(pair: Pair) -> None:
    source, target = pair.buffer(1 << 20), pair.target("target-1", 1 << 20)
    pair.initiator.connect(target.metadata)
    writes = [
        pair.initiator.prepare_write(
            "target-1", ranges(source.ctypes.data, [at], size), ranges(target.address, [at], size)
        )
        for at, size in ((0, 1), (1, 4095), (4096, 500_000), (504_096, (1 << 20) - 504_096))
    ]
    for index, write in enumerate(writes):
        write.post(b"part %d" % index)
    wait_all(writes, TIMEOUT_S)
    assert sorted(collect(target, 4)) == [("initiator-1", b"part %d" % index) for index in range(4)]
    assert target.ask("read") == source.tobytes()
    wait_all([], 0)


def test_a_read_brings_the_bytes_here_and_the_owner_hears_nothing(pair: Pair) -> None:
    source, target = pair.buffer(1 << 18), pair.target("target-1", 1 << 18)
    pair.initiator.connect(target.metadata)
    ends = ranges(source.ctypes.data, [0], 1 << 18), ranges(target.address, [0], 1 << 18)
    write = pair.initiator.prepare_write("target-1", *ends)
    write.post(b"there")
    write.wait(TIMEOUT_S)
    sent = source.copy()
    read = pair.initiator.prepare_read("target-1", *reversed(ends))
    assert read.nbytes == 1 << 18
    for _ in range(2):  # it can be posted again
        source[:] = 0
        read.post()
        read.wait(TIMEOUT_S)
        assert np.array_equal(source, sent)
    assert collect(target, 1) == [("initiator-1", b"there")]
    with pytest.raises(FabricError, match="carries no message"):
        read.post(b"back")
    registration = pair.initiator.register([region_of(source)])
    with pytest.raises(FabricError, match="release the write first"):
        registration.release()


def test_a_message_can_travel_without_a_write(pair: Pair) -> None:
    target = pair.target("target-1", 16)
    pair.initiator.connect(target.metadata)
    pair.initiator.notify("target-1", b"hello \x00\xff")
    assert collect(target, 1) == [("initiator-1", b"hello \x00\xff")]


def test_two_agents_of_one_process_write_to_each_other(pair: Pair) -> None:
    here, there = pair.buffer(64), np.zeros(64, dtype=np.uint8)
    with pair.agent("other-1") as other:
        other.register([region_of(there)])
        pair.initiator.connect(other.metadata())
        other.connect(pair.initiator.metadata())
        out = pair.initiator.prepare_write(
            "other-1", ranges(here.ctypes.data, [0], 64), ranges(there.ctypes.data, [0], 64)
        )
        out.post(b"out")
        out.wait(TIMEOUT_S)
        np.testing.assert_array_equal(there, here)
        there[:] = 5
        back = other.prepare_write("initiator-1", ranges(there.ctypes.data, [0], 64), ranges(here.ctypes.data, [0], 64))
        back.post(b"back")
        back.wait(TIMEOUT_S)
        assert set(here) == {5}
        out.release()


# --- what is refused, on both fabrics ------------------------------------------------------------------------------


def test_a_post_without_a_message_is_refused(pair: Pair) -> None:
    source, target = pair.buffer(16), pair.target("target-1", 16)
    pair.initiator.connect(target.metadata)
    write = pair.initiator.prepare_write(
        "target-1", ranges(source.ctypes.data, [0], 16), ranges(target.address, [0], 16)
    )
    with pytest.raises(FabricError, match="carries a message"):
        write.post(b"")
    with pytest.raises(FabricError, match="is not posted"):
        write.done()
    write.release()
    write.release()
    with pytest.raises(FabricError, match="cannot be posted"):
        write.post(b"x")


def test_descriptors_that_do_not_fit_are_refused(pair: Pair) -> None:
    source, target = pair.buffer(64), pair.target("target-1", 64)
    pair.initiator.connect(target.metadata)
    here, there = source.ctypes.data, target.address

    def prepare(local: Descriptors, remote: Descriptors) -> None:
        pair.initiator.prepare_write("target-1", local, remote)

    with pytest.raises(FabricError, match="length above 0"):
        prepare(ranges(here, [], 8), ranges(there, [], 8))
    with pytest.raises(FabricError, match="length above 0"):
        prepare(ranges(here, [0, 8], 8), ranges(there, [0], 8))
    with pytest.raises(FabricError, match="same on both sides"):
        prepare(ranges(here, [0, 8], [8, 4]), ranges(there, [0, 8], 8))
    with pytest.raises(FabricError, match="above 0"):
        prepare(ranges(here, [0, 8], [8, 0]), ranges(there, [0, 8], [8, 0]))
    with pytest.raises(FabricError, match="unknown memory"):
        prepare(ranges(here, [0], 8), ranges(there, [60], 8))
    with pytest.raises(FabricError, match="unknown memory"):
        prepare(ranges(here, [60], 8), ranges(there, [0], 8))
    with pytest.raises(FabricError, match="not connected to 'stranger'"):
        pair.initiator.prepare_write("stranger", ranges(here, [0], 8), ranges(there, [0], 8))
    with pytest.raises(FabricError, match="not connected to 'stranger'"):
        pair.initiator.notify("stranger", b"x")


def test_memory_and_connection_under_a_prepared_write_cannot_be_taken_away(pair: Pair) -> None:
    source, target = np.zeros(64, dtype=np.uint8), pair.target("target-1", 64)
    registration, other = pair.initiator.register([region_of(source)]), pair.buffer(64)
    pair.initiator.connect(target.metadata)
    write = pair.initiator.prepare_write("target-1", ranges(source.ctypes.data, [8], 8), ranges(target.address, [0], 8))
    with pytest.raises(FabricError, match="release the write first"):
        registration.release()
    with pytest.raises(FabricError, match="release it first"):
        pair.initiator.disconnect("target-1")
    write.release()
    registration.release()
    registration.release()
    pair.initiator.disconnect("target-1")
    pair.initiator.disconnect("target-1")
    assert other.any()


def test_bad_metadata_and_a_namesake_are_refused_and_leave_no_trace(pair: Pair) -> None:
    target = pair.target("target-1", 16)
    for damaged in (b"", b"junk", bytes(4), target.metadata[:12], target.metadata[:-9], b"!" + target.metadata[1:]):
        with pytest.raises(FabricError, match="not the whole metadata"):
            pair.initiator.connect(damaged)
    with pytest.raises(FabricError, match="the same name"):
        pair.initiator.connect(pair.initiator.metadata())
    assert pair.initiator.connect(target.metadata) == "target-1"


def test_a_restarted_agent_of_the_same_name_replaces_the_old_one(pair: Pair) -> None:
    source, first = pair.buffer(16), pair.target("target", 16)
    pair.initiator.connect(first.metadata)
    assert pair.initiator.connect(first.metadata) == "target"
    first.kill()
    second = pair.target("target", 16)
    pair.initiator.connect(second.metadata)
    write = pair.initiator.prepare_write("target", ranges(source.ctypes.data, [0], 16), ranges(second.address, [0], 16))
    write.post(b"to the second")
    write.wait(TIMEOUT_S)
    assert collect(second, 1) == [("initiator-1", b"to the second")]


def test_no_memory_cannot_be_registered(pair: Pair) -> None:
    for region in (Region(0, 8), Region(4096, 0), Region(4096, -8)):
        with pytest.raises(RegistrationFailed, match="sleep mode"):
            pair.initiator.register([region])


def test_memory_that_is_not_on_the_device_it_claims_cannot_be_registered(pair: Pair) -> None:
    array = np.zeros(4096, dtype=np.uint8)
    good = region_of(array)
    with pytest.raises(RegistrationFailed, match=r"expandable_segments.*memlock|ulimit"):
        pair.initiator.register([good, Region(good.address, good.nbytes, "VRAM", 0)])
    pair.initiator.register([good]).release()


def test_a_closed_agent_refuses_everything_and_closes_twice(pair: Pair) -> None:
    source, target = pair.buffer(16), pair.target("target-1", 16)
    pair.initiator.connect(target.metadata)
    write = pair.initiator.prepare_write(
        "target-1", ranges(source.ctypes.data, [0], 16), ranges(target.address, [0], 16)
    )
    pair.initiator.close()
    pair.initiator.close()
    for call in (
        pair.initiator.metadata,
        pair.initiator.notifications,
        lambda: pair.initiator.connect(target.metadata),
    ):
        with pytest.raises(FabricError, match="it is closed"):
            call()
    with pytest.raises(FabricError, match="released"):
        write.post(b"x")
    write.release()


# --- the other side stops or dies, on both fabrics -----------------------------------------------------------------


def test_a_stopped_target_costs_the_deadline_and_the_write_stays_in_flight_until_it_goes_on(pair: Pair) -> None:
    source, target = pair.buffer(1 << 20), pair.target("target-1", 1 << 20)
    target.freeze()
    pair.initiator.connect(target.metadata)
    write = pair.initiator.prepare_write(
        "target-1", ranges(source.ctypes.data, [0], 1 << 20), ranges(target.address, [0], 1 << 20)
    )
    write.post(b"late")
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"to 'target-1', still in flight after 0\.5 s") as caught:
        write.wait(0.5)
    assert time.monotonic() - started < 2
    assert caught.value.details["remotes"] == ["target-1"]
    assert write.state == "in_flight"
    for refused in (write.release, lambda: write.post(b"again"), lambda: pair.initiator.disconnect("target-1")):
        with pytest.raises(FabricError, match="in_flight"):
            refused()
    target.thaw()
    write.wait(TIMEOUT_S)
    assert collect(target, 1) == [("initiator-1", b"late")]
    assert target.ask("read") == source.tobytes()
    write.release()


def test_closing_is_the_way_out_of_a_write_to_a_target_that_stays_stopped(pair: Pair) -> None:
    source, target = pair.buffer(1 << 20), pair.target("target-1", 1 << 20)
    target.freeze()
    pair.initiator.connect(target.metadata)
    write = pair.initiator.prepare_write(
        "target-1", ranges(source.ctypes.data, [0], 1 << 20), ranges(target.address, [0], 1 << 20)
    )
    write.post(b"never")
    with pytest.raises(DeadlineExceeded):
        write.wait(0.1)
    pair.initiator.close()
    assert write.state == "released"
    target.thaw()
    assert collect(target, 1, timeout_s=0.3) == []


@pytest.mark.parametrize("posted_before", [False, True])
def test_a_killed_target_is_an_error_and_never_a_hang(pair: Pair, posted_before: bool) -> None:
    source, target = pair.buffer(1 << 20), pair.target("target-1", 1 << 20)
    pair.initiator.connect(target.metadata)
    write = pair.initiator.prepare_write(
        "target-1", ranges(source.ctypes.data, [0], 1 << 20), ranges(target.address, [0], 1 << 20)
    )
    if posted_before:
        write.post(b"first")
        write.wait(TIMEOUT_S)
    target.kill()
    with contextlib.suppress(FabricError):
        write.post(b"second")
    with pytest.raises(FabricError, match="the other process is gone"):
        write.wait(TIMEOUT_S)
    with pytest.raises(FabricError, match="the other process is gone"):
        write.done()
    with pytest.raises(FabricError, match="cannot be posted"):
        write.post(b"third")
    write.release()
    pair.initiator.disconnect("target-1")


def test_a_target_killed_under_a_write_in_flight_is_an_error(pair: Pair) -> None:
    source, target = pair.buffer(1 << 20), pair.target("target-1", 1 << 20)
    target.freeze()
    pair.initiator.connect(target.metadata)
    write = pair.initiator.prepare_write(
        "target-1", ranges(source.ctypes.data, [0], 1 << 20), ranges(target.address, [0], 1 << 20)
    )
    write.post(b"lost")
    target.kill()
    with pytest.raises((FabricError, DeadlineExceeded)):
        write.wait(TIMEOUT_S)


def test_one_dead_target_does_not_keep_the_others_from_getting_theirs(pair: Pair) -> None:
    source = pair.buffer(1 << 16)
    targets = [pair.target(f"target-{index}", 1 << 16) for index in range(2)]
    writes = []
    for target in targets:
        pair.initiator.connect(target.metadata)
        whole = ranges(source.ctypes.data, [0], 1 << 16), ranges(target.address, [0], 1 << 16)
        writes.append(pair.initiator.prepare_write(target.name, *whole))
    targets[0].kill()
    for write in writes:
        with contextlib.suppress(FabricError):
            write.post(b"x")
    with pytest.raises(FabricError, match="target-0"):
        wait_all(writes, TIMEOUT_S)
    assert [write.state for write in writes] == ["failed", "done"]
    assert collect(targets[1], 1) == [("initiator-1", b"x")]


# --- NIXL only -----------------------------------------------------------------------------------------------------


def test_every_exception_of_nixl_has_a_remedy_and_becomes_a_fabric_error() -> None:
    bindings = load_nixl()
    names = {name for name in vars(bindings) if name.endswith("Error")}
    assert names | {"RuntimeError", "ValueError"} == set(REMEDIES)
    errors = nixl_errors(bindings)
    assert {error.__name__ for error in errors} == set(REMEDIES)
    with NixlAgent("initiator-1") as agent:
        real = agent._nixl
        for error in errors:

            def fail(*_: Any, error: type[Exception] = error) -> None:
                raise error("the cause")

            agent._nixl = SimpleNamespace(getLocalMD=fail)
            with pytest.raises(FabricError, match=r"agent 'initiator-1': getLocalMD failed with .*the cause") as caught:
                agent.metadata()
            assert REMEDIES[error.__name__] in caught.value.message
            assert caught.value.details == {"agent": "initiator-1", "operation": "getLocalMD", "cause": error.__name__}
            assert isinstance(caught.value.__cause__, error)
        agent._nixl = real


def test_importing_the_module_loads_no_nixl_and_no_torch_and_leaves_the_environment_alone() -> None:
    program = (
        "import os, sys; before = dict(os.environ); import vllm_nixl_plugin.agent; "
        "loaded = [name for name in sys.modules if name.split('.')[0] in ('nixl', 'nixl_cu12', 'nixl_cu13', 'torch')]; "
        "assert not loaded, loaded; assert dict(os.environ) == before"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_idle_agent_hardly_uses_a_core_and_listens_on_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "all")
    with contextlib.closing(ProcessTarget("target-1", 64)) as target:
        assert target.ask("cpu_share") < 0.2
        assert target.ask("listening") <= LOOPBACK
        assert target.ask("environment")["UCX_NET_DEVICES"] == "all"


def test_tcp_leaves_loopback_only_when_an_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with contextlib.closing(ProcessTarget("target-1", 64)) as target:
        assert target.ask("listening") <= LOOPBACK
        assert target.ask("listening")
    others = [name for _, name in socket.if_nameindex() if name.startswith("e")]
    if others:
        with contextlib.closing(ProcessTarget("target-2", 64, interfaces=(others[0],))) as target:
            assert target.ask("listening")
            assert not target.ask("listening") & LOOPBACK


def test_tcp_over_loopback_carries_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with contextlib.closing(Pair("nixl")) as pair:
        source, target = pair.buffer(1 << 20), pair.target("target-1", 1 << 20)
        pair.initiator.connect(target.metadata)
        whole = ranges(source.ctypes.data, [0], 1 << 20), ranges(target.address, [0], 1 << 20)
        write = pair.initiator.prepare_write("target-1", *whole)
        write.post(b"over tcp")
        write.wait(TIMEOUT_S)
        assert collect(target, 1) == [("initiator-1", b"over tcp")]
        assert target.ask("read") == source.tobytes()


def test_an_interface_that_does_not_exist_and_a_backend_that_cannot_be_bound_are_refused() -> None:
    with pytest.raises(FabricError, match=r"no network device 'mlx5_77:1' here, only .*lo"):
        NixlAgent("a", interfaces=("lo", "mlx5_77:1"))
    with pytest.raises(FabricError, match="LIBFABRIC cannot be bound to interfaces"):
        NixlAgent("a", backend="LIBFABRIC")
    with pytest.raises(FabricError, match="createBackend failed with nixlNotFoundError"):
        NixlAgent("a", backend="NOSUCH", interfaces=("all",))
    assert "UCX_NET_DEVICES" not in os.environ


def test_creating_an_agent_leaves_the_logging_of_the_process_alone() -> None:
    NixlAgent("a", num_threads=1).close()
    assert logging.raiseExceptions


def test_other_threads_run_while_a_large_write_is_copied() -> None:
    with contextlib.closing(Pair("nixl")) as pair:
        source, target = pair.buffer(1 << 26), pair.target("target-1", 1 << 26)
        pair.initiator.connect(target.metadata)
        whole = ranges(source.ctypes.data, [0], 1 << 26), ranges(target.address, [0], 1 << 26)
        write = pair.initiator.prepare_write("target-1", *whole)
        stop, ticks = threading.Event(), [time.monotonic()]

        def tick() -> None:
            while not stop.wait(0.001):
                ticks.append(time.monotonic())

        thread = threading.Thread(target=tick)
        thread.start()
        started = time.monotonic()
        write.post(b"large")
        write.wait(TIMEOUT_S)
        took = time.monotonic() - started
        stop.set()
        thread.join()
        assert max(np.diff(ticks)) < max(0.5 * took, 0.1)


# --- the fake only -------------------------------------------------------------------------------------------------


def test_injected_faults_strike_the_named_agent_as_often_as_told(memory: Pair) -> None:
    source, target = memory.buffer(16), memory.target("target-1", 16)
    fault = FabricError("injected")
    memory.network.inject("connect", fault, agent="somebody else")
    memory.initiator.connect(target.metadata)
    whole = ranges(source.ctypes.data, [0], 16), ranges(target.address, [0], 16)
    for operation, call in (
        ("register", lambda: memory.buffer(16)),
        ("prepare", lambda: memory.initiator.prepare_write("target-1", *whole)),
        ("notify", lambda: memory.initiator.notify("target-1", b"x")),
        ("post", lambda: memory.initiator.prepare_write("target-1", *whole).post(b"x")),
        ("done", lambda: memory.initiator.prepare_write("target-1", *whole).post(b"x")),
    ):
        memory.network.inject(operation, fault, agent="initiator-1", times=2)
        for _ in range(2):
            with pytest.raises(FabricError, match="injected"):
                call()
        call()


def test_bytes_and_messages_can_be_lost_on_the_way(memory: Pair) -> None:
    source, target = memory.buffer(16), memory.target("target-1", 16)
    memory.initiator.connect(target.metadata)
    write = memory.initiator.prepare_write(
        "target-1", ranges(source.ctypes.data, [0], 16), ranges(target.address, [0], 16)
    )
    memory.network.inject("copy")
    write.post(b"1")
    assert (collect(target, 1), target.ask("read")) == ([("initiator-1", b"1")], bytes(16))
    memory.network.inject("deliver")
    write.post(b"2")
    assert (collect(target, 1, timeout_s=0.01), target.ask("read")) == ([], source.tobytes())


def test_the_bytes_of_a_stopped_writer_land_when_it_goes_on_although_nobody_waits_any_more(memory: Pair) -> None:
    source, target = memory.buffer(16), memory.target("target-1", 16)
    memory.initiator.connect(target.metadata)
    write = memory.initiator.prepare_write(
        "target-1", ranges(source.ctypes.data, [0], 16), ranges(target.address, [0], 16)
    )
    memory.network.freeze("initiator-1")
    write.post(b"stale")
    assert target.ask("read") == bytes(16)
    memory.network.thaw("initiator-1")
    assert target.ask("read") == source.tobytes()
    assert target.ask("notifications") == []


def test_the_bytes_of_a_stopped_writer_never_reach_a_target_that_is_gone(memory: Pair) -> None:
    source, target = memory.buffer(16), memory.target("target-1", 16)
    memory.initiator.connect(target.metadata)
    whole = ranges(source.ctypes.data, [0], 16), ranges(target.address, [0], 16)
    memory.network.freeze("initiator-1")
    write = memory.initiator.prepare_write("target-1", *whole)
    write.post(b"stale")
    target.kill()
    memory.network.thaw("initiator-1")
    with pytest.raises(FabricError, match="the other process is gone"):
        write.wait(TIMEOUT_S)


def test_a_region_is_the_whole_storage_of_a_tensor() -> None:
    storage = SimpleNamespace(data_ptr=lambda: 4096, nbytes=lambda: 800)
    tensor = SimpleNamespace(untyped_storage=lambda: storage, device=SimpleNamespace(type="cuda", index=3))
    assert Region.of(tensor) == Region(4096, 800, "VRAM", 3)
    tensor.device = SimpleNamespace(type="cpu", index=None)
    assert Region.of(tensor) == Region(4096, 800, "DRAM", 0)
    tensor.device = SimpleNamespace(type="meta", index=None)
    with pytest.raises(RegistrationFailed, match="meta"):
        Region.of(tensor)


def test_an_agent_needs_a_name() -> None:
    with pytest.raises(FabricError, match="needs a name"):
        MemoryFabric("", MemoryNetwork())


def test_what_ucx_logs_goes_to_standard_error_because_results_go_to_standard_output() -> None:
    program = "from vllm_nixl_plugin.agent import NixlAgent\nwith NixlAgent('a'):\n    print('result')"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("UCX_")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment | {"UCX_LOG_LEVEL": "info"}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout == "result\n"
    assert "UCX" in done.stderr
