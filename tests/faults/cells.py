"""The table: which process falls or stops, at which stage of an update, in which mode; and what has to come of it.

Every cell begins with a server (or three) that serves old weights, and a trainer that pushes new ones and is held at
the stage. Then the fault strikes, and the trainer or server that was held goes on.

    victim   trainer   the trainer, of one process
             rank      the second of a trainer's two ranks
             worker    the second worker of a server of two (TP 2)
             api       the API server process
             server    all processes of one of three servers
    how      kill      SIGKILL
             stop      SIGSTOP until the lease is over (trainer, rank: until somebody else has pushed), then SIGCONT

`expected` is the whole of what is promised: how the push ends for its trainer, what the server does then, and what the
next push of another trainer finds. Modes: those of the protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

STAGES = (
    "before begin", "begun", "writing", "written", "prepare", "paused", "installing", "installed", "after",
)  # fmt: skip
STREAMED = tuple(stage for stage in STAGES if stage not in ("prepare", "installing"))
MODES = {"shadow": STAGES, "in_place": STAGES, "streamed": STREAMED}
"""By mode. A streamed update is prepared and installed while it is written: those are no stages of their own."""
VICTIMS = {
    "kill": ("trainer", "rank", "worker", "api", "server"),
    "stop": ("trainer", "rank", "server"),
}

OLD, NEW, PAUSED, TORN, DEAD = "serves old", "serves new", "paused, not ready", "torn, not ready", "server dead"
OK = ("ok",)


@dataclass(frozen=True)
class Cell:
    """One cell of the table."""

    victim: str
    how: str
    stage: str
    mode: str

    @property
    def committed(self) -> bool:
        """Whether all bytes are there and the commit is asked for, so that the server goes on by itself."""
        return STAGES.index(self.stage) >= STAGES.index("written" if self.mode == "streamed" else "prepare")

    @property
    def begun(self) -> bool:
        """Whether the server has given its addresses out."""
        return self.stage != "before begin"

    @property
    def name(self) -> str:
        """As tests and tables call it."""
        return f"{self.how} {self.victim}, {self.stage}, {self.mode}"

    def place(self, port: int) -> str:
        """Where a process is held, with the server on that port."""
        writer = 1 if self.victim == "rank" else 0
        return {
            "before begin": f"trainer.0.before.begin@{port}", "begun": f"trainer.0.after.begin@{port}",
            "writing": f"trainer.{writer}.writing@{port}", "written": f"trainer.0.before.commit@{port}",
            "prepare": "worker.0.before.prepare", "paused": "worker.0.before.install",
            "installing": "worker.0.installing", "installed": "worker.0.after.install", "after": "trainer.0.after",
        }[self.stage]  # fmt: skip


@dataclass(frozen=True)
class Expected:
    """``push``: how the push may end for the trainer (``killed``, ``ok``, codes of errors). ``server``: how the server
    stands then. ``blocked``: the next push is refused with ``lease_held`` while the victim stands. ``otherwise``: other
    ends of the push that are as right, and how the server stands after each. Servers that are no victims serve what is
    new. The next push always succeeds in the end, after a restart where the server died.
    """

    push: tuple[str, ...]
    server: str
    blocked: bool = False
    otherwise: tuple[tuple[str, str], ...] = ()

    @property
    def ends(self) -> tuple[str, ...]:
        """How the push may end."""
        return (*self.push, *(push for push, _ in self.otherwise))

    def server_after(self, push: str) -> str:
        """How the server has to stand after a push that ended like this."""
        return dict(self.otherwise).get(push, self.server)


def expected(cell: Cell) -> Expected:
    """What has to come of a cell."""
    return {"trainer": _trainer, "rank": _rank, "server": _server}.get(cell.victim, _part_of_server)(cell)


def _trainer(cell: Cell) -> Expected:
    """Before the commit the old policy serves on, or an in-place engine stands; after it the server needs nobody."""
    interrupted = cell.begun and not cell.committed
    server = NEW if cell.committed else OLD
    if interrupted and cell.mode != "shadow":  # a streamed commit hears that nobody renews the lease
        server = TORN if cell.mode == "streamed" and cell.stage == "writing" else PAUSED
    if cell.how == "kill":
        return Expected(("killed",) if cell.stage != "after" else OK, server)
    # Another push takes the update over, so that the first has failed when it goes on. It begins one if it had none
    # yet, and hears of the end of one that has ended.
    lost = ("stale_update", "incomplete") if cell.mode == "streamed" else ("stale_update",)
    return Expected(lost if interrupted else OK, server, interrupted and cell.mode != "shadow")


def _rank(cell: Cell) -> Expected:
    """The other rank notices and ends the update, unless all bytes were there; in place that leaves the engine torn."""
    if cell.committed or cell.stage == "written":
        return Expected(OK if cell.stage == "after" else ("ok", "rank_lost"), NEW)
    torn = cell.mode != "shadow"
    # A streamed update begins with the worker's connection to each rank: one that is gone by then stops nothing.
    unreached = cell.mode == "streamed" and cell.how == "kill" and not cell.begun
    otherwise = (("fabric", OLD),) if unreached else ()
    return Expected(("rank_lost",), TORN if torn else OLD, torn and cell.how == "stop", otherwise)


def _part_of_server(cell: Cell) -> Expected:
    """vLLM ends a server of which a process died. The trainer learns it from a connection or from a write; or not at
    all, when the worker had done its part of the install, and the judge said so before the engine ended."""
    if cell.stage == "after":
        return Expected(OK, DEAD)
    done = OK if cell.victim == "worker" and cell.stage in ("paused", "installing", "installed") else ()
    return Expected(("unreachable", "worker_failed", "fabric", *done), DEAD)


def _server(cell: Cell) -> Expected:
    """One that died fails alone. One that stood goes on where it was: its lease is only looked at by rivals."""
    if cell.how == "stop":
        return Expected(OK, NEW)
    return Expected(OK if cell.stage == "after" else ("unreachable", "fabric"), DEAD)


def all_cells() -> Iterator[Cell]:
    """Every cell, those of one kind of server together."""
    for how, victims in VICTIMS.items():
        for victim in victims:
            for mode, stages in MODES.items():
                for stage in stages:
                    yield Cell(victim, how, stage, mode)
