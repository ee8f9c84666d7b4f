"""Stage 1 of a push: what the trainer holds, as shards in storages.

`collect` takes what the caller of `push_weights` has (a module, a state dict, an iterable of named tensors) and gives
`Sources`: for every tensor a `Shard` (which box of which global tensor, and where it lies), and the storages they lie
in. Everything later works on these numbers; only packing and registration touch the memory itself. `WeightClient` calls
it first in every push, because optimizers may have replaced the tensors since the last one.

A module counts as what it would save: tied copies that ``save_pretrained`` omits and buffers that are not persistent
are not sent. A state dict or iterable counts as checkpoint names, and all of it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_nixl_plugin.errors import InvalidRequest

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a global tensor and where this process has it.

    ``offsets`` and ``shape`` are in elements of the global tensor; ``offset_bytes`` and ``strides_bytes`` say where the
    box lies in storage number ``storage`` of its `Sources`. ``replica_index`` of ``replica_count`` holders of this very
    box is this process; a route sends only its share.
    """

    name: str
    dtype: str
    itemsize: int
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    storage: int
    offset_bytes: int
    strides_bytes: tuple[int, ...]
    replica_index: int = 0
    replica_count: int = 1


@dataclass(frozen=True, slots=True)
class Storage:
    """A range of memory: its absolute address, size in bytes, and torch device (``"cpu"``, ``"cuda:0"``)."""

    address: int
    nbytes: int
    device: str


@dataclass(frozen=True)
class Sources:
    """All shards of one push. ``owners`` keeps the memory alive and in place: one untyped storage per `Storage`."""

    shards: tuple[Shard, ...]
    storages: tuple[Storage, ...]
    owners: tuple[torch.UntypedStorage, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        total = 0
        for shard in self.shards:
            numel = 1
            for extent in shard.shape:
                numel *= extent
            total += numel * shard.itemsize
        return total

    def places(self) -> tuple[tuple[int, int, int], ...]:
        """Where the storages are. Equal to that of other sources that are still held: the very same memory."""
        return tuple((owner._cdata, s.address, s.nbytes) for owner, s in zip(self.owners, self.storages, strict=True))

    def geometry(self) -> tuple[tuple[Shard, ...], tuple[tuple[int, str], ...]]:
        """Everything a route depends on: all but the addresses."""
        return self.shards, tuple((storage.nbytes, storage.device) for storage in self.storages)


def collect(model: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> Sources:
    """The shards of ``model``. Errors: InvalidRequest that names the tensor and the remedy.

    An iterable is drawn to its end before anything is sent, so its tensors have to fit in memory together.
    """
    tensors = named_tensors(model)
    shards: list[Shard] = []
    storages: list[Storage] = []
    owners: list[torch.UntypedStorage] = []
    known: dict[int, int] = {}
    for name, tensor in tensors.items():
        _check(name, tensor)
        owner = tensor.untyped_storage()
        key: int = owner._cdata
        if key not in known:
            known[key] = len(storages)
            storages.append(Storage(owner.data_ptr(), owner.nbytes(), str(tensor.device)))
            owners.append(owner)
        itemsize = tensor.itemsize
        shape = tuple(tensor.shape)
        shards.append(Shard(
            name=name, dtype=str(tensor.dtype).removeprefix("torch."), itemsize=itemsize,
            global_shape=shape, offsets=(0,) * len(shape), shape=shape, storage=known[key],
            offset_bytes=int(tensor.storage_offset()) * itemsize,
            strides_bytes=tuple(stride * itemsize for stride in tensor.stride()),
        ))  # fmt: skip
    return Sources(tuple(shards), tuple(storages), tuple(owners))


def named_tensors(model: Any) -> dict[str, Tensor]:
    """Name to tensor, in the order of ``model``. Errors: InvalidRequest (no tensors, doubled names)."""
    from torch import Tensor, nn

    pairs: Iterable[Any]
    if isinstance(model, nn.Module):
        pairs = _of_module(unwrap(model)).items()
    elif isinstance(model, Mapping):
        pairs = model.items()
    elif isinstance(model, Iterable) and not isinstance(model, (str, bytes, Tensor)):
        pairs = model
    else:
        raise InvalidRequest(
            f"push_weights got {type(model).__name__}; give an nn.Module, a mapping of name to tensor, or an iterable "
            "of (name, tensor) pairs"
        )
    found: dict[str, Tensor] = {}
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise InvalidRequest(
                f"expected (name, tensor) pairs, got {type(pair).__name__}: use model.named_parameters()"
            )
        name, tensor = pair
        if not isinstance(tensor, Tensor):
            raise InvalidRequest(
                f"{name} is {type(tensor).__name__}, expected a torch.Tensor: leave it out of the push"
            )
        if name in found:
            raise InvalidRequest(f"{name} comes twice: give every tensor once")
        found[name] = tensor
    if not found:
        raise InvalidRequest("there is no tensor to push: the model, state dict or iterable is empty")
    return found


def unwrap(module: nn.Module) -> nn.Module:
    """The module that owns the names: inside ``torch.compile`` and DistributedDataParallel wrappers."""
    from torch.nn.parallel import DistributedDataParallel

    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, DistributedDataParallel):
            inner = module.module
        if inner is None:
            return module
        module = inner


def _of_module(module: nn.Module) -> dict[str, Any]:
    state = dict(module.state_dict())
    for name in getattr(module, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    for name in tied_copies(module, state):
        del state[name]
    return state


def tied_copies(module: nn.Module, state: Mapping[str, Any]) -> set[str]:
    """Names of a transformers model that lie over another name and are declared tied:

    ``save_pretrained`` omits them.
    """
    declared = getattr(module, "all_tied_weights_keys", None)
    if not isinstance(declared, Mapping):
        return set()
    places: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        if name in declared or name in declared.values():
            place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
            places.setdefault(place, []).append(name)
    copies: set[str] = set()
    for names in places.values():
        tied = sorted(name for name in names if name in declared)
        copies.update(tied[: len(names) - 1])
    return copies


def _check(name: str, tensor: Tensor) -> None:
    import torch

    if getattr(type(tensor), "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__:
        raise InvalidRequest(
            f"{name} is a {type(tensor).__name__}; expected a plain tensor: pass full_tensor() of a DTensor, or the "
            "dequantized tensor of a quantized one"
        )
    if tensor.is_quantized or hasattr(tensor, "quant_state"):
        raise InvalidRequest(
            f"{name} is quantized ({tensor.dtype}); expected plain values: dequantize it before the push"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise InvalidRequest(
            f"{name} has layout {tensor.layout}; expected a dense tensor: call to_dense() before the push"
        )
    if tensor.is_meta:
        raise InvalidRequest(f"{name} is on the meta device and has no values: load or initialise it before the push")
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidRequest(f"{name} is on {tensor.device}; expected cpu or cuda: move it before the push")
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidRequest(
            f"{name} is a lazy conjugate or negation: call resolve_conj().resolve_neg() before the push"
        )
