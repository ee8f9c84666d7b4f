"""`make soak MINUTES=5`: two servers under requests and pushes without a break, with faults at random moments.

    servers, fresh ones to compare with, two trainers -> requests flow -> [a push, or a fault and the push that heals
    it; every 4th: figures; every 25th: greedy answers and fingerprint against a fresh server] -> the report

The first server lives through all of it; the second is killed and started again now and then. Ends with 1 when a
request or a push failed that should not, an answer was wrong, or something grows (leaks.py says what is flat).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import TOKEN, EngineOptions, Server, close_launcher, completions
from harness.checkpoints import write_checkpoint
from harness.server import HARNESS
from soak.leaks import Watch
from soak.traffic import Target, Traffic, Versions
from soak.trainer import LEASE_S, Trainer
from trainer_client.control import Control

LENGTH = 512
OPTIONS = EngineOptions(
    args=(
        "--enable-scale-out", "--enable-prefix-caching", "--enable-chunked-prefill", "--max-num-batched-tokens", "64",
        "--max-model-len", str(LENGTH), "--max-num-seqs", "16",
    )
)  # fmt: skip
CLIENTS = 3
"""Streaming clients of each server."""
HEALED_S = 60.0
"""By when a push succeeds after a fault."""
START_S = 600.0
WARM_UP_S = 20.0
SAMPLE_EVERY, CHECK_EVERY = 4, 25
STARTUP = Path(__file__).parent / "startup"


class Soak:
    """One run. ``counts`` and ``failures`` are what it ends with."""

    def __init__(self, folder: Path, seed: int, stack: contextlib.ExitStack) -> None:
        self.draw = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.pushes, self._number = 0, 0
        self._answers = folder / "counts"
        self._answers.mkdir()
        self._paths = {of: write_checkpoint(folder / of, "qwen3", seed) for of, seed in (("a", 1), ("b", 2))}
        env = {"PYTHONPATH": f"{HARNESS / 'startup'}:{STARTUP}", "SOAK_COUNTS": str(self._answers)}
        self.servers = [
            stack.enter_context(Server(self._paths["a"], OPTIONS, env=env, log=folder / f"server-{number}.log"))
            for number in range(2)
        ]
        fresh = {of: stack.enter_context(Server(path, OPTIONS)) for of, path in self._paths.items()}
        self._fresh = {of: server.url for of, server in fresh.items()}
        self._expected = {of: (completions(url), _fingerprint(url)) for of, url in self._fresh.items()}
        assert self._expected["a"] != self._expected["b"]
        self._targets = [Target(server.url) for server in self.servers]
        for target in self._targets:
            target.up.set()
        self.versions = Versions()
        self.steady, self.victim, self._spare = (self._trainer() for _ in range(3))
        stack.callback(lambda: [trainer.kill() for trainer in (self.steady, self.victim, self._spare)])
        for trainer in (self.steady, self.victim):
            trainer.answer(START_S)
        self.traffic = Traffic(self._targets, self._fresh, self.versions, CLIENTS)
        self.watch = Watch(self._answers)

    def run(self, seconds: float) -> None:
        """Push until the time is over."""
        faults: list[tuple[int, Callable[[], None]]] = [
            (4, self._killed), (3, self._stopped), (3, self._cancelled), (4, self._misshaped), (3, self._wrong_token),
            (1, self._server_killed),
        ]  # fmt: skip
        self._sample()
        time.sleep(WARM_UP_S)  # requests fill caches of vLLM's own
        end = time.monotonic() + seconds
        rounds = 0
        while time.monotonic() < end:
            if self.draw.random() < 0.2:
                [fault] = self.draw.choices([f for _, f in faults], [w for w, _ in faults])
                self.counts[f"faults: {fault.__name__.strip('_').replace('_', ' ')}"] += 1
                fault()
                self._push(self.steady, healing=True)
            else:
                self._push(self.draw.choice((self.steady, self.steady, self.victim)))
            rounds += 1
            if rounds % SAMPLE_EVERY == 0:
                self._sample()
            if rounds % CHECK_EVERY == 0:
                self._compare()
        self._compare()
        self._sample()
        self.traffic.stop()

    # Pushes.

    def _order(self, **fixed: str) -> dict[str, Any]:
        self._number += 1
        letter = self.draw.choice("ab")
        kv_cache = self.draw.choice(("recompute", "recompute", "recompute", "keep"))
        order = {
            "what": self.draw.choice(("push", "push", "push", "pairs")), "letter": letter,
            "version": f"{letter}{self._number}", "mode": self.draw.choice(("shadow", "shadow", "in_place")),
            "pause": self.draw.choice(("keep", "keep", "keep", "wait", "abort")), "kv_cache": kv_cache,
        } | fixed  # fmt: skip
        if order["kv_cache"] == "keep":
            self.versions.kept.add(order["version"])
        return order

    @contextlib.contextmanager
    def _may_abort(self, order: dict[str, Any]) -> Any:
        aborts = order["pause"] == "abort"
        self.versions.aborting += aborts
        try:
            yield
        finally:
            self.versions.aborted += aborts

    def _push(self, trainer: Trainer, *, healing: bool = False, **fixed: str) -> str:
        """A push that has to succeed on both servers; after a fault, in the end. Returns its letter."""
        deadline = time.monotonic() + HEALED_S
        while True:
            order = self._order(**fixed)
            begin = time.monotonic()
            with self._may_abort(order):
                said = trainer.do(**order)
            self.counts["seconds of pushes"] += round(time.monotonic() - begin, 3)  # type: ignore[assignment]
            if said["outcome"] == "ok":
                self.pushes += 1
                self.counts[f"pushes: {order['mode']}, {order['pause']}"] += 1
                return str(order["letter"])
            # In place, generation has to stop within the lease, which is short here.
            slow = order["mode"] == "in_place" and order["pause"] == "wait" and "deadline" in said["servers"].values()
            if not (healing or slow) or time.monotonic() > deadline:
                self._fail(f"push {order} failed: {said}")
                return ""
            self.counts[f"a push had to be done again: {_codes(said)}"] += 1
            time.sleep(0.3)

    # Faults. Each is followed by a push that has to heal it.

    def _killed(self) -> None:
        """kill -9 at any moment of a push."""
        order = self._order()
        with self._may_abort(order):
            self.victim.start(**order)
            time.sleep(self.draw.uniform(0, 0.15))
            self.victim.kill()
            self.victim, self._spare = self._spare, self._trainer()
            self._push(self.steady, healing=True)
        self.victim.answer(START_S)

    def _stopped(self) -> None:
        """SIGSTOP at any moment of a push, until long after the lease is over; what it does then must not matter."""
        order = self._order()
        with self._may_abort(order):
            self.victim.start(**order)
            time.sleep(self.draw.uniform(0, 0.15))
            self.victim.stop()
            time.sleep(LEASE_S * 1.5)
            if order["mode"] == "shadow":
                self._push(self.steady, healing=True)
            self.victim.go_on()
            self.counts[f"a stopped trainer's push ended with: {_codes(self.victim.answer())}"] += 1

    def _cancelled(self) -> None:
        order = self._order(what="cancelled")
        with self._may_abort(order):
            self.counts[f"a cancelled push ended with: {_codes(self.victim.do(**order))}"] += 1

    def _misshaped(self) -> None:
        said = self.victim.do(**self._order(what="misshaped"))
        if set(said["servers"].values()) != {"plan_refused"}:
            self._fail(f"a misshaped push was answered by {said}")

    def _wrong_token(self) -> None:
        said = self.victim.do(**self._order(what="wrong token"))
        if set(said["servers"].values()) != {"unauthorized"}:
            self._fail(f"a push with a wrong token was answered by {said}")

    def _server_killed(self) -> None:
        """kill -9 of the second server, in the middle of a push or between two."""
        server, target = self.servers[1], self._targets[1]
        order = self._order()
        with self._may_abort(order):
            self.victim.start(**order)
            time.sleep(self.draw.uniform(0, 0.3))
            target.restarts += 1
            target.up.clear()
            server.kill()
            said = self.victim.answer()
            self.counts[f"a push to a killed server ended with: {_codes(said)}"] += 1
            if said["servers"].get(self.servers[0].url) != "ok":
                self._fail(f"the other server failed with the killed one: {said}")
        server.start()
        target.up.set()

    # What is looked at.

    def _trainer(self) -> Trainer:
        """One that starts: its first answer says when it has."""
        return Trainer([server.url for server in self.servers], TOKEN, self._paths, self._answers)

    def _sample(self) -> None:
        processes = {"trainer": [self.steady.pid]}
        for number, server in enumerate(self.servers):
            processes[f"server {number}, API"] = [server.pid]
            processes[f"server {number}, engine"] = [pid for pid in server.processes() if pid != server.pid]
        self.watch.sample(processes, self.pushes)

    def _compare(self) -> None:
        """Both servers say what a fresh one says, in every bit, and hold what it holds."""
        with self.traffic.quiet():
            letter = self._push(self.steady, kv_cache="recompute", pause="keep")
            for server in self.servers if letter else ():
                found = completions(server.url), _fingerprint(server.url)
                for what, one, other in zip(("answers", "fingerprint"), found, self._expected[letter], strict=True):
                    if one != other:
                        self._fail(f"the {what} of {server.url} with weights {letter} differ from a fresh server's")
            self.counts["comparisons with a fresh server"] += 1

    def _fail(self, what: str) -> None:
        self.failures.append(f"{time.strftime('%X')} {what}")
        print(self.failures[-1], flush=True)


def _fingerprint(url: str) -> str:
    with Control(url, token=TOKEN) as control:
        return control.fingerprint(paths=False).digest


def _codes(said: dict[str, Any]) -> str:
    return ", ".join(sorted(set(said["servers"].values()))) or str(said["outcome"])


def main() -> int:
    """Run, and print the report."""
    parser = argparse.ArgumentParser(prog="soak")
    parser.add_argument("minutes", type=float)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    parser.add_argument("--keep", type=Path, help="a folder for checkpoints and logs, kept; default: a temporary one")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    try:
        with contextlib.ExitStack() as stack:
            folder = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder.mkdir(parents=True, exist_ok=True)
            soak = Soak(folder, given.seed, stack)
            begin = time.monotonic()
            soak.run(given.minutes * 60)
            minutes = (time.monotonic() - begin) / 60
    finally:
        close_launcher()
    leaks = soak.watch.leaks()
    failures = [*soak.failures, *soak.traffic.failures]
    print(f"\n{soak.watch.table()}\n")
    for name, number in sorted((soak.counts + soak.traffic.counts).items()):
        print(f"{number:10,.10g}  {name}")
    faults = sum(number for name, number in soak.counts.items() if name.startswith("faults: "))
    requests = sum(number for name, number in soak.traffic.counts.items() if name.startswith("requests: "))
    for line in [*failures[:20], *leaks]:
        print(line)
    print(
        f"\n{minutes:.1f} minutes, {soak.pushes} pushes, {requests} requests, {faults} faults, "
        f"{len(failures)} failures, {len(leaks)} leaks"
    )
    return 1 if failures or leaks else 0


if __name__ == "__main__":
    sys.exit(main())
