"""Says what a trainer's conversion does in the few operations that the tracer follows element by element.

The tracer knows views, copies, casts, concatenations and arithmetic with numbers. Conversions use more that only moves
elements: indexing with a list of rows, ``repeat``, ``flip``, ``roll``, padding, tensors made by ``torch.empty`` and
then written to, numbers that are tensors without dims. `Rewriting` is entered around a conversion, inside the tracer,
and turns each of these into the former; all else goes on as it is. Memory is never allocated for what is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Rewriting(TorchDispatchMode):
    """The mode. ``like``: a traced tensor, of whose kind new ones are made."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._like = like

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made: Any = None
        with self:
            if func in _FACTORIES:
                made = self._made(func, *args, **kwargs)
            elif args and isinstance(args[0], Tensor) and _is_traced(args[0]):
                made = self._moved(func, args, kwargs)
            elif func in _COMMUTING and len(args) == 2 and (number := _number(*args)) is not None:
                made = func(args[1], number)
            if made is None and any(_is_traced(value) for value in args if isinstance(value, Tensor)):
                made = func.decompose(*args, **kwargs)  # in inference mode, autograd has not done it before
        return func(*args, **kwargs) if made is None or made is NotImplemented else made

    def _made(self, func: Any, size: Sequence[int], *values: Any, dtype: Any = None, **_: Any) -> Tensor | None:
        """A traced tensor for one with dims that may hold weights; indices and flags are made for real."""
        kind = dtype or (torch.get_default_dtype() if func is not aten.full.default else _kind(values[0]))
        if not size or not kind.is_floating_point:
            return None
        made = self._like.new_empty(tuple(size), dtype=kind)
        value = values[0] if func is aten.full.default else _FACTORIES[func]
        return made if value is None else made.fill_(value)

    def _moved(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, *rest = args
        if func in _ARITHMETIC and len(rest) == 1 and not kwargs:
            number = _number(rest[0], tensor)
            return None if number is None else func(tensor, number)
        if func is aten.rsub.Scalar and len(rest) == 1 and not kwargs:
            return tensor.neg().add(rest[0])
        if func is aten.index.Tensor:
            found = _rows(rest[0])
            return None if found is None else _taken(tensor, *found)
        if func is aten.index_select.default and not _is_traced(rest[1]):
            return _taken(tensor, rest[0] % max(tensor.dim(), 1), rest[1]) if tensor.dim() else None
        if func in (aten.index_put_.default, aten.index_put.default) and not (len(rest) > 2 and rest[2]) and not kwargs:
            found = _rows(rest[0])
            if found is None or not _is_traced(rest[1]):
                return None
            return _put(tensor if func is aten.index_put_.default else tensor.clone(), *found, rest[1])
        if func in _LIKES:
            size, values = (rest[0], rest[1:]) if _LIKES[func] else (tensor.shape, rest)
            made = tensor.new_empty(size, dtype=kwargs.get("dtype"))
            return made.fill_(values[0] if values else _FILLED.get(func, 0))
        rewrite = _REWRITES.get(func)
        return None if rewrite is None or kwargs else rewrite(tensor, *rest)


def _is_traced(tensor: Tensor) -> bool:
    return hasattr(type(tensor), "traced_base")


def _number(value: Any, other: Any) -> float | None:
    """The number in a real tensor without dims, next to a traced floating tensor with dims."""
    if not isinstance(value, Tensor) or value.dim() or _is_traced(value) or value.is_meta or value.is_complex():
        return None
    if not isinstance(other, Tensor) or not _is_traced(other) or not other.dim() or not other.is_floating_point():
        return None
    return float(value)


def _rows(indices: Sequence[Tensor | None]) -> tuple[int, Tensor] | None:
    """Dim and rows of an indexing along one dim by a real tensor."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1 or _is_traced(given[0][1]) or given[0][1].is_meta:
        return None
    dim, index = given[0]
    if index.dtype not in (torch.bool, torch.uint8):
        return dim, index
    return (dim, index.nonzero().squeeze(1)) if index.dim() == 1 else None


def _kind(value: Any) -> torch.dtype:
    return torch.get_default_dtype() if isinstance(value, float) else torch.int64


def _steps(rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Start, count and step (at least 1) of the longest stretches of ``rows`` with equal distances."""
    at = 0
    while at < len(rows):
        step = rows[at + 1] - rows[at] if at + 1 < len(rows) else 1
        count = 1
        while step > 0 and at + count < len(rows) and rows[at + count] - rows[at + count - 1] == step:
            count += 1
        yield rows[at], count, max(step, 1)
        at += count


def _slices(tensor: Tensor, dim: int, index: Tensor) -> Iterator[Tensor]:
    extent = tensor.shape[dim]
    rows = [row + extent if row < 0 else row for row in index.reshape(-1).tolist()]
    if any(not 0 <= row < extent for row in rows):
        raise IndexError(f"index {min(rows)} to {max(rows)} is out of bounds for dim {dim} of size {extent}")
    for start, count, step in _steps(rows):
        yield aten.slice.Tensor(tensor, dim, start, start + (count - 1) * step + 1, step)


def _taken(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """Rows ``index`` along ``dim``, of any shape."""
    shape = (*tensor.shape[:dim], *index.shape, *tensor.shape[dim + 1 :])
    slices = list(_slices(tensor, dim, index)) or [tensor.narrow(dim, 0, 0)]
    return torch.cat(slices, dim).view(shape)


def _put(tensor: Tensor, dim: int, index: Tensor, values: Tensor) -> Tensor:
    """Writes ``values`` to rows ``index`` along ``dim``."""
    values = values.expand(*tensor.shape[:dim], *index.shape, *tensor.shape[dim + 1 :])
    values = values.reshape(*tensor.shape[:dim], index.numel(), *tensor.shape[dim + 1 :])
    at = 0
    for target in _slices(tensor, dim, index):
        target.copy_(values.narrow(dim, at, target.shape[dim]))
        at += target.shape[dim]
    return tensor


def _repeated(tensor: Tensor, repeats: Sequence[int]) -> Tensor:
    shape = (1,) * (len(repeats) - tensor.dim()) + tuple(tensor.shape)
    doubled = [size for n in shape for size in (1, n)]
    expanded = [size for n, times in zip(shape, repeats, strict=True) for size in (times, n)]
    return tensor.reshape(doubled).expand(expanded).reshape([n * t for n, t in zip(shape, repeats, strict=True)])


def _flipped(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        tensor = _taken(tensor, dim % tensor.dim(), torch.arange(tensor.shape[dim] - 1, -1, -1))
    return tensor.clone()


def _rolled(tensor: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    if not dims:
        return _rolled(tensor.reshape(-1), shifts, [0]).view(tensor.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        cut = -shift % max(tensor.shape[dim], 1)
        tensor = torch.cat([tensor.narrow(dim, cut, tensor.shape[dim] - cut), tensor.narrow(dim, 0, cut)], dim)
    return tensor.clone()


def _padded(tensor: Tensor, pad: Sequence[int], value: float = 0) -> Tensor | None:
    if any(n < 0 for n in pad):
        return None
    sides = [(0, 0)] * (tensor.dim() - len(pad) // 2) + list(zip(pad[-2::-2], pad[::-2], strict=True))
    made = tensor.new_empty([n + a + b for n, (a, b) in zip(tensor.shape, sides, strict=True)])
    made.fill_(value)
    inner = made
    for dim, (before, _) in enumerate(sides):
        inner = inner.narrow(dim, before, tensor.shape[dim])
    inner.copy_(tensor)
    return made


_ARITHMETIC = {
    aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor,
    aten.mul_.Tensor, aten.add_.Tensor, aten.sub_.Tensor, aten.div_.Tensor,
}  # fmt: skip
_COMMUTING = {aten.mul.Tensor, aten.add.Tensor}
_FACTORIES = {
    aten.empty.memory_format: None, aten.zeros.default: 0, aten.ones.default: 1, aten.full.default: None,
}  # fmt: skip
_LIKES = {
    aten.new_zeros.default: True, aten.new_ones.default: True, aten.new_full.default: True,
    aten.zeros_like.default: False, aten.ones_like.default: False, aten.full_like.default: False,
}  # fmt: skip
"""Whether the size is an argument."""
_FILLED = {aten.new_ones.default: 1, aten.ones_like.default: 1}
_REWRITES: dict[Any, Callable[..., Tensor | None]] = {
    aten.repeat.default: _repeated, aten.flip.default: _flipped, aten.roll.default: _rolled,
    aten.constant_pad_nd.default: _padded,
}  # fmt: skip
