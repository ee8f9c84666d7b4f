"""Every command of the quick start runs, in its order, as a user types it; the server is started by the page's line.

Its Python: test_docs.py. What needs another host, or a GPU, is named in `ELSEWHERE`, and the test says why.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness import EngineOptions, Server

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "quickstart.md"
ELSEWHERE = {
    "Qwen/Qwen3-8B": "on a GPU: benchmarks/gpu.py starts such servers",
    "mlx5_0": "network devices of another host: test_agent.py has those of this one",
}
OPTIONS = ("--enforce-eager", "--max-model-len", "2048", "--kv-cache-memory-bytes", "1073741824")
"""Of the page's server on a CPU; the replica beside it has the same."""

ONE = "vllm-nixl push path/to/checkpoint http://localhost"
"""How the line begins that pushes one checkpoint."""


def lines() -> list[str]:
    """Every command of the page's shell blocks."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    found = [line.partition(" #")[0] for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [" ".join(line.split()) for line in found if line.strip()]


class Shell:
    """A terminal: runs lines one after the other, in a folder, and keeps what they export. ``instead``: what this test
    has in place of a word of the page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.instead: dict[str, str] = {}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}

    def _line(self, line: str) -> str:
        for word, mine in self.instead.items():
            line = line.replace(word, mine)
        return line.replace("curl ", "curl --fail --silent --show-error ", 1)

    def run(self, line: str, folder: Path | None = None) -> str:
        """What a command that has to succeed prints."""
        done = subprocess.run(
            ["bash", "-c", self._line(line)], cwd=folder or self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=400, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout[-4000:]}"
        return done.stdout

    def export(self, line: str) -> None:
        """``export NAME=VALUE``."""
        name = line.split()[1].partition("=")[0]
        self.environment[name] = self.run(f'{line}; printf %s "${name}"')
        assert self.environment[name]

    @contextmanager
    def running(self, line: str, until: str, end: signal.Signals = signal.SIGINT) -> Iterator[list[str]]:
        """A command that does not end by itself: entered when its output has ``until``; ends by a signal, of Ctrl-C."""
        said: list[str] = []
        with subprocess.Popen(
            ["bash", "-c", f"exec env {self._line(line)}"], cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            reader = threading.Thread(target=lambda: said.extend(process.stdout or ()), daemon=True)
            reader.start()
            try:
                deadline = time.monotonic() + 300
                while not any(until in one for one in said):
                    if process.poll() is not None or time.monotonic() > deadline:
                        pytest.fail(f"{line}\n{''.join(said)[-4000:]}")
                    time.sleep(0.1)
                yield said
                process.send_signal(end)
                process.wait(60)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                reader.join(10)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def long(checkpoint: Path, folder: Path) -> Path:
    """A copy of a checkpoint for contexts as long as those of the page."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    return folder


def _of(commands: list[str], start: str) -> str:
    [found] = [line for line in commands if line.startswith(start)]
    return found


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_the_quick_start_runs(checkpoint, tmp_path: Path) -> None:
    commands = [line for line in lines() if not any(word in line for word in ELSEWHERE)]
    weights, saved = long(checkpoint("qwen3", 1), tmp_path / "weights"), tmp_path / "checkpoints"
    long(checkpoint("qwen3", 2), saved / "step-7")
    port, shell = _free_port(), Shell(tmp_path)
    shell.instead = {
        "Qwen/Qwen3-0.6B": f"{weights} --port {port}", "http://localhost:8000": f"http://localhost:{port}",
        "path/to/checkpoints": str(saved), "path/to/checkpoint": str(weights),
    }  # fmt: skip
    todo = iter(commands)
    for line in todo:
        if line.startswith("pip "):  # as far as it goes without changing this environment
            said = shell.run(line.replace("install", "install --dry-run --no-build-isolation"), ROOT)
            assert "does not provide the extra" not in said
        elif line.startswith("export "):
            shell.export(line)
        else:
            break
    assert "vllm serve" in line
    assert all(option in line for option in OPTIONS)
    replica = Server(
        weights, EngineOptions(args=(*OPTIONS, "--dtype", "auto")), token=shell.environment["PUSH_WEIGHTS_TOKEN"]
    )
    with shell.running(line, "Application startup complete", signal.SIGTERM), replica:
        shell.instead["http://localhost:8001"] = replica.url
        said = {line: _run(shell, line) for line in todo}
    assert (tmp_path / "plan.html").exists()
    assert "step-100" in said[_of(commands, ONE)]
    assert "step-7" in said[_of(commands, "vllm-nixl push path/to/checkpoints ")]
    assert {line.split()[1] for line in said if line.startswith("vllm-nixl")} >= {
        "doctor", "status", "plan", "push", "verify", "fingerprint", "pause", "resume", "catch-up",
    }  # fmt: skip


def _run(shell: Shell, line: str) -> str:
    if "--watch" not in line:
        return shell.run(line)
    with shell.running(line, "step-7") as said:
        pass
    shell.run(_of(lines(), ONE))  # the page goes on with these weights
    return "".join(said)


def test_what_is_not_run_is_only_what_this_machine_cannot() -> None:
    left = [line for line in lines() if any(word in line for word in ELSEWHERE)]
    assert {next(word for word in ELSEWHERE if word in line) for line in left} == set(ELSEWHERE)
    [served] = [line for line in left if " serve " in line]
    here = _of(lines(), "VLLM_PLUGINS=nixl vllm serve Qwen/Qwen3-0.6B")
    known = {*shlex.split(here), "Qwen/Qwen3-8B", "--gpu-memory-utilization", "0.7"}
    assert set(shlex.split(served)) <= known
