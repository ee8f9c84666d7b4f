"""Strided copies between flat memories, and their algebra: compose, subtract, split, runs, coverage.

Numbers only: no tensor, no device, no address. Offsets and strides are in bytes unless a docstring says otherwise.
Callers:

- tracing composes the copies of a loader (checkpoint -> temporary -> parameter) into one;
- planning checks with `coverage` that every byte of a destination has exactly one writer;
- routing composes trainer shards (`box`) with the plan, and cuts the result with `runs` and `split`.

No operation enumerates elements where strides are nested: `_partition` works on whole dims.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.int64]
Ranges = list[tuple[int, int]]

_MAX_EXPANDED_RUNS = 1 << 22


class LayoutError(ValueError):
    """A geometry that has no meaning: a box outside its tensor, half an element of a cast, a write out of bounds."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Moves ``prod(shape)`` elements, each ``src_itemsize`` bytes at its source, ``dst_itemsize`` at its destination.

    Element ``i`` is read at ``src_offset + sum(i * src_strides)`` and written at ``dst_offset + sum(i * dst_strides)``.
    Strides are not negative. A source stride of 0 reads one element many times. An empty ``shape`` is one element.
    With equal itemsizes the copy is *pure*: it moves bytes and may be cut anywhere; otherwise it converts each element.
    A conversion between dtypes of one size looks pure here: its caller composes it with copies of that itemsize only.

    The constructor checks nothing, so that plans of millions of copies load quickly; `wire.decode_plan` checks.
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


def simplify(copy: Copy) -> Copy:
    """The same moves in as few dims as possible, destination strides descending.

    Extents of 1 go, and neighbouring dims that step alike on both sides merge; elements and itemsizes stay. Every empty
    copy becomes one of shape (0,) at offset 0.
    """
    src, dst = copy.src_itemsize, copy.dst_itemsize
    if 0 in copy.shape:
        return _from_dims(0, src, 0, dst, [(dst, src, 0)])
    return _from_dims(copy.src_offset, src, copy.dst_offset, dst, _merged(_dims(copy)))


def compose(first: Copy, second: Copy) -> list[Copy]:
    """``first`` writes a -> b, ``second`` reads b -> c: disjoint copies a -> c of all that ``second`` reads of it.

    Pure copies are cut at bytes, so their itemsizes may differ; the result has elements as wide as its offsets and
    strides divide. Where one copy converts, the other must move whole elements of it. ``first`` must not write a place
    twice. Errors: LayoutError when part of a converted element would move, or ``first`` has a destination stride of 0.
    """
    pieces = _composed(first, second)
    widest = math.lcm(first.dst_itemsize, second.src_itemsize)
    if first.src_itemsize != first.dst_itemsize or second.src_itemsize != second.dst_itemsize:
        return pieces
    return [piece if piece.dst_itemsize == widest else _widened(piece, widest, aligned=True) for piece in pieces]


def subtract(copy: Copy, cover: Copy) -> list[Copy]:
    """The part of ``copy`` that writes outside the destination bytes of ``cover``, as disjoint copies.

    What ``cover`` reads does not matter. Errors: LayoutError when ``copy`` converts and ``cover`` splits its elements.
    """
    if 0 in copy.shape:
        return []
    if 0 in cover.shape or _apart(cover, reverse := _reversed(copy)):
        return [simplify(copy)]
    pieces = _joined([simplify(_reversed(piece)) for piece in _meet(_dst_only(cover), reverse)[1]])
    if copy.src_itemsize != copy.dst_itemsize:
        return pieces
    return [_widened(piece, copy.dst_itemsize, aligned=True) for piece in pieces]


def overlaps(a: Copy, b: Copy) -> bool:
    """Whether some byte is written by both."""
    if 0 in a.shape or 0 in b.shape or _apart(a, reverse := _dst_only(b)):
        return False
    return bool(_meet(_dst_only(a), reverse)[0])


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
    dst_stride, src_stride, n = _dims(copy)[cut]
    outer = [range(n) for n in copy.shape[:cut]]
    pieces = []
    for *index, start in itertools.product(*outer, range(0, n, rows)):
        at = (*index, start)
        dims = [(dst_stride, src_stride, min(rows, n - start)), *_dims(copy)[cut + 1 :]]
        src = copy.src_offset + sum(i * s for i, s in zip(at, copy.src_strides, strict=False))
        dst = copy.dst_offset + sum(i * s for i, s in zip(at, copy.dst_strides, strict=False))
        pieces.append(_from_dims(src, copy.src_itemsize, dst, copy.dst_itemsize, _merged(dims)))
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
            stop = start + _span(copy.shape, copy.dst_strides, copy.dst_itemsize)
            if start < 0 or stop > nbytes:
                raise LayoutError(f"copy {index} writes bytes {start} to {stop} of a storage of {nbytes} bytes")
            spans.append((start, stop, _dst_only(copy, free=True)))
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
    doubled = [piece for a, b in itertools.combinations(group, 2) if not _apart(a, b) for piece in _meet(a, b)[0]]
    missing: list[Copy] = []
    if doubled or sum(c.dst_nbytes for c in group) < stop - start:
        missing = [_from_dims(0, 1, start, 1, [(1, 1, stop - start)])]
        for cover in group:
            missing = [piece for block in missing for piece in subtract(block, cover)]
    edges, depth = _depths([_dst_only(piece) for piece in missing])
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


class _Side(NamedTuple):
    """Elements in the storage that two copies share: where they lie there, and where on the copy's other side.

    A dim is (stride here, stride on the other side, extent); dims are ordered by stride here, descending, none of it 0.
    """

    at: int
    other: int
    dims: tuple[tuple[int, int, int], ...]


class _Match(NamedTuple):
    """Elements that two sides share. A dim is (stride of p's other side, stride of q's other side, extent)."""

    p: int
    q: int
    dims: tuple[tuple[int, int, int], ...]


def _partition(ps: list[_Side], qs: list[_Side], e: int) -> tuple[list[_Match], list[_Side]]:
    """Cuts the elements (of ``e`` bytes) of ``ps`` into those that are also in one of ``qs``, and the others."""
    inside: list[_Match] = []
    for q in qs:
        outside: list[_Side] = []
        q_stop = q.at + _reach(q.dims, e)
        for p in ps:
            p_stop = p.at + _reach(p.dims, e)
            if p_stop <= q.at or q_stop <= p.at:
                outside.append(p)
                continue
            match = _in_block(p, p_stop, q, q_stop, e)
            if match is not None:
                inside.append(match)
                continue
            more_inside, more_outside = _partition_pair(p, q, e)
            inside += more_inside
            outside += more_outside
        ps = outside
    return inside, ps


def _in_block(p: _Side, p_stop: int, q: _Side, q_stop: int, e: int) -> _Match | None:
    """All of ``p``, if ``q`` is one element or one contiguous block of elements and ``p`` lies in it."""
    if len(q.dims) > 1 or (q.dims and q.dims[0][0] != e) or p.at < q.at or p_stop > q_stop:
        return None
    if (p.at - q.at) % e or any(s % e for s, _, _ in p.dims):
        return None
    v = q.dims[0][1] if q.dims else 0
    return _Match(p.other, q.other + (p.at - q.at) // e * v, tuple([(u, s // e * v, n) for s, u, n in p.dims]))


def _partition_pair(p: _Side, q: _Side, e: int) -> tuple[list[_Match], list[_Side]]:
    """Brings the leading dims of both to one stride, the least common multiple, and matches row by row.

    Where neither side has two such steps, the side with the larger stride is halved.
    """
    if not p.dims and not q.dims:
        raise LayoutError(f"elements of {e} bytes overlap in part, {abs(p.at - q.at)} bytes apart, and a copy converts")
    s, t = (p.dims or q.dims)[0][0], (q.dims or p.dims)[0][0]
    if s == t and p.dims and q.dims:
        return _partition_rows(p, q, e)
    step = math.lcm(s, t)
    if step in (s, t) or p.dims[0][2] * s >= 2 * step or q.dims[0][2] * t >= 2 * step:
        return _partition(_fold(p, step), _fold(q, step), e)
    if s > t:
        return _partition(_halves(p), [q], e)
    return _partition([p], _halves(q), e)


def _fold(side: _Side, step: int) -> list[_Side]:
    """The same elements with a leading stride of ``step``, a multiple of the present one, and what is left over."""
    if not side.dims or side.dims[0][2] * side.dims[0][0] < step:
        return [side._replace(dims=((step, 0, 1), *side.dims))]
    (s, u, n), rest = side.dims[0], side.dims[1:]
    r = step // s
    if r == 1:
        return [side]
    folded = [side._replace(dims=((step, u * r, n // r), (s, u, r), *rest))]
    return folded + ([_rows(side, n - n % r, n)] if n % r else [])


def _halves(side: _Side) -> list[_Side]:
    n = side.dims[0][2]
    return [_rows(side, 0, n // 2), _rows(side, n // 2, n)] if n > 1 else [_rows(side, 0, 1)]


def _rows(side: _Side, start: int, stop: int) -> _Side:
    """Rows ``[start, stop)`` of the leading dim; the dim is dropped if that is one row."""
    (s, u, _), rest = side.dims[0], side.dims[1:]
    dims = ((s, u, stop - start), *rest) if stop - start > 1 else rest
    return _Side(side.at + start * s, side.other + start * u, dims)


def _partition_rows(p: _Side, q: _Side, e: int) -> tuple[list[_Match], list[_Side]]:
    """Sides of equal leading stride: row i of ``p`` can meet row i + k of ``q`` only for a few k, which all i share."""
    (s, u, m), (_, v, n) = p.dims[0], q.dims[0]
    apart = p.at - q.at
    k_min = max((apart - _reach(q.dims[1:], e)) // s + 1, 1 - m)
    k_max = min(-(-(apart + _reach(p.dims[1:], e)) // s) - 1, n - 1)
    shifts = [(k, max(0, -k), min(m, n - k)) for k in range(k_min, k_max + 1)]
    cuts = sorted({0, m}.union(*((lo, hi) for _, lo, hi in shifts)))
    inside: list[_Match] = []
    outside: list[_Side] = []
    for start, stop in itertools.pairwise(cuts):
        partners = [_rows(q, start + k, start + k + 1) for k, lo, hi in shifts if lo <= start and stop <= hi]
        if not partners:
            outside.append(_rows(p, start, stop))
            continue
        more_inside, more_outside = _partition([_rows(p, start, start + 1)], partners, e)
        if stop - start > 1:
            count = stop - start
            more_inside = [x._replace(dims=((u, v, count), *x.dims)) for x in more_inside]
            more_outside = [x._replace(dims=((s, u, count), *x.dims)) for x in more_outside]
        inside += more_inside
        outside += more_outside
    return inside, outside


def _composed(first: Copy, second: Copy) -> list[Copy]:
    """`compose`, with elements as small as cutting left them; first the cases in which one copy is a whole block."""
    if 0 in first.shape or 0 in second.shape:
        return []
    if _is_block(first) and _within(second.src_offset, second.shape, second.src_strides, second.src_itemsize,
                                    first.dst_offset, first.dst_nbytes):
        at = second.src_offset - first.dst_offset + first.src_offset
        dims = _merged(_dims(second))
        return [_from_dims(at, second.src_itemsize, second.dst_offset, second.dst_itemsize, dims)]
    if _apart(first, second):
        return []
    if any(s == 0 and n > 1 for s, n in zip(first.dst_strides, first.shape, strict=True)):
        raise LayoutError(f"{first} writes one place many times (a destination stride of 0); compose needs one writer")
    if _is_block(second) and _within(first.dst_offset, first.shape, first.dst_strides, first.dst_itemsize,
                                     second.src_offset, second.src_nbytes):
        at = first.dst_offset - second.src_offset + second.dst_offset
        return [_from_dims(first.src_offset, first.src_itemsize, at, first.dst_itemsize, _merged(_dims(first)))]
    return _joined(_meet(first, second)[0])


def _meet(first: Copy, second: Copy) -> tuple[list[Copy], list[Copy]]:
    """``first`` writes what ``second`` reads: the composed copies, and the parts of ``second`` that read elsewhere."""
    pair = _in_common_units(simplify(first), simplify(second))
    if pair is None:
        if not overlaps(_dst_only(first), _dst_only(_reversed(second))):
            return [], [second]
        raise LayoutError(
            f"elements of {first.dst_itemsize} bytes are read as elements of {second.src_itemsize} bytes, and a copy "
            f"converts: {first}, {second}"
        )
    first, second = pair
    read = _merged(_dims(_reversed(second)))
    free = [d for d in read if d[0] == 0]
    p = _Side(second.src_offset, second.dst_offset, tuple([d for d in read if d[0]]))
    q = _Side(first.dst_offset, first.src_offset, tuple(_merged(_dims(first))))
    inside, outside = _partition([p], [q], first.dst_itemsize)
    composed = [
        _from_dims(x.q, first.src_itemsize, x.p, second.dst_itemsize,
                   _merged([*x.dims, *((u, 0, n) for _, u, n in free)]))
        for x in inside
    ]
    if not inside:
        return [], [second]
    left = [
        _from_dims(x.at, second.src_itemsize, x.other, second.dst_itemsize,
                   _merged([(u, s, n) for s, u, n in (*x.dims, *free)]))
        for x in outside
    ]
    return composed, left


def _in_common_units(first: Copy, second: Copy) -> tuple[Copy, Copy] | None:
    """Both with one element size in the shared storage, that of a copy that converts; None if there is none."""
    first_pure = first.src_itemsize == first.dst_itemsize
    second_pure = second.src_itemsize == second.dst_itemsize
    if first_pure and second_pure:
        unit = math.gcd(first.dst_itemsize, second.src_itemsize, first.dst_offset - second.src_offset,
                        *first.dst_strides, *second.src_strides)
    else:
        unit = second.src_itemsize if first_pure else first.dst_itemsize
    if first_pure:
        first = _in_units(first, unit)
    if second_pure:
        second = _in_units(second, unit)
    return (first, second) if first.dst_itemsize == unit == second.src_itemsize else None


def _in_units(copy: Copy, unit: int) -> Copy:
    """A simplified pure copy with elements of ``unit`` bytes, or of another size if it cannot be cut so."""
    if copy.src_itemsize % unit:
        return _widened(copy, unit, aligned=False)
    if copy.src_itemsize == unit:
        return copy
    parts = (unit, unit, copy.src_itemsize // unit)
    return _from_dims(copy.src_offset, unit, copy.dst_offset, unit, _merged([*_dims(copy), parts]))


def _widened(copy: Copy, widest: int, *, aligned: bool) -> Copy:
    """A simplified pure copy with elements as wide as its runs, and ``aligned`` offsets and strides, allow."""
    e = copy.dst_itemsize
    if not copy.shape or copy.src_strides[-1] != e or copy.dst_strides[-1] != e:
        return copy
    dims = _dims(copy)[:-1]
    wide = math.gcd(widest, copy.shape[-1] * e)
    if aligned:
        wide = math.gcd(wide, copy.src_offset, copy.dst_offset, *(s for dim in dims for s in dim[:2]))
    if wide <= e or wide % e:
        return copy
    dims.append((wide, wide, copy.shape[-1] * e // wide))
    return _from_dims(copy.src_offset, wide, copy.dst_offset, wide, _merged(dims))


def _joined(copies: list[Copy]) -> list[Copy]:
    """Simplified copies in the order of the destination, neighbours that continue each other made one."""
    done: list[Copy] = []
    for copy in sorted(copies, key=lambda c: c.dst_offset):
        while done and (longer := _continued(done[-1], copy)) is not None:
            done.pop()
            copy = longer
        done.append(copy)
    return done


def _continued(a: Copy, b: Copy) -> Copy | None:
    """``a`` and ``b`` as one copy, if ``b`` begins where one dim of ``a`` ends and the other dims are equal."""
    if (a.src_itemsize, a.dst_itemsize) != (b.src_itemsize, b.dst_itemsize) or abs(len(a.shape) - len(b.shape)) > 1:
        return None
    x, y = _dims(a), _dims(b)
    longer = (x if len(x) >= len(y) else y) or [(a.dst_itemsize, a.src_itemsize, 1)]
    step = (b.dst_offset - a.dst_offset, b.src_offset - a.src_offset)
    for d, (s, u, _) in enumerate(longer):
        left = x if len(x) == len(longer) else [*x[:d], (s, u, 1), *x[d:]]
        right = y if len(y) == len(longer) else [*y[:d], (s, u, 1), *y[d:]]
        n, m = left[d][2], right[d][2]
        if step == (n * s, n * u) and right == [*left[:d], (s, u, m), *left[d + 1 :]]:
            dims = _merged([*left[:d], (s, u, n + m), *left[d + 1 :]])
            return _from_dims(a.src_offset, a.src_itemsize, a.dst_offset, a.dst_itemsize, dims)
    return None


def _dims(copy: Copy) -> list[tuple[int, int, int]]:
    return list(zip(copy.dst_strides, copy.src_strides, copy.shape, strict=True))


def _merged(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
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


def _from_dims(src: int, src_itemsize: int, dst: int, dst_itemsize: int, dims: Sequence[tuple[int, int, int]]) -> Copy:
    """A copy from offset ``src`` to ``dst`` over dims (destination stride, source stride, extent)."""
    dst_strides, src_strides, shape = zip(*dims, strict=True) if dims else ((), (), ())
    return Copy(shape, src, src_strides, src_itemsize, dst, dst_strides, dst_itemsize)


def _reversed(copy: Copy) -> Copy:
    return Copy(copy.shape, copy.dst_offset, copy.dst_strides, copy.dst_itemsize,
                copy.src_offset, copy.src_strides, copy.src_itemsize)


def _dst_only(copy: Copy, *, free: bool = False) -> Copy:
    """The bytes that ``copy`` writes, as a pure copy onto itself; ``free``: as often as it writes them."""
    dims = [(s, s, n) for s, n in zip(copy.dst_strides, copy.shape, strict=True) if s or free]
    return _from_dims(copy.dst_offset, copy.dst_itemsize, copy.dst_offset, copy.dst_itemsize, _merged(dims))


def _span(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes from the first to the end of the last element."""
    for n, s in zip(shape, strides, strict=True):
        itemsize += (n - 1) * s
    return itemsize


def _reach(dims: Sequence[tuple[int, int, int]], e: int) -> int:
    for s, _, n in dims:
        e += (n - 1) * s
    return e


def _within(at: int, shape: Sequence[int], strides: Sequence[int], itemsize: int, start: int, nbytes: int) -> bool:
    return at >= start and at + _span(shape, strides, itemsize) <= start + nbytes


def _apart(first: Copy, second: Copy) -> bool:
    """Whether the bounds of what ``first`` writes and ``second`` reads do not touch."""
    written, read = first.dst_offset, second.src_offset
    return (written + _span(first.shape, first.dst_strides, first.dst_itemsize) <= read
            or read + _span(second.shape, second.src_strides, second.src_itemsize) <= written)


def _is_block(copy: Copy) -> bool:
    """Whether a copy moves one contiguous block of bytes, in order."""
    step = copy.dst_itemsize
    if step != copy.src_itemsize:
        return False
    for n, s, d in zip(reversed(copy.shape), reversed(copy.src_strides), reversed(copy.dst_strides), strict=True):
        if n != 1:
            if s != step or d != step:
                return False
            step *= n
    return True


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
