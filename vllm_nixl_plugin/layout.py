"""Strided copies between flat memories, and their algebra: compose, subtract, split, runs, coverage.

Numbers only: no tensor, no device, no address. Offsets and strides are in bytes unless a docstring says otherwise.
Callers:

- tracing composes the copies of a loader (checkpoint -> temporary -> parameter) into one;
- planning checks with `coverage` that every byte of a destination has exactly one writer;
- routing composes trainer shards (`box`) with the plan, and cuts the result with `runs` and `split`.

The algebra itself is in `intersection`; `Copy` and its simplest form are in `copies`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_nixl_plugin.copies import (
    Copy,
    LayoutError,
    bounds_apart,
    dims_of,
    dst_only,
    from_dims,
    merged_dims,
    reversed_copy,
    simplify,
    span_nbytes,
)
from vllm_nixl_plugin.intersection import composed_pieces, joined, meet, overlaps, widened

__all__ = [
    "Copy",
    "Coverage",
    "LayoutError",
    "box",
    "compose",
    "contiguous_strides",
    "coverage",
    "identity",
    "overlaps",
    "run_nbytes",
    "runs",
    "simplify",
    "split",
    "subtract",
]

Offsets = npt.NDArray[np.int64]
Ranges = list[tuple[int, int]]

_MAX_EXPANDED_RUNS = 1 << 22


@dataclass(frozen=True, slots=True)
class Coverage:
    """Byte ranges ``[start, stop)`` of a storage, ascending and apart: written by no copy, written more than once."""

    missing: tuple[tuple[int, int], ...]
    doubled: tuple[tuple[int, int], ...]


def contiguous_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Byte strides of a row-major tensor; an extent of 0 counts as 1, as in torch."""
    strides = [itemsize] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(shape[d + 1], 1)
    return tuple(strides)


def identity(shape: Sequence[int], itemsize: int) -> Copy:
    """A contiguous tensor onto a contiguous tensor of the same shape, both at offset 0."""
    strides = contiguous_strides(shape, itemsize)
    return Copy(tuple(shape), 0, strides, itemsize, 0, strides, itemsize)


def box(
    global_shape: Sequence[int], offsets: Sequence[int], shape: Sequence[int], itemsize: int,
    local_offset: int = 0, local_strides: Sequence[int] | None = None,
) -> Copy:
    """A shard's memory onto its box in the contiguous global tensor.

    ``offsets`` (in elements, one per dim) and ``shape`` say which box; ``local_offset`` and ``local_strides`` (in
    bytes, contiguous if not given) where the shard lies in its own memory. Errors: LayoutError when the box leaves the
    tensor.
    """
    local = contiguous_strides(shape, itemsize) if local_strides is None else tuple(local_strides)
    if not len(global_shape) == len(offsets) == len(shape) == len(local):
        raise LayoutError(f"a box of shape {tuple(shape)} at {tuple(offsets)} in {tuple(global_shape)}: ranks differ")
    if any(o < 0 or n < 0 or o + n > g for g, o, n in zip(global_shape, offsets, shape, strict=True)):
        raise LayoutError(f"a box of shape {tuple(shape)} at {tuple(offsets)} leaves the tensor {tuple(global_shape)}")
    strides = contiguous_strides(global_shape, itemsize)
    at = sum(o * s for o, s in zip(offsets, strides, strict=True))
    return Copy(tuple(shape), local_offset, local, itemsize, at, strides, itemsize)


def compose(first: Copy, second: Copy) -> list[Copy]:
    """``first`` writes a -> b, ``second`` reads b -> c: disjoint copies a -> c of all that ``second`` reads of it.

    Pure copies are cut at bytes, so their itemsizes may differ; the result has elements as wide as its offsets and
    strides divide. Where one copy converts, the other must move whole elements of it. ``first`` must not write a place
    twice. Errors: LayoutError when part of a converted element would move, or ``first`` has a destination stride of 0.
    """
    pieces = composed_pieces(first, second)
    widest = math.lcm(first.dst_itemsize, second.src_itemsize)
    if first.src_itemsize != first.dst_itemsize or second.src_itemsize != second.dst_itemsize:
        return pieces
    return [piece if piece.dst_itemsize == widest else widened(piece, widest, aligned=True) for piece in pieces]


def subtract(copy: Copy, cover: Copy) -> list[Copy]:
    """The part of ``copy`` that writes outside the destination bytes of ``cover``, as disjoint copies.

    What ``cover`` reads does not matter. Errors: LayoutError when ``copy`` converts and ``cover`` splits its elements.
    """
    if 0 in copy.shape:
        return []
    if 0 in cover.shape or bounds_apart(cover, reverse := reversed_copy(copy)):
        return [simplify(copy)]
    pieces = joined([simplify(reversed_copy(piece)) for piece in meet(dst_only(cover), reverse)[1]])
    if copy.src_itemsize != copy.dst_itemsize:
        return pieces
    return [widened(piece, copy.dst_itemsize, aligned=True) for piece in pieces]


def run_nbytes(copy: Copy) -> int:
    """Length of the runs of a copy: the stretches that are contiguous on both sides; 0 if the copy is empty.

    One element where the innermost dim is not contiguous; ``dst_itemsize`` for a copy that converts.
    """
    return _run_nbytes(simplify(copy))


def runs(copy: Copy) -> tuple[Offsets, Offsets, int]:
    """Source offsets, destination offsets and the length of the runs of ``copy``, in the order of the destination.

    All in bytes, the offsets int64. For a copy that converts, the length is that of a destination element.
    """
    copy = simplify(copy)
    nbytes = _run_nbytes(copy)
    if not nbytes:
        return np.empty(0, np.int64), np.empty(0, np.int64), 0
    inner = bool(copy.shape) and nbytes != copy.dst_itemsize
    shape = copy.shape[:-1] if inner else copy.shape
    src, dst = np.full(1, copy.src_offset, np.int64), np.full(1, copy.dst_offset, np.int64)
    for n, s, d in zip(shape, copy.src_strides, copy.dst_strides, strict=False):
        steps = np.arange(n, dtype=np.int64)
        src = (src[:, None] + steps * s).reshape(-1)
        dst = (dst[:, None] + steps * d).reshape(-1)
    if not _is_nested(copy):
        order = np.argsort(dst, kind="stable")
        src, dst = src[order], dst[order]
    return src, dst, nbytes


def split(copy: Copy, max_dst_nbytes: int) -> list[Copy]:
    """Pieces of at most ``max_dst_nbytes`` destination bytes, but at least one element, in destination order.

    The outermost destination dims are cut first, so pieces stay as contiguous as the copy is. Errors: LayoutError
    when the limit is not positive.
    """
    if max_dst_nbytes <= 0:
        raise LayoutError(f"pieces of at most {max_dst_nbytes} bytes; expected a positive limit")
    copy = simplify(copy)
    if 0 in copy.shape:
        return []
    if copy.dst_nbytes <= max_dst_nbytes or not copy.shape:
        return [copy]
    cut, inner = len(copy.shape) - 1, copy.dst_itemsize
    while cut and inner * copy.shape[cut] <= max_dst_nbytes:
        inner *= copy.shape[cut]
        cut -= 1
    rows = max(max_dst_nbytes // inner, 1)
    dst_stride, src_stride, n = dims_of(copy)[cut]
    outer = [range(n) for n in copy.shape[:cut]]
    pieces = []
    for *index, start in itertools.product(*outer, range(0, n, rows)):
        at = (*index, start)
        dims = [(dst_stride, src_stride, min(rows, n - start)), *dims_of(copy)[cut + 1 :]]
        src = copy.src_offset + sum(i * s for i, s in zip(at, copy.src_strides, strict=False))
        dst = copy.dst_offset + sum(i * s for i, s in zip(at, copy.dst_strides, strict=False))
        pieces.append(from_dims(src, copy.src_itemsize, dst, copy.dst_itemsize, merged_dims(dims)))
    return pieces if _is_nested(copy) else sorted(pieces, key=lambda piece: piece.dst_offset)


def coverage(copies: Sequence[Copy], nbytes: int) -> Coverage:
    """Which bytes of a storage of ``nbytes`` no copy writes, and which are written more than once.

    Copies whose bounds do not touch are intervals. Interlocked ones are expanded to runs while these are few, and else
    intersected pairwise. Errors: LayoutError when a copy writes outside the storage.
    """
    spans: list[tuple[int, int, Copy]] = []
    for index, copy in enumerate(copies):
        if 0 not in copy.shape:
            start = copy.dst_offset
            stop = start + span_nbytes(copy.shape, copy.dst_strides, copy.dst_itemsize)
            if start < 0 or stop > nbytes:
                raise LayoutError(f"copy {index} writes bytes {start} to {stop} of a storage of {nbytes} bytes")
            spans.append((start, stop, dst_only(copy, free=True)))
    spans.sort(key=lambda span: span[0])
    missing: Ranges = []
    doubled: Ranges = []
    reach = 0
    for start, stop, group in _interlocked(spans):
        missing.append((reach, start))
        if len(group) > 1 or group[0].dst_nbytes != stop - start or not _is_nested(group[0]):
            holes, twice = _group_coverage(group, start, stop)
            missing += holes
            doubled += twice
        reach = stop
    missing.append((reach, nbytes))
    return Coverage(_touching_joined(missing), _touching_joined(doubled))


def _interlocked(spans: Sequence[tuple[int, int, Copy]]) -> Iterator[tuple[int, int, list[Copy]]]:
    """Start, stop and members of the groups of copies, from ascending spans, that keep their bounds apart."""
    group: list[Copy] = []
    first = reach = 0
    for start, stop, copy in spans:
        if group and start >= reach:
            yield first, reach, group
            group = []
        if not group:
            first, reach = start, stop
        group.append(copy)
        reach = max(reach, stop)
    if group:
        yield first, reach, group


def _group_coverage(group: list[Copy], start: int, stop: int) -> tuple[Ranges, Ranges]:
    """Missing and doubled ranges from ``start`` to ``stop``: by counting runs or, if these are too many, by algebra."""
    n_runs = sum(c.dst_nbytes // _run_nbytes(c) for c in group)
    if n_runs <= _MAX_EXPANDED_RUNS or not all(_is_nested(c) for c in group):
        edges, depth = _depths(group)
        return _ranges(edges, depth == 0), _ranges(edges, depth > 1)
    doubled = [piece for a, b in itertools.combinations(group, 2) if not bounds_apart(a, b) for piece in meet(a, b)[0]]
    missing: list[Copy] = []
    if doubled or sum(c.dst_nbytes for c in group) < stop - start:
        missing = [from_dims(0, 1, start, 1, [(1, 1, stop - start)])]
        for cover in group:
            missing = [piece for block in missing for piece in subtract(block, cover)]
    edges, depth = _depths([dst_only(piece) for piece in missing])
    twice_edges, twice_depth = _depths(doubled)
    return _ranges(edges, depth > 0), _ranges(twice_edges, twice_depth > 0)


def _depths(copies: Sequence[Copy]) -> tuple[Offsets, Offsets]:
    """Edges in ascending order, and how many times the bytes from each edge to the next are written."""
    written = [(dst, dst + nbytes) for _, dst, nbytes in map(runs, copies)]
    starts = np.concatenate([start for start, _ in written] or [np.empty(0, np.int64)])
    stops = np.concatenate([stop for _, stop in written] or [np.empty(0, np.int64)])
    edges = np.unique(np.concatenate([starts, stops]))
    begun = np.searchsorted(np.sort(starts), edges, side="right")
    ended = np.searchsorted(np.sort(stops), edges, side="right")
    return edges, (begun - ended)[:-1]


def _ranges(edges: Offsets, chosen: npt.NDArray[np.bool_]) -> Ranges:
    """Maximal ranges of neighbouring chosen intervals from an edge to the next."""
    change = np.diff(np.concatenate([[False], chosen, [False]]).astype(np.int8))
    starts, stops = edges[np.flatnonzero(change > 0)], edges[np.flatnonzero(change < 0)]
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _touching_joined(ranges: Ranges) -> tuple[tuple[int, int], ...]:
    joined: Ranges = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)


def _is_nested(copy: Copy) -> bool:
    """Whether the destination of a simplified copy is in ascending order and writes no byte twice."""
    span = copy.dst_itemsize
    for n, d in zip(reversed(copy.shape), reversed(copy.dst_strides), strict=True):
        if d < span:
            return False
        span += (n - 1) * d
    return True


def _run_nbytes(copy: Copy) -> int:
    e = copy.dst_itemsize
    if 0 in copy.shape:
        return 0
    if e == copy.src_itemsize and copy.shape and copy.src_strides[-1] == e == copy.dst_strides[-1]:
        return copy.shape[-1] * e
    return e
