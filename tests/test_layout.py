"""Strided copies against brute force: every element enumerated with numpy, and real bytes moved with torch views."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_nixl_plugin import layout
from vllm_nixl_plugin.layout import (
    Copy,
    Coverage,
    LayoutError,
    box,
    compose,
    contiguous_strides,
    coverage,
    identity,
    overlaps,
    run_nbytes,
    runs,
    simplify,
    split,
    subtract,
)

few = settings(max_examples=60, deadline=None)
many = settings(max_examples=150, deadline=None)
Pair = tuple[int, int]
Half = tuple[tuple[int, ...], int, tuple[int, ...]]


# Brute force.


def element_pairs(copy: Copy) -> list[Pair]:
    """(source address, destination address) of every element."""
    pairs = []
    for index in itertools.product(*map(range, copy.shape)):
        src = copy.src_offset + sum(i * s for i, s in zip(index, copy.src_strides, strict=True))
        dst = copy.dst_offset + sum(i * s for i, s in zip(index, copy.dst_strides, strict=True))
        pairs.append((src, dst))
    return pairs


def byte_pairs(copies: Iterable[Copy]) -> list[Pair]:
    """(source byte, destination byte) of every byte that pure copies move, sorted."""
    pairs = []
    for copy in copies:
        assert copy.src_itemsize == copy.dst_itemsize
        pairs += [(s + i, d + i) for s, d in element_pairs(copy) for i in range(copy.src_itemsize)]
    return sorted(pairs)


def dst_bytes(copy: Copy) -> list[int]:
    return [d + i for _, d in element_pairs(copy) for i in range(copy.dst_itemsize)]


def apply_copy(copy: Copy, src: np.ndarray, dst: np.ndarray) -> None:
    """Moves the bytes of a pure copy."""
    for s, d in byte_pairs([copy]):
        dst[d] = src[s]


def expected_composition(first: Iterable[Pair], second: Iterable[Pair]) -> list[Pair]:
    written = {b: a for a, b in first}
    return sorted((written[b], c) for b, c in second if b in written)


# Random layouts.


@st.composite
def views(draw: st.DrawFn, itemsize: int, expand: bool = False) -> Half:
    """Shape, offset and strides of a view of a small contiguous tensor, made by the usual torch calls."""
    view = torch.empty(draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 8]), max_size=3)), device="meta")
    for op in draw(st.lists(st.sampled_from(["narrow", "transpose", "step", "unflatten", "flatten"]), max_size=4)):
        if not view.dim():
            break
        d = draw(st.integers(0, view.dim() - 1))
        n = view.shape[d]
        if op == "narrow":
            start = draw(st.integers(0, n - 1))
            view = view.narrow(d, start, draw(st.integers(1, n - start)))
        elif op == "transpose":
            view = view.transpose(d, draw(st.integers(0, view.dim() - 1)))
        elif op == "step":
            view = view[(slice(None),) * d + (slice(draw(st.integers(0, n - 1)), None, draw(st.integers(2, 3))),)]
        elif op == "unflatten" and n % 2 == 0:
            view = view.unflatten(d, (2, n // 2) if draw(st.booleans()) else (n // 2, 2))
        elif op == "flatten" and view.is_contiguous():
            view = view.flatten()
    if expand and draw(st.booleans()):
        view = view.unsqueeze(d := draw(st.integers(0, view.dim())))
        view = view.expand(*view.shape[:d], draw(st.integers(2, 3)), *view.shape[d + 1 :])
    at = view.storage_offset() + draw(st.integers(0, 12))
    return tuple(view.shape), at * itemsize, tuple(s * itemsize for s in view.stride())


@st.composite
def places(draw: st.DrawFn, shape: tuple[int, ...], itemsize: int, unaligned: bool = False) -> Half:
    """Offset and strides for a shape such that no two elements overlap: any order of dims, padded at any level."""
    unit = 1 if unaligned else itemsize
    strides = [0] * len(shape)
    span = itemsize
    for d in draw(st.permutations(range(len(shape)))):
        strides[d] = span + draw(st.integers(0, 3)) * unit
        span += (shape[d] - 1) * strides[d]
    return shape, draw(st.integers(0, 12)) * unit, tuple(strides)


@st.composite
def half(draw: st.DrawFn, itemsize: int, expand: bool = False, unaligned: bool = False) -> Half:
    """One side of a copy: a view, or a small shape with padding between its elements."""
    if draw(st.booleans()):
        return draw(views(itemsize, expand))
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    return draw(places(shape, itemsize, unaligned))


@st.composite
def writers(draw: st.DrawFn, src_itemsize: int, dst_itemsize: int, unaligned: bool = False) -> Copy:
    """A copy that is interesting on its destination side."""
    shape, dst, dst_strides = draw(half(dst_itemsize, unaligned=unaligned))
    _, src, src_strides = draw(places(shape, src_itemsize, unaligned))
    if shape and draw(st.integers(0, 4)) == 0:
        src_strides = (0, *src_strides[1:])
    return Copy(shape, src, src_strides, src_itemsize, dst, dst_strides, dst_itemsize)


@st.composite
def readers(draw: st.DrawFn, src_itemsize: int, dst_itemsize: int, unaligned: bool = False) -> Copy:
    """A copy that is interesting on its source side, where it may read elements many times."""
    shape, src, src_strides = draw(half(src_itemsize, expand=True, unaligned=unaligned))
    _, dst, dst_strides = draw(places(shape, dst_itemsize, unaligned))
    return Copy(shape, src, src_strides, src_itemsize, dst, dst_strides, dst_itemsize)


itemsizes = st.sampled_from([1, 2, 4, 8])


# compose


@many
@given(st.data(), itemsizes)
def test_compose_moves_exactly_what_second_reads_of_first(data: st.DataObject, e: int) -> None:
    first, second = data.draw(writers(e, e)), data.draw(readers(e, e))
    pieces = compose(first, second)
    assert byte_pairs(pieces) == expected_composition(byte_pairs([first]), byte_pairs([second]))
    assert all(piece == simplify(piece) for piece in pieces)


@many
@given(st.data(), itemsizes, itemsizes)
def test_compose_of_pure_copies_cuts_elements_of_any_size_at_any_byte(data: st.DataObject, e: int, f: int) -> None:
    first, second = data.draw(writers(e, e, unaligned=True)), data.draw(readers(f, f, unaligned=True))
    pieces = compose(first, second)
    assert byte_pairs(pieces) == expected_composition(byte_pairs([first]), byte_pairs([second]))


@many
@given(st.data(), itemsizes, itemsizes, itemsizes)
def test_compose_keeps_converted_elements_whole(data: st.DataObject, a: int, b: int, c: int) -> None:
    first, second = data.draw(writers(a, b)), data.draw(readers(b, c))
    pieces = compose(first, second)
    if a != b or b != c:
        assert all((p.src_itemsize, p.dst_itemsize) == (a, c) for p in pieces)
        pairs = sorted(pair for p in pieces for pair in element_pairs(p))
        assert pairs == expected_composition(element_pairs(first), element_pairs(second))


@few
@given(st.data(), itemsizes)
def test_composed_copies_move_the_same_data_as_one_after_the_other(data: st.DataObject, e: int) -> None:
    first, second = data.draw(writers(e, e)), data.draw(readers(e, e))
    size = 1 + max(max(s, d) for copy in (first, second) for s, d in byte_pairs([copy]))
    a = np.random.default_rng(0).integers(0, 128, size, np.uint8)
    b, c, direct = (np.full(size, 255, np.uint8) for _ in range(3))
    apply_copy(first, a, b)
    apply_copy(second, b, c)
    for piece in compose(first, second):
        apply_copy(piece, a, direct)
    assert (direct == c).all()


@few
@given(st.data())
def test_compose_with_strides_that_do_not_divide_each_other(data: st.DataObject) -> None:
    s, t, inner = (data.draw(st.integers(1, 15)) for _ in range(3))
    first = Copy((40, 2), 0, (7, 1), 1, data.draw(st.integers(0, 30)), (s + inner, inner), 1)
    second = Copy((50,), data.draw(st.integers(0, 30)), (t,), 1, 0, (1,), 1)
    assert byte_pairs(compose(first, second)) == expected_composition(byte_pairs([first]), byte_pairs([second]))


@few
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(0, 9))
def test_compose_may_read_overlapping_windows(n: int, width: int, step: int, at: int) -> None:
    first = Copy((5, 2), 3, (2, 1), 1, 4, (3, 1), 1)
    windows = Copy((n, width), at, (step, 1), 1, 0, (width, 1), 1)
    assert byte_pairs(compose(first, windows)) == expected_composition(byte_pairs([first]), byte_pairs([windows]))


def test_compose_with_a_whole_tensor_returns_the_other_copy() -> None:
    second = Copy((3, 4), 16, (64, 2), 2, 8, (8, 2), 2)
    assert compose(identity((16, 32), 2), second) == [second]
    first = Copy((3, 4), 8, (8, 2), 2, 16, (64, 2), 2)
    assert compose(first, identity((16, 32), 2)) == [first]


def test_compose_casts_through_a_raw_byte_copy() -> None:
    raw = Copy((64,), 0, (1,), 1, 0, (1,), 1)
    upcast = Copy((32, 2), 0, (2, 0), 2, 0, (4, 128), 4)
    assert compose(raw, upcast) == [simplify(upcast)]
    scattered = Copy((8, 8), 0, (8, 1), 1, 0, (16, 1), 1)
    pieces = compose(scattered, Copy((64,), 0, (2,), 2, 0, (4,), 4))
    assert pieces == [Copy((8, 4), 0, (8, 2), 2, 0, (32, 4), 4)]


def test_compose_widens_elements_again_where_alignment_allows() -> None:
    first = Copy((8, 16), 0, (16, 1), 1, 0, (32, 1), 1)
    second = Copy((64,), 0, (4,), 4, 0, (4,), 4)
    assert compose(first, second) == [Copy((8, 4), 0, (16, 4), 4, 0, (32, 4), 4)]


def test_compose_refuses_half_of_a_converted_element() -> None:
    upcast = Copy((8,), 0, (2,), 2, 0, (4,), 4)
    with pytest.raises(LayoutError, match="converts"):
        compose(Copy((2, 3), 0, (3, 1), 1, 0, (8, 1), 1), upcast)
    with pytest.raises(LayoutError, match="overlap in part"):
        compose(Copy((4,), 0, (4,), 4, 1, (2,), 2), upcast)
    assert compose(Copy((2, 3), 0, (3, 1), 1, 16, (8, 1), 1), upcast) == []
    with pytest.raises(LayoutError, match="stride of 0"):
        compose(Copy((2, 3), 0, (4, 1), 1, 0, (0, 1), 1), upcast)


def test_compose_of_empty_and_of_single_elements() -> None:
    one, none = identity((), 4), identity((3, 0), 4)
    assert compose(one, one) == [one]
    assert compose(none, one) == compose(one, none) == []
    assert compose(one, Copy((), 4, (), 4, 0, (), 4)) == []
    assert byte_pairs(compose(one, Copy((), 2, (), 4, 0, (), 4))) == [(2, 0), (3, 1)]


def test_compose_of_large_tensors_does_not_enumerate() -> None:
    """A column shard of a fused projection meets a transposed, row-sharded reader: few pieces, whatever the extents."""
    rows, columns = 1 << 20, 1 << 14
    shard = box((rows, columns), (0, columns // 4), (rows, columns // 4), 2)
    reader = Copy((columns // 2, rows // 8), columns // 4, (2, 2 * columns), 2, 0, (rows // 4, 2), 2)
    (piece,) = compose(shard, reader)
    assert piece.numel == (columns // 2 - columns // 8) * rows // 8 - (columns // 8) * rows // 8
    coprime = compose(Copy((1 << 30,), 0, (1,), 1, 0, (3,), 1), Copy((1 << 28,), 0, (10,), 1, 0, (1,), 1))
    assert sum(p.numel for p in coprime) == -(-(1 << 28) // 3)
    assert len(coprime) <= 10


def test_compose_of_interleaved_heads_of_a_fused_qkv_weight() -> None:
    """Four trainer shards of a fused QKV weight cover a reader that takes K of each of 8 groups."""
    groups, q_heads, dim, hidden = 8, 4, 16, 32
    rows = groups * (q_heads + 2) * dim
    group = (q_heads + 2) * dim * hidden * 2
    reader = Copy((groups, dim * hidden), q_heads * dim * hidden * 2, (group, 2), 2, 0, (dim * hidden * 2, 2), 2)
    shards = [box((rows, hidden), (k * rows // 4, 0), (rows // 4, hidden), 2) for k in range(4)]
    pieces = [compose(shard, reader) for shard in shards]
    assert [len(p) for p in pieces] == [1, 1, 1, 1]
    assert coverage([p for ps in pieces for p in ps], reader.dst_nbytes) == Coverage((), ())


# subtract, overlaps


@many
@given(st.data(), itemsizes, itemsizes)
def test_subtract_leaves_exactly_the_bytes_outside_the_cover(data: st.DataObject, e: int, f: int) -> None:
    copy, cover = data.draw(writers(e, e, unaligned=True)), data.draw(writers(f, f, unaligned=True))
    covered = set(dst_bytes(cover))
    rest = [pair for pair in byte_pairs([copy]) if pair[1] not in covered]
    pieces = subtract(copy, cover)
    assert byte_pairs(pieces) == rest
    assert all(piece == simplify(piece) for piece in pieces)
    assert overlaps(copy, cover) == overlaps(cover, copy) == (len(rest) < copy.dst_nbytes)


@few
@given(st.data(), itemsizes, itemsizes)
def test_subtract_keeps_converted_elements_whole(data: st.DataObject, e: int, f: int) -> None:
    copy, cover = data.draw(writers(e, f)), data.draw(writers(1, f))
    covered = set(dst_bytes(cover))
    pairs = sorted(pair for piece in subtract(copy, cover) for pair in element_pairs(piece))
    if e != f:
        assert pairs == sorted(pair for pair in element_pairs(copy) if pair[1] not in covered)


def test_subtract_from_and_of_nothing_and_of_half_an_element() -> None:
    copy = Copy((4, 2), 0, (4, 2), 2, 0, (8, 4), 4)
    assert subtract(copy, identity((0,), 4)) == [simplify(copy)]
    assert subtract(identity((0,), 4), copy) == []
    assert subtract(copy, copy) == []
    assert subtract(copy, identity((100,), 1)) == []
    with pytest.raises(LayoutError, match="converts"):
        subtract(copy, identity((6,), 1))


def test_subtract_takes_a_column_block_out_of_a_matrix_in_two_pieces() -> None:
    pieces = subtract(identity((1000, 64), 2), box((1000, 64), (0, 16), (1000, 32), 2))
    assert [p.shape for p in pieces] in ([(1000, 16), (1000, 16)], [(16,), (999, 32), (16,)])


# coverage


def brute_coverage(copies: list[Copy], nbytes: int) -> Coverage:
    count = np.zeros(nbytes, np.int64)
    for copy in copies:
        np.add.at(count, dst_bytes(copy), 1)

    def ranges(chosen: np.ndarray) -> tuple[Pair, ...]:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], chosen.astype(int), [0]]))).tolist()
        return tuple(zip(edges[::2], edges[1::2], strict=True))

    return Coverage(ranges(count == 0), ranges(count > 1))


@many
@given(st.data(), st.booleans())
def test_coverage_counts_the_writers_of_every_byte(data: st.DataObject, algebra: bool) -> None:
    """Both by counting runs and by algebra."""
    copies = []
    for _ in range(data.draw(st.integers(0, 4))):
        e = data.draw(itemsizes)
        copies.append(data.draw(writers(data.draw(itemsizes), e, unaligned=True)))
    nbytes = max((max(dst_bytes(copy)) + 1 for copy in copies), default=0) + data.draw(st.integers(0, 3))
    with pytest.MonkeyPatch.context() as patch:
        if algebra:
            patch.setattr(layout, "_MAX_EXPANDED_RUNS", 0)
        assert coverage(copies, nbytes) == brute_coverage(copies, nbytes)


@few
@given(st.data(), st.booleans())
def test_coverage_of_a_partition_is_complete(data: st.DataObject, algebra: bool) -> None:
    whole, cover = identity((12, 10), 2), data.draw(writers(2, 2))
    parts, inside = subtract(whole, cover), [whole]
    for part in parts:
        inside = [piece for block in inside for piece in subtract(block, part)]
    with pytest.MonkeyPatch.context() as patch:
        if algebra:
            patch.setattr(layout, "_MAX_EXPANDED_RUNS", 0)
        assert coverage(parts + inside, whole.dst_nbytes) == Coverage((), ())
        assert coverage([*parts, whole], whole.dst_nbytes).missing == ()


def test_coverage_of_interlocked_copies_too_many_to_expand() -> None:
    """Eight interleaved copies of 2**30 bytes are complete; one more doubles, and one byte less is missed."""
    copies = [Copy((1 << 30,), 0, (1,), 1, k, (8,), 1) for k in range(8)]
    assert coverage(copies, 1 << 33) == Coverage((), ())
    assert coverage([*copies, identity((8,), 1)], 1 << 33) == Coverage((), ((0, 8),))
    short = Copy(((1 << 30) - 1,), 0, (1,), 1, 3, (8,), 1)
    last = 3 + 8 * ((1 << 30) - 1)
    assert coverage([*copies[:3], short, *copies[4:]], 1 << 33) == Coverage(((last, last + 1),), ())


def test_coverage_counts_a_copy_that_writes_a_place_twice() -> None:
    assert coverage([Copy((3, 2), 0, (0, 1), 1, 0, (0, 1), 1)], 4) == Coverage(((2, 4),), ((0, 2),))
    assert coverage([Copy((3, 2), 0, (0, 1), 1, 0, (1, 1), 1)], 4) == Coverage((), ((1, 3),))


def test_coverage_joins_ranges_and_knows_empty_storages() -> None:
    twice = [identity((4,), 1)] * 2 + [Copy((4,), 0, (1,), 1, 4, (1,), 1)] * 2
    assert coverage(twice, 10) == Coverage(((8, 10),), ((0, 8),))
    assert coverage([], 0) == coverage([identity((0,), 4)], 0) == Coverage((), ())
    assert coverage([], 5) == Coverage(((0, 5),), ())


@pytest.mark.parametrize("copy", [identity((5,), 1), Copy((1,), 0, (1,), 1, -1, (1,), 1)])
def test_coverage_refuses_a_write_outside_the_storage(copy: Copy) -> None:
    with pytest.raises(LayoutError, match="copy 1 writes"):
        coverage([identity((4,), 1), copy], 4)


# simplify, runs, split


any_copy = itemsizes.flatmap(lambda e: st.one_of(writers(e, e), readers(e, e, unaligned=True), writers(e, 4)))


@many
@given(any_copy)
def test_simplify_keeps_the_moves_and_orders_the_dims(copy: Copy) -> None:
    simple = simplify(copy)
    assert sorted(element_pairs(simple)) == sorted(element_pairs(copy))
    assert list(simple.dst_strides) == sorted(simple.dst_strides, reverse=True)
    assert simplify(simple) == simple
    assert 1 not in simple.shape
    assert simple.numel == copy.numel
    assert (simple.src_nbytes, simple.dst_nbytes) == (copy.src_nbytes, copy.dst_nbytes)


def test_simplify_merges_contiguous_dims_and_unifies_empty_copies() -> None:
    assert simplify(identity((2, 3, 1, 4), 2)) == identity((24,), 2)
    assert simplify(identity((1, 1), 2)) == identity((), 2)
    assert simplify(Copy((3, 0), 7, (9, 9), 2, 5, (1, 1), 4)) == Copy((0,), 0, (2,), 2, 0, (4,), 4)


@many
@given(any_copy)
def test_runs_are_the_bytes_of_the_copy_in_destination_order(copy: Copy) -> None:
    src, dst, nbytes = runs(copy)
    assert src.dtype == dst.dtype == np.int64
    assert (np.diff(dst) > 0).all()
    assert nbytes == run_nbytes(copy)
    if copy.src_itemsize == copy.dst_itemsize:
        pairs = [(s + i, d + i) for s, d in zip(src.tolist(), dst.tolist(), strict=True) for i in range(nbytes)]
        assert sorted(pairs) == byte_pairs([copy])
    else:
        assert nbytes == copy.dst_itemsize
        assert sorted(zip(src.tolist(), dst.tolist(), strict=True)) == sorted(element_pairs(copy))


def test_runs_of_blocks_rows_and_nothing() -> None:
    assert run_nbytes(identity((4, 5), 2)) == 40
    assert run_nbytes(box((4, 5), (0, 1), (4, 3), 2)) == 6
    assert run_nbytes(Copy((4, 5), 0, (2, 8), 2, 0, (10, 2), 2)) == 2
    assert run_nbytes(identity((), 8)) == 8
    src, dst, nbytes = runs(identity((0, 3), 2))
    assert len(src) == len(dst) == nbytes == run_nbytes(identity((0,), 2)) == 0


@many
@given(any_copy, st.integers(1, 64))
def test_split_gives_small_pieces_in_destination_order(copy: Copy, limit: int) -> None:
    pieces = split(copy, limit)
    assert all(p.dst_nbytes <= max(limit, copy.dst_itemsize) for p in pieces)
    assert sorted(pair for p in pieces for pair in element_pairs(p)) == sorted(element_pairs(copy))
    starts = [p.dst_offset for p in pieces]
    assert starts == sorted(starts)


def test_split_cuts_the_outermost_dim_and_refuses_a_limit_of_zero() -> None:
    assert [p.dst_nbytes for p in split(identity((10, 8), 2), 70)] == [70, 70, 20]
    rows = split(box((10, 16), (0, 0), (10, 8), 2), 70)
    assert [p.shape for p in rows] == [(4, 8), (4, 8), (2, 8)]
    assert split(identity((0,), 2), 4) == []
    with pytest.raises(LayoutError, match="positive"):
        split(identity((1,), 2), 0)


# Constructors.


@few
@given(st.data(), st.integers(0, 4))
def test_box_is_the_slice_of_a_torch_tensor(data: st.DataObject, rank: int) -> None:
    shape = [data.draw(st.integers(1, 5)) for _ in range(rank)]
    offsets = [data.draw(st.integers(0, n)) for n in shape]
    extents = [data.draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True)]
    whole = torch.zeros(shape, dtype=torch.int16)
    local = torch.arange(1, math.prod(extents) + 1, dtype=torch.int16).reshape(extents)
    if rank > 1:
        local = local.transpose(0, 1).contiguous().transpose(0, 1)
    strides = [2 * s for s in local.stride()]
    memory = torch.as_strided(local, (local.numel(),), (1,)).numpy().view(np.uint8)
    padded = np.concatenate([np.zeros(6, np.uint8), memory])
    moved = np.zeros(whole.numel() * 2, np.uint8)
    apply_copy(box(shape, offsets, extents, 2, local_offset=6, local_strides=strides), padded, moved)
    whole[tuple(slice(o, o + n) for o, n in zip(offsets, extents, strict=True))] = local
    assert (moved.view(np.int16) == whole.numpy().reshape(-1)).all()


@pytest.mark.parametrize(("offsets", "shape"), [((0, 3), (2, 2)), ((-1, 0), (1, 1)), ((0,), (2,)), ((0, 0), (2, -1))])
def test_box_refuses_to_leave_the_tensor(offsets: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="a box of shape"):
        box((2, 4), offsets, shape, 2)


@few
@given(st.lists(st.integers(0, 4), max_size=4))
def test_contiguous_strides_are_those_of_torch(shape: list[int]) -> None:
    assert contiguous_strides(shape, 1) == torch.empty(shape, device="meta").stride()
    assert identity(shape, 2).dst_nbytes == 2 * math.prod(shape)
