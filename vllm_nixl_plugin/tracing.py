"""Follow every element from named source tensors to where a function puts it, without any data.

The first stage of the path (trace). The function, vLLM's ``load_weights`` or a trainer's conversion, runs on meta
tensors under a `TorchDispatchMode`. A meta view carries its storage, offset, shape and strides, so views need no
recording; every op that makes or writes a storage is recorded as strided copies from *roots*:

    Source(name)       bytes of a named source tensor
    Constant(value)    a number, or a real tensor that the function brought along
    Creation(key)      what a destination held before the function ran
    Opaque(op, names)  the result of arithmetic that is not an element-wise program; it depends on these sources

Each storage keeps a list of `Piece`s that is resolved to roots at the moment of writing, so temporaries may be reused,
casts, concatenations and loader arithmetic compose, and the last writer of a byte wins. Traced tensors report the
device of the tensor they stand for. An op that needs the data itself raises `NeedsData`.

Used by `planning` (vLLM's loader) and by `trainer_client.conversion`; it knows nothing of either. torch only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_nixl_plugin.known import SMALL_NBYTES, Known, NotKnown
from vllm_nixl_plugin.layout import Copy, LayoutError, compose, contiguous_strides
from vllm_nixl_plugin.provenance import (
    Constant,
    Creation,
    NeedsData,
    Opaque,
    Operation,
    Piece,
    Record,
    Records,
    Root,
    Source,
)
from vllm_nixl_plugin.traced import as_traced, traced_class

__all__ = ["Constant", "Creation", "NeedsData", "Opaque", "Operation", "Piece", "Root", "Source", "Tracer",
           "trace_function"]  # fmt: skip

aten = torch.ops.aten
_DisableTorchDispatch = torch._C._DisableTorchDispatch


_ELEMENTWISE = {
    # Correctly rounded or exact on every device, so that a program gives the same bits wherever it runs.
    aten.neg.default: "neg", aten.abs.default: "abs",
    aten.mul.Tensor: "mul", aten.mul.Scalar: "mul", aten.add.Tensor: "add", aten.add.Scalar: "add",
    aten.sub.Tensor: "sub", aten.sub.Scalar: "sub", aten.div.Tensor: "div", aten.div.Scalar: "div",
}  # fmt: skip
_ELEMENTWISE_IN_PLACE = {
    aten.neg_.default: "neg", aten.abs_.default: "abs",
    aten.mul_.Tensor: "mul", aten.mul_.Scalar: "mul", aten.add_.Tensor: "add", aten.add_.Scalar: "add",
    aten.sub_.Tensor: "sub", aten.sub_.Scalar: "sub", aten.div_.Tensor: "div", aten.div_.Scalar: "div",
}  # fmt: skip
_MAX_ROWS = 4096
"""Longer lists of rows are not followed."""
_DATA = {
    aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.nonzero.default,
    aten.masked_select.default, aten.unique_dim.default, aten._unique2.default,
}  # fmt: skip
_COPIES = {aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default}


def _storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes_of(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], int]:
    size = tensor.element_size()
    return int(tensor.storage_offset()) * size, tuple(s * size for s in tensor.stride()), size


def _between(src: torch.Tensor, dst: torch.Tensor) -> Copy:
    """The copy of a view of one storage to a view of another, both of the same shape."""
    src_offset, src_strides, src_size = _bytes_of(src)
    dst_offset, dst_strides, dst_size = _bytes_of(dst)
    return Copy(tuple(dst.shape), src_offset, src_strides, src_size, dst_offset, dst_strides, dst_size)


def _flatten(values: Iterable[Any]) -> list[torch.Tensor]:
    out: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            out.append(value)
        elif isinstance(value, list | tuple):
            out.extend(_flatten(value))
    return out


class Tracer(TorchDispatchMode):
    """Records what a function does to traced tensors while it is entered as a context (one thread).

    Order of use: `source` and `stand_ins` make the inputs, ``with tracer: function(...)``, then `pieces` or `read`.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled while tracing; the guard against it costs more than all else here."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._records = Records()
        self._twins: dict[int, torch.Tensor] = {}
        self._known = Known(self)

    # Inputs

    def source(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """A traced tensor, contiguous, that stands for the named source."""
        with _DisableTorchDispatch():
            tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._records.sources[_storage_id(tensor)] = (name, tensor)
        return as_traced(tensor, torch.device(device))

    def stand_ins(self, tensors: Mapping[str, torch.Tensor], device: torch.device | None = None) -> dict[str, Any]:
        """Traced twins of real or meta tensors: same class, attributes, geometry and aliasing, one `Creation` root
        per storage, named after the first of its tensors. ``device`` is reported by twins of meta tensors."""
        storages: dict[int, torch.UntypedStorage] = {}
        out: dict[str, Any] = {}
        for key, tensor in tensors.items():
            old = tensor.untyped_storage()
            storage = storages.get(old._cdata)
            fresh = torch.empty(0, dtype=tensor.dtype, device="meta")
            if storage is None:
                raw = torch.empty(old.nbytes(), dtype=torch.uint8, device="meta")
                storage = storages[old._cdata] = raw.untyped_storage()
                whole = Copy((old.nbytes(),), 0, (1,), 1, 0, (1,), 1)
                self._records[storage._cdata] = Record(raw, [Piece(Creation(key), whole)])
                if tensor.device.type != "meta" and old.nbytes() <= SMALL_NBYTES:
                    self._known.creations[key] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(old)
            fresh.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
            base = getattr(type(tensor), "traced_base", type(tensor))
            real = device if tensor.device.type == "meta" and device is not None else tensor.device
            fresh.__class__ = traced_class(base, real)
            fresh.__dict__.update(tensor.__dict__)
            out[key] = fresh
        return out

    # Results

    def pieces(self, tensor: torch.Tensor) -> list[Piece]:
        """Who wrote the bytes of the tensor's whole storage; destinations of the copies address that storage."""
        return list(self._records[_storage_id(tensor)].pieces)

    def read(self, tensor: torch.Tensor) -> list[Piece]:
        """The elements of a tensor (real or traced), as pieces whose destination is its contiguous row-major form."""
        tensor = self._twin_of(tensor)
        size = tensor.element_size()
        src_offset, src_strides, _ = _bytes_of(tensor)
        shape = tuple(tensor.shape)
        copy = Copy(shape, src_offset, src_strides, size, 0, contiguous_strides(shape, size), size)
        return self._through(tensor, copy)

    def has_changed(self, tensor: torch.Tensor) -> bool:
        """Whether the function wrote to a real tensor."""
        raw = self._twins.get(_storage_id(tensor))
        return raw is not None and self._records[_storage_id(raw)].pieces != [raw.whole]  # type: ignore[attr-defined]

    def is_read(self, name: str) -> bool:
        """Whether anything but a view has been made of a source."""
        return name in self._records.read

    # Recording

    def _twin_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The plain meta tensor behind a traced one; a real tensor becomes a constant when first asked for."""
        sid = _storage_id(tensor)
        if sid in self._records:
            return tensor.detach()
        raw = self._twins.get(sid)
        if raw is None:
            storage = tensor.untyped_storage()
            raw = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
            whole = Copy((storage.nbytes(),), 0, (1,), 1, 0, (1,), 1)
            held = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            value = held if tensor.device.type == "meta" else held.clone()
            raw.whole = Piece(Constant(value), whole)  # type: ignore[attr-defined]
            self._records[_storage_id(raw)] = Record(raw, [raw.whole])  # type: ignore[attr-defined]
            self._twins[sid] = raw
            raw.held_real = held  # type: ignore[attr-defined]
        view = torch.empty(0, dtype=tensor.dtype, device="meta")
        view.set_(raw.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return view

    def _through(self, src: torch.Tensor, copy: Copy, step: tuple[Operation, ...] = ()) -> list[Piece]:
        """Resolve a copy that reads the storage of ``src`` to the roots of what lies there now."""
        out: list[Piece] = []
        for piece in self._records[_storage_id(src)].pieces:
            opaque = isinstance(piece.root, Opaque)
            try:
                found = compose(piece.copy, copy)
            except LayoutError:
                sources = self.sources_of([src])
                return [Piece(Opaque("reinterpreted elements", sources), copy)]
            program = () if opaque else piece.program + step
            out.extend(Piece(piece.root, c, program) for c in found)
        return out

    def _write(self, dst: torch.Tensor, pieces: list[Piece]) -> None:
        """The given pieces, which address the storage of ``dst``, replace what they cover."""
        record = self._records[_storage_id(dst)]
        for piece in pieces:
            record.overwrite(piece)

    def sources_of(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        """Names of the sources that tensors depend on."""
        names: set[str] = set()
        for tensor in tensors:
            record = self._records.get(_storage_id(tensor))
            for piece in record.pieces if record else ():
                if isinstance(piece.root, Source):
                    names.add(piece.root.name)
                elif isinstance(piece.root, Opaque):
                    names |= piece.root.sources
        return frozenset(names)

    def _new(self, out: torch.Tensor, pieces: list[Piece], device: torch.device) -> torch.Tensor:
        self._records[_storage_id(out)] = Record(out.detach(), pieces)
        return as_traced(out, device)

    def is_traced(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has no values but a record."""
        sid = _storage_id(tensor)
        return sid in self._records or sid in self._twins

    def _is_any_traced(self, values: Iterable[Any]) -> bool:
        for value in values:
            if isinstance(value, torch.Tensor):
                if self.is_traced(value):
                    return True
            elif isinstance(value, list | tuple) and self._is_any_traced(value):
                return True
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not self._is_any_traced(args) and not (kwargs and self._is_any_traced(kwargs.values())):
            if func is aten.scalar_tensor.default and str(kwargs.get("device")) == "meta":
                kwargs["device"] = None  # the number of ``traced[0] = 1``, whose value has to be kept
            return func(*args, **kwargs)
        tensors = _flatten([*args, *kwargs.values()])
        traced = [self._twin_of(t) for t in tensors if self.is_traced(t)]
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else tensors[0].device
        if func in _DATA or (func is aten.index.Tensor and any(_is_bool(t) for t in traced)):
            if (known := self._known.arguments(args, kwargs)) is not None:
                return func(*known[0], **known[1])
            raise NeedsData(str(func), self.sources_of(traced))
        if func is aten.copy_.default:
            return self._copy_(*args[:2])
        if func in (aten.fill_.Scalar, aten.zero_.default):
            return self._fill_(args[0], args[1] if len(args) > 1 else 0)
        if func in _COPIES:
            return self._copied(func, args, kwargs, device)
        if func in (aten.cat.default, aten.stack.default):
            return self._joined(func, args, kwargs, device)
        if func is aten.index.Tensor and (at := self._rows(*args[:2])) is not None:
            return self._taken(args[0], *at, device)
        if func in _ELEMENTWISE or func in _ELEMENTWISE_IN_PLACE:
            scalars = self._scalars(args[1:], kwargs)
            if scalars is not None and self.is_traced(args[0]):
                return self._elementwise(func, args[0], scalars, device)
        return self._other(func, args, kwargs, traced, device)

    def _copy_(self, dst: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
        target, origin = self._twin_of(dst), self._twin_of(src)
        origin = origin.expand(target.shape)
        step = () if origin.dtype == target.dtype else (Operation("to", (), target.dtype),)
        self._write(target, self._through(origin, _between(origin, target), step))
        return dst

    def _fill_(self, dst: torch.Tensor, value: Any) -> torch.Tensor:
        target = self._twin_of(dst)
        offset, strides, size = _bytes_of(target)
        copy = Copy(tuple(target.shape), 0, (0,) * target.dim(), size, offset, strides, size)
        self._write(target, [Piece(Constant(value), copy)])
        return dst

    def _copied(self, func: Any, args: Any, kwargs: dict[str, Any], device: torch.device) -> torch.Tensor:
        origin = self._twin_of(args[0])
        kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "non_blocking")}
        out = func(origin, **kwargs)
        step = () if out.dtype == origin.dtype else (Operation("to", (), out.dtype),)
        return self._new(out, self._through(origin, _between(origin, out), step), device)

    def _joined(self, func: Any, args: Any, kwargs: dict[str, Any], device: torch.device) -> torch.Tensor:
        parts = [self._twin_of(t) for t in args[0]]
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        out = func(parts, dim)
        slots: Sequence[torch.Tensor]
        if func is aten.stack.default:
            slots = out.unbind(dim)
        else:
            parts = [p for p in parts if not (p.dim() == 1 and p.numel() == 0)] or parts[:1]
            slots = out.split([p.shape[dim] for p in parts], dim)
        pieces: list[Piece] = []
        for part, slot in zip(parts, slots, strict=True):
            step = () if part.dtype == slot.dtype else (Operation("to", (), slot.dtype),)
            pieces += self._through(part, _between(part, slot), step)
        return self._new(out, pieces, device)

    def _rows(self, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> tuple[int, list[int]] | None:
        """Dim and rows of an indexing along one dim by values that are known."""
        given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
        if len(given) != 1 or not self.is_traced(tensor):
            return None
        [(dim, index)] = given
        if index.dim() != 1 or index.numel() > _MAX_ROWS or index.is_floating_point() or _is_bool(index):
            return None
        try:
            rows = self._known.value(index).tolist()
        except NotKnown:
            return None
        extent = tensor.shape[dim]
        rows = [row + extent if row < 0 else row for row in rows]
        return (dim, rows) if all(0 <= row < extent for row in rows) else None

    def _taken(self, tensor: torch.Tensor, dim: int, rows: list[int], device: torch.device) -> torch.Tensor:
        origin = self._twin_of(tensor)
        shape = (*origin.shape[:dim], len(rows), *origin.shape[dim + 1 :])
        out = torch.empty(shape, dtype=origin.dtype, device="meta")
        pieces: list[Piece] = []
        start = 0
        while start < len(rows):
            stop = start + 1
            while stop < len(rows) and rows[stop] == rows[stop - 1] + 1:
                stop += 1
            part, slot = origin.narrow(dim, rows[start], stop - start), out.narrow(dim, start, stop - start)
            pieces += self._through(part, _between(part, slot))
            start = stop
        return self._new(out, pieces, device)

    @staticmethod
    def _scalars(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int | float, ...] | None:
        """The scalar arguments of an element-wise op, or None when there is anything else."""
        if kwargs or not all(isinstance(a, int | float) and not isinstance(a, bool) for a in args) or len(args) > 1:
            return None
        return tuple(args)

    def _elementwise(self, func: Any, tensor: Any, scalars: tuple[int | float, ...], device: torch.device) -> Any:
        origin = self._twin_of(tensor)
        if func in _ELEMENTWISE:
            out = func(origin, *scalars)
            step = Operation(_ELEMENTWISE[func], scalars, out.dtype)
            return self._new(out, self._through(origin, _between(origin, out), (step,)), device)
        step = Operation(_ELEMENTWISE_IN_PLACE[func], scalars, origin.dtype)
        self._write(origin, self._through(origin, _between(origin, origin), (step,)))
        return tensor

    def _other(self, func: Any, args: Any, kwargs: dict[str, Any], traced: list[torch.Tensor], device: Any) -> Any:
        """Views pass, and ops on known values run for real; every other op is opaque: its results depend on all of its
        traced inputs."""
        pure = not func._schema.is_mutable and not _is_view(func)
        if pure and (known := self._known.arguments(args, kwargs)) is not None:
            return func(*known[0], **known[1])
        low_args = self._lowered(args)
        low_kwargs = {k: self._lowered(v) for k, v in kwargs.items() if k != "device"}
        try:
            result = func(*low_args, **low_kwargs)
        except (NotImplementedError, RuntimeError) as error:
            reason = str(error).splitlines()[0][:120]
            raise NeedsData(f"{func} ({reason})", self.sources_of(traced)) from error
        arguments = func._schema.arguments
        written = [a for a, s in zip(args, arguments, strict=False) if s.alias_info and s.alias_info.is_write]
        if not written:
            return self._results(func, result, traced, device)
        sources = self.sources_of(traced)
        for tensor in _flatten(written):
            target = self._twin_of(tensor)
            self._write(target, [Piece(Opaque(str(func), sources), _between(target, target))])
        return written[0] if len(func._schema.returns) == 1 else result

    def _lowered(self, value: Any) -> Any:
        """Traced tensors as plain meta tensors; real operands follow them there."""
        if isinstance(value, torch.Tensor):
            if self.is_traced(value):
                return self._twin_of(value)
            return value.to("meta") if value.device.type != "meta" and value.dim() else value
        return type(value)(self._lowered(v) for v in value) if isinstance(value, list | tuple) else value

    def _results(self, func: Any, result: Any, traced: list[torch.Tensor], device: torch.device) -> Any:
        if isinstance(result, list | tuple):
            return type(result)(self._results(func, r, traced, device) for r in result)
        if not isinstance(result, torch.Tensor):
            return result
        if _storage_id(result) not in self._records:
            piece = Piece(Opaque(str(func), self.sources_of(traced)), _between(result, result))
            return self._new(result, [piece], device)
        return as_traced(result, device)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return any(r.alias_info is not None for r in returns) or func is aten.detach.default


def _is_bool(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.bool, torch.uint8)


def trace_function(
    function: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]],
    sources: Mapping[str, tuple[Sequence[int], torch.dtype]],
    device: torch.device | str = "cpu",
) -> dict[str, tuple[tuple[int, ...], torch.dtype, list[Piece]]]:
    """Trace a function from a dict of named tensors to named tensors.

    Returns for each output its shape, dtype and pieces (destination: its contiguous form).
    Errors: NeedsData when the function looks at values.
    """
    tracer = Tracer()
    inputs = {name: tracer.source(name, shape, dtype, device) for name, (shape, dtype) in sources.items()}
    with tracer:
        result = function(inputs)
        outputs = dict(result.items() if isinstance(result, Mapping) else result)
    return {name: (tuple(t.shape), t.dtype, tracer.read(t)) for name, t in outputs.items()}
