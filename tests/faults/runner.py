"""Carries out cells on real servers and real trainers, and says what became of them.

    old weights -> a trainer pushes new ones and is held at the stage -> the fault -> it goes on -> how that ended, and
    how the server stands -> another trainer pushes third ones -> tokens, logprobs, fingerprint equal a fresh server's

A `World` keeps servers, trainers and what fresh servers say from cell to cell, and starts each at first use.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from faults.cells import DEAD, NEW, OLD, PAUSED, TORN, Cell, Expected, expected
from faults.gate import Gate
from faults.trainer import Rank, Trainers, stop
from harness import TOKEN, EngineOptions, Server, completions
from harness.checkpoints import read_weights, write_checkpoint
from harness.server import HARNESS
from trainer_client import PushFailed, WeightClient
from trainer_client.control import Control
from vllm_nixl_plugin.errors import PushWeightsError

LEASE_S = 2.0
RANK_TIMEOUT_S = 4.0
START_S = 500.0
REACH_S = 120.0
END_S = 150.0
"""By when the push has ended for its trainer, once the fault has struck: its `timeout_s`, and a minute to clear up."""
SETTLE_S = 30.0
"""By when the server stands as it has to, from then on."""
NEXT_S = 60.0
"""By when the next push is done."""
LIMITS = {"timeout_s": 60.0, "lease_s": LEASE_S, "rank_timeout_s": RANK_TIMEOUT_S}
MODEL = "qwen3"
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Row:
    """What became of a cell. ``push``: how it ended for the trainer, ``blocked``: whether the next push had to wait for
    the victim; seconds from the fault to the end of the push, to where the server stands, and of the next push."""

    cell: Cell
    push: str
    server: str
    others: tuple[str, ...]
    blocked: bool
    next: str
    equal: bool
    push_s: float
    server_s: float
    next_s: float
    said: str = ""

    @property
    def wrong(self) -> str:
        """What differs from what is expected; empty when nothing does."""
        wanted = expected(self.cell)
        standing = wanted.server_after(self.push)
        found = [
            f"push {self.push} ({self.said}), expected {' or '.join(wanted.ends)}" * (self.push not in wanted.ends),
            f"{self.server}, expected {standing}" * (self.server != standing),
            f"others {self.others}" * any(other != NEW for other in self.others),
            f"next push {'' if self.blocked else 'not '}held up by the victim" * (self.blocked != wanted.blocked),
            f"next push {self.next}" * (self.next != "ok"),
            "different from a fresh server" * (not self.equal),
        ]
        return "; ".join(filter(None, found))


def hooked(gate: Path) -> dict[str, str]:
    """The environment that puts the places of `server_hooks` into a server."""
    startup = [str(HARNESS / "startup"), str(Path(__file__).parent / "startup")]
    return {"FAULTS_GATE": str(gate), "PYTHONPATH": os.pathsep.join(startup)}


class Fleet:
    """Servers of one kind that are pushed to together; the last of them is the one that faults strike."""

    def __init__(self, world: World, count: int, options: EngineOptions) -> None:
        self.world = world
        self.gates = [Gate(world.folder / f"gate-{options.tensor_parallel}-{count}-{i}") for i in range(count)]
        self.servers = [
            Server(world.checkpoints[SEEDS[0]], options, env=hooked(gate.folder), start_timeout_s=START_S)
            for gate in self.gates
        ]
        self.seed = SEEDS[0]
        for server in self.servers:
            server.start()
        self.urls = [server.url for server in self.servers]
        self.clients: list[WeightClient] = []
        self.said = ""

    @property
    def victim(self) -> Server:
        """The one that faults strike."""
        return self.servers[-1]

    @property
    def gate(self) -> Gate:
        """That of the victim, and of the trainers that push to it."""
        return self.gates[-1]

    def push(self, seed: int, version: str) -> str:
        """A push of another trainer, this process: ``ok`` or an error's code."""
        if not self.clients:
            self.clients.append(WeightClient(self.urls, token=TOKEN, progress=False, **LIMITS))
        try:
            self.clients[0].push_weights(self.world.weights(seed), version=version)
        except PushFailed as error:
            self.said = error.message
            return next(server.error_code or "" for server in error.report.servers if not server.ok)
        self.seed = seed
        return "ok"

    def restart(self) -> None:
        """Start all of them anew: a cell before has left something behind."""
        for server in self.servers:
            server.kill()
            server.start()
        self.seed = SEEDS[0]

    def close(self) -> None:
        """End them."""
        for client in self.clients:
            client.close()
        for server in self.servers:
            server.stop()


class World:
    """Everything that cells share. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = {seed: write_checkpoint(folder / f"{MODEL}-{seed}", MODEL, seed) for seed in SEEDS}
        self.trainers = Trainers(folder / "trainers")
        self._fleets: dict[tuple[int, int], Fleet] = {}
        self._fresh: dict[tuple[int, int], Any] = {}
        self._weights: dict[int, Any] = {}
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with ExitStack() as closing:
            for fleet in self._fleets.values():
                closing.callback(fleet.close)
            closing.enter_context(self.trainers)

    def fleet(self, cell: Cell) -> Fleet:
        """The servers for a cell."""
        kind = (1, 2) if cell.victim == "worker" else (3, 1) if cell.victim == "server" else (1, 1)
        if kind not in self._fleets:
            self._fleets[kind] = Fleet(self, kind[0], EngineOptions(tensor_parallel=kind[1]))
        return self._fleets[kind]

    def weights(self, seed: int) -> Any:
        """Those of a checkpoint, the same tensors each time."""
        if seed not in self._weights:
            self._weights[seed] = read_weights(self.checkpoints[seed])
        return self._weights[seed]

    def fresh(self, seed: int, options: EngineOptions) -> Any:
        """What `seen` gives of a server that was started on the checkpoint of this seed."""
        key = (seed, options.tensor_parallel)
        if key not in self._fresh:
            with Server(self.checkpoints[seed], options, start_timeout_s=START_S) as server:
                self._fresh[key] = seen(server)
        return self._fresh[key]

    def version(self, seed: int) -> str:
        """A name for a push, never used before."""
        self._count += 1
        return f"{self._count}-of-seed-{seed}"


def seen(server: Server) -> Any:
    """Tokens and logprobs, and the digest of everything that each worker's engine can read."""
    with Control(server.url, token=TOKEN) as control:
        return completions(server.url), [worker.digest for worker in control.fingerprint(paths=False).workers]


def run(world: World, cell: Cell) -> Row:
    """One cell. Errors: TimeoutError where something hangs."""
    fleet = world.fleet(cell)
    fleet.gate.clear()
    if fleet.push(fleet.seed, world.version(fleet.seed)) != "ok":
        fleet.restart()
    old = fleet.seed
    new, third = (seed for seed in SEEDS if seed != old)
    wanted, version = expected(cell), world.version(new)
    if fleet.push(old, world.version(old)) != "ok":
        raise RuntimeError(f"the cell {cell.name} cannot begin: {fleet.said}")
    before = status_of(fleet.victim)["weight_version"]
    names = {before: OLD, version: NEW}
    workers = [worker["pid"] for worker in ask(fleet.victim, "/metadata")["workers"]]
    place = cell.place(fleet.victim.port)
    fleet.gate.set(place)
    ranks = world.trainers.push(
        fleet.urls, world.checkpoints[new], gate=fleet.gate.folder, version=version, mode=cell.mode,
        ranks=2 if cell.victim == "rank" else 1, **LIMITS,
    )  # fmt: skip
    try:
        fleet.gate.wait(place, REACH_S, lambda: ranks[0].is_over and cell.stage != "after" and ranks[0].said)
        begin = time.monotonic()
        pids = _victims(cell, fleet, ranks, workers)
        _strike(cell, fleet, ranks, pids)
        return _aftermath(world, cell, wanted, fleet, ranks, pids, names, begin, (old, new, third))
    finally:
        for rank in ranks:
            rank.kill()
        fleet.gate.clear()


def _victims(cell: Cell, fleet: Fleet, ranks: list[Rank], workers: list[int]) -> list[int]:
    if cell.victim == "trainer":
        return [ranks[0].pid]
    if cell.victim == "rank":
        return [ranks[1].pid]
    if cell.victim == "api":
        return [fleet.victim.pid]
    if cell.victim == "worker":
        return workers[1:]
    return fleet.victim.processes()


def _strike(cell: Cell, fleet: Fleet, ranks: list[Rank], pids: list[int]) -> None:
    if cell.how == "stop":
        for pid in pids:
            stop(pid)
    elif cell.victim == "server":
        fleet.victim.kill()
    else:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    fleet.gate.release(cell.place(fleet.victim.port))


def _aftermath(
    world: World, cell: Cell, wanted: Expected, fleet: Fleet, ranks: list[Rank], pids: list[int],
    names: dict[str, str], begin: float, seeds: tuple[int, int, int],
) -> Row:  # fmt: skip
    """What becomes of everybody."""
    old, new, third = seeds
    stands, equal, push = cell.how == "stop" and cell.victim != "server", True, ""
    if cell.how == "stop":
        time.sleep(max(begin + LEASE_S * 1.5 - time.monotonic(), 0))
    if cell.how == "stop" and cell.victim == "server":
        _go_on(pids)
    if not (stands and cell.victim == "trainer"):
        push = ranks[0].outcome(END_S)
    push_s = time.monotonic() - begin
    server = settled(fleet.victim, names, wanted.server_after(push))
    server_s = time.monotonic() - begin
    others = tuple(settled(each, names, NEW) for each in fleet.servers[:-1])
    if server in (OLD, NEW) and world.fresh(old if server == OLD else new, fleet.victim.options) != seen(fleet.victim):
        equal = False
    if server in (TORN, PAUSED):
        equal = ask(fleet.victim, "/resume", "POST", 409)["error"]["code"] in ("torn", "lease_held")
    if server == DEAD:
        fleet.victim.kill()
        fleet.victim.start()
    next_begin = time.monotonic()
    found, blocked = next_push(world, fleet, third, patient=not wanted.blocked), False
    if stands:
        blocked = found == "lease_held"
        _go_on(pids)
        push = ranks[0].outcome(END_S) if cell.victim == "trainer" else push
        for rank in ranks:
            rank.outcome(END_S)
        if blocked or not cell.begun:  # one that had not begun has pushed now
            found = next_push(world, fleet, third, patient=True)
    next_s = time.monotonic() - next_begin
    equal &= all(seen(each) == world.fresh(third, each.options) for each in fleet.servers)
    said = "" if push in ("ok", "killed") else ranks[0].said["message"]
    return Row(cell, push, server, others, blocked, found, equal, push_s, server_s, next_s, said)


def _go_on(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def next_push(world: World, fleet: Fleet, seed: int, *, patient: bool) -> str:
    """Another trainer's push; patient: again as long as somebody else's lease is in the way."""
    deadline = time.monotonic() + NEXT_S
    while True:
        found = fleet.push(seed, world.version(seed))
        if found != "lease_held" or not patient or time.monotonic() > deadline:
            return found
        time.sleep(LEASE_S / 4)


def settled(server: Server, names: dict[str, str], wanted: str) -> str:
    """How the server stands, as soon as that is what is wanted, or after `SETTLE_S`."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        found = stands(server, names)
        if found == wanted or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def stands(server: Server, names: dict[str, str]) -> str:
    """How it stands now. ``names``: what to call its versions."""
    try:
        status = status_of(server)
    except (httpx.HTTPError, PushWeightsError):
        return DEAD
    ready = httpx.get(f"{server.url}/nixl/v1/ready", headers=AUTHORIZED, timeout=10).status_code == 200
    if ready != status["ready"]:
        return "undecided"
    if ready:
        return names.get(status["weight_version"], f"serves {status['weight_version']}")
    return TORN if status["torn"] else PAUSED


AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


def ask(server: Server, path: str, method: str = "GET", status: int = 200) -> Any:
    """The JSON of an answer below /nixl/v1. Errors: PushWeightsError on any other status."""
    answer = httpx.request(method, f"{server.url}/nixl/v1{path}", headers=AUTHORIZED, timeout=10)
    if answer.status_code != status:
        raise PushWeightsError(f"{method} {path}: {answer.status_code} {answer.text}")
    return answer.json()


def status_of(server: Server) -> dict[str, Any]:
    """Its /status."""
    return dict(ask(server, "/status"))
