"""Places at which the processes under test can be stopped, by files in a folder that they and the test share.

A process calls `arrive` at a place. Nothing happens unless the test has set a trap there: then the process holds still
until it is released, or kills or stops itself. One arrival uses a trap up.

    test      gate.set("trainer.0.after")    gate.wait("trainer.0.after") -> PID    gate.release("trainer.0.after")
    process   arrive("trainer.0.after")      `-- holds ------------------------------------------'

The clock of the day can be made to jump, too. The processes find the folder in FAULTS_GATE. Standard library only: it
is imported at the start of every server.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

HOLD_S = 120.0
"""The longest hold: a test that dies leaves nobody standing."""
STEP_S = 0.01


def arrive(place: str) -> None:
    """Pass a place, or do what the trap there says."""
    if (files := claim(place)) is not None:
        hold(*files)


async def arrive_async(place: str) -> None:
    """The same in an event loop, which goes on meanwhile."""
    if (files := claim(place)) is not None:
        await asyncio.to_thread(hold, *files)


def hold(reached: Path, go: Path) -> None:
    """Tell of the arrival, and wait."""
    partial = reached.with_name(f"{reached.name}.part")
    partial.write_text(str(os.getpid()))
    partial.rename(reached)
    deadline = time.monotonic() + HOLD_S
    while not go.exists() and time.monotonic() < deadline:
        time.sleep(STEP_S)


def claim(place: str) -> tuple[Path, Path] | None:
    """Use up the trap at a place, if there is one: the file that tells of the arrival, and the one to wait for."""
    folder = os.environ.get("FAULTS_GATE")
    if not folder:
        return None
    try:
        Path(folder, f"{place}.set").rename(Path(folder, f"{place}.{os.getpid()}"))
    except FileNotFoundError:
        return None
    return Path(folder, f"{place}.reached"), Path(folder, f"{place}.go")


def shift_clock() -> None:
    """From now on the clock of the day is wrong in this process by what the file ``clock`` says, in seconds."""
    right, file = time.time, Path(os.environ.get("FAULTS_GATE", "/nowhere"), "clock")

    def wrong() -> float:
        return right() + (float(file.read_text()) if file.exists() else 0.0)

    time.time = wrong


class Gate:
    """The test's side of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def set(self, place: str) -> None:
        """The next process that arrives there holds still."""
        (self.folder / f"{place}.set").touch()

    def wait(self, place: str, timeout_s: float, in_vain: Callable[[], object] = bool) -> int:
        """The PID of the process that holds there. Errors: TimeoutError, at once when ``in_vain`` says so."""
        reached, deadline = self.folder / f"{place}.reached", time.monotonic() + timeout_s
        while not reached.exists():
            if why := in_vain():
                raise TimeoutError(f"nobody comes to {place}: {why}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody came to {place} within {timeout_s:g} s")
            time.sleep(STEP_S)
        return int(reached.read_text().split()[0])

    def is_in_a_write(self, place: str) -> bool:
        """Whether who holds there does so between two halves of one WRITE (half_write.c)."""
        return (self.folder / f"{place}.reached").read_text().endswith(" half")

    def jump(self, seconds: float) -> None:
        """The clocks of all processes jump, until `clear`."""
        partial = self.folder / "clock.part"
        partial.write_text(str(seconds))
        partial.rename(self.folder / "clock")

    def release(self, place: str) -> None:
        """Let it go on."""
        (self.folder / f"{place}.go").touch()

    def clear(self) -> None:
        """Let everybody go on, and take all traps away."""
        for path in self.folder.glob("*.set"):
            path.unlink(missing_ok=True)
        for path in self.folder.glob("*.reached"):
            self.release(path.name.removesuffix(".reached"))
        time.sleep(STEP_S * 3)
        for path in self.folder.iterdir():
            path.unlink(missing_ok=True)
