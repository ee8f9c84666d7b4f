"""Stage 1 of a push: what this rank of the trainer holds, as shards in storages.

`collect` takes what the caller of `push_weights` has (a module, a state dict, an iterable of named values) and gives
`Sources`: `Shard`s, each a box of a global tensor and where it lies, and the storages they lie in. What a value is on
this rank says `sharding`. Everything later works on these numbers; only packing and registration touch the memory.
`WeightClient` comes here first in every push, because optimizers may have replaced the tensors since the last one;
`collector` answers for it where nothing has changed.

A module counts as what it would save: tied copies that ``save_pretrained`` omits and buffers that are not persistent
are not sent. A state dict or iterable counts as checkpoint names, and all of it is sent. Names lose the marks of
wrappers (compile, activation checkpointing, FSDP1) in both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trainer_client.flattened import flat_state
from trainer_client.sharding import WRAPPERS, LocalShard, local_shards, unmarked
from vllm_nixl_plugin.errors import InvalidRequest

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from trainer_client.packing import Maker

    Value = Tensor | LocalShard | Sequence[LocalShard]


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
    """All shards of one push. ``owners`` keeps the memory alive and in place: one untyped storage per `Storage`.

    ``makers``: numbers of storages that are imagined, and who makes what they would hold (`packing.Maker`).
    """

    shards: tuple[Shard, ...]
    storages: tuple[Storage, ...]
    owners: tuple[torch.UntypedStorage, ...]
    makers: Mapping[int, Maker] = field(default_factory=dict)

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
        return self._places

    def geometry(self) -> tuple[tuple[Shard, ...], tuple[tuple[int, str], ...]]:
        """Everything a route depends on: all but the addresses."""
        return self._geometry

    @cached_property
    def devices(self) -> frozenset[str]:
        """Those of the storages."""
        return frozenset(storage.device for storage in self.storages)

    @cached_property
    def memory(self) -> tuple[Tensor, ...]:
        """The bytes of each storage."""
        return tuple(as_bytes(owner, s.device) for owner, s in zip(self.owners, self.storages, strict=True))

    @cached_property
    def _places(self) -> tuple[tuple[int, int, int], ...]:
        return tuple((owner._cdata, s.address, s.nbytes) for owner, s in zip(self.owners, self.storages, strict=True))

    @cached_property
    def _geometry(self) -> tuple[tuple[Shard, ...], tuple[tuple[int, str], ...]]:
        return self.shards, tuple((storage.nbytes, storage.device) for storage in self.storages)


def as_bytes(storage: torch.UntypedStorage, device: str) -> Tensor:
    """All of a storage as uint8."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def collect(model: nn.Module | Mapping[str, Value] | Iterable[tuple[str, Value]]) -> Sources:
    """The shards of ``model`` on this rank, where they lie: nothing is copied and nothing communicated.

    A rank that has nothing of a tensor has no shard of it. An iterable is drawn to its end before anything is sent, so
    its tensors have to fit in memory together.
    Errors: InvalidRequest that names the tensor and the remedy.
    """
    shards: list[Shard] = []
    storages: list[Storage] = []
    owners: list[torch.UntypedStorage] = []
    known: dict[int, int] = {}
    for name, value in named_values(model).items():
        for local in local_shards(name, value):
            tensor = local.tensor
            owner = tensor.untyped_storage()
            key: int = owner._cdata
            if key not in known:
                known[key] = len(storages)
                storages.append(Storage(owner.data_ptr(), owner.nbytes(), str(tensor.device)))
                owners.append(owner)
            itemsize = tensor.itemsize
            shards.append(Shard(
                name=name, dtype=str(tensor.dtype).removeprefix("torch."), itemsize=itemsize,
                global_shape=local.global_shape, offsets=local.offsets, shape=tuple(tensor.shape), storage=known[key],
                offset_bytes=int(tensor.storage_offset()) * itemsize,
                strides_bytes=tuple(stride * itemsize for stride in tensor.stride()),
            ))  # fmt: skip
    return Sources(tuple(shards), tuple(storages), tuple(owners))


def named_values(model: Any) -> dict[str, Any]:
    """Name to what this rank has of it, in the order of ``model``: a tensor, or declared `LocalShard`s.

    A module gives its state dict, with the hooks that it has; one that FSDP1 wraps what `flat_state` finds, because the
    state dicts of FSDP1 gather the model, unit by unit.
    It may be empty, on a rank that has nothing. Errors: InvalidRequest (doubled names, no names).
    """
    from torch import Tensor, nn

    pairs: Iterable[Any]
    if isinstance(model, nn.Module):
        pairs = _of_module(model).items()
    elif isinstance(model, Mapping):
        pairs = model.items()
    elif isinstance(model, Iterable) and not isinstance(model, (str, bytes, Tensor)):
        pairs = model
    else:
        raise InvalidRequest(
            f"push_weights got {type(model).__name__}; give an nn.Module, a mapping of name to tensor, or an iterable "
            "of (name, tensor) pairs"
        )
    found: dict[str, Any] = {}
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise InvalidRequest(
                f"expected (name, tensor) pairs, got {type(pair).__name__}: use model.named_parameters()"
            )
        name = unmarked(pair[0])
        if name in found:
            raise InvalidRequest(f"{name} comes twice: give every tensor once")
        found[name] = pair[1]
    return found


def unwrap(module: nn.Module) -> nn.Module:
    """The module that owns the names: inside compile, checkpoint, FSDP1 and DistributedDataParallel wrappers."""
    from torch.nn.parallel import DistributedDataParallel

    while True:
        inner = next((module._modules[name] for name in WRAPPERS if name in module._modules), None)
        if inner is None and isinstance(module, DistributedDataParallel):
            inner = module.module
        if inner is None:
            return module
        module = inner


def _of_module(module: nn.Module) -> dict[str, Any]:
    inner = unwrap(module)
    saved = flat_state(module) if has_fsdp1(module) else inner.state_dict()
    state = {unmarked(name): value for name, value in saved.items() if not name.endswith("_extra_state")}
    for name in getattr(inner, "_keys_to_ignore_on_save", None) or ():
        state.pop(name, None)
    for name in tied_copies(inner, state):
        del state[name]
    return state


def has_fsdp1(module: nn.Module) -> bool:
    """Whether FSDP1 wraps any part of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in module.modules())


def tied_copies(module: nn.Module, state: Mapping[str, Any]) -> set[str]:
    """Names of a transformers model that lie over another name and are declared tied:

    ``save_pretrained`` omits them.
    """
    declared = getattr(module, "all_tied_weights_keys", None)
    if not isinstance(declared, Mapping):
        return set()
    places: dict[Any, list[str]] = {}
    for name, value in state.items():
        if name in declared or name in declared.values():
            place = tuple(_place(shard) for shard in local_shards(name, value))
            places.setdefault(place, []).append(name)
    copies: set[str] = set()
    for names in places.values():
        tied = sorted(name for name in names if name in declared)
        copies.update(tied[: len(names) - 1])
    return copies


def _place(shard: LocalShard) -> tuple[Any, ...]:
    tensor = shard.tensor
    return shard.offsets, tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
