"""Routes put every byte where torch indexing puts it, once, whatever the layouts on both sides."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer_client.batching import ALIGNMENT
from trainer_client.conversion import convert_shards
from trainer_client.routing import Offer, Route, compute_route
from trainer_client.sources import Shard, Sources, collect
from vllm_nixl_plugin.errors import PlanRefused
from vllm_nixl_plugin.layout import Copy, identity
from vllm_nixl_plugin.wire import Destination, PlannedCopy, Step, WeightSpec, WorkerPlan

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def between(src: Tensor, dst: Tensor) -> Copy:
    a, b = src.element_size(), dst.element_size()
    return Copy(
        tuple(dst.shape),
        src.storage_offset() * a,
        tuple(s * a for s in src.stride()),
        a,
        dst.storage_offset() * b,
        tuple(s * b for s in dst.stride()),
        b,
    )


@dataclass
class Worker:
    """A plan under construction, and the destination memory that it should fill, filled by torch."""

    weights: dict[str, Tensor]
    destinations: list[Tensor] = field(default_factory=list)
    copies: list[PlannedCopy] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.weights = {name: w.clone(memory_format=torch.contiguous_format) for name, w in self.weights.items()}

    def destination(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.destinations.append(torch.zeros(tuple(shape), dtype=dtype))
        return self.destinations[-1]

    def load(self, dst: Tensor, weight: str, view: Callable[[Tensor], Tensor], program: tuple[Step, ...] = ()) -> None:
        """``dst``, a view of the last destination, takes ``view`` of the weight."""
        src = view(self.weights[weight])
        copy = between(src, dst)
        for step in program:
            src = src.to(getattr(torch, step.dtype)) if step.op == "to" else getattr(torch, step.op)(src, *step.args)
        dst.copy_(src)
        index = list(self.weights).index(weight)
        self.copies.append(
            PlannedCopy(weight=index, destination=len(self.destinations) - 1, copy_=copy, program=program)
        )

    def plan(self) -> WorkerPlan:
        return WorkerPlan(
            weights=tuple(
                WeightSpec(name=n, shape=tuple(t.shape), dtype=name_of(t.dtype)) for n, t in self.weights.items()
            ),
            destinations=tuple(
                Destination(names=(f"p{i}",), nbytes=t.untyped_storage().nbytes(), home="shadow")
                for i, t in enumerate(self.destinations)
            ),
            copies=tuple(self.copies),
        )


def raw(storage: torch.UntypedStorage) -> np.ndarray:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def strided(memory: np.ndarray, dtype: str, shape: Sequence[int], offset: int, strides: Sequence[int]) -> Tensor:
    """A copy of the elements, gathered byte by byte."""
    size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    at = np.full((1,) * len(shape), offset)
    for d, (extent, stride) in enumerate(zip(shape, strides, strict=True)):
        at = at + (np.arange(extent) * stride).reshape([-1 if i == d else 1 for i in range(len(shape))])
    at = np.broadcast_to(at, tuple(shape)).reshape(-1, 1) + np.arange(size)
    return torch.from_numpy(memory[at].reshape(-1).copy()).view(getattr(torch, dtype)).reshape(tuple(shape))


def execute(route: Route, sources: Sources, plan: WorkerPlan, limit: int, *, whole: bool = True) -> list[np.ndarray]:
    """What the route leaves in the destinations, with plain byte copies; every byte at most once."""
    storages = [raw(owner) for owner in sources.owners]
    out = [np.zeros(d.nbytes, np.uint8) for d in plan.destinations]
    written = [np.zeros(d.nbytes, np.uint8) for d in plan.destinations]

    def write(memory: np.ndarray, at: int, dst: int, to: int, nbytes: int) -> None:
        out[dst][to : to + nbytes] = memory[at : at + nbytes]
        written[dst][to : to + nbytes] += 1

    for src, at, dst, to, nbytes in zip(*vars(route.direct).values(), strict=True):
        write(storages[src], at, dst, to, nbytes)
    for batch in route.batches:
        assert batch.nbytes <= limit
        buffer = np.full(batch.nbytes, 0xEE, np.uint8)
        for item in batch.items:
            c = item.copy
            if not item.program:
                values = strided(
                    storages[item.storage], "uint8", (*c.shape, c.src_itemsize), c.src_offset, (*c.src_strides, 1)
                )
            else:
                values = strided(storages[item.storage], item.dtype, c.shape, c.src_offset, c.src_strides)
                for step in item.program:
                    dtype = getattr(torch, step.dtype)
                    values = values.to(dtype) if step.op == "to" else getattr(torch, step.op)(values, *step.args)
                assert values.element_size() == c.dst_itemsize
                assert c.dst_offset % c.dst_itemsize == 0
            data = values.contiguous().reshape(-1).view(torch.uint8).numpy().reshape(-1, c.dst_itemsize)
            at = np.full((1,) * len(c.shape), c.dst_offset)
            for d, (extent, stride) in enumerate(zip(c.shape, c.dst_strides, strict=True)):
                at = at + (np.arange(extent) * stride).reshape([-1 if i == d else 1 for i in range(len(c.shape))])
            buffer[np.broadcast_to(at, c.shape).reshape(-1, 1) + np.arange(c.dst_itemsize)] = data
        for _, at, dst, to, nbytes in zip(*vars(batch.writes).values(), strict=True):
            write(buffer, at, dst, to, nbytes)
    covered = sum(c.copy_.dst_nbytes for c in plan.copies)
    assert route.nbytes == sum(int(w.sum()) for w in written)
    assert route.nbytes == covered or not whole
    assert max((int(w.max(initial=0)) for w in written), default=0) <= 1
    return out


def check(model: dict[str, Tensor], worker: Worker, convert=None, *, direct: int = 64, buffer: int = 256) -> Route:
    sources = collect(model)
    plan = worker.plan()
    offer = Offer(sources.shards, [s.device for s in sources.storages], convert_shards(sources.shards, convert))
    route = compute_route(offer, plan, direct_run_bytes=direct, buffer_bytes=buffer)
    for found, expected in zip(execute(route, sources, plan, buffer), worker.destinations, strict=True):
        assert found.tobytes() == raw(expected.untyped_storage()).tobytes()
    return route


def random_bits(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator).to(dtype)
    return torch.randint(0, 250, tuple(shape), generator=generator).to(dtype)


def test_a_long_contiguous_weight_is_one_direct_run() -> None:
    model = {"w": torch.randn(32, 16)}
    worker = Worker(model)
    worker.load(worker.destination((32, 16), torch.float32), "w", lambda w: w)
    route = check(model, worker)
    assert len(route.direct) == 1
    assert route.batches == ()


def test_rows_of_fused_weights_in_one_destination_are_direct_runs() -> None:
    model = {"q": torch.randn(8, 16), "k": torch.randn(4, 16), "v": torch.randn(4, 16)}
    worker = Worker(model)
    qkv = worker.destination((8, 16), torch.float32)
    worker.load(qkv[:4], "q", lambda w: w[4:])
    worker.load(qkv[4:6], "k", lambda w: w[2:])
    worker.load(qkv[6:], "v", lambda w: w[2:])
    assert len(check(model, worker).direct) == 3


def test_columns_of_a_weight_with_short_rows_are_packed_into_one_write() -> None:
    model = {"o": torch.randn(16, 16)}
    worker = Worker(model)
    worker.load(worker.destination((16, 4), torch.float32), "o", lambda w: w[:, 4:8])
    route = check(model, worker)
    assert len(route.direct) == 0
    assert [len(batch.writes) for batch in route.batches] == [1]


def test_interleaved_weights_that_fill_a_destination_leave_the_buffer_as_one_write() -> None:
    model = {"a": torch.randn(8, 4), "b": torch.randn(8, 4)}
    worker = Worker(model)
    both = worker.destination((8, 8), torch.float32)
    worker.load(both[:, :4], "a", lambda w: w)
    worker.load(both[:, 4:], "b", lambda w: w)
    route = check(model, worker)
    assert [len(batch.writes) for batch in route.batches] == [1]


def test_interleaved_weights_larger_than_the_buffer_are_cut_at_common_rows() -> None:
    model = {"a": torch.randn(64, 4), "b": torch.randn(64, 12)}
    worker = Worker(model)
    both = worker.destination((64, 16), torch.float32)
    worker.load(both[:, :4], "a", lambda w: w)
    worker.load(both[:, 4:], "b", lambda w: w)
    route = check(model, worker)
    assert [len(batch.writes) for batch in route.batches] == [1] * 16


def test_short_writes_into_a_destination_with_holes_are_packed_densely() -> None:
    model = {"a": torch.randn(8, 4)}
    worker = Worker(model)
    worker.load(worker.destination((8, 8), torch.float32)[:, 2:6], "a", lambda w: w)
    route = check(model, worker)
    assert [(batch.nbytes, len(batch.writes)) for batch in route.batches] == [(128, 8)]


def test_experts_that_the_trainer_packs_and_the_worker_fuses_join_to_one_run() -> None:
    gate_up = torch.randn(4, 8, 16)
    weights = {f"e{i}.{part}": gate_up[i, 4 * j : 4 * j + 4] for i in range(4) for j, part in enumerate(("gate", "up"))}
    worker = Worker(weights)
    w13 = worker.destination((4, 8, 16), torch.float32)
    for i in range(4):
        worker.load(w13[i, :4], f"e{i}.gate", lambda w: w)
        worker.load(w13[i, 4:], f"e{i}.up", lambda w: w)

    def convert(state):
        for i, expert in enumerate(state["gate_up"].unbind(0)):
            yield from zip((f"e{i}.gate", f"e{i}.up"), expert.chunk(2), strict=True)

    route = check({"gate_up": gate_up}, worker, convert)
    assert len(route.direct) == 1


def test_a_cast_in_the_trainer_and_one_in_the_worker_run_in_this_order() -> None:
    master = torch.randn(16, 16, dtype=torch.float64)
    worker = Worker({"w": master.to(torch.bfloat16)})
    worker.load(worker.destination((16, 8), torch.float32), "w", lambda w: w[:, 8:], (Step(op="to", dtype="float32"),))
    check({"w": master}, worker, lambda state: {"w": state["w"].to(torch.bfloat16)})


def test_a_plan_for_a_weight_that_is_not_offered_is_refused_by_name() -> None:
    sources = collect({"a": torch.randn(4)})
    worker = Worker({"b": torch.randn(4)})
    worker.load(worker.destination((4,), torch.float32), "b", lambda w: w)
    offer = Offer(sources.shards, ["cpu"], convert_shards(sources.shards, None))
    with pytest.raises(PlanRefused, match="b"):
        compute_route(offer, worker.plan(), direct_run_bytes=1, buffer_bytes=64)


def test_a_plan_that_reads_past_the_end_of_a_weight_is_refused() -> None:
    sources = collect({"a": torch.randn(4)})
    worker = Worker({"a": torch.randn(4)})
    worker.load(worker.destination((4,), torch.float32), "a", lambda w: w)
    worker.copies[0] = worker.copies[0].model_copy(update={"copy_": identity((5,), 4)})
    offer = Offer(sources.shards, ["cpu"], convert_shards(sources.shards, None))
    with pytest.raises(PlanRefused, match="past the end"):
        compute_route(offer, worker.plan(), direct_run_bytes=1, buffer_bytes=64)


def test_a_plan_made_for_another_shape_of_a_weight_is_refused() -> None:
    sources = collect({"a": torch.randn(4)})
    worker = Worker({"a": torch.randn(8)})
    worker.load(worker.destination((8,), torch.float32), "a", lambda w: w)
    offer = Offer(sources.shards, ["cpu"], convert_shards(sources.shards, None))
    with pytest.raises(PlanRefused, match=r"float32\[8\].*float32\[4\]"):
        compute_route(offer, worker.plan(), direct_run_bytes=1, buffer_bytes=64)


@pytest.mark.parametrize("direct", [1, 1 << 20])
def test_the_replicas_of_a_shard_send_every_byte_once_however_each_has_it_in_memory(direct: int) -> None:
    model = {"w": torch.randn(96, 160), "v": torch.randn(3)}
    worker = Worker(model)
    worker.load(worker.destination((96, 80), torch.float32), "w", lambda w: w[:, 80:])
    worker.load(worker.destination((160, 90), torch.float32), "w", lambda w: w[6:].t())
    worker.load(worker.destination((3,), torch.float32), "v", lambda w: w)
    memories = [model["w"], model["w"].t().contiguous().t(), torch.cat([torch.zeros(1, 160), model["w"]])[1:]]
    plan, sent, found = worker.plan(), [], []
    for index, memory in enumerate(memories):
        sources = collect(model | {"w": memory})
        shards = [replica(s, index, 3) for s in sources.shards]
        offer = Offer(shards, ["cpu"] * 2, convert_shards(shards, None))
        route = compute_route(offer, plan, direct_run_bytes=direct, buffer_bytes=1 << 12)
        found.append(execute(route, sources, plan, 1 << 12, whole=False))
        sent.append(route.nbytes)
    assert sum(sent) == plan.nbytes
    assert max(sent) < 1.02 * plan.nbytes / 3
    for parts, expected in zip(zip(*found, strict=True), worker.destinations, strict=True):
        assert np.bitwise_or.reduce(parts).tobytes() == raw(expected.untyped_storage()).tobytes()


@pytest.mark.parametrize("count", [2, 3, 8])
def test_replicas_have_about_the_same_to_send_also_of_many_small_tensors(count: int) -> None:
    model = {f"layers.{i}.norm.weight": torch.zeros(1 << (4 + i % 7)) for i in range(400)}
    worker = Worker(model)
    for name, tensor in model.items():
        worker.load(worker.destination(tensor.shape, torch.float32), name, lambda w: w)
    sources, plan, sent = collect(model), worker.plan(), []
    for index in range(count):
        shards = [replica(s, index, count) for s in sources.shards]
        offer = Offer(shards, ["cpu"] * len(model), convert_shards(shards, None))
        sent.append(compute_route(offer, plan, direct_run_bytes=1, buffer_bytes=1 << 12).nbytes)
    assert sum(sent) == plan.nbytes
    assert max(sent) < 1.25 * plan.nbytes / count


def replica(shard: Shard, index: int, count: int) -> Shard:
    from dataclasses import replace

    return replace(shard, replica_index=index, replica_count=count)


def test_boxes_of_one_tensor_in_several_shards_compose_to_the_whole() -> None:
    whole = torch.randn(8, 12)
    parts = [whole[:4, :6].contiguous(), whole[:4, 6:].t().contiguous().t(), whole[4:].contiguous()]
    offsets = [(0, 0), (0, 6), (4, 0)]
    sources = collect([(str(i), part) for i, part in enumerate(parts)])
    from dataclasses import replace

    shards = tuple(
        replace(s, name="w", global_shape=(8, 12), offsets=at) for s, at in zip(sources.shards, offsets, strict=True)
    )
    worker = Worker({"w": whole})
    worker.load(worker.destination((12, 8), torch.float32), "w", lambda w: w.t())
    worker.load(worker.destination((3, 12), torch.float32), "w", lambda w: w[2:5])
    plan = worker.plan()
    offer = Offer(shards, ["cpu"] * 3, convert_shards(shards, None))
    route = compute_route(offer, plan, direct_run_bytes=24, buffer_bytes=128)
    for found, expected in zip(execute(route, sources, plan, 128), worker.destinations, strict=True):
        assert found.tobytes() == raw(expected.untyped_storage()).tobytes()


PROGRAMS = {
    "none": lambda dtype: (),
    "cast": lambda dtype: (Step(op="to", dtype="float32"),),
    "negate": lambda dtype: (Step(op="neg", dtype=name_of(dtype)), Step(op="to", dtype="float64")),
    "scale": lambda dtype: (Step(op="to", dtype="float32"), Step(op="mul", args=(0.3,), dtype="float32")),
}


@st.composite
def cases(draw):
    """A model with odd strides, maybe a conversion, and a worker with TP-like and transposed, fused destinations."""
    model: dict[str, Tensor] = {}
    for i in range(draw(st.integers(1, 4))):
        rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9))
        dtype = draw(st.sampled_from(DTYPES))
        base = random_bits((columns + 2, rows + 1), dtype, i)
        model[f"w{i}"] = base[1:-1, 1:].t() if draw(st.booleans()) else base[1:-1, 1:].t().contiguous()
    packed = draw(st.booleans())
    weights = {name: w.contiguous() for name, w in model.items()}
    convert = None
    if packed:
        weights = {}
        for name, w in model.items():
            half = (w.shape[0] + 1) // 2
            weights |= {f"{name}.a": w[:half].contiguous(), f"{name}.b": w[half:].t().contiguous()}

        def convert(state):
            for name, w in state.items():
                half = (w.shape[0] + 1) // 2
                yield f"{name}.a", w[:half]
                yield f"{name}.b", w[half:].t().contiguous()

    worker = Worker(weights)
    for _ in range(draw(st.integers(1, 4))):
        same = draw(st.sampled_from(sorted(weights)))
        members = [n for n in sorted(weights) if weights[n].dtype == weights[same].dtype]
        members = draw(st.lists(st.sampled_from(members), min_size=1, max_size=3))
        views = []
        for name in members:
            shape = weights[name].shape
            r, c = draw(st.integers(0, shape[0])), draw(st.integers(0, shape[1]))
            turn = draw(st.booleans())
            views.append((name, lambda w, r=r, c=c, t=turn: w[r:, c:].t() if t else w[r:, c:]))
        shapes = [view(weights[name]).shape for name, view in views]
        dtype = weights[same].dtype
        kind = draw(
            st.sampled_from(["none", "cast", "negate", "scale"] if dtype.is_floating_point else ["none", "cast"])
        )
        program = PROGRAMS[kind](dtype)
        out = getattr(torch, program[-1].dtype) if program else dtype
        along = draw(st.booleans())
        gap = draw(st.integers(0, 1))
        if along:
            dst = worker.destination((max(s[0] for s in shapes), sum(s[1] for s in shapes) + gap), out)
        else:
            dst = worker.destination((sum(s[0] for s in shapes) + gap, max(s[1] for s in shapes)), out)
        at = 0
        for (name, view), shape in zip(views, shapes, strict=True):
            slot = dst[: shape[0], at : at + shape[1]] if along else dst[at : at + shape[0], : shape[1]]
            worker.load(slot, name, view, program)
            at += shape[1] if along else shape[0]
    return model, worker, convert


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.sampled_from([1, 8, 40, 1 << 20]), st.sampled_from([16, 48, 200, 1 << 12]))
def test_any_route_equals_torch_indexing(case, direct: int, buffer: int) -> None:
    model, worker, convert = case
    check(model, worker, convert, direct=direct, buffer=buffer)


def test_stretches_of_different_types_begin_aligned() -> None:
    model = {"a": torch.arange(3, dtype=torch.uint8), "b": torch.randn(3)}
    worker = Worker(model)
    for name, tensor in model.items():
        worker.load(worker.destination((3,), tensor.dtype), name, lambda w: w)
    (batch,) = check(model, worker).batches
    assert batch.writes.src_offset.tolist() == [0, ALIGNMENT]


def test_forty_thousand_tensors_are_routed_in_seconds() -> None:
    count, weights, copies, destinations, tensors = 40_000, [], [], [], []
    memory = torch.empty(1 << 16, dtype=torch.bfloat16)
    for i in range(count):
        weights.append(WeightSpec(name=f"w{i}", shape=(128, 64), dtype="bfloat16"))
        tensors.append((f"w{i}", memory[:8192].view(128, 64)))
        destinations.append(Destination(names=(f"p{i}",), nbytes=8192, home="live"))
        rows = i % 2 == 0
        part = (
            Copy((64, 64), 0, (128, 2), 2, 0, (128, 2), 2) if rows else Copy((128, 32), 0, (128, 2), 2, 0, (64, 2), 2)
        )
        copies.append(PlannedCopy(weight=i, destination=i, copy_=part))
    plan = WorkerPlan(weights=tuple(weights), destinations=tuple(destinations), copies=tuple(copies))
    begin = time.perf_counter()
    sources = collect(tensors)
    collected = time.perf_counter()
    conversion = convert_shards(sources.shards, None)
    offer = Offer(sources.shards, [s.device for s in sources.storages], conversion)
    converted = time.perf_counter()
    route = compute_route(offer, plan, direct_run_bytes=4096, buffer_bytes=64 << 20)
    end = time.perf_counter()
    print(f"collect {collected - begin:.2f} s, convert {converted - collected:.2f} s, route {end - converted:.2f} s")
    assert route.nbytes == plan.nbytes == count * 8192
    assert end - converted < 10
