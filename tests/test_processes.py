"""Names of processes: whether the one that was named still exists, told from its successors in the same PID."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from vllm_nixl_plugin.processes import is_running, this_process

PRINT_NAME = (
    "import sys; from vllm_nixl_plugin.processes import this_process; "
    "print(this_process(), flush=True); sys.stdin.read()"
)


def test_a_process_runs_until_it_is_dead_also_when_it_is_stopped_or_not_yet_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", PRINT_NAME], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    name = child.stdout.readline().decode().strip()
    assert f"/{child.pid}@" in name
    assert is_running(name)
    child.send_signal(signal.SIGSTOP)
    assert is_running(name)
    child.kill()
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and still there to be reaped
    assert not is_running(name)
    child.wait()
    assert not is_running(name)
    child.stdout.close()


@pytest.mark.parametrize("other", ["", "host/1@1", "/1@", "@", "host/x@y"])
def test_a_name_of_another_host_or_no_name_is_no_process_of_this_one(other: str) -> None:
    assert is_running(this_process())
    assert not is_running(other)
    assert not is_running(this_process() + "0")
