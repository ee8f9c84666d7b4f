"""What a push takes beyond weights and send buffers stays small, whatever it does to the weights on the way."""

import itertools
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer_client import quantizing
from trainer_client.block_fp8 import BlockFP8
from trainer_client.conversion import convert_shards
from trainer_client.packing import PreparedBatch
from trainer_client.quantizing import Quantizer
from trainer_client.routing import Offer, compute_route
from trainer_client.sources import collect
from vllm_nixl_plugin.layout import Copy, identity
from vllm_nixl_plugin.wire import Destination, PlannedCopy, Step, WorkerPlan

BUFFER = 1 << 20


class Allocations(TorchDispatchMode):
    """The most bytes that storages made while it is entered had at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        old = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in old | self._known:
                storage = tensor.untyped_storage()
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return result

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def test_the_measure_sees_what_is_made_and_freed() -> None:
    with Allocations() as seen:
        a = torch.zeros(1000, dtype=torch.uint8)
        b = a.view(10, 100)[3]
        del a
        c = torch.ones(500, dtype=torch.uint8)
        del b
        torch.zeros(200, dtype=torch.uint8)
        del c
    assert (seen.peak, seen.now) == (1500, 0)


def pack(sources, conversion, shards, devices, copies, nbytes) -> int:
    """Fill the send buffers for a worker as a push does; the most bytes that it takes beside them."""
    plan = WorkerPlan(
        weights=conversion.weights, copies=copies,
        destinations=tuple(Destination(names=(f"p{i}",), nbytes=n, home="shadow") for i, n in enumerate(nbytes)),
    )  # fmt: skip
    route = compute_route(Offer(shards, devices, conversion), plan, direct_run_bytes=16 << 10, buffer_bytes=BUFFER)
    assert len(route.batches) >= 8
    batches = []
    for batch in route.batches:
        assert batch.nbytes <= BUFFER
        buffer = torch.zeros(batch.nbytes, dtype=torch.uint8)
        batches.append(PreparedBatch(batch, sources.owners, buffer, sources.makers))
    with Allocations() as seen:
        for prepared in batches:
            prepared.fill()
    return seen.peak


@pytest.mark.parametrize(("source", "target"), [*itertools.permutations(["float32", "bfloat16", "float16"], 2)])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("scaled", [0, 1])
def test_a_cast_takes_no_more_than_what_it_sends_in_one_buffer(source, target, whole, scaled) -> None:
    """Of a whole tensor, and of the columns of a tensor-parallel rank; alone, and behind another operation."""
    weight = torch.randn(4096, 2048).to(getattr(torch, source))
    sources = collect({"w": weight})
    size = getattr(torch, target).itemsize
    columns = 2048 if whole else 1024
    a, b = weight.element_size() * 2048, size * columns
    copy = Copy((4096, columns), 0, (a, weight.element_size()), weight.element_size(), 0, (b, size), size)
    cast = (*(Step(op="mul", args=(0.5,), dtype=source) for _ in range(scaled)), Step(op="to", args=(), dtype=target))
    taken = pack(sources, convert_shards(sources.shards, None), sources.shards, ["cpu"],
                 (PlannedCopy(weight=0, destination=0, copy_=copy, program=cast),), [4096 * b])  # fmt: skip
    elements = BUFFER // size
    assert taken <= scaled * elements * weight.element_size() + BUFFER <= weight.nbytes / 5
    assert taken or not scaled


def test_block_fp8_takes_a_patch_at_a_time(monkeypatch) -> None:
    monkeypatch.setattr(quantizing, "PATCH_NUMEL", 1 << 18)
    weight = torch.randn(4096, 4096, dtype=torch.bfloat16)
    sources = collect({"w": weight})
    quantizer = Quantizer(sources, convert_shards(sources.shards, None), BlockFP8(), ["w"])
    bound = quantizer.bind(sources)
    with Allocations() as seen:
        quantizer.measure()
    assert 0 < seen.peak <= 3 * (1 << 18)
    conversion = quantizer.conversion
    copies = [identity(conversion.weights[0].shape, 1), identity(conversion.weights[1].shape, 4)]
    planned = tuple(PlannedCopy(weight=i, destination=i, copy_=copy) for i, copy in enumerate(copies))
    nbytes = [copy.dst_nbytes for copy in copies]
    taken = pack(bound, conversion, quantizer.shards, quantizer.devices, planned, nbytes)
    assert 0 < taken <= 5 * (1 << 18) < weight.nbytes / 16
