"""How far a push is: counted for `PushHandle.progress`, shown as a bar on a terminal, and silence elsewhere.

`WeightClient` opens one `Progress` around all servers; the transfer threads call `add` with the bytes that
have arrived, and `stage` when a server enters the next stage.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


@dataclass(frozen=True, slots=True)
class ServerProgress:
    """How far the push to one server is: its stage, bytes that have arrived, and bytes to send (0: not known yet)."""

    stage: str = "waiting"
    sent_nbytes: int = 0
    total_nbytes: int = 0


class Progress:
    """One line per server. ``enabled`` None: only when standard error is a terminal. Safe to call from many threads."""

    def __init__(self, servers: tuple[str, ...], *, enabled: bool | None = None) -> None:
        self._servers = dict.fromkeys(servers, ServerProgress())
        self._lock = threading.Lock()
        self._bars: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}
        if sys.stderr.isatty() if enabled is None else enabled:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
            from rich.progress import Progress as RichProgress

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
                       TextColumn("{task.fields[stage]}"))  # fmt: skip
            self._bars = RichProgress(*columns, console=Console(stderr=True))
            for server in servers:
                self._tasks[server] = self._bars.add_task(server, total=None, stage="plan")

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def stage(self, server: str, stage: str, *, total_nbytes: int | None = None) -> None:
        """``server`` enters ``stage``; ``total_nbytes`` is what its bar counts to, once known."""
        with self._lock:
            now = replace(self._servers.get(server, ServerProgress()), stage=stage)
            self._servers[server] = now if total_nbytes is None else ServerProgress(stage, 0, total_nbytes)
        if self._bars is not None:
            if server not in self._tasks:  # it has come since
                self._tasks[server] = self._bars.add_task(server, total=None, stage=stage)
            self._bars.update(self._tasks[server], stage=stage)
            if total_nbytes is not None:
                self._bars.update(self._tasks[server], total=total_nbytes)

    def add(self, server: str, nbytes: int) -> None:
        """``nbytes`` more have arrived at ``server``."""
        with self._lock:
            now = self._servers[server]
            self._servers[server] = replace(now, sent_nbytes=now.sent_nbytes + nbytes)
        if self._bars is not None:
            self._bars.advance(self._tasks[server], nbytes)

    def servers(self) -> dict[str, ServerProgress]:
        """How far every server is, now."""
        with self._lock:
            return dict(self._servers)
