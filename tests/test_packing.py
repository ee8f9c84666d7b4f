"""Send buffers hold exactly the bytes that the loader would have produced."""

import pytest
import torch

from trainer_client.batching import Batch, PackItem, Runs
from trainer_client.packing import OPERATIONS, PreparedBatch, operation_of
from vllm_nixl_plugin.errors import PlanRefused
from vllm_nixl_plugin.layout import Copy, identity
from vllm_nixl_plugin.wire import Step

NO_RUNS = Runs(*(torch.zeros(0, dtype=torch.int64).numpy() for _ in range(5)))


def fill(source: torch.Tensor, copy: Copy, *program: Step, nbytes: int = 0) -> torch.Tensor:
    nbytes = nbytes or copy.dst_nbytes
    item = PackItem(0, str(source.dtype).removeprefix("torch."), copy, program)
    buffer = torch.zeros(nbytes, dtype=torch.uint8)
    prepared = PreparedBatch(Batch("cpu", (item,), nbytes, NO_RUNS), [source.untyped_storage()], buffer)
    prepared.fill()
    return buffer


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.bool, torch.float64, torch.complex128])
def test_bytes_are_moved_unchanged_whatever_their_type(dtype) -> None:
    source = torch.randint(0, 255, (6, 4 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    size = dtype.itemsize
    columns = Copy((6, 2), size, (4 * size, size), size, 0, (2 * size, size), size)
    expected = source.view(torch.uint8).reshape(6, 4, size)[:, 1:3].reshape(-1)
    assert torch.equal(fill(source, columns), expected)


def test_a_signalling_nan_survives() -> None:
    source = torch.tensor([0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert torch.equal(fill(source, identity((2,), 4)).view(torch.int32), source.view(torch.int32))


def test_wide_elements_at_odd_offsets_are_moved_in_narrower_ones() -> None:
    source = torch.arange(24, dtype=torch.uint8)
    odd = Copy((2,), 3, (8,), 8, 0, (8,), 8)
    assert torch.equal(fill(source, odd), source[3:19])


def test_programs_run_in_the_order_and_the_types_of_their_steps() -> None:
    source = torch.randn(64, dtype=torch.float32)
    steps = (Step(op="neg", dtype="float32"), Step(op="mul", args=(0.1,), dtype="float32"),
             Step(op="to", dtype="bfloat16"), Step(op="add", args=(1,), dtype="bfloat16"),
             Step(op="to", dtype="float64"))  # fmt: skip
    expected = ((-source) * 0.1).to(torch.bfloat16).add(1).to(torch.float64)
    size = Copy((64,), 0, (4,), 4, 0, (8,), 8)
    assert torch.equal(fill(source, size, *steps).view(torch.float64), expected)


def test_filling_again_takes_the_present_values() -> None:
    source = torch.zeros(4)
    buffer = torch.zeros(16, dtype=torch.uint8)
    batch = Batch("cpu", (PackItem(0, "float32", identity((4,), 4), ()),), 16, NO_RUNS)
    prepared = PreparedBatch(batch, [source.untyped_storage()], buffer)
    source.fill_(3.0)
    prepared.fill()
    assert torch.equal(buffer.view(torch.float32), source)


@pytest.mark.parametrize("op", sorted(OPERATIONS))
def test_every_operation_of_the_list_equals_torch(op) -> None:
    source, args = torch.randn(16), (0.3,) * OPERATIONS[op]
    expected = source.to(torch.bfloat16) if op == "to" else getattr(torch, op)(source, *args)
    name = str(expected.dtype).removeprefix("torch.")
    found = fill(
        source, Copy((16,), 0, (4,), 4, 0, (expected.itemsize,), expected.itemsize), Step(op=op, args=args, dtype=name)
    )
    assert torch.equal(found.view(expected.dtype), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (5,), (37, 11)])
def test_a_quotient_is_that_of_a_cpu_in_every_bit(dtype, shape) -> None:
    source = torch.randn(shape).to(dtype)
    divide = operation_of(Step(op="div", args=(3.3,), dtype=str(dtype).removeprefix("torch.")))
    assert torch.equal(divide(source), torch.div(source, 3.3))
    devices = ["cuda"] if torch.cuda.is_available() else []
    assert all(torch.equal(divide(source.to(device)).cpu(), torch.div(source, 3.3)) for device in devices)


@pytest.mark.parametrize(
    "step",
    [
        Step(op="exp", dtype="float32"), Step(op="mul", dtype="float32"), Step(op="neg", args=(1,), dtype="float32"),
        Step(op="mul", args=("x",), dtype="float32"), Step(op="to", dtype="float33"), Step(op="to", dtype="save"),
        Step(op="load", args=("/etc/passwd",), dtype="float32"),
    ],
)  # fmt: skip
def test_anything_else_in_a_program_is_refused(step) -> None:
    with pytest.raises(PlanRefused):
        fill(torch.zeros(4), identity((4,), 4), step)


def test_a_change_of_itemsize_without_a_program_is_refused() -> None:
    with pytest.raises(PlanRefused):
        fill(torch.zeros(4), Copy((4,), 0, (4,), 4, 0, (2,), 2))
