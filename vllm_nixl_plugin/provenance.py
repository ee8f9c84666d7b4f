"""Where bytes come from: roots, the pieces that lead from them to a storage, and who wrote each byte of it last.

The data of `tracing`, which is the public face. Offsets and strides of pieces are in bytes. torch only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_nixl_plugin.copies import Copy
from vllm_nixl_plugin.layout import contiguous_strides, subtract


class NeedsData(Exception):
    """An op asked for the values of traced tensors. ``op``: its name; ``sources``: the names it depends on."""

    def __init__(self, op: str, sources: frozenset[str]) -> None:
        super().__init__(f"{op} needs the values of {', '.join(sorted(sources)) or 'a destination'}")
        self.op = op
        self.sources = sources


@dataclass(frozen=True, slots=True)
class Source:
    """Bytes of a named source tensor."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """``value``: a Python number, or a real tensor whose storage bytes the piece's copy addresses."""

    value: Any


@dataclass(frozen=True, slots=True)
class Creation:
    """What a destination held before."""

    key: str


@dataclass(frozen=True, slots=True)
class Opaque:
    """A result that is no element-wise program of its sources."""

    op: str
    sources: frozenset[str]


Root = Source | Constant | Creation | Opaque


@dataclass(frozen=True, slots=True)
class Operation:
    """One element-wise step: aten op name (``to`` for a cast), scalar arguments, dtype of the result."""

    op: str
    args: tuple[int | float, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of ``root`` (bytes of its storage) that lie at ``copy.dst`` after ``program``."""

    root: Root
    copy: Copy
    program: tuple[Operation, ...] = ()


class Record:
    """What is known of one storage: who wrote each byte last. ``hold`` keeps the storage alive, since ids of freed
    storages are reused. Pieces are kept in the order of their first byte, so that a write finds what it meets."""

    __slots__ = ("_pieces", "_starts", "_widest", "hold")

    def __init__(self, hold: torch.Tensor, pieces: Sequence[Piece]) -> None:
        self.hold = hold
        self._pieces: list[Piece] = []
        self._starts: list[int] = []
        self._widest = 0
        for piece in pieces:
            self._insert(piece)

    @property
    def pieces(self) -> list[Piece]:
        """In the order of their first byte."""
        return self._pieces

    def _insert(self, piece: Piece) -> None:
        start, stop = _bounds(piece.copy)
        at = bisect_left(self._starts, start)
        self._starts.insert(at, start)
        self._pieces.insert(at, piece)
        self._widest = max(self._widest, stop - start)

    def overwrite(self, new: Piece) -> None:
        """The piece replaces what lies where it writes."""
        start, stop = _bounds(new.copy)
        first = bisect_left(self._starts, start - self._widest)
        last = bisect_left(self._starts, stop)
        rest: list[Piece] = []
        for at in range(last - 1, first - 1, -1):
            old = self._pieces[at]
            if _bounds(old.copy)[1] <= start:
                continue
            rest += [Piece(old.root, c, old.program) for c in subtract(old.copy, new.copy)]
            del self._pieces[at], self._starts[at]
        if rest and self._widest > 4 * max(1, stop - start):
            self._widest = max((b - a for a, b in (_bounds(p.copy) for p in self._pieces)), default=0)
        for piece in (*rest, new):
            self._insert(piece)


class Records(dict[int, Record]):
    """Records by storage. That of a source is made when something reads it: many a weight is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[int, tuple[str, torch.Tensor]] = {}
        self.read: set[str] = set()

    def __contains__(self, sid: object) -> bool:
        return sid in self.sources or super().__contains__(sid)

    def __missing__(self, sid: int) -> Record:
        name, tensor = self.sources[sid]
        self.read.add(name)
        shape, size = tuple(tensor.shape), tensor.element_size()
        strides = contiguous_strides(shape, size)
        made = self[sid] = Record(tensor, [Piece(Source(name), Copy(shape, 0, strides, size, 0, strides, size))])
        return made

    def get(self, sid: int, default: Any = None) -> Any:
        """The record, or the default where there is none."""
        return self[sid] if sid in self else default  # noqa: SIM401 - this is what get is made of


def _bounds(copy: Copy) -> tuple[int, int]:
    """First and one past the last destination byte that a copy touches."""
    if not copy.numel:
        return copy.dst_offset, copy.dst_offset
    span = sum((n - 1) * s for n, s in zip(copy.shape, copy.dst_strides, strict=True))
    return copy.dst_offset, copy.dst_offset + span + copy.dst_itemsize
