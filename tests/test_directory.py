"""Ranks learn of their own boxes who else has them, and what does not add up to a tensor is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranks import groups_of, on_all
from trainer_client import directory
from trainer_client.directory import TensorSpec, check_cover, share_boxes
from trainer_client.exchange import Exchange
from trainer_client.sources import Shard
from vllm_nixl_plugin.errors import InvalidRequest


def shard(name: str, whole: tuple[int, ...], offsets: tuple[int, ...], shape: tuple[int, ...]) -> Shard:
    return Shard(name, "float32", 4, whole, offsets, shape, 0, 0, tuple(4 for _ in shape))


def shared(parts: list[list[Shard]]) -> list:
    tensors = {s.name: TensorSpec(s.name, s.dtype, s.itemsize, s.global_shape) for part in parts for s in part}
    groups = groups_of(len(parts))

    def of(rank: int) -> tuple[Shard, ...]:
        with Exchange(groups[rank], timeout_s=20, rank_timeout_s=20) as exchange:
            return share_boxes(exchange, tuple(tensors.values()), parts[rank])

    return on_all([lambda rank=rank: of(rank) for rank in range(len(parts))])


@pytest.mark.parametrize("homes", [1, 2, 16])
def test_replicas_are_counted_and_numbered_once_each(monkeypatch, homes: int) -> None:
    monkeypatch.setattr(directory, "HOMES", homes)
    parts = [[shard("norm", (8,), (0,), (8,)), shard("w", (4, 4), (2 * (rank % 2), 0), (2, 4))] for rank in range(4)]
    found = shared(parts)
    norms, matrices = zip(*found, strict=True)
    assert sorted(s.replica_index for s in norms) == [0, 1, 2, 3]
    assert {s.replica_count for s in norms} == {4}
    for half in (0, 2):
        assert sorted(s.replica_index for s in matrices if s.offsets[0] == half) == [0, 1]
    assert {s.replica_count for s in matrices} == {2}


def test_several_boxes_of_a_tensor_on_a_rank_keep_their_order() -> None:
    one = [shard("w", (6, 2), (at, 0), (2, 2)) for at in (4, 0)]
    two = [shard("w", (6, 2), (2, 0), (2, 2)), shard("v", (3,), (0,), (3,))]
    found = shared([one, two])
    assert [list(part) for part in found] == [one, two]


def test_what_is_missing_is_the_error_of_all_ranks() -> None:
    found = shared([[shard("w", (6, 2), (0, 0), (2, 2))], [shard("w", (6, 2), (3, 0), (3, 2))]])
    assert all(isinstance(error, InvalidRequest) for error in found), found
    assert len({str(error) for error in found}) == 1


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ({((0, 0), (2, 4)): [0], ((2, 0), (1, 4)): [1]}, r"no rank has elements \[3:4, 0:4\] of w \[4, 4\]"),
        ({((0, 0), (3, 4)): [0], ((2, 0), (2, 4)): [1]}, r"\[0:3, 0:4\] on rank 0, \[2:4, 0:4\] on rank 1"),
        ({((0, 0), (4, 4)): [0, 2], ((1, 1), (1, 1)): [1]}, r"overlap by half: \[0:4, 0:4\] on ranks 0, 2"),
        ({}, r"no rank has elements \[0:4, 0:4\]"),
    ],
)
def test_holes_and_overlaps_are_refused_with_ranks_and_boxes(boxes, message) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_cover(TensorSpec("w", "float32", 4, (4, 4)), boxes)


def test_scalars_and_tensors_without_elements_are_covered() -> None:
    check_cover(TensorSpec("s", "float32", 4, ()), {((), ()): [0, 1]})
    check_cover(TensorSpec("e", "float32", 4, (0, 3)), {})
    check_cover(TensorSpec("e", "float32", 4, (2,)), {((0,), (2,)): [0], ((2,), (0,)): [1]})
    with pytest.raises(InvalidRequest):
        check_cover(TensorSpec("s", "float32", 4, ()), {})


@given(st.data())
def test_any_cutting_covers_and_any_other_does_not(data) -> None:
    whole = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    boxes = [((0,) * len(whole), whole)]
    for _ in range(data.draw(st.integers(0, 5))):
        offsets, shape = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(whole) - 1))
        at = data.draw(st.integers(0, shape[dim]))
        left = (*shape[:dim], at, *shape[dim + 1 :])
        right = (*shape[:dim], shape[dim] - at, *shape[dim + 1 :])
        moved = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        boxes += [box for box in ((offsets, left), (moved, right)) if 0 not in box[1]]
    spec = TensorSpec("w", "float32", 4, whole)
    check_cover(spec, {box: [0] for box in boxes})
    gone = data.draw(st.integers(0, len(boxes) - 1))
    with pytest.raises(InvalidRequest):
        check_cover(spec, {box: [0] for i, box in enumerate(boxes) if i != gone})
