"""A bar on a terminal while a push runs, and silence elsewhere.

`WeightClient.push_weights` opens one `Progress` around all servers; the transfer threads call `add` with the bytes that
have arrived, and `stage` when a server enters the next stage.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class Progress:
    """One line per server. ``enabled`` None: only when standard error is a terminal. Safe to call from many threads."""

    def __init__(self, servers: tuple[str, ...], *, enabled: bool | None = None) -> None:
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
        if self._bars is not None:
            self._bars.update(self._tasks[server], stage=stage)
            if total_nbytes is not None:
                self._bars.update(self._tasks[server], total=total_nbytes)

    def add(self, server: str, nbytes: int) -> None:
        """``nbytes`` more have arrived at ``server``."""
        if self._bars is not None:
            self._bars.advance(self._tasks[server], nbytes)
