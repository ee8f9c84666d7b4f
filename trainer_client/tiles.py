"""Which rows and columns of a matrix a strided copy touches, and how a grid of blocks cuts them. Pure numbers.

Called by `quantizing`. A weight of more than two dims counts as one matrix with its leading dims among the rows (packed
experts); blocks never reach from one of its matrices into the next.

    tiles    a copy onto a matrix -> rectangles of it, each strided in two dims on the other side
    patches  a rectangle -> parts of whole blocks, or of parts of them, small enough to be worked on at a time
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_nixl_plugin.layout import Copy, simplify


@dataclass(frozen=True, slots=True)
class Tile:
    """A rectangle of a matrix, in elements, and where its elements lie in another memory, in bytes."""

    row: int
    column: int
    n_rows: int
    n_columns: int
    offset_bytes: int
    row_stride_bytes: int
    column_stride_bytes: int

    def part(self, row: int, column: int, n_rows: int, n_columns: int) -> Tile:
        """A rectangle of this one; ``row`` and ``column`` count from its corner."""
        at = self.offset_bytes + row * self.row_stride_bytes + column * self.column_stride_bytes
        return Tile(
            self.row + row, self.column + column, n_rows, n_columns, at, self.row_stride_bytes, self.column_stride_bytes
        )

    def within(self, other: Tile) -> Tile | None:
        """The rectangle of this one that lies in ``other``, or None where they are apart."""
        top, left = max(self.row, other.row), max(self.column, other.column)
        bottom = min(self.row + self.n_rows, other.row + other.n_rows)
        right = min(self.column + self.n_columns, other.column + other.n_columns)
        if top >= bottom or left >= right:
            return None
        return self.part(top - self.row, left - self.column, bottom - top, right - left)


def tiles(copy: Copy, width: int) -> Iterator[Tile]:
    """What ``copy`` writes of a contiguous matrix of ``width`` columns at offset 0; where it reads is the other side.

    Usual copies give one tile; rows that are not equally far apart on the other side give several.
    """
    copy = simplify(copy)
    if 0 in copy.shape:
        return
    size = copy.dst_itemsize
    dims = [(d // size, s, n) for d, s, n in zip(copy.dst_strides, copy.src_strides, copy.shape, strict=True)]
    run, step = (dims[-1][2], dims[-1][1]) if dims and dims[-1][0] == 1 else (1, 0)
    outer = dims[:-1] if run > 1 else dims
    rows = next((dim for dim in outer if dim[0] == width), None)
    unrolled = [dim for dim in outer if dim is not rows]
    n_rows, row_step = (rows[2], rows[1]) if rows else (1, 0)
    for index in itertools.product(*(range(n) for _, _, n in unrolled)):
        at = copy.dst_offset // size + sum(i * here for i, (here, _, _) in zip(index, unrolled, strict=True))
        other = copy.src_offset + sum(i * there for i, (_, there, _) in zip(index, unrolled, strict=True))
        row, column = divmod(at, width)
        if column + run <= width:
            yield Tile(row, column, n_rows, run, other, row_step, step)
            continue
        for number in range(n_rows):
            yield from _wrapped(row + number, column, run, width, other + number * row_step, step)


def _wrapped(row: int, column: int, run: int, width: int, other: int, step: int) -> Iterator[Tile]:
    """A run of neighbours that goes on in the next rows."""
    if column:
        head = width - column
        yield Tile(row, column, 1, head, other, 0, step)
        row, run, other = row + 1, run - head, other + head * step
    if run >= width:
        yield Tile(row, 0, run // width, width, other, width * step, step)
    if rest := run % width:
        yield Tile(row + run // width, 0, 1, rest, other + (run - rest) * step, 0, step)


@dataclass(frozen=True, slots=True)
class Grid:
    """Blocks of ``block`` elements over a matrix of ``shape`` that consists of matrices of ``period`` rows each.

    Blocks at the lower and right edges may be smaller.
    """

    shape: tuple[int, int]
    block: tuple[int, int]
    period: int

    @classmethod
    def over(cls, shape: Sequence[int], block: tuple[int, int]) -> Grid:
        """The grid over a weight of two dims or more."""
        *leading, rows, columns = shape
        return cls((math.prod(leading) * rows, columns), block, rows)

    @property
    def n_blocks(self) -> tuple[int, int]:
        """Rows and columns of blocks."""
        per_matrix = -(-self.period // self.block[0])
        return self.shape[0] // max(self.period, 1) * per_matrix, -(-self.shape[1] // self.block[1])

    def sizes(self) -> npt.NDArray[np.int64]:
        """Elements of each block."""
        heights = np.minimum(self.block[0], self.period - np.arange(0, self.period, self.block[0]))
        widths = np.minimum(self.block[1], self.shape[1] - np.arange(0, self.shape[1], self.block[1]))
        return np.outer(np.tile(heights, self.shape[0] // max(self.period, 1)), widths).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Patch:
    """``n_blocks`` whole blocks of a grid, or equal parts of blocks: ``height`` x ``width`` elements of each.

    ``row`` and ``column`` count from the corner of the tile; ``first_block`` is the block of the grid at its corner.
    """

    row: int
    column: int
    height: int
    width: int
    first_block: tuple[int, int]
    n_blocks: tuple[int, int]


def patches(tile: Tile, grid: Grid, most: int) -> Iterator[Patch]:
    """Cut a tile at the blocks of the grid, into patches of about ``most`` elements, but at least one block each."""
    for row, height, block_row, block_rows in _spans(tile.row, tile.n_rows, grid.block[0], grid.period):
        for column, width, block_column, block_columns in _spans(
            tile.column, tile.n_columns, grid.block[1], grid.shape[1]
        ):
            wide = min(block_columns, max(most // (height * width), 1))
            high = min(block_rows, max(most // (height * width * wide), 1))
            for i in range(0, block_rows, high):
                for j in range(0, block_columns, wide):
                    yield Patch(
                        row - tile.row + i * height, column - tile.column + j * width, height, width,
                        (block_row + i, block_column + j), (min(high, block_rows - i), min(wide, block_columns - j)),
                    )  # fmt: skip


def _spans(start: int, count: int, block: int, period: int) -> Iterator[tuple[int, int, int, int]]:
    """A range cut into (start, extent in each block, first block, number of blocks): a head, whole blocks, a tail.

    Blocks begin anew at every multiple of ``period``.
    """
    stop = start + count
    per_period = -(-period // block)
    even = period % block == 0
    while start < stop:
        inside = start % period
        left = stop - start if even else min(stop - start, period - inside)
        number = start // period * per_period + inside // block
        head = min(left, block - inside % block)
        if head < block:
            yield start, head, number, 1
            start += head
        else:
            whole = left // block
            yield start, block, number, whole
            start += whole * block


def rectangles(mask: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int, int, int]]:
    """The set cells of a mask as disjoint rectangles (row, column, rows, columns)."""
    begun: dict[tuple[int, int], int] = {}
    for row, cells in enumerate(np.pad(mask, ((0, 1), (1, 1)))):
        edges = np.flatnonzero(cells[1:] != cells[:-1]).tolist()
        spans = set(zip(edges[::2], edges[1::2], strict=True))
        for span in [span for span in begun if span not in spans]:
            first = begun.pop(span)
            yield first, span[0], row - first, span[1] - span[0]
        for span in spans:
            begun.setdefault(span, row)
