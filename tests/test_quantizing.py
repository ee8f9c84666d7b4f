"""Block FP8 from shards has the bytes of block FP8 from the whole tensor, and every byte of it one sender."""

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer_client.block_fp8 import BlockFP8, choose, quantize
from trainer_client.conversion import Conversion, convert_shards
from trainer_client.exchange import Exchange
from trainer_client.group import RankGroup
from trainer_client.packing import PreparedBatch
from trainer_client.quantizing import Quantizer
from trainer_client.routing import Offer, compute_route
from trainer_client.sharding import LocalShard
from trainer_client.sources import Sources, collect
from trainer_client.tiles import Grid, patches, rectangles, tiles
from vllm_nixl_plugin.errors import InvalidRequest, PushWeightsError
from vllm_nixl_plugin.layout import Copy, identity
from vllm_nixl_plugin.wire import Destination, PlannedCopy, Step, WeightSpec, WorkerPlan

Box = tuple[tuple[int, ...], tuple[int, ...]]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Of very different size from block to block, so that a wrong scale shows."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-12, 6, shape, generator=generator).float().exp2()
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


def as_bytes(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def whole_plan(weights: Sequence[WeightSpec]) -> WorkerPlan:
    """A worker that takes every weight as it is."""
    copies, destinations = [], []
    for number, weight in enumerate(weights):
        copy = identity(weight.shape, getattr(torch, weight.dtype).itemsize)
        copies.append(PlannedCopy(weight=number, destination=number, copy_=copy))
        destinations.append(Destination(names=(weight.name,), nbytes=copy.dst_nbytes, home="shadow"))
    return WorkerPlan(weights=tuple(weights), destinations=tuple(destinations), copies=tuple(copies))


def send(sources: Sources, conversion: Conversion, plan: WorkerPlan, arrived: list[np.ndarray], counts) -> int:
    """What this rank writes to the worker, as `transfer` does it; returns how much of it was packed."""
    offer = Offer(sources.shards, [storage.device for storage in sources.storages], conversion)
    route = compute_route(offer, plan, direct_run_bytes=256, buffer_bytes=4096)
    for src, at, dst, to, nbytes in zip(*vars(route.direct).values(), strict=True):
        memory = torch.empty(0, dtype=torch.uint8).set_(sources.owners[src]).numpy()
        arrived[dst][to : to + nbytes] = memory[at : at + nbytes]
        counts[dst][to : to + nbytes] += 1
    for batch in route.batches:
        buffer = torch.full((batch.nbytes,), 0xEE, dtype=torch.uint8)
        PreparedBatch(batch, sources.owners, buffer, sources.makers).fill()
        for _, at, dst, to, nbytes in zip(*vars(batch.writes).values(), strict=True):
            arrived[dst][to : to + nbytes] = buffer.numpy()[at : at + nbytes]
            counts[dst][to : to + nbytes] += 1
    return route.packed_nbytes


def push(
    ranks: Sequence[dict], scheme: BlockFP8, names: Sequence[str], convert=None, plan_of: Callable = whole_plan
) -> dict[str, np.ndarray]:
    """One push of all ranks (each a thread, with the real messages between them); what arrives at a worker by name."""
    store = torch.distributed.HashStore()
    everything = {s.name: s for model in ranks for s in collect(model).shards}
    failed: list[BaseException] = []
    arrived: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    lock = threading.Lock()
    plans: list[WorkerPlan] = []

    def rank(number: int, model: dict) -> None:
        try:
            sources = collect(model)
            sources = replace(sources, shards=with_replicas(ranks, number, sources))
            conversion = convert_shards(list(everything.values()), convert)
            with Exchange(RankGroup(store, number, len(ranks)), timeout_s=20, rank_timeout_s=20) as exchange:
                quantizer = Quantizer(sources, conversion, scheme, names, exchange)
                bound = quantizer.bind(sources)
                quantizer.measure(exchange)
                with lock:
                    if not plans:
                        plans.append(plan_of(quantizer.conversion.weights))
                        arrived.extend(np.zeros(d.nbytes, np.uint8) for d in plans[0].destinations)
                        counts.extend(np.zeros(d.nbytes, np.uint8) for d in plans[0].destinations)
                    send(bound, quantizer.conversion, plans[0], arrived, counts)
        except BaseException as error:  # noqa: BLE001 - raised again by the test's own thread
            failed.append(error)

    threads = [threading.Thread(target=rank, args=(n, m)) for n, m in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failed:
        raise failed[0]
    assert all((count == 1).all() for count in counts)
    return {d.names[0]: data for d, data in zip(plans[0].destinations, arrived, strict=True)}


def with_replicas(ranks: Sequence[dict], number: int, sources: Sources) -> tuple:
    """The shards with who else has the same box, as `directory.share_boxes` finds out."""
    holders: dict = {}
    for rank, model in enumerate(ranks):
        for shard in collect(model).shards:
            holders.setdefault((shard.name, shard.offsets, shard.shape), []).append(rank)
    found = []
    for shard in sources.shards:
        who = holders[shard.name, shard.offsets, shard.shape]
        found.append(replace(shard, replica_index=who.index(number), replica_count=len(who)))
    return tuple(found)


def shard(tensor: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> LocalShard:
    local = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))].clone()
    return LocalShard(local, tuple(tensor.shape), tuple(offsets))


def expect(got: dict[str, np.ndarray], name: str, weight: Tensor, block: tuple[int, int]) -> None:
    quantized, scale = quantize(weight, block)
    assert np.array_equal(got[name], as_bytes(quantized.view(torch.uint8)))
    assert np.array_equal(got[f"{name}_scale_inv"], as_bytes(scale))


def test_the_definition_is_that_of_vllm_and_deepgemm() -> None:
    cast = pytest.importorskip("vllm.utils.deep_gemm").per_block_cast_to_fp8._torchdynamo_orig_callable
    for dtype in (torch.float32, torch.bfloat16):
        weight = values(300, 520, dtype=dtype)
        weight[:128, :128] = 0
        expected, expected_scale = cast(weight, [128, 128])
        got, scale = quantize(weight)
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scale, expected_scale)
        assert not got[:128, :128].float().any()


def test_block_fp8_is_as_near_as_fp8_can_be() -> None:
    weight = values(256, 384)
    got, scale = quantize(weight)
    back = got.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert (got.float().abs() <= 448).all()
    steps = (weight.abs() * 2.0**-4).clamp(min=2.0**-10 * scale.max())
    assert ((back - weight).abs() <= steps).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_process_sends_the_quantized_tensor(dtype) -> None:
    weight = values(300, 520, dtype=dtype)
    got = push([{"w": weight, "norm": values(7, dtype=dtype)}], BlockFP8(), ["w"])
    expect(got, "w", weight, (128, 128))
    assert np.array_equal(got["norm"], as_bytes(values(7, dtype=dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("cuts", [[128], [100], [1, 77, 130, 131, 299], [64, 128, 192, 256]])
def test_shards_that_cut_blocks_give_the_same_bytes(dtype, dim, cuts) -> None:
    weight = values(300, 300, dtype=dtype)
    edges = [0, *cuts, 300]
    ranks = []
    for a, b in itertools.pairwise(edges):
        offsets, shape = [0, 0], [300, 300]
        offsets[dim], shape[dim] = a, b - a
        ranks.append({"w": shard(weight, offsets, shape)})
    expect(push(ranks, BlockFP8(), ["w"]), "w", weight, (128, 128))


def test_a_mesh_of_two_dims_with_replicas_gives_the_same_bytes_and_shares_the_sending() -> None:
    weight = values(260, 390, dtype=torch.bfloat16)
    boxes = [((r, c), (130, 195)) for r in (0, 130) for c in (0, 195)]
    ranks = [{"w": shard(weight, *box)} for box in boxes for _ in range(2)]
    expect(push(ranks, BlockFP8(block=(64, 32)), ["w"]), "w", weight, (64, 32))


def test_replicas_may_have_their_experts_in_different_order_in_memory() -> None:
    experts = values(6, 130, 70, dtype=torch.bfloat16)
    part = experts[:4]
    turned = part.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    ranks = [{"e": LocalShard(t, (6, 130, 70), (0, 0, 0))} for t in (part.clone(), turned)]
    ranks.append({"e": shard(experts, (4, 0, 0), (2, 130, 70))})
    expect(push(ranks, BlockFP8(block=(64, 64)), ["e"]), "e", experts, (64, 64))


def test_a_rank_without_a_part_of_a_weight_takes_part_all_the_same() -> None:
    weight, other = values(200, 128), values(128, 300, seed=1)
    ranks = [{"w": shard(weight, (0, 0), (70, 128))}, {"v": other}, {"w": shard(weight, (70, 0), (130, 128))}]
    got = push(ranks, BlockFP8(), ["w", "v"])
    expect(got, "w", weight, (128, 128))
    expect(got, "v", other, (128, 128))


def test_packed_experts_are_quantized_one_by_one() -> None:
    experts = values(5, 200, 130)
    ranks = [{"e": shard(experts, (0, 0, 0), (2, 200, 130))}, {"e": shard(experts, (2, 0, 0), (3, 200, 130))}]
    got = push(ranks, BlockFP8(), ["e"])
    expect(got, "e", experts, (128, 128))
    alone = quantize(experts[3])
    assert torch.equal(quantize(experts)[0][3].view(torch.uint8), alone[0].view(torch.uint8))


def test_weights_are_quantized_as_the_checkpoint_has_them_not_as_the_trainer_has() -> None:
    """Split, transposed, cast and scaled on the way: blocks are those of the result."""
    packed = values(3, 130, 400)

    def convert(state):
        for expert in range(3):
            gate, up = state["packed"][expert].chunk(2, dim=1)
            yield f"{expert}.gate", gate.t()
            yield f"{expert}.up", up.t().to(torch.bfloat16) * 0.5

    converted = dict(convert({"packed": packed}))
    ranks = [{"packed": shard(packed, (0, 0, k), (3, 130, n))} for k, n in ((0, 150), (150, 75), (225, 175))]
    got = push(ranks, BlockFP8(block=(64, 64)), list(converted), convert)
    for name, tensor in converted.items():
        expect(got, name, tensor, (64, 64))


def test_interleaved_heads_are_gathered_before_they_are_quantized() -> None:
    """Megatron keeps q, k and v of each group together, so a block of q has rows from several places."""
    fused = values(4 * 96, 160, dtype=torch.bfloat16)

    def convert(state):
        groups = state["qkv"].unflatten(0, (4, 96))
        yield "q", groups[:, :64].flatten(0, 1)
        yield "k", groups[:, 64:80].flatten(0, 1)

    for edges in ([0, 384], [0, 192, 384], [0, 130, 250, 384]):
        ranks = [{"qkv": shard(fused, (a, 0), (b - a, 160))} for a, b in itertools.pairwise(edges)]
        got = push(ranks, BlockFP8(), ["q", "k"], convert)
        for name, tensor in convert({"qkv": fused}):
            expect(got, name, tensor, (128, 128))


def test_a_worker_takes_any_part_of_a_quantized_weight() -> None:
    """Columns of a tensor-parallel rank, transposed, and a cast of the loader behind it."""
    weight = values(192, 256, dtype=torch.bfloat16)

    def plan_of(weights):
        _, s = weights
        half = Copy((192, 128), 128, (256, 1), 1, 0, (1, 192), 1)
        widened = Copy((192, 128), 0, (256, 1), 1, 0, (256, 2), 2)
        copies = (
            PlannedCopy(weight=0, destination=0, copy_=half),
            PlannedCopy(weight=0, destination=1, copy_=widened, program=(Step(op="to", args=(), dtype="bfloat16"),)),
            PlannedCopy(weight=1, destination=2, copy_=identity(s.shape, 4)),
        )
        sizes = {"half": 192 * 128, "wide": 2 * 192 * 128, "scale": identity(s.shape, 4).dst_nbytes}
        destinations = tuple(Destination(names=(n,), nbytes=b, home="shadow") for n, b in sizes.items())
        return WorkerPlan(weights=tuple(weights), destinations=destinations, copies=copies)

    ranks = [{"w": shard(weight, (0, 0), (100, 256))}, {"w": shard(weight, (100, 0), (92, 256))}]
    got = push(ranks, BlockFP8(), ["w"], plan_of=plan_of)
    quantized, scale = quantize(weight)
    assert np.array_equal(got["half"], as_bytes(quantized[:, 128:].t().contiguous().view(torch.uint8)))
    assert np.array_equal(got["wide"], as_bytes(quantized[:, :128].to(torch.bfloat16).contiguous()))
    assert np.array_equal(got["scale"], as_bytes(scale))


def test_values_that_are_no_numbers_and_zeros_stay_in_their_blocks() -> None:
    weight = values(256, 256)
    weight[:128, :128] = 0
    weight[200, 200] = float("nan")
    ranks = [{"w": shard(weight, (0, 0), (190, 256))}, {"w": shard(weight, (190, 0), (66, 256))}]
    got = push(ranks, BlockFP8(), ["w"])
    back = torch.from_numpy(got["w"]).view(torch.float8_e4m3fn).view(256, 256).float()
    assert not back[:128, :128].any()
    assert back[:128, 128:].isfinite().all()
    assert back[200, 200].isnan()
    expect(got, "w", weight, (128, 128))


def test_a_second_push_measures_again() -> None:
    weight = values(150, 150)
    sources = collect({"w": weight})
    quantizer = Quantizer(sources, convert_shards(sources.shards, None), BlockFP8(), ["w"])
    bound = quantizer.bind(sources)
    plan = whole_plan(quantizer.conversion.weights)
    for factor in (1.0, 0.01):
        weight *= factor
        quantizer.measure()
        arrived = [np.zeros(d.nbytes, np.uint8) for d in plan.destinations]
        send(bound, quantizer.conversion, plan, arrived, [np.zeros(d.nbytes, np.uint8) for d in plan.destinations])
        expect(dict(zip(("w", "w_scale_inv"), arrived, strict=True)), "w", weight, (128, 128))


def test_ranks_that_choose_other_weights_are_told() -> None:
    weight = values(200, 128)
    ranks = [{"w": shard(weight, (0, 0), (70, 128))}, {"w": shard(weight, (70, 0), (130, 128))}]
    store = torch.distributed.HashStore()
    failed: list[PushWeightsError] = []

    def rank(number: int) -> None:
        sources = collect(ranks[number])
        conversion = convert_shards(sources.shards, None)
        try:
            with Exchange(RankGroup(store, number, 2), timeout_s=20, rank_timeout_s=20) as exchange:
                Quantizer(sources, conversion, BlockFP8(), ["w"] * number, exchange)
        except PushWeightsError as error:
            failed.append(error)

    threads = [threading.Thread(target=rank, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(failed) == 2
    assert all("quantizes other weights" in error.message for error in failed)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cut_of_any_matrix_gives_the_same_bytes(data) -> None:
    rows, columns = (data.draw(st.integers(1, 40)) for _ in range(2))
    block = (data.draw(st.integers(1, 17)), data.draw(st.integers(1, 17)))
    cut_rows = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows), max_size=2))})
    cut_columns = sorted({0, columns, *data.draw(st.lists(st.integers(0, columns), max_size=2))})
    weight = values(rows, columns, seed=data.draw(st.integers(0, 5)))
    boxes = [
        ((a, c), (b - a, d - c)) for a, b in itertools.pairwise(cut_rows) for c, d in itertools.pairwise(cut_columns)
    ]
    owners = [data.draw(st.integers(0, 2)) for _ in boxes]
    ranks = [{"w": [shard(weight, *b) for b, o in zip(boxes, owners, strict=True) if o == r]} for r in range(3)]
    ranks = [model for model in ranks if model["w"]]
    expect(push(ranks, BlockFP8(block=block), ["w"]), "w", weight, block)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_tiles_are_what_a_copy_writes(data) -> None:
    """Dims of a tensor that becomes rows and columns, in any order in memory, a part of each taken."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=4))
    width_dims = data.draw(st.integers(1, len(shape)))
    order = data.draw(st.permutations(range(len(shape))))
    here = torch.arange(int(np.prod(shape))).view(shape)
    there = torch.empty([shape[i] for i in order]).permute([order.index(i) for i in range(len(shape))])
    index = []
    for n in shape:
        start = data.draw(st.integers(0, n - 1))
        index.append(slice(start, data.draw(st.integers(start + 1, n)), data.draw(st.integers(1, 2))))
    part, other = here[tuple(index)], there[tuple(index)]
    copy = Copy(tuple(part.shape), 4 * other.storage_offset(), tuple(4 * s for s in other.stride()), 4,
                4 * part.storage_offset(), tuple(4 * s for s in part.stride()), 4)  # fmt: skip
    width = int(np.prod(shape[len(shape) - width_dims :]))
    found = {}
    for tile in tiles(copy, width):
        for r in range(tile.n_rows):
            for c in range(tile.n_columns):
                at = (tile.row + r) * width + tile.column + c
                assert at not in found
                assert tile.column + tile.n_columns <= width
                found[at] = tile.offset_bytes + r * tile.row_stride_bytes + c * tile.column_stride_bytes
    addresses = {}
    for at in np.ndindex(*part.shape):
        address = 4 * (other.storage_offset() + sum(i * s for i, s in zip(at, other.stride(), strict=True)))
        addresses[int(part[at])] = address
    assert found == addresses


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_patches_are_the_blocks_of_a_tile(data) -> None:
    period, n = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    columns, block = data.draw(st.integers(1, 12)), (data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5)))
    grid = Grid.over((n, period, columns), block)
    blocks = np.zeros((n, period, columns), int)
    for r in range(period):
        for c in range(columns):
            blocks[:, r, c] = r // block[0] * -(-columns // block[1]) + c // block[1]
    blocks += (np.arange(n) * -(-period // block[0]) * -(-columns // block[1]))[:, None, None]
    blocks = blocks.reshape(n * period, columns)
    assert np.array_equal(np.bincount(blocks.reshape(-1)), grid.sizes().reshape(-1))
    row, column = data.draw(st.integers(0, n * period - 1)), data.draw(st.integers(0, columns - 1))
    n_rows = data.draw(st.integers(1, n * period - row))
    n_columns = data.draw(st.integers(1, columns - column))
    tile = next(tiles(Copy((n_rows, n_columns), 0, (columns, 1), 1, row * columns + column, (columns, 1), 1), columns))
    seen = np.full((n * period, columns), -1)
    for patch in patches(tile, grid, data.draw(st.integers(1, 50))):
        for i in range(patch.n_blocks[0]):
            for j in range(patch.n_blocks[1]):
                r, c = row + patch.row + i * patch.height, column + patch.column + j * patch.width
                part = seen[r : r + patch.height, c : c + patch.width]
                assert part.shape == (patch.height, patch.width)
                assert (part == -1).all()
                part[:] = (patch.first_block[0] + i) * grid.n_blocks[1] + patch.first_block[1] + j
    inside = (slice(row, row + n_rows), slice(column, column + n_columns))
    assert np.array_equal(seen[inside], blocks[inside])
    assert (seen >= 0).sum() == n_rows * n_columns


@given(st.integers(0, 2**20 - 1))
def test_rectangles_are_the_cells_of_a_mask(bits) -> None:
    mask = np.array([bits >> i & 1 for i in range(20)], dtype=bool).reshape(4, 5)
    again = np.zeros((4, 5), int)
    for row, column, n_rows, n_columns in rectangles(mask):
        again[row : row + n_rows, column : column + n_columns] += 1
    assert np.array_equal(again, mask.astype(int))


def offered(**weights: Tensor) -> Conversion:
    return convert_shards(collect(weights).shards, None)


def spec(name: str, dtype: str, *shape: int) -> WeightSpec:
    return WeightSpec(name=name, shape=shape, dtype=dtype)


def test_the_weights_that_are_fp8_with_scales_on_the_servers_are_chosen() -> None:
    conversion = offered(w=values(256, 128), v=values(128, 128), norm=values(128))
    checkpoint = [spec("w", "float8_e4m3fn", 256, 128), spec("w_scale_inv", "float32", 2, 1),
                  spec("v", "bfloat16", 128, 128), spec("norm", "bfloat16", 128)]  # fmt: skip
    assert choose(conversion, BlockFP8(), lambda: [checkpoint, checkpoint]) == ("w",)
    assert choose(conversion, BlockFP8(select=lambda name: name != "w"), list) == ("v",)
    with pytest.raises(InvalidRequest, match=r"w_scale_inv as float32\[2, 1\]; blocks of \(64, 64\) would give"):
        choose(conversion, BlockFP8(block=(64, 64)), lambda: [checkpoint])
    with pytest.raises(InvalidRequest, match="none has a checkpoint"):
        choose(conversion, BlockFP8(), lambda: [[]])
    with pytest.raises(InvalidRequest, match="different ones"):
        choose(conversion, BlockFP8(), lambda: [checkpoint, checkpoint[2:]])
