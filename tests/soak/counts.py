"""What a process of ours holds at the moment: told on SIGUSR2, in a file, for the leak figures of a soak.

`install` is called in every process of a server under test (startup/sitecustomize.py) and in the trainers; forked
processes inherit the handler. `ask` sends the signal and reads the answer. Agents, registrations and prepared writes
are found among the objects that live, so that one that nobody uses any more, but somebody holds, counts too.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

FOLDER = "SOAK_COUNTS"


def install() -> None:
    """Answer SIGUSR2 from now on."""
    signal.signal(signal.SIGUSR2, _answer)


def ask(pid: int, folder: Path, timeout_s: float = 30) -> dict[str, int] | None:
    """What the process holds; None when it does not answer."""
    if not _answers(pid):
        return None
    answer = folder / f"{pid}.json"
    answer.unlink(missing_ok=True)
    os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + timeout_s
    while not answer.exists():
        if time.monotonic() > deadline or not Path(f"/proc/{pid}").exists():
            return None
        time.sleep(0.01)
    return dict(json.loads(answer.read_text()))


def _answers(pid: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    [caught] = [line.split()[1] for line in lines if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (signal.SIGUSR2 - 1) & 1)


def _answer(_number: int, _frame: Any) -> None:
    folder = Path(os.environ[FOLDER])
    unfinished = folder / f"{os.getpid()}.part"
    unfinished.write_text(json.dumps(_counts()))
    unfinished.rename(folder / f"{os.getpid()}.json")


def _counts() -> dict[str, int]:
    fabric = sys.modules.get("vllm_nixl_plugin.fabric")
    found = dict.fromkeys(("agents", "remotes", "registrations", "registered", "writes"), 0)
    found["python threads"] = threading.active_count()
    for each in gc.get_objects() if fabric else ():
        if isinstance(each, fabric.Fabric):
            found["agents"] += each._open
            found["remotes"] += len(each._remotes)
            found["registrations"] += len(each._registrations)
            found["registered"] += sum(region.nbytes for held in each._registrations for region in held.regions)
            found["writes"] += len(each._writes)
    return found
