"""Lays out what cannot be written directly in send buffers; the second half of routing, and pure like it.

`compute_route` gives the items for each destination to a `Filler`, which makes batches of them: each fills one send
buffer, in the order of the destination, and is emptied by as few writes as there are contiguous stretches of the
destination in it. Items that interlock (columns of one matrix from different weights) become one image of the
destination where together they fill it; elsewhere each item is packed densely by itself. `packing` fills the buffers,
`transfer` empties them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vllm_nixl_plugin.layout import Copy, coverage, identity, runs, simplify, split
from vllm_nixl_plugin.wire import Step

Numbers = npt.NDArray[np.int64]

ALIGNMENT = 16
"""Stretches begin at multiples of this in a send buffer: the widest element of torch."""

RUN = np.dtype([("src", "i8"), ("src_offset", "i8"), ("dst", "i8"), ("dst_offset", "i8"), ("nbytes", "i8")])


@dataclass(frozen=True, eq=False)
class Runs:
    """Contiguous byte ranges, one a row: ``src`` (a storage; 0 where the source is a send buffer) and ``src_offset``,
    ``dst`` (a destination of the plan) and ``dst_offset``, ``nbytes``. Ordered by destination."""

    src: Numbers
    src_offset: Numbers
    dst: Numbers
    dst_offset: Numbers
    nbytes: Numbers

    def __len__(self) -> int:
        return len(self.src)

    @property
    def total_nbytes(self) -> int:
        """Bytes of all runs."""
        return int(self.nbytes.sum())

    def take(self, chosen: npt.NDArray[np.bool_]) -> Runs:
        """The rows where ``chosen``."""
        return Runs(*(column[chosen] for column in (self.src, self.src_offset, self.dst, self.dst_offset, self.nbytes)))


@dataclass(frozen=True, slots=True)
class PackItem:
    """Elements of storage ``storage``, of type ``dtype``, that go through ``program`` into a send buffer.

    ``copy.src`` addresses the storage and ``copy.dst`` the buffer, in bytes.
    """

    storage: int
    dtype: str
    copy: Copy
    program: tuple[Step, ...]


@dataclass(frozen=True)
class Batch:
    """What one filling of a send buffer on ``device`` holds: ``nbytes`` with gaps, and the writes that empty it."""

    device: str
    items: tuple[PackItem, ...]
    nbytes: int
    writes: Runs


def join_runs(rows: npt.NDArray[np.void]) -> Runs:
    """Rows in the order of the destination, neighbours that continue each other on both sides made one."""
    rows = rows[np.lexsort((rows["dst_offset"], rows["dst"]))]
    before, after = rows[:-1], rows[1:]
    continues = (
        (before["src"] == after["src"]) & (before["src_offset"] + before["nbytes"] == after["src_offset"])
        & (before["dst"] == after["dst"]) & (before["dst_offset"] + before["nbytes"] == after["dst_offset"])
    )  # fmt: skip
    starts = np.flatnonzero(np.concatenate([np.ones(min(len(rows), 1), dtype=bool), ~continues]))
    nbytes = np.add.reduceat(rows["nbytes"], starts) if len(rows) else rows["nbytes"]
    first = rows[starts]
    src, src_offset, dst, dst_offset = (
        np.ascontiguousarray(first[name]) for name in ("src", "src_offset", "dst", "dst_offset")
    )
    return Runs(src, src_offset, dst, dst_offset, np.ascontiguousarray(nbytes))


def moved(copy: Copy, *, src: int = 0, dst: int = 0) -> Copy:
    """``copy`` with both offsets shifted."""
    return Copy(copy.shape, copy.src_offset + src, copy.src_strides, copy.src_itemsize,
                copy.dst_offset + dst, copy.dst_strides, copy.dst_itemsize)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Segment:
    """A stretch of send buffer: the items that fill it and the writes that empty it, both counted from its begin."""

    items: Sequence[PackItem]
    nbytes: int
    buffer_offsets: Sequence[int] | Numbers
    dst_offsets: Sequence[int] | Numbers
    run_nbytes: int


class Filler:
    """Lays items out in send buffers of one device, destination by destination."""

    def __init__(self, device: str, limit: int) -> None:
        self._device, self._limit = device, limit
        self._batches: list[Batch] = []
        self._items: list[PackItem] = []
        self._writes: list[npt.NDArray[np.void]] = []
        self._write: list[tuple[int, int, int, int, int]] = []
        self._nbytes = 0
        self._end: tuple[int, int] = (-1, -1)
        """Destination and offset at which the last write ends."""

    def add(self, destination: int, items: list[PackItem]) -> None:
        """All items of one destination."""
        for group in _interlocked(items):
            for segment in _segments(group, self._limit):
                self._append(destination, segment)

    def finish(self) -> list[Batch]:
        """All batches; the last one is closed."""
        self._close()
        return self._batches

    def _append(self, destination: int, segment: _Segment) -> None:
        widest = max(item.copy.dst_itemsize for item in segment.items)
        goes_on = self._end == (destination, int(segment.dst_offsets[0])) and self._nbytes % widest == 0
        at = self._nbytes if goes_on else -(-self._nbytes // ALIGNMENT) * ALIGNMENT
        if at and at + segment.nbytes > self._limit:
            self._close()
            at = 0
        self._items += [_at(item, at) for item in segment.items]
        if len(segment.dst_offsets) == 1:
            offsets = int(segment.buffer_offsets[0]) + at, destination, int(segment.dst_offsets[0])
            self._write.append((0, *offsets, segment.run_nbytes))
        else:
            rows = np.zeros(len(segment.dst_offsets), dtype=RUN)
            rows["src_offset"], rows["dst"] = np.add(segment.buffer_offsets, at), destination
            rows["dst_offset"], rows["nbytes"] = segment.dst_offsets, segment.run_nbytes
            self._writes.append(rows)
        self._nbytes = at + segment.nbytes
        self._end = destination, int(segment.dst_offsets[-1]) + segment.run_nbytes

    def _close(self) -> None:
        if self._items:
            writes = join_runs(np.concatenate([*self._writes, np.array(self._write, dtype=RUN)]))
            self._batches.append(Batch(self._device, tuple(self._items), self._nbytes, writes))
        self._items, self._writes, self._write, self._nbytes, self._end = [], [], [], 0, (-1, -1)


def _at(item: PackItem, shift: int) -> PackItem:
    return PackItem(item.storage, item.dtype, moved(item.copy, dst=shift), item.program)


def _bounds(copy: Copy) -> tuple[int, int]:
    """First and one past the last destination byte; the copy is not empty."""
    stop = copy.dst_offset + copy.dst_itemsize
    for extent, stride in zip(copy.shape, copy.dst_strides, strict=True):
        stop += (extent - 1) * stride
    return copy.dst_offset, stop


def _interlocked(items: list[PackItem]) -> Iterator[list[PackItem]]:
    """Items in the order of the destination, grouped where their bounds overlap."""
    group: list[PackItem] = []
    reach = 0
    for item in sorted(items, key=lambda item: item.copy.dst_offset):
        start, stop = _bounds(item.copy)
        if group and start >= reach:
            yield group
            group = []
        reach = max(reach, stop) if group else stop
        group.append(item)
    if group:
        yield group


def _segments(group: list[PackItem], limit: int) -> Iterator[_Segment]:
    """The segments of interlocked items: one image of the destination where they fill it, else each item by itself."""
    start = group[0].copy.dst_offset
    nbytes = max(_bounds(item.copy)[1] for item in group) - start
    placed = [_at(item, -start) for item in group]
    if _fills(placed, nbytes):
        if nbytes <= limit:
            yield _Segment(placed, nbytes, (0,), (start,), nbytes)
            return
        if len(group) > 1 and (rows := _cut_rows(placed, limit)):
            for part in _interlocked(rows):
                yield from _segments([_at(item, start) for item in part], limit)
            return
    for item in group:
        for piece in split(item.copy, limit):
            packed = identity(piece.shape, piece.dst_itemsize)
            unpack = replace(packed, dst_offset=piece.dst_offset, dst_strides=piece.dst_strides)
            buffer_offsets, dst_offsets, run = runs(unpack)
            compact = replace(piece, dst_offset=0, dst_strides=packed.dst_strides)
            yield _Segment((replace(item, copy=compact),), piece.dst_nbytes, buffer_offsets, dst_offsets, run)


def _fills(placed: list[PackItem], nbytes: int) -> bool:
    """Whether the items write every one of ``nbytes`` bytes once, at places that suit their itemsize."""
    if sum(item.copy.dst_nbytes for item in placed) != nbytes:
        return False
    copies = [item.copy for item in placed]
    if any(at % c.dst_itemsize for c in copies for at in (c.dst_offset, *c.dst_strides)):
        return False
    if len(placed) == 1:
        return True
    found = coverage(copies, nbytes)
    return not found.missing and not found.doubled


def _cut_rows(placed: list[PackItem], limit: int) -> list[PackItem]:
    """The same items cut at rows of their common outermost stride, as many rows as fit ``limit``; empty: no use."""
    pitch = max((item.copy.dst_strides[0] for item in placed if item.copy.shape), default=0)
    rows = limit // pitch if pitch else 0
    if not rows:
        return []
    pieces: list[PackItem] = []
    for item in placed:
        c = item.copy
        if not c.shape or c.dst_strides[0] != pitch:
            pieces.append(item)
            continue
        row, begin = c.dst_offset // pitch, 0
        while begin < c.shape[0]:
            end = min(c.shape[0], begin + rows - (row + begin) % rows)
            part = moved(c, src=begin * c.src_strides[0], dst=begin * pitch)
            pieces.append(replace(item, copy=simplify(replace(part, shape=(end - begin, *c.shape[1:])))))
            begin = end
    return pieces if len(pieces) > len(placed) else []
