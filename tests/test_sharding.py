"""The shards of every kind of trainer are its full tensors, cut where its ranks have them."""

import itertools
import math
import random

import pytest
import torch
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from layouts import LAYOUTS, run_ranks
from trainer_client import LocalShard
from trainer_client.flattened import range_boxes
from trainer_client.sharding import dim_runs, local_shards
from trainer_client.sources import collect
from vllm_nixl_plugin.errors import InvalidRequest


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of each world, what went wrong in its layouts; the ranks are started once."""
    known = {}

    def of(world):
        if world not in known:
            known[world] = run_ranks(world, tmp_path_factory.mktemp(f"world-{world}"))
        return known[world]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("world", "layout"), [(world, name) for world in LAYOUTS for name in LAYOUTS[world]])
def test_the_boxes_of_all_ranks_make_up_the_full_tensors(world, layout, outcomes) -> None:
    wrong = outcomes(world)[layout]
    assert not wrong, "\n".join(wrong)


class Spec:
    """What `dim_runs` reads of a DTensorSpec."""

    def __init__(self, placements) -> None:
        self.placements = placements


def split_by_torch(extent, placements, mesh, coordinate):
    """Indices of a dim by the splitting of DTensor's own placements."""
    indices = torch.arange(extent)
    for placement, chunks, index in zip(placements, mesh, coordinate, strict=True):
        if not placement.is_replicate():
            indices = placement._split_tensor(indices, chunks, with_padding=False, contiguous=False)[0][index]
    return indices.tolist()


def test_runs_are_where_the_placements_of_torch_put_the_elements() -> None:
    chance = random.Random(1)
    for _ in range(400):
        mesh = tuple(chance.randint(1, 4) for _ in range(chance.randint(1, 3)))
        kinds = [Shard(0), Replicate(), *(_StridedShard(0, split_factor=n) for n in (2, 3, 4))]
        placements, extent = [chance.choice(kinds) for _ in mesh], chance.randint(0, 40)
        for coordinate in itertools.product(*map(range, mesh)):
            (runs,) = dim_runs("w", (extent,), Spec(placements), mesh, coordinate)
            found = [i for start, stop in runs for i in range(start, stop)]
            assert found == split_by_torch(extent, placements, mesh, coordinate), (extent, placements, mesh, coordinate)
            assert all(one[1] != two[0] for one, two in itertools.pairwise(runs))


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (3, 1, 2, 2)])
def test_a_range_of_elements_is_a_few_boxes(shape) -> None:
    indices = torch.arange(math.prod(shape)).view(shape)
    for start, stop in itertools.combinations(range(indices.numel() + 1), 2):
        boxes = list(range_boxes(shape, start, stop))
        parts = [indices[tuple(slice(o, o + n) for o, n in zip(at, extents, strict=True))] for at, extents in boxes]
        assert torch.cat([part.reshape(-1) for part in parts]).tolist() == list(range(start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_declared_box_lies_where_its_tensor_does() -> None:
    memory = torch.zeros(4, 6)
    (shard,) = collect({"w": LocalShard(memory[1:3, 2:5], (10, 3), (4, 0))}).shards
    assert (shard.global_shape, shard.offsets, shard.shape) == ((10, 3), (4, 0), (2, 3))
    assert (shard.offset_bytes, shard.strides_bytes) == (32, (24, 4))


def test_a_rank_that_has_no_box_of_a_tensor_has_no_shard_of_it() -> None:
    given = {"a": [], "b": LocalShard(torch.zeros(0, 3), (2, 3), (2, 0)), "c": torch.zeros(0)}
    assert [shard.name for shard in collect(given).shards] == ["c"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (LocalShard(torch.zeros(2), (2, 2), (0, 0)), r"w is declared with global_shape \(2, 2\).*as many dims"),
        (LocalShard(torch.zeros(2), (4,), (3,)), r"w is declared as a box of shape \(2,\).*leaves the global shape"),
        (LocalShard(torch.zeros(2), (4,), (-1,)), r"w is declared as a box .*leaves"),
        ([LocalShard(torch.zeros(2), (4,), (0,)), LocalShard(torch.zeros(2), (4,), (1,))], r"w .*boxes .*overlap"),
        ([LocalShard(torch.zeros(2), (4,), (0,)), LocalShard(torch.zeros(2), (5,), (2,))], r"w .*one dtype and global"),
        (
            [LocalShard(torch.zeros(2), (4,), (0,)), LocalShard(torch.zeros(2).half(), (4,), (2,))],
            r"w is declared as torch.float32\[4\] and as torch.float16\[4\]",
        ),
        ([torch.zeros(2)], r"w has Tensor in its list, expected LocalShard"),
        (LocalShard(LocalShard(torch.zeros(2), (2,), (0,)), (2,), (0,)), r"w has a LocalShard in a LocalShard"),
        (LocalShard(3, (2,), (0,)), r"w is int, expected a torch.Tensor"),
        (LocalShard(torch.zeros(2, device="meta"), (2,), (0,)), r"w is on the meta device"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused_with_the_name(value, message) -> None:
    with pytest.raises(InvalidRequest, match=message):
        local_shards("w", value)


def test_placements_that_are_no_part_of_the_values_are_refused() -> None:
    class Elsewhere:
        def is_partial(self) -> bool:
            return False

        is_replicate = is_partial

    with pytest.raises(InvalidRequest, match=r"w is a DTensor with placement .*expected Shard or Replicate"):
        dim_runs("w", (4,), Spec([Elsewhere()]), (2,), (0,))
