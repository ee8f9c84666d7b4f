"""How much memory processes take at most while something runs, sampled from outside.

On a CPU: memory of their own and shared memory of all processes of a session; pages of files do not count, since the
system may drop them. On a GPU: what is taken of the device, by whoever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

EVERY_S = 0.03
COUNTED = ("RssAnon:", "RssShmem:")


def watch(session: int, device: str) -> Peak:
    """The peak of all processes of a session or, for a process that leads none, of that one; or of a GPU."""
    if device == "cpu":
        pids = _processes(session) or [session]
        return Peak(lambda: sum(_nbytes(pid) for pid in pids))
    return Peak(lambda: _device_nbytes(device))


def _device_nbytes(device: str) -> int:
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _processes(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session:
                found.append(int(entry.name))
    return found


def _nbytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(COUNTED))


class Peak:
    """The largest of what ``read`` says while the context is entered, and what it said at first, in bytes."""

    def __init__(self, read: Callable[[], int]) -> None:
        self.before = self.peak = 0
        self._read = read
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def extra_nbytes(self) -> int:
        """How much more than at first."""
        return self.peak - self.before

    def __enter__(self) -> Self:
        self.before = self.peak = self._read()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, self._read())

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            self.peak = max(self.peak, self._read())
