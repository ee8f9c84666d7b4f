"""Stage 2 of a push: from the trainer's names and shapes to those of the checkpoint, by tracing.

A trainer may hold a model in another form than its checkpoint: transformers 5 packs the experts of a layer into one
tensor, other trainers fuse or rename projections. `convert_shards` runs the function that undoes this, once, on tensors
without data, and keeps where every element went: a `Conversion`, which routing composes with the plans of the workers.
The function itself never runs on data. `WeightClient` keeps the result for as long as names, shapes and dtypes stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from trainer_client.sources import unwrap
from vllm_nixl_plugin.errors import InvalidRequest, PushWeightsError
from vllm_nixl_plugin.layout import Copy, identity, simplify
from vllm_nixl_plugin.wire import Step, WeightSpec

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_nixl_plugin.tracing import Piece

Named = Mapping[str, "Tensor"] | Iterable[tuple[str, "Tensor"]]
Convert = Callable[[dict[str, "Tensor"]], Named]


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of one weight that come from trainer tensor ``source``.

    ``copy.src`` addresses the tensor as contiguous row-major of its global shape, ``copy.dst`` the weight likewise;
    both in bytes. ``program`` is applied to each element on the way. ``is_whole``: the part is the tensor onto itself.
    """

    source: str
    copy: Copy
    program: tuple[Step, ...] = ()
    is_whole: bool = False


@dataclass(frozen=True)
class Conversion:
    """The weights a push offers, and for each, by index, the parts it is made of: every byte exactly once."""

    weights: tuple[WeightSpec, ...]
    parts: tuple[tuple[Part, ...], ...]


class Described(Protocol):
    """A tensor without its values: a `Shard` stands for the whole of which it is a box."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def itemsize(self) -> int: ...  # noqa: D102
    @property
    def global_shape(self) -> tuple[int, ...]: ...  # noqa: D102


def convert_shards(shards: Iterable[Described], convert: Convert | None) -> Conversion:
    """What ``convert`` (None: nothing) makes of the tensors that the shards are boxes of.

    Errors: InvalidRequest when the function looks at values, does arithmetic that is no element-wise program, or
    returns something else than named tensors that come from the trainer.
    """
    tensors = {shard.name: shard for shard in shards}
    if convert is None:
        weights = tuple(WeightSpec(name=s.name, shape=s.global_shape, dtype=s.dtype) for s in tensors.values())
        same = (Part(s.name, identity(s.global_shape, s.itemsize), is_whole=True) for s in tensors.values())
        return Conversion(weights, tuple((part,) for part in same))
    return _traced(tensors, convert)


def checkpoint_converter(model: Any) -> Convert | None:
    """The function that gives a transformers model its checkpoint names back; None for everything else."""
    from torch import nn

    if not isinstance(model, nn.Module):
        return None
    inner = unwrap(model)
    if not _is_pretrained(inner):
        return None
    from transformers.core_model_loading import revert_weight_conversion

    def revert(state: dict[str, Tensor]) -> Mapping[str, Tensor]:
        result: Mapping[str, Tensor] = revert_weight_conversion(inner, state)
        return result

    return revert


def _is_pretrained(module: Any) -> bool:
    return any(
        c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers.") for c in type(module).__mro__
    )


def _traced(tensors: Mapping[str, Described], convert: Convert) -> Conversion:
    import torch

    from trainer_client.rewriting import Rewriting
    from vllm_nixl_plugin.tracing import NeedsData, trace_function

    def function(state: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        with Rewriting(next(iter(state.values()))):
            for name, tensor in _pairs(convert(state)):
                if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                    raise InvalidRequest(f"convert returned {name!r}: {type(tensor).__name__}; expected named tensors")
                if name in found:
                    raise InvalidRequest(f"convert returned {name} twice: return every weight once")
                found[name] = tensor
        return found

    inputs = {name: (shard.global_shape, getattr(torch, shard.dtype)) for name, shard in tensors.items()}
    try:
        traced = trace_function(function, inputs)
    except NeedsData as error:
        raise InvalidRequest(
            f"convert calls {error.op} on the values of {_few(error.sources)}; it runs once, on tensors without "
            "values: use only views, copies, casts, concatenations and arithmetic with numbers"
        ) from error
    except PushWeightsError:
        raise
    except Exception as error:
        error.add_note("This was raised by convert, which runs once, on tensors without values, for all ranks.")
        raise
    weights, parts = [], []
    for name, (shape, dtype, pieces) in traced.items():
        weights.append(WeightSpec(name=name, shape=shape, dtype=str(dtype).removeprefix("torch.")))
        made = [_part(name, piece) for piece in pieces]
        if len(made) == 1 and not made[0].program and shape == tensors[made[0].source].global_shape:
            itemsize = tensors[made[0].source].itemsize
            same = identity(shape, itemsize)
            if simplify(same) == simplify(made[0].copy):
                made = [Part(made[0].source, same, is_whole=True)]
        parts.append(tuple(made))
    return Conversion(tuple(weights), tuple(parts))


def _part(name: str, piece: Piece) -> Part:
    import torch

    from vllm_nixl_plugin.tracing import Constant, Opaque, Source

    root = piece.root
    if isinstance(root, Source):
        steps = tuple(
            Step(op=step.op, args=step.args, dtype=str(step.dtype).removeprefix("torch.")) for step in piece.program
        )
        return Part(root.name, piece.copy, steps)
    if isinstance(root, Opaque) and "empty" in root.op:
        raise InvalidRequest(f"weight {name} has elements that convert never writes: write all of what it returns")
    if isinstance(root, Opaque):
        raise InvalidRequest(
            f"weight {name} comes from {root.op} on {_few(root.sources)}, which does more than move, cast or scale "
            "single elements: do it in the trainer and push the result"
        )
    if isinstance(root, Constant) and not isinstance(root.value, torch.Tensor):
        raise InvalidRequest(
            f"weight {name} has elements that convert sets to {root.value}: add a tensor with them to what is pushed"
        )
    raise InvalidRequest(
        f"weight {name} comes from a tensor that convert did not get but made or kept itself: add that tensor to what "
        "is pushed, and take it from the dict that convert gets"
    )


def _pairs(result: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(result, Mapping):
        return result.items()
    if isinstance(result, Iterable):
        return result
    raise InvalidRequest(
        f"convert returned {type(result).__name__}; expected a mapping of name to tensor, or (name, tensor) pairs"
    )


def _few(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return (", ".join(listed[:3]) or "no trainer tensor") + more
