"""Fingerprints that API processes are reading from one worker, a slice at each call, the engine serving in between.

`session` asks for slices (`Readings.read`) and drops all readings (`clear`) when weights are about to change, so that
no reading mixes two versions. No vLLM, no device here.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from vllm_nixl_plugin.errors import StaleUpdate

CAPACITY = 4

Slice = list[tuple[str, str]]


class Readings:
    """Those under way, by ticket: the ``CAPACITY`` used last. ``begin`` starts one from its first slice."""

    def __init__(self, begin: Callable[[], Iterator[Slice]]) -> None:
        self._begin = begin
        self._open: OrderedDict[str, tuple[Iterator[Slice], dict[str, str]]] = OrderedDict()

    def read(self, ticket: str, *, start: bool, paths: bool) -> dict[str, Any]:
        """The next slice: ``lines`` (path, checksum), none without ``paths``; after the last, ``digest`` and
        ``n_paths`` of all of them, None before.

        Errors: StaleUpdate, when weights have changed since the start; those of the slices, which end the reading.
        """
        if start:
            self._open[ticket] = (self._begin(), {})
            while len(self._open) > CAPACITY:
                self._open.popitem(last=False)
        reading = self._open.pop(ticket, None)
        if reading is None:
            raise StaleUpdate("the weights changed while they were read, or too many others read them: ask again")
        slices, found = reading
        lines = next(slices, None)
        if lines is None:
            return {"lines": [], "digest": digest_of(found), "n_paths": len(found)}
        found.update(lines)
        self._open[ticket] = reading
        return {"lines": [list(line) for line in lines] if paths else [], "digest": None, "n_paths": None}

    def clear(self) -> None:
        """End all readings."""
        self._open.clear()


def digest_of(lines: dict[str, str]) -> str:
    """SHA-256 over the lines ``path<tab>checksum<newline>`` in the order of their paths."""
    return hashlib.sha256("".join(f"{path}\t{lines[path]}\n" for path in sorted(lines)).encode()).hexdigest()
