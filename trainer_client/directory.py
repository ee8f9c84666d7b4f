"""Stage 2 among several ranks: what tensors there are in all, and who sends which part of what several ranks hold.

    agree_on_tensors    every rank learns names, dtypes and global shapes of all ranks' tensors (not their boxes)
    share_boxes         each rank learns of its own shards which replica of how many they are

No rank sees the whole map. A tensor has a *home* by the hash of its name: one of the first `HOMES` ranks, which hears
from all ranks which boxes of it they hold, checks that together they are the tensor, every element once (the same box
twice makes replicas), and answers each holder. `WeightClient` does this when the layout of any rank has changed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trainer_client.exchange import Exchange
from trainer_client.group import told
from trainer_client.sources import Shard
from vllm_nixl_plugin.errors import InvalidRequest

HOMES = 16
"""More homes mean less to hear for each, and more messages."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and shape, in elements of the global tensor."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a name means on every rank."""

    name: str
    dtype: str
    itemsize: int
    global_shape: tuple[int, ...]


def tensors_of(shards: Iterable[Shard]) -> tuple[TensorSpec, ...]:
    """What the shards are boxes of, in their order."""
    found = {s.name: TensorSpec(s.name, s.dtype, s.itemsize, s.global_shape) for s in shards}
    return tuple(found.values())


def pack_tensors(tensors: Sequence[TensorSpec]) -> bytes:
    """The same tensors in the same order give the same bytes."""
    rows = [[t.name, t.dtype, t.itemsize, t.global_shape] for t in tensors]
    return zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 1)


def _unpack_tensors(data: bytes) -> tuple[TensorSpec, ...]:
    rows = json.loads(zlib.decompress(data))
    return tuple(TensorSpec(name, dtype, itemsize, tuple(shape)) for name, dtype, itemsize, shape in rows)


def agree_on_tensors(exchange: Exchange, holders: Mapping[str, int], packed: bytes) -> tuple[TensorSpec, ...]:
    """The tensors of all ranks, in the same order on every rank.

    ``holders``: each different set of tensors by its digest, and a rank that has it, which leaves it on the board.
    ``packed``: this rank's own. Errors: InvalidRequest when two ranks mean different tensors by one name.
    """
    for digest, rank in holders.items():
        if rank == exchange.rank:
            exchange.put(f"tensors/{digest}", packed)
    found: dict[str, tuple[TensorSpec, int]] = {}
    blobs = exchange.take([f"tensors/{digest}" for digest in holders])
    for rank, blob in zip(holders.values(), blobs, strict=True):
        for tensor in _unpack_tensors(blob):
            known, first = found.setdefault(tensor.name, (tensor, rank))
            if known != tensor:
                raise InvalidRequest(
                    f"{tensor.name} is {known.dtype}{list(known.global_shape)} on rank {first}, but "
                    f"{tensor.dtype}{list(tensor.global_shape)} on rank {rank}: a name means one tensor on all ranks, "
                    "with its global shape. Number layers and experts globally, and declare what is a part of a "
                    "tensor as a DTensor or LocalShard", ranks=[first, rank],
                )  # fmt: skip
    return tuple(tensor for tensor, _ in found.values())


def share_boxes(exchange: Exchange, tensors: Sequence[TensorSpec], shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """The shards with their ``replica_index`` and ``replica_count``. ``tensors``: those of all ranks.

    Errors: InvalidRequest naming tensor, ranks and boxes, where boxes overlap by half or leave a hole.
    """
    number = {tensor.name: i for i, tensor in enumerate(tensors)}
    homes = min(exchange.size, HOMES)
    mine: list[list[int]] = [[] for _ in range(homes)]
    for index, shard in enumerate(shards):
        mine[_home(shard.name, homes)].append(index)
    for home, indices in enumerate(mine):
        rows = [[number[shards[i].name], shards[i].offsets, shards[i].shape] for i in indices]
        exchange.put(f"boxes/{home}/{exchange.rank}", _pack(rows))
    if exchange.rank < homes:
        heard = [_unpack(data) for data in exchange.gather(f"boxes/{exchange.rank}")]
        own = [i for i, tensor in enumerate(tensors) if _home(tensor.name, homes) == exchange.rank]
        for rank, answer in enumerate(_divide(tensors, own, heard)):
            exchange.put(f"shares/{exchange.rank}/{rank}", _pack(answer))
    shared = list(shards)
    told_shares = exchange.take([f"shares/{home}/{exchange.rank}" for home in range(homes)])
    for indices, data in zip(mine, told_shares, strict=True):
        for i, (replica, count) in zip(indices, _unpack(data), strict=True):
            shared[i] = replace(shards[i], replica_index=replica, replica_count=count)
    return tuple(shared)


def _divide(
    tensors: Sequence[TensorSpec], own: Sequence[int], heard: Sequence[list[Any]]
) -> list[list[tuple[int, int]]]:
    """For each rank and each row that it sent: which replica of how many its box is."""
    holders: dict[int, dict[Box, list[tuple[int, int]]]] = {index: {} for index in own}
    for rank, rows in enumerate(heard):
        for place, (index, offsets, shape) in enumerate(rows):
            holders[index].setdefault((tuple(offsets), tuple(shape)), []).append((rank, place))
    answers: list[list[tuple[int, int]]] = [[(0, 1)] * len(rows) for rows in heard]
    for index, boxes in holders.items():
        tensor = tensors[index]
        check_cover(tensor, {box: [rank for rank, _ in places] for box, places in boxes.items()})
        for at, places in enumerate(boxes.values()):
            turn = (zlib.crc32(tensor.name.encode()) >> 8) + at
            for i, (rank, place) in enumerate(places):
                answers[rank][place] = (i + turn) % len(places), len(places)
    return answers


def check_cover(tensor: TensorSpec, boxes: Mapping[Box, Sequence[int]]) -> None:
    """The boxes, each with its ranks, are the whole tensor, every element once. Errors: InvalidRequest."""
    whole = tensor.global_shape
    if 0 in whole:
        return
    solid = [box for box in boxes if 0 not in box[1]]
    if solid == [((0,) * len(whole), whole)]:
        return
    edges = [
        np.unique([0, n, *(b[0][d] for b in solid), *(b[0][d] + b[1][d] for b in solid)]) for d, n in enumerate(whole)
    ]
    count = np.zeros([len(of) - 1 for of in edges], dtype=np.int32)
    spans = []
    for offsets, shape in solid:
        ends = [np.searchsorted(of, (o, o + n)) for of, o, n in zip(edges, offsets, shape, strict=True)]
        spans.append(tuple(slice(int(start), int(stop)) for start, stop in ends))
        count[spans[-1]] += 1
    if (count == 1).all():
        return
    cell = tuple(int(i) for i in np.argwhere(count != 1)[0])
    at = tuple(int(of[i]) for of, i in zip(edges, cell, strict=True))
    sizes = tuple(int(of[i + 1] - of[i]) for of, i in zip(edges, cell, strict=True))
    there = [box for box, span in zip(solid, spans, strict=True) if _holds(span, cell)]
    if not there:
        raise InvalidRequest(
            f"no rank has elements {_range(at, sizes)} of {tensor.name} {list(whole)}; the ranks have "
            f"{_told(dict(list(boxes.items())[:4]))}{' …' if len(boxes) > 4 else ''}. Push the missing part too, or "
            "call push_weights on the ranks that have it", tensor=tensor.name,
        )  # fmt: skip
    raise InvalidRequest(
        f"boxes of {tensor.name} {list(whole)} overlap by half: {_told({box: boxes[box] for box in there})}. Boxes are "
        "either the same (replicas, which share the sending) or apart: check the offsets and global shape",
        tensor=tensor.name, ranks=sorted({rank for box in there for rank in boxes[box]}),
    )  # fmt: skip


def _holds(span: Sequence[slice], cell: Sequence[int]) -> bool:
    return all(s.start <= i < s.stop for s, i in zip(span, cell, strict=True))


def _range(offsets: Sequence[int], shape: Sequence[int]) -> str:
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(offsets, shape, strict=True)) + "]"


def _told(boxes: Mapping[Box, Sequence[int]]) -> str:
    return ", ".join(f"{_range(*box)} on {told(ranks)}" for box, ranks in boxes.items())


def _home(name: str, homes: int) -> int:
    return zlib.crc32(name.encode()) % homes


def _pack(rows: Sequence[object]) -> bytes:
    return zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 1)


def _unpack(data: bytes) -> list[Any]:
    found: list[Any] = json.loads(zlib.decompress(data))
    return found
