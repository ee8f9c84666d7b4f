"""Requests that never stop, and what is wrong with their answers.

Each `Client` is a thread that streams one request after the other from one server: short and long prompts, several
choices, answers of a given form, and now and then it goes away in the middle. An answer is wrong when it breaks off,
when it is shorter than asked for (unless pushes abort), when its versions go backwards, or when its logprobs are not
those that a fresh server with the weights of its version gives the same tokens.
"""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from harness.streams import Output, Stream, scores

TOLERANCE = 0.35
"""By how much a logprob may differ with what shares a batch; other weights differ by 1.4 on average."""
SCORED = 0.15
"""The part of the answers that a fresh server scores, too."""
HANGS_S = 150.0
PAUSE_S = 0.5
"""The longest pause of a client between two requests: pushes need a processor, too."""


@dataclass
class Target:
    """A server that requests go to. ``restarts`` counts from before it is killed; ``up`` while it serves."""

    url: str
    up: threading.Event = field(default_factory=threading.Event)
    restarts: int = 0


@dataclass
class Versions:
    """What is known of the versions that were pushed; a name is the letter of its weights and a number."""

    kept: set[str] = field(default_factory=set)
    """Those that kept the KV of older weights."""
    aborting: int = 0
    """Pushes with pause="abort" that have begun, and"""
    aborted: int = 0
    """those of them that are over."""


class Traffic:
    """All clients. ``fresh``: URLs of servers by the letter of their weights, which nobody pushes to."""

    def __init__(self, targets: list[Target], fresh: Mapping[str, str], versions: Versions, per_target: int) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._fresh, self._versions = fresh, versions
        self._stop, self._open = threading.Event(), threading.Event()
        self._open.set()
        self._busy = 0
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, args=(target, number), daemon=True)
            for target in targets
            for number in range(per_target)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No more requests; those under way end first."""
        self._stop.set()
        self._open.set()
        for thread in self._threads:
            thread.join(HANGS_S + 30)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """No request is under way inside."""
        self._open.clear()
        try:
            with self._changed:
                assert self._changed.wait_for(lambda: self._busy == 0, HANGS_S + 30), "requests do not end"
            yield
        finally:
            self._open.set()

    def _run(self, target: Target, number: int) -> None:
        draw = random.Random(f"{target.url}{number}")
        while not self._stop.is_set():
            time.sleep(draw.uniform(0, PAUSE_S))
            self._open.wait()
            if not target.up.wait(1.0):
                continue
            with self._changed:
                self._busy += 1
            restarts, aborted = target.restarts, self._versions.aborted
            try:
                said = self._one(target, draw, aborted)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a failure
                said = f"{type(error).__name__}: {error}"
            finally:
                with self._changed:
                    self._busy -= 1
                    self._changed.notify_all()
            if said and (target.restarts != restarts or not target.up.is_set()):
                self.counts["requests lost with a killed server"] += 1
            elif said:
                self.failures.append(f"{time.strftime('%X')} {target.url}: {said}")

    def _one(self, target: Target, draw: random.Random, aborted: int) -> str:
        """What is wrong with one request; empty when nothing is."""
        prompt = [draw.randrange(3, 500) for _ in range(draw.choice((3, 20, 60, 200)))]
        kind = draw.choice(("greedy", "greedy", "sampled", "digits", "leaves"))
        params = {
            "sampled": {"n": 2, "temperature": 1.0},
            "digits": {"structured_outputs": {"regex": "[0-9]{100}"}},
        }.get(kind, {})
        stream = Stream(target.url, prompt, draw.choice((20, 100, 100)), timeout_s=HANGS_S, **params)
        self.counts[f"requests: {kind}"] += 1
        if kind == "leaves":
            with contextlib.suppress(AssertionError):
                stream.wait_for(draw.randrange(1, 15), HANGS_S)
            if not stream.ended:
                stream.leave()
                return ""
        outputs = stream.result(HANGS_S)
        for output in outputs:
            if output.finish_reason == "abort" and self._versions.aborting > aborted:
                self.counts["choices that a push has aborted"] += 1
            elif output.finish_reason != "length":
                return f"{kind}: ended by {output.finish_reason!r} after {len(output.tokens)} tokens"
            if wrong := wrong_order(output):
                return f"{kind}: {wrong}"
            self.counts["tokens"] += len(output.tokens)
            self.counts["choices of several versions"] += len(output.versions) > 1
            if kind != "digits" and draw.random() < SCORED and (wrong := self._wrong_score(stream, output)):
                return f"{kind}: {wrong}"
        return ""

    def _wrong_score(self, stream: Stream, output: Output) -> str:
        for number, (version, start, end) in enumerate(output.versions):
            if number and version in self._versions.kept:  # from here on with KV of other weights
                return ""
            before, tokens = output.tokens[:start], output.tokens[start:end]
            found = scores(self._fresh[letter_of(version)], [*stream.prompt, *before], tokens, timeout_s=HANGS_S)
            worst = max((abs(a - b) for a, b in zip(output.logprobs[start:end], found, strict=True)), default=0.0)
            if worst > TOLERANCE:
                return f"tokens {start} to {end} of version {version} differ by {worst:.2f}: {output.versions}"
            self.counts["tokens that a fresh server has scored"] += end - start
        return ""


def letter_of(version: str) -> str:
    """Servers start with the weights of letter a."""
    return version[0] if re.fullmatch(r"[ab]\d+", version) else "a"


def number_of(version: str) -> int:
    """0 for what a server starts with."""
    return int(version[1:]) if re.fullmatch(r"[ab]\d+", version) else 0


def wrong_order(output: Output) -> str:
    """What is wrong with the versions of an answer; empty when nothing is."""
    ends = [0, *(end for _, _, end in output.versions)]
    numbers = [number_of(version) for version, _, _ in output.versions]
    if [start for _, start, _ in output.versions] != ends[:-1] or ends[-1] != len(output.tokens):
        return f"{len(output.tokens)} tokens have versions {output.versions}"
    if numbers != sorted(set(numbers)):
        return f"versions go backwards: {output.versions}"
    return ""
