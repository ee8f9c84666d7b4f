"""What a strided copy between flat memories is: `Copy`, its dims, and its simplest form.

The lowest layer of `layout`, which is the public face. Numbers only: offsets and strides are in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


class LayoutError(ValueError):
    """A geometry that has no meaning: a box outside its tensor, half an element of a cast, a write out of bounds."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Moves ``prod(shape)`` elements, each ``src_itemsize`` bytes at its source, ``dst_itemsize`` at its destination.

    Element ``i`` is read at ``src_offset + sum(i * src_strides)`` and written at ``dst_offset + sum(i * dst_strides)``.
    Strides are not negative. A source stride of 0 reads one element many times. An empty ``shape`` is one element.
    With equal itemsizes the copy is *pure*: it moves bytes and may be cut anywhere; otherwise it converts each element.
    A conversion between dtypes of one size looks pure here: its caller composes it with copies of that itemsize only.

    The constructor checks nothing, so that plans of millions of copies load quickly; `encoding.decode_plan` checks.
    """

    shape: tuple[int, ...]
    src_offset: int
    src_strides: tuple[int, ...]
    src_itemsize: int
    dst_offset: int
    dst_strides: tuple[int, ...]
    dst_itemsize: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def src_nbytes(self) -> int:
        """Bytes read; with a source stride of 0 the same byte counts as often as it is read."""
        return math.prod(self.shape) * self.src_itemsize

    @property
    def dst_nbytes(self) -> int:
        """Bytes written."""
        return math.prod(self.shape) * self.dst_itemsize


def simplify(copy: Copy) -> Copy:
    """The same moves in as few dims as possible, destination strides descending.

    Extents of 1 go, and neighbouring dims that step alike on both sides merge; elements and itemsizes stay. Every empty
    copy becomes one of shape (0,) at offset 0.
    """
    src, dst = copy.src_itemsize, copy.dst_itemsize
    if 0 in copy.shape:
        return from_dims(0, src, 0, dst, [(dst, src, 0)])
    return from_dims(copy.src_offset, src, copy.dst_offset, dst, merged_dims(dims_of(copy)))


def dims_of(copy: Copy) -> list[tuple[int, int, int]]:
    """(Destination stride, source stride, extent) of every dim."""
    return list(zip(copy.dst_strides, copy.src_strides, copy.shape, strict=True))


def merged_dims(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Dims (stride, other stride, extent), descending, without extents of 1, merged where one continues another."""
    merged: list[tuple[int, int, int]] = []
    for dim in sorted(dims, reverse=True) if len(dims) > 1 else dims:
        s, u, n = dim
        if n == 1:
            continue
        if merged:
            outer_s, outer_u, outer_n = merged[-1]
            if outer_s == n * s and outer_u == n * u:
                merged[-1] = (s, u, outer_n * n)
                continue
        merged.append(dim)
    return merged


def from_dims(src: int, src_itemsize: int, dst: int, dst_itemsize: int, dims: Sequence[tuple[int, int, int]]) -> Copy:
    """A copy from offset ``src`` to ``dst`` over dims (destination stride, source stride, extent)."""
    dst_strides, src_strides, shape = zip(*dims, strict=True) if dims else ((), (), ())
    return Copy(shape, src, src_strides, src_itemsize, dst, dst_strides, dst_itemsize)


def reversed_copy(copy: Copy) -> Copy:
    """The copy from the destination back to the source."""
    return Copy(copy.shape, copy.dst_offset, copy.dst_strides, copy.dst_itemsize,
                copy.src_offset, copy.src_strides, copy.src_itemsize)


def dst_only(copy: Copy, *, free: bool = False) -> Copy:
    """The bytes that ``copy`` writes, as a pure copy onto itself; ``free``: as often as it writes them."""
    dims = [(s, s, n) for s, n in zip(copy.dst_strides, copy.shape, strict=True) if s or free]
    return from_dims(copy.dst_offset, copy.dst_itemsize, copy.dst_offset, copy.dst_itemsize, merged_dims(dims))


def span_nbytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes from the first to the end of the last element."""
    for n, s in zip(shape, strides, strict=True):
        itemsize += (n - 1) * s
    return itemsize


def bounds_apart(first: Copy, second: Copy) -> bool:
    """Whether the bounds of what ``first`` writes and ``second`` reads do not touch."""
    written, read = first.dst_offset, second.src_offset
    return (written + span_nbytes(first.shape, first.dst_strides, first.dst_itemsize) <= read
            or read + span_nbytes(second.shape, second.src_strides, second.src_itemsize) <= written)
