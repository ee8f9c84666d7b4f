"""Where the bytes that one copy writes and another reads coincide: the machinery under `layout`'s algebra.

Numbers only, as in `layout`. No operation enumerates elements where strides are nested: `_partition` works on whole
dims. It cuts the elements of one side into those that the other side has too and the rest; `meet` brings two copies to
one element size before that and makes copies of the outcome; `joined` and `widened` make them few and wide again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

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


def overlaps(a: Copy, b: Copy) -> bool:
    """Whether some byte is written by both."""
    if 0 in a.shape or 0 in b.shape or bounds_apart(a, reverse := dst_only(b)):
        return False
    return bool(meet(dst_only(a), reverse)[0])


def composed_pieces(first: Copy, second: Copy) -> list[Copy]:
    """`compose`, with elements as small as cutting left them; first the cases in which one copy is a whole block."""
    if 0 in first.shape or 0 in second.shape:
        return []
    if _is_block(first) and _within(second.src_offset, second.shape, second.src_strides, second.src_itemsize,
                                    first.dst_offset, first.dst_nbytes):
        at = second.src_offset - first.dst_offset + first.src_offset
        dims = merged_dims(dims_of(second))
        return [from_dims(at, second.src_itemsize, second.dst_offset, second.dst_itemsize, dims)]
    if bounds_apart(first, second):
        return []
    if any(s == 0 and n > 1 for s, n in zip(first.dst_strides, first.shape, strict=True)):
        raise LayoutError(f"{first} writes one place many times (a destination stride of 0); compose needs one writer")
    if _is_block(second) and _within(first.dst_offset, first.shape, first.dst_strides, first.dst_itemsize,
                                     second.src_offset, second.src_nbytes):
        at = first.dst_offset - second.src_offset + second.dst_offset
        return [from_dims(first.src_offset, first.src_itemsize, at, first.dst_itemsize, merged_dims(dims_of(first)))]
    return joined(meet(first, second)[0])


def meet(first: Copy, second: Copy) -> tuple[list[Copy], list[Copy]]:
    """``first`` writes what ``second`` reads: the composed copies, and the parts of ``second`` that read elsewhere."""
    pair = _in_common_units(simplify(first), simplify(second))
    if pair is None:
        if not overlaps(dst_only(first), dst_only(reversed_copy(second))):
            return [], [second]
        raise LayoutError(
            f"elements of {first.dst_itemsize} bytes are read as elements of {second.src_itemsize} bytes, and a copy "
            f"converts: {first}, {second}"
        )
    first, second = pair
    read = merged_dims(dims_of(reversed_copy(second)))
    free = [d for d in read if d[0] == 0]
    p = _Side(second.src_offset, second.dst_offset, tuple([d for d in read if d[0]]))
    q = _Side(first.dst_offset, first.src_offset, tuple(merged_dims(dims_of(first))))
    inside, outside = _partition([p], [q], first.dst_itemsize)
    composed = [
        from_dims(x.q, first.src_itemsize, x.p, second.dst_itemsize,
                  merged_dims([*x.dims, *((u, 0, n) for _, u, n in free)]))
        for x in inside
    ]
    if not inside:
        return [], [second]
    left = [
        from_dims(x.at, second.src_itemsize, x.other, second.dst_itemsize,
                  merged_dims([(u, s, n) for s, u, n in (*x.dims, *free)]))
        for x in outside
    ]
    return composed, left


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
        return widened(copy, unit, aligned=False)
    if copy.src_itemsize == unit:
        return copy
    parts = (unit, unit, copy.src_itemsize // unit)
    return from_dims(copy.src_offset, unit, copy.dst_offset, unit, merged_dims([*dims_of(copy), parts]))


def widened(copy: Copy, widest: int, *, aligned: bool) -> Copy:
    """A simplified pure copy with elements as wide as its runs, and ``aligned`` offsets and strides, allow."""
    e = copy.dst_itemsize
    if not copy.shape or copy.src_strides[-1] != e or copy.dst_strides[-1] != e:
        return copy
    dims = dims_of(copy)[:-1]
    wide = math.gcd(widest, copy.shape[-1] * e)
    if aligned:
        wide = math.gcd(wide, copy.src_offset, copy.dst_offset, *(s for dim in dims for s in dim[:2]))
    if wide <= e or wide % e:
        return copy
    dims.append((wide, wide, copy.shape[-1] * e // wide))
    return from_dims(copy.src_offset, wide, copy.dst_offset, wide, merged_dims(dims))


def joined(copies: list[Copy]) -> list[Copy]:
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
    x, y = dims_of(a), dims_of(b)
    longer = (x if len(x) >= len(y) else y) or [(a.dst_itemsize, a.src_itemsize, 1)]
    step = (b.dst_offset - a.dst_offset, b.src_offset - a.src_offset)
    for d, (s, u, _) in enumerate(longer):
        left = x if len(x) == len(longer) else [*x[:d], (s, u, 1), *x[d:]]
        right = y if len(y) == len(longer) else [*y[:d], (s, u, 1), *y[d:]]
        n, m = left[d][2], right[d][2]
        if step == (n * s, n * u) and right == [*left[:d], (s, u, m), *left[d + 1 :]]:
            dims = merged_dims([*left[:d], (s, u, n + m), *left[d + 1 :]])
            return from_dims(a.src_offset, a.src_itemsize, a.dst_offset, a.dst_itemsize, dims)
    return None


def _reach(dims: Sequence[tuple[int, int, int]], e: int) -> int:
    for s, _, n in dims:
        e += (n - 1) * s
    return e


def _within(at: int, shape: Sequence[int], strides: Sequence[int], itemsize: int, start: int, nbytes: int) -> bool:
    return at >= start and at + span_nbytes(shape, strides, itemsize) <= start + nbytes


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
