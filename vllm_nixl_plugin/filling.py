"""What modules of a twin hold before vLLM processes them (the stage: install).

What has arrived for a module comes from its shadows; what no weight writes is as it was created, or as it serves today.
Called by `preparation`, which fills all modules before it processes any, and by `streaming`, a group at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from vllm_nixl_plugin import graph, replay
from vllm_nixl_plugin.binding import Binder
from vllm_nixl_plugin.composition import Part, Place
from vllm_nixl_plugin.planning import dtype_of
from vllm_nixl_plugin.wire import Mode


class Filling:
    """The storages of one model's twin that have been filled in one update."""

    def __init__(self, part: Part, binder: Binder, mode: Mode) -> None:
        self._part, self._binder, self._mode = part, binder, mode
        self._filled: set[int] = set()
        self._keys = part.model.twin.storage_keys()
        self._places = {place.key: place for place in part.places}
        self._served = part.model.record.served()

    def fill(self, path: str) -> set[int]:
        """Fill the storages of a module that are not filled yet; these storages."""
        twin = self._part.model.twin
        contents: dict[int, torch.Tensor] = {}
        for name, tensor in graph.tensors(twin.modules[path]):
            storage = self._keys.get(id(tensor))
            if storage is None or storage in self._filled:
                continue
            self._filled.add(storage)
            content = self._content(path, name, storage)
            if content is not None:
                contents[storage] = content
        twin.fill_more(contents)
        return set(contents)

    def fill_rest(self) -> Iterator[None]:
        """For a partial plan: what else the processing may read, from shadows that are whole."""
        twin = self._part.model.twin
        for number, rest in self._binder.remainder.needed(self._part):
            if isinstance(rest, int) and rest not in self._filled:
                device = twin.storages[rest].device
                twin.fill_more({rest: self._binder.shadow((number, rest)).to(device, copy=True)})
                yield

    def _content(self, path: str, name: str, storage: int) -> torch.Tensor | None:
        model, partial = self._part.model, self._part.partial
        info, key = model.twin.storages[storage], (model.number, storage)
        place = self._places.get(key)
        if place is not None and (self._mode == "shadow" or not place.live):
            return self._arrived(place, storage)
        if place is not None:
            return model.live_storage(place.destination).clone()
        if partial and self._binder.remainder.is_whole(key):
            return self._binder.shadow(key).to(info.device, copy=True)
        if path in self._served and (info.value is None or (partial and model.is_live(info.names))):
            today = dict(graph.tensors(self._served[path])).get(name)
            if today is not None and today.untyped_storage().nbytes() == info.nbytes:
                return graph.raw_bytes(today).clone()
            return torch.empty(info.nbytes, dtype=torch.uint8, device=info.device)
        return model.twin.made_anew(storage) if isinstance(info.value, int | float) else None

    def _arrived(self, place: Place, storage: int) -> torch.Tensor:
        """A copy of the shadow. The place in a window holds nothing but what has arrived: the rest is written here."""
        info = self._part.model.twin.storages[storage]
        content = self._binder.shadow(place.key).to(info.device, copy=True)
        if self._mode == "streamed":
            for fill in place.fills:
                replay.fill(content, fill, info.value, info.dtype)
        return content


def whole_weights(part: Part, binder: Binder, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
    """Weights of the fallback, for vLLM's own loader, in the host's memory."""
    specs = {w.name: w for w in part.plan.weights}
    raw = {name: binder.shadow((part.model.number, name)).cpu() for name in names}
    return [(name, raw[name].view(dtype_of(specs[name].dtype)).view(specs[name].shape)) for name in names]
