"""`make demo` succeeds, says so, and leaves nothing behind, whatever ends it."""

import ast
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

DEMO = Path(__file__).parent.parent / "examples" / "demo.py"


@pytest.fixture
def demo() -> Iterator[subprocess.Popen[str]]:
    """The running demo; afterwards no process and no file of it may be left."""
    name, number = "DEMO_TEST_ID", uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="d-") as folder:  # short: vLLM puts sockets there
        environment = os.environ | {"TMPDIR": folder, "PYTHONUNBUFFERED": "1", name: number}
        with subprocess.Popen(
            [sys.executable, DEMO], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            try:
                yield process
            finally:
                process.terminate()
                process.communicate(timeout=150)
        deadline = time.monotonic() + 30  # what has been killed takes a moment to go on a busy machine
        while (left := carrying(f"{name}={number}")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left == []
        assert [path.name for path in Path(folder).iterdir() if not path.name.startswith("torchinductor")] == []


def carrying(mark: str) -> list[str]:
    """Command lines of the processes with this in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found


@pytest.mark.server
@pytest.mark.slow
def test_the_demo_learns_its_sentence_and_ends_equal(demo: subprocess.Popen[str]) -> None:
    text, _ = demo.communicate(timeout=500)
    assert demo.returncode == 0, text
    assert "\nequal: " in text
    assert "not one request has failed." in text
    assert ": 0 failed" in text
    assert "\x1b[" not in text  # plain where there is no terminal


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [
    (signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.thorough),
])  # fmt: skip
def test_the_demo_can_be_stopped_while_its_server_starts(
    demo: subprocess.Popen[str], number: signal.Signals, status: int
) -> None:
    assert demo.stdout
    for line in demo.stdout:
        if line.startswith("$ "):
            break
    demo.send_signal(number)
    demo.communicate(timeout=150)
    assert demo.returncode == status


def test_the_demo_needs_nothing_of_the_tests() -> None:
    tree = ast.walk(ast.parse(DEMO.read_text()))
    modules = {n.module for n in tree if isinstance(n, ast.ImportFrom)}
    assert not any(str(module).startswith(("harness", "tests", "conftest")) for module in modules)
