"""The harness itself: what it compares, and that it leaves nothing behind."""

import contextlib
import os
import sys
import time
from pathlib import Path

import httpx
import pytest

from harness import EngineOptions, Launcher, Server, completions, reference


def test_a_checkpoint_of_the_same_name_and_seed_has_the_same_bytes(tmp_path: Path) -> None:
    from harness.checkpoints import MODELS, write_checkpoint

    for name in MODELS:
        first, again = (write_checkpoint(tmp_path / folder / name, name, 3) for folder in ("first", "again"))
        assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes(), name


def test_every_tensor_of_a_checkpoint_depends_on_the_seed(checkpoint) -> None:
    from harness.checkpoints import MODELS, read_weights

    for name in MODELS:
        one, two = read_weights(checkpoint(name, 1)), read_weights(checkpoint(name, 2))
        assert one.keys() == two.keys()
        assert [key for key in one if one[key].equal(two[key])] == [], name


def test_a_checkpoint_written_from_weights_is_the_checkpoint_they_came_from(checkpoint, tmp_path: Path) -> None:
    from harness.checkpoints import read_weights, write_weights

    original = checkpoint("qwen3")
    copy = write_weights(tmp_path / "copy", read_weights(original), like=original)
    assert sorted(file.name for file in copy.iterdir()) == sorted(file.name for file in original.iterdir())
    assert all(tensor.equal(read_weights(original)[name]) for name, tensor in read_weights(copy).items())


def test_the_end_of_the_launcher_is_the_end_of_what_it_started(tmp_path: Path) -> None:
    launcher = Launcher()
    sleep = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    pid = launcher.ask(
        op="start", how="exec", command=[sys.executable, "-c", sleep], env=dict(os.environ), log=str(tmp_path / "log")
    )["pid"]
    deadline = time.monotonic() + 30
    while len(session := _session(pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(session) == 2
    launcher.close()
    assert _session(pid) == []


def test_a_server_that_gets_the_number_of_one_that_ended_is_running(tmp_path: Path) -> None:
    launcher = Launcher()

    def started(code: str) -> int:
        command = [sys.executable, "-c", code]
        return launcher.ask(op="start", how="exec", command=command, env={}, log=str(tmp_path / "log"))["pid"]

    def returncode(pid: int) -> int | None:
        return launcher.ask(op="poll", pid=pid)["returncode"]

    first = started("")
    while returncode(first) is None:
        time.sleep(0.05)
    # Numbers come back after 32,768 processes; where the kernel lets us, at once.
    with contextlib.suppress(OSError):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(first - 1))
    second = started("import time; time.sleep(600)")
    assert returncode(second) is None
    launcher.close()


def test_the_launcher_tells_how_a_process_ended(tmp_path: Path) -> None:
    launcher = Launcher()
    command = [sys.executable, "-c", "print('said'); raise SystemExit(7)"]
    pid = launcher.ask(op="start", how="exec", command=command, env={}, log=str(tmp_path / "log"))["pid"]
    while (answer := launcher.ask(op="poll", pid=pid))["returncode"] is None:
        time.sleep(0.05)
    assert (answer["returncode"], (tmp_path / "log").read_text()) == (7, "said\n")
    launcher.close()


@pytest.mark.server
def test_a_server_and_the_reference_of_its_checkpoint_agree(checkpoint) -> None:
    with Server(checkpoint("qwen3"), plugin=False) as server:
        generated = completions(server.url)
        assert generated == completions(server.url)
        assert len(server.processes()) >= 2
    assert server.processes() == []
    assert generated == reference(checkpoint("qwen3"), options=server.options)
    assert generated != reference(checkpoint("qwen3", seed=2), options=server.options)


@pytest.mark.server
@pytest.mark.parametrize("ranks", [{"tensor_parallel": 2}, {"data_parallel": 2}], ids=["tp", "dp"])
def test_several_ranks_generate_the_same_twice_and_leave_nothing_behind(checkpoint, ranks: dict[str, int]) -> None:
    options = EngineOptions(**ranks)
    with Server(checkpoint("qwen3"), options, plugin=False) as server:
        assert completions(server.url) == reference(checkpoint("qwen3"), options=options)
    assert server.processes() == []


@pytest.mark.server
@pytest.mark.parametrize(
    "name", ["qwen3-tied", "qwen3-wide", "qwen3-moe", "qwen3-moe-wide", "llama", "deepseek-v2", "mamba2"]
)
def test_every_tiny_model_is_served(checkpoint, name: str) -> None:
    generated = reference(checkpoint(name))
    assert all(len(set(completion.tokens)) > 1 for completion in generated)


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.thorough  # test_verification compares a server of each kind
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_forked_server_generates_what_a_server_started_by_a_user_does(checkpoint, tensor_parallel: int) -> None:
    forked = EngineOptions(tensor_parallel=tensor_parallel, launch="fork")
    with Server(checkpoint("qwen3"), forked.with_(launch="exec"), plugin=False) as server:
        assert completions(server.url) == reference(checkpoint("qwen3"), options=forked)
    assert server.processes() == []


@pytest.mark.server
def test_a_killed_server_comes_back_at_the_same_address(checkpoint) -> None:
    server = Server(checkpoint("qwen3"), plugin=False)
    with server:
        url = server.url
        server.kill()
        assert server.processes() == []
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", timeout=5)
        server.start()
        assert server.url == url
        assert completions(url) == reference(checkpoint("qwen3"))


@pytest.mark.server
def test_a_server_that_does_not_start_shows_its_output(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ended with 1 while starting[\s\S]*no-such-model"), Server(
        tmp_path / "no-such-model", plugin=False
    ):
        pass


def _session(pid: int) -> list[int]:
    from harness.launcher import processes_of_session

    return processes_of_session(pid)
