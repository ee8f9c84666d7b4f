"""Blocks of a quantized weight that several ranks have parts of: found once, their maxima exchanged in every push.

A block that one rank has whole needs nobody else; replicas of it share its sending as they share the weight's. All
others, called cut, are told to all ranks when a `Quantizer` is made. From then on every rank knows whose block is
whose: each rank sends the maxima of its parts and takes the largest that anybody sent, and the lowest rank that has a
part sends the scale to the servers. Only numbers of cut blocks travel, 8 bytes each to make it and 4 in every push.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trainer_client.tiles import Grid, Tile, patches
from vllm_nixl_plugin.errors import InvalidRequest
from vllm_nixl_plugin.wire import WeightSpec

Share = tuple[int, int]
"""Replica index and count: this process sends its share of so many."""
_WHOLE_TILE = 1 << 62


class Ranks(Protocol):
    """The ranks of a trainer in one push: an `exchange.Exchange`."""

    rank: int

    def post(self, stage: str, answer: bytes, /) -> None:
        """This rank's message in a stage."""
        ...

    def gather(self, stage: str, /) -> list[bytes]:
        """The messages of all ranks in a stage, in their order."""
        ...


@dataclass(frozen=True, slots=True)
class Held:
    """A rectangle of weight number ``weight`` that this process has, and its share of sending it."""

    weight: int
    tile: Tile
    share: Share


class CutBlocks:
    """Which blocks here are cut, and which are whole.

    ``cut``: for each weight that is here, the numbers (row by row) of its cut blocks. ``whole``: for each of them, by
    share, a mask of the others.
    """

    def __init__(
        self, weights: Sequence[WeightSpec], grids: Sequence[Grid], held: Iterable[Held], ranks: Ranks | None
    ) -> None:
        """All ``ranks`` make theirs in the same push, of the same weights. Errors: InvalidRequest."""
        by_weight: dict[int, list[Held]] = {}
        for each in held:
            by_weight.setdefault(each.weight, []).append(each)
        self.cut: dict[int, npt.NDArray[np.int64]] = {}
        self.whole: dict[int, dict[Share, npt.NDArray[np.bool_]]] = {}
        for number, rectangles in by_weight.items():
            self.cut[number], self.whole[number] = _judge(grids[number], rectangles)
        starts = np.cumsum([0, *(grid.n_blocks[0] * grid.n_blocks[1] for grid in grids)])
        keys = [starts[number] + cut for number, cut in sorted(self.cut.items())]
        self._keys = np.concatenate([*keys, np.empty(0, np.int64)])
        self._meetings: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        self._mine = np.ones(len(self._keys), dtype=np.bool_)
        self._needed = False
        if ranks is not None:
            self._meet(ranks, weights)

    def owned(self) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """For each weight, the numbers of the cut blocks whose scales this process sends."""
        at = 0
        for number, cut in sorted(self.cut.items()):
            yield number, cut[self._mine[at : at + len(cut)]]
            at += len(cut)

    @property
    def is_needed(self) -> bool:
        """Whether some rank has a cut block, so that all of them have to call `largest` in every push."""
        return self._needed

    def largest(self, values: npt.NDArray[np.float32], ranks: Ranks) -> npt.NDArray[np.float32]:
        """The largest of what all ranks have, for the blocks of `cut` in the order of weights; not a number wins."""
        found = values.copy()
        ranks.post("largest", values.tobytes())
        for (mine, theirs), data in zip(self._meetings, ranks.gather("largest"), strict=True):
            found[mine] = np.maximum(found[mine], np.frombuffer(data, np.float32)[theirs])
        return found

    def _meet(self, ranks: Ranks, weights: Sequence[WeightSpec]) -> None:
        names = hashlib.sha256(repr([(w.name, w.shape) for w in weights]).encode()).digest()
        ranks.post("cut", names + self._keys.tobytes())
        for rank, answer in enumerate(ranks.gather("cut")):
            if answer[: len(names)] != names:
                raise InvalidRequest(
                    f"rank {rank} quantizes other weights than rank {ranks.rank}: give all ranks the same quantize"
                )
            keys = np.frombuffer(answer, np.int64, offset=len(names))
            _, mine, theirs = np.intersect1d(self._keys, keys, assume_unique=True, return_indices=True)
            self._meetings.append((mine, theirs))
            self._needed |= len(keys) > 0
            if rank < ranks.rank:
                self._mine[mine] = False


def _judge(grid: Grid, held: Sequence[Held]) -> tuple[npt.NDArray[np.int64], dict[Share, npt.NDArray[np.bool_]]]:
    """Which blocks of one weight are cut, and for each share of the others, which they are."""
    counts = np.zeros(grid.n_blocks, dtype=np.int64)
    times = np.zeros(grid.n_blocks, dtype=np.int64)
    copied = np.zeros(grid.n_blocks, dtype=np.bool_)
    shares: dict[Share, npt.NDArray[np.bool_]] = {}
    for each in held:
        mask = shares.setdefault(each.share, np.zeros(grid.n_blocks, dtype=np.bool_))
        touched = np.zeros(grid.n_blocks, dtype=np.bool_)
        for patch in patches(each.tile, grid, _WHOLE_TILE):
            (i, j), (n, m) = patch.first_block, patch.n_blocks
            counts[i : i + n, j : j + m] += patch.height * patch.width
            touched[i : i + n, j : j + m] = True
        times += touched
        copied |= touched & (each.share[1] > 1)
        mask |= touched
    # Parts that meet in a block may have other holders than each other: its ranks find out together.
    cut = (times > 0) & ((counts < grid.sizes()) | ((times > 1) & copied))
    return np.flatnonzero(cut), {share: mask & ~cut for share, mask in shares.items()}
