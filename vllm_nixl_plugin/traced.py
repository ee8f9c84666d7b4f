"""Tensors on meta that say they live where the tensor lives that they stand for: loaders that ask are not misled.

The class of tensors that `tracing` hands to a function. torch only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from vllm_nixl_plugin.provenance import NeedsData

_POINTERS = ("data_ptr", "numpy", "tolist", "__array__", "__dlpack__")
"""Ways around the dispatcher to the data that a traced tensor has not got."""

_traced_classes: dict[tuple[type, torch.device], type] = {}


def traced_class(base: type, device: torch.device) -> type:
    """A subclass of ``base`` that says it lives on ``device``, for tensors whose storage is on meta."""
    found = _traced_classes.get((base, device))
    if found is None:

        def get_data(self: Any) -> Any:
            return as_traced(torch.Tensor.data.__get__(self), device)  # type: ignore[attr-defined]

        def set_data(self: Any, value: torch.Tensor) -> None:
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

        def get_pointer(name: str) -> Callable[..., Any]:
            def pointer(self: Any, *args: Any, **kwargs: Any) -> Any:
                sources = getattr(_get_current_dispatch_mode(), "sources_of", None)
                raise NeedsData(name, sources([self]) if sources is not None else frozenset())

            return pointer

        found = type(
            f"Traced{base.__name__}",
            (base,),
            {
                "device": property(lambda _: device),
                "is_meta": False,
                "is_cpu": device.type == "cpu",
                "is_cuda": device.type == "cuda",
                "data": property(get_data, set_data),
                "get_device": lambda _: -1 if device.type == "cpu" else (device.index or 0),
                "__torch_function__": torch._C._disabled_torch_function_impl,
                "traced_base": base,
                **{name: get_pointer(name) for name in _POINTERS},
            },
        )
        _traced_classes[base, device] = found
    return found


def as_traced(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same tensor object, saying that it lives on ``device``."""
    if not hasattr(type(tensor), "traced_base"):
        tensor.__class__ = traced_class(type(tensor), device)
    return tensor
