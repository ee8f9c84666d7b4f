"""Which weights of a model's repeated blocks need not be offered to a loader that is traced. Pure.

With experts spread over 32 ranks, a worker uses a thirtieth of some ninety thousand weights, and most of the time of a
trace is the loader's own look at each of the others. Blocks whose weights have the same names but for the number of the
block, the same shapes and dtypes, are *alike*. Of the first of them all weights are offered; of the others only those
that something read of the first. `hold` says afterwards whether the guess was right: nothing more of the first was read
later, and each of the others is written exactly as the first one is. If not, `loadtrace` offers everything.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from vllm_nixl_plugin.tracing import Creation, Opaque, Root, Source

if TYPE_CHECKING:
    from vllm_nixl_plugin.planning import TracedDestination
    from vllm_nixl_plugin.wire import WeightSpec

FEW = 4096
"""So many weights are offered without further ado."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class Repeats:
    """The blocks of a manifest. ``is_read``: whether anything has read the weight of a name so far."""

    def __init__(self, weights: Sequence[WeightSpec], is_read: Callable[[str], bool], few: int = FEW) -> None:
        self._is_read = is_read
        self._of: dict[str, str] = {}
        self._members: dict[str, list[str]] = {}
        self._kinds: dict[str, int] = {}
        self._model: dict[int, str] = {}
        """The block that others of its kind are taken to be like."""
        self._unread: dict[int, frozenset[str]] = {}
        self._done: Counter[str] = Counter()
        self.skipped: set[str] = set()
        if len(weights) <= few:
            return
        forms: dict[str, list[Hashable]] = {}
        for weight in weights:
            if match := _NUMBER.search(weight.name):
                block = weight.name[: match.end()]
                self._of[weight.name] = block
                self._members.setdefault(block, []).append(weight.name)
                forms.setdefault(block, []).append((weight.name[match.end() :], weight.shape, weight.dtype))
        numbers: dict[Hashable, int] = {}
        for block, form in forms.items():
            self._kinds[block] = numbers.setdefault((neutral(block), frozenset(form)), len(numbers))

    def skip(self, name: str) -> bool:
        """Whether a weight, the next one in order, need not be offered."""
        block = self._of.get(name)
        if block is None:
            return False
        self._done[block] += 1
        kind = self._kinds[block]
        if kind not in self._unread and not self._look_at_model(kind, block):
            return False
        if block == self._model[kind] or name[len(block) :] not in self._unread[kind]:
            return False
        self.skipped.add(name)
        return True

    def _look_at_model(self, kind: int, block: str) -> bool:
        """Whether the model of a kind is known now. One of which nothing is read (it is on another worker) is none."""
        model = self._model.setdefault(kind, block)
        members = self._members[model]
        if model == block or self._done[model] < len(members):
            return False
        unread = [n for n in members if not self._is_read(n)]
        if len(unread) == len(members):
            self._model[kind] = block
            return False
        self._unread[kind] = frozenset(n[len(model) :] for n in unread)
        return True

    def hold(self, destinations: Sequence[TracedDestination]) -> bool:
        """Whether what was skipped can be taken for unused."""
        if not self.skipped:
            return True
        models = {self._model[kind]: unread for kind, unread in self._unread.items()}
        if any(self._is_read(model + rest) for model, unread in models.items() for rest in unread):
            return False
        blocks = {self._of[name] for name in self.skipped}
        written: dict[str, dict[Hashable, Hashable]] = {}
        for destination in destinations:
            sources = {self._of.get(n, "") for piece in destination.pieces for n in _names(piece.root)}
            at = sources & (blocks | models.keys())
            if at and len(sources) > 1:
                return False
            for block in at:
                names = tuple(neutral(name) for name in destination.names)
                pieces = tuple((_neutral_root(p.root), p.copy, p.program) for p in destination.pieces)
                written.setdefault(block, {})[names] = (destination.nbytes, pieces)
        here = {block for block in blocks if any(self._is_read(name) for name in self._members[block])}
        return all(written.get(block) == written.get(self._model[self._kinds[block]]) for block in here)


def neutral(name: str) -> str:
    """A name without its first number."""
    return _NUMBER.sub("#", name, count=1)


def _names(root: Root) -> tuple[str, ...]:
    if isinstance(root, Source):
        return (root.name,)
    return tuple(root.sources) if isinstance(root, Opaque) else ()


def _neutral_root(root: Root) -> Hashable:
    if isinstance(root, Source):
        return neutral(root.name)
    if isinstance(root, Opaque):
        return root.op, frozenset(neutral(name) for name in root.sources)
    return "creation" if isinstance(root, Creation) else str(root.value)
