"""Block FP8: what it is, for which weights of a push, and `quantize`, which is its definition on a whole tensor.

`WeightClient` takes a `BlockFP8` and calls `choose` when it makes a new offer; `quantizing` does the same arithmetic on
shards, with `scale_of` and `cast` from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer_client.conversion import Conversion
from vllm_nixl_plugin.errors import InvalidRequest
from vllm_nixl_plugin.wire import WeightSpec

if TYPE_CHECKING:
    from torch import Tensor

FP8 = "float8_e4m3fn"
SCALE_SUFFIX = "_scale_inv"
LARGEST = 448.0
"""The largest float8_e4m3fn."""
LEAST_AMAX = 1e-4
"""Blocks of smaller values count as if they had this one, so that a block of zeros has a scale."""
_QUANTIZABLE = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True)
class BlockFP8:
    """Push weights as block FP8: ``push_weights(model, quantize=BlockFP8())``.

    Args:
        block: rows and columns of a block: ``weight_block_size`` in the configuration of such checkpoints.
        select: which weights, by checkpoint name; asked about floating-point weights of two dims or more. Default: the
            servers say which weights of the checkpoint that they started from are FP8 with scales.
    """

    block: tuple[int, int] = (128, 128)
    select: Callable[[str], bool] | None = None

    def __post_init__(self) -> None:
        if min(self.block) < 1:
            raise InvalidRequest(f"block is {self.block}; expected two positive numbers, rows and columns")


def quantize(weight: Tensor, block: tuple[int, int] = (128, 128)) -> tuple[Tensor, Tensor]:
    """The FP8 weight and the scales of its blocks, for a whole tensor: what a push sends, in one piece.

    ``weight``: two dims or more; blocks lie in the last two. In float32, scale = max(amax, 1e-4) / 448, and an element
    is weight * (1 / scale), rounded to the nearest float8_e4m3fn, ties to even. That is ``per_block_cast_to_fp8`` of
    DeepGEMM (``deep_gemm/utils/math.py``), by which vLLM, too, quantizes in blocks (``vllm/utils/deep_gemm.py``).
    """
    import torch

    *leading, rows, columns = weight.shape
    height, width = block
    padded = torch.nn.functional.pad(weight.to(torch.float32), (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))
    scale = scale_of(blocks.abs().amax((-3, -1)))
    quantized = cast(blocks, scale.reciprocal()[..., :, None, :, None]).reshape(padded.shape)
    return quantized[..., :rows, :columns].reshape(*leading, rows, columns).contiguous(), scale


def choose(
    conversion: Conversion, scheme: BlockFP8, ask: Callable[[], Iterable[Sequence[WeightSpec]]]
) -> tuple[str, ...]:
    """Names of the weights to quantize. ``ask``: what the checkpoints of the servers hold, if they have one.

    Errors: InvalidRequest when that is not known, or does not fit ``scheme``.
    """
    able = {w.name: w for w in conversion.weights if w.dtype in _QUANTIZABLE and len(w.shape) >= 2}
    if scheme.select is not None:
        return tuple(name for name in able if scheme.select(name))
    found: set[tuple[str, ...]] = set()
    for checkpoint in ask():
        specs = {weight.name: weight for weight in checkpoint}
        chosen = [n for n in able if n in specs and specs[n].dtype == FP8 and n + SCALE_SUFFIX in specs]
        for name in chosen:
            expected, scale = scale_spec(able[name], scheme.block), specs[name + SCALE_SUFFIX]
            if scale != expected:
                raise InvalidRequest(
                    f"the servers' checkpoint has {scale.name} as {scale.dtype}{list(scale.shape)}; blocks of "
                    f"{scheme.block} would give {expected.dtype}{list(expected.shape)}: give quantize the block of "
                    "that checkpoint (weight_block_size in its config.json)"
                )
        found.add(tuple(chosen))
    if len(found) != 1 or not all(found):
        why = "they have started from different ones" if len(found) > 1 else "none has a checkpoint with such weights"
        raise InvalidRequest(
            f"the servers do not say which weights are block FP8 ({why}): give quantize=BlockFP8(select=...), a "
            "function from a weight's name to whether it is to be quantized"
        )
    return found.pop()


def scale_of(amax: Tensor) -> Tensor:
    """Scales of blocks, in float32, from their largest magnitudes."""
    # A GPU divides by a number by multiplying with its inverse, which gives other bits than dividing by a tensor.
    return amax.clamp(min=LEAST_AMAX) / amax.new_full((1,), LARGEST)


def cast(values: Tensor, inverse: Tensor) -> Tensor:
    """Floating-point values, and the float32 inverses of their scales (of the same number of dims), to FP8."""
    import torch

    if values.dtype == torch.float64:
        values = values.to(torch.float32)
    return torch.mul(values, inverse).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def scale_spec(weight: WeightSpec, block: tuple[int, int]) -> WeightSpec:
    """The scales of a weight as the checkpoint has them."""
    *leading, rows, columns = weight.shape
    shape = (*leading, -(-rows // block[0]), -(-columns // block[1]))
    return WeightSpec(name=weight.name + SCALE_SUFFIX, shape=shape, dtype="float32")
