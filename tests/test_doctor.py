"""`vllm-nixl doctor` finds what is there and what is wrong, on this machine and on others, with a remedy."""

import json
import os
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from fake_server import TOKEN, FakeServer, listening
from trainer_client.cli import main
from trainer_client.diagnosis import environment, machine, transports, versions
from trainer_client.diagnosis.finding import Finding, Level
from vllm_nixl_plugin.memory_fabric import MemoryFabric, MemoryNetwork

ROOT = Path(__file__).parent.parent
Run = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith(("PUSH_WEIGHTS_", "UCX_", "VLLM_", "PYTORCH_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PUSH_WEIGHTS_TOKEN", TOKEN)
    monkeypatch.setenv("VLLM_PLUGINS", "nixl")


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*args: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["vllm-nixl", "doctor", *map(str, args)])
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0), capsys.readouterr().out

    return run


def bad(found: list[Finding]) -> dict[str, str]:
    return {each.what: each.remedy for each in found if each.level == Level.BAD}


def test_this_machine_is_well_and_writes_between_processes_are_measured(doctor: Run) -> None:
    code, out = doctor("--json", "--nbytes", 1 << 20)
    told = json.loads(out)
    by_name = {each["what"]: each for each in told["findings"]}
    assert (code, told["ok"]) == (0, True), [each for each in told["findings"] if each["level"] == "bad"]
    assert "UCX" in by_name["NIXL plug-ins"]["found"]
    assert re.search(r"B/s by (cma|posix|sysv|xpmem)/memory, [\d.]+ of a copy", by_name["host memory"]["found"])
    assert "B/s by tcp/lo, " in by_name["host memory, TCP alone"]["found"]
    assert by_name["PUSH_WEIGHTS_TOKEN"]["found"] == "(secret)"
    assert {"Python", "torch", "nixl", "vllm", "VLLM_PLUGINS", "/dev/shm", "lo"} <= set(by_name)
    assert TOKEN not in out


def test_what_is_wrong_is_marked_with_its_remedy_and_ends_with_one(
    doctor: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PUSH_WEIGHTS_SHADOWS", "host")
    monkeypatch.setenv("UCX_TLS", "posix,cma")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    code, out = doctor("--no-measure")
    assert code == 1
    assert "BAD  PUSH_WEIGHTS_SHADOWS: PUSH_WEIGHTS_SHADOWS is no setting: did you mean PUSH_WEIGHTS_SHADOW?" in out
    assert "BAD  UCX_TLS: posix,cma: NIXL cannot connect by these alone" in out
    assert "BAD  VLLM_PLUGINS: 'other' leaves the plugin out" in out
    assert "-> VLLM_PLUGINS=other,nixl" in out
    assert "3 bad, " in out


def test_a_transport_that_ucx_cannot_use_is_said_not_to_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "posix,cma")
    found = transports.measured("host memory", ("host", "host"), 1 << 16, {})
    assert found.level == Level.BAD
    assert "does not work" in found.found


def test_servers_are_asked_too(doctor: Run) -> None:
    network = MemoryNetwork()
    with listening(FakeServer(lambda name: MemoryFabric(name, network))) as url:
        code, out = doctor("--no-measure", "--json", url, "http://127.0.0.1:9")
    told = {each["what"]: each for each in json.loads(out)["findings"]}
    assert code == 1
    assert told[url]["level"] == "warning"
    assert "run the same version on both sides" in told[url]["remedy"]
    assert told["http://127.0.0.1:9"]["level"] == "bad"


def test_of_what_ucx_prints_the_last_write_to_another_process_is_the_one() -> None:
    def block(where: str, what: str, way: str) -> str:
        lines = [
            f"probe-source {where} cfg#1 |",
            f"{what} |",
            "Range | Description | Config |",
            "0..99 | short | tcp/lo |",
        ]
        return "\n".join(f"[1.2] [vm:1:0] | {line}" for line in [*lines, f"100..inf | zero-copy | {way}     |"])

    put = "remote memory write by ucp_put* from"
    printed = [
        block("intra-node", f"{put} host memory to host", "cma/memory"),
        block("intra-node", f"{put} cuda to cuda", "cuda_ipc/cuda"),
        block("intra-node", "active message by ucp_am_send*", "tcp/lo"),
        block("self", f"{put} host memory to host", "self/x"),
    ]  # fmt: skip
    assert transports.TAKEN.findall("\n".join(printed)) == ["cma/memory", "cuda_ipc/cuda"]


@pytest.mark.parametrize(
    ("name", "value", "gpu", "level"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments:True", True, Level.BAD),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", False, Level.WARNING),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", True, None),
        ("UCX_TLS", "tcp,sm", True, Level.BAD),
        ("UCX_TLS", "rc,sm,cuda", True, None),
        ("UCX_TLS", "^cuda_ipc", True, Level.WARNING),
        ("UCX_TLS", "all", True, None),
        ("UCX_NET_DEVICES", "eth0", False, Level.NOTE),
        ("VLLM_SERVER_DEV_MODE", "1", False, Level.WARNING),
        ("VLLM_USE_RUST_FRONTEND", "1", False, Level.BAD),
    ],
)
def test_combinations_that_are_known_to_go_wrong_are_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, gpu: bool, level: Level | None
) -> None:
    monkeypatch.setenv(name, value)
    found = [each for each in environment.environment(has_gpu=gpu) if each.what == name]
    assert {each.level for each in found} == ({level} if level else set())
    assert all(each.remedy for each in found)


def test_devices_of_another_machine_are_told_with_their_distance_from_each_gpu(tmp_path: Path) -> None:
    """A GPU beside one card behind a switch, another card at the same root, and a third at the other socket."""
    places = {
        "gpu": "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0",
        "mlx5_0": "pci0000:00/0000:00:01.0/0000:01:01.0/0000:03:00.0",
        "mlx5_1": "pci0000:00/0000:00:02.0/0000:04:00.0", "mlx5_2": "pci0000:80/0000:80:01.0/0000:81:00.0",
    }  # fmt: skip
    for name, place in places.items():
        path = tmp_path / "sys/devices" / place
        path.mkdir(parents=True)
        (path / "numa_node").write_text("1" if name == "mlx5_2" else "0")
        if name != "gpu":
            port = tmp_path / "sys/class/infiniband" / name / "ports/1"
            port.mkdir(parents=True)
            (port / "rate").write_text("400 Gb/sec (4X NDR)")
            (port / "state").write_text("4: ACTIVE")
            (port.parents[1] / "device").symlink_to(path)
    gpu = machine.Device("GPU 0", "a GPU", tmp_path / "sys/devices" / places["gpu"], 0)
    found = {each.what: each for each in machine.machine([gpu], tmp_path)}
    assert found["mlx5_0:1"].found == "4: ACTIVE, 400 Gb/sec (4X NDR), NUMA node 0"
    assert found["from GPU 0"].found == "mlx5_0:1: same switch, mlx5_1:1: same root, mlx5_2:1: other NUMA node"
    assert found["network devices"].found == "none"
    assert found["/dev/shm"].level == Level.BAD
    assert found["namespaces"].found == "those of the host"


def test_a_container_with_namespaces_of_its_own_and_limits_is_told_what_to_ask_for(tmp_path: Path) -> None:
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/ipc").symlink_to("ipc:[4026532000]")
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026531836]")
    (tmp_path / "proc/sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/yama/ptrace_scope").write_text("1\n")
    assert [each.found for each in machine.namespaces(tmp_path)] == ["ipc of this container, not of the host"]
    scope = next(each for each in machine.memory(tmp_path, rdma=True) if "ptrace_scope" in each.what)
    assert (scope.found, scope.level) == ("1", Level.NOTE)


def test_supported_versions_are_those_of_the_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [vllm] = [each for each in project["optional-dependencies"]["server"] if each.startswith("vllm")]
    [nixl] = [each for each in project["dependencies"] if each.startswith("nixl")]
    bounds = [".".join(map(str, each)) for each in (*versions.VLLM, *versions.NIXL)]
    assert vllm == f"vllm>={bounds[0]},<{bounds[1]}"
    assert nixl == f"nixl>={bounds[2]},<{bounds[3]}," + ",".join(f"!={each}" for each in versions.NIXL_UNUSABLE)
    assert [versions.supported(v, versions.VLLM) for v in ("0.25.1", "0.26.0", "0.32.0+cpu", "0.33.0", "dev")] == [
        False, True, True, False, True,
    ]  # fmt: skip
