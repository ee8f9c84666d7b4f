"""What a partial push leaves as it is: which shadows hold what serves, and where the bytes of the others come from.

A partial push writes some weights of a fused parameter, or some parameters of a module that vLLM processes as a whole.
The rest has to be there in the layout of the loader, which a serving engine no longer has. Per shadow:

    it was installed from           its bytes are those that serve; nothing to do
    its weights are those that      vLLM's own loader loads them once more from the server's checkpoint, into the twin
    the server started with         (`load`, in the thread that plans; only the weights that are needed)
    else                            refused: only a full push can make it whole

`binding` calls `check` and `fill` at begin and `exposed` before addresses leave; `install` calls `installed`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping

import torch

from vllm_nixl_plugin import graph
from vllm_nixl_plugin.composition import Held, Key, Part
from vllm_nixl_plugin.errors import PlanRefused, UnknownPlan
from vllm_nixl_plugin.loaded import LoadedModel
from vllm_nixl_plugin.memory import Arena
from vllm_nixl_plugin.model import digest, read_checkpoint
from vllm_nixl_plugin.planning import TracedDestination
from vllm_nixl_plugin.tracing import Creation, Opaque, Piece, Source
from vllm_nixl_plugin.twin import config_context
from vllm_nixl_plugin.wire import Mode

logger = logging.getLogger("vllm.nixl_plugin")


class Remainder:
    """State of the shadows of one worker. `load` runs in the thread that plans, everything else in the main one."""

    def __init__(self) -> None:
        self._whole: set[Key] = set()
        """Shadows that hold what serves."""
        self._changed: set[Key] = set()
        """Destinations that are no longer as vLLM loaded them."""
        self._loaded: dict[Key, torch.Tensor] = {}
        self._lock = threading.Lock()

    def load(self, held: Held) -> None:
        """Read from the checkpoint what a partial plan needs and no shadow has. Errors: PlanRefused naming layers."""
        if not held.partial:
            return
        found: dict[Key, torch.Tensor] = {}
        for part in held.parts:
            if lacking := self._lacking(part):
                self._refuse(part, lacking)
                found |= _from_checkpoint(part.model, lacking)
        with self._lock:
            self._loaded = found

    def check(self, held: Held) -> list[tuple[Key, int]]:
        """Shadows beyond the plan that its install reads, and their bytes: room is to be made for them.

        Errors: PlanRefused, and UnknownPlan where planning again makes whole what is not.
        """
        if not held.partial:
            return []
        wanted: list[tuple[Key, int]] = []
        for part in held.parts:
            lacking = self._lacking(part)
            self._refuse(part, lacking)
            if not lacking <= self._loaded.keys():
                raise UnknownPlan("an update that was given up has left half of its bytes in the shadows; plan again")
            storages = part.model.twin.storages
            wanted += [(k, storages[k[1]].nbytes) for k in self.needed(part) if isinstance(k[1], int)]
        return wanted

    def fill(self, held: Held, arena: Arena) -> None:
        """Write what `load` has read into the shadows."""
        if not held.partial:
            return
        with self._lock:
            for key, raw in self._loaded.items():
                if key in arena and key not in self._whole and key not in self._changed:
                    arena[key].copy_(raw)
                    self._whole.add(key)
            _finish(self._loaded.values())
            self._loaded = {}

    def needed(self, part: Part) -> set[Key]:
        """Shadows that have to be whole when a partial plan is installed: those it writes, and what is processed along.

        Where the server has no checkpoint, all there is to know of the latter are destinations of earlier plans.
        """
        model = part.model
        needed = {place.key for place in part.places if place.destination.home == "shadow"}
        loadable: set[Key] = {(model.number, d.key) for d in model.baseline()}
        with self._lock:
            loadable |= {key for key in self._changed if key[0] == model.number}
        storages = {storage for path in part.processed for storage in model.within_reach(path)}
        for number, storage in loadable - needed:
            if storage in storages and not model.is_live(model.twin.storages[int(storage)].names):
                needed.add((number, storage))
        return needed

    def is_whole(self, key: Key) -> bool:
        """Whether the shadow holds what serves."""
        return key in self._whole

    def exposed(self, held: Held, mode: Mode) -> None:
        """From now on the update may write: into its shadows, and in other modes than ``shadow`` into what serves."""
        with self._lock:
            for place in held.places:
                self._whole.discard(place.key)
                if mode == "streamed" or (mode == "in_place" and place.live):
                    self._changed.add(place.key)

    def installed(self, held: Held, mode: Mode) -> None:
        """What the shadows of the update hold serves now."""
        with self._lock:
            self._loaded = {}
            for place in held.places:
                self._changed.add(place.key)
                if mode == "shadow" or (mode == "in_place" and not place.live):
                    self._whole.add(place.key)

    def forget(self) -> None:
        """The shadows are gone."""
        self._whole.clear()

    def _lacking(self, part: Part) -> set[Key]:
        return self.needed(part) - self._whole

    def _refuse(self, part: Part, lacking: set[Key]) -> None:
        record, twin = part.model.record, part.model.twin
        lost = {key for key in lacking if key in self._changed or not record.checkpoint}
        if lost:
            names = sorted(twin.storages[storage].names[0] for _, storage in lost if isinstance(storage, int))
            why = "pushes have changed them since" if record.checkpoint else "this server started without a checkpoint"
            raise PlanRefused(
                f"a partial push into {', '.join(names[:5])} needs the other weights of these layers and of their "
                f"neighbours as vLLM's loader lays them out, and this worker has them nowhere: {why}. Push all weights "
                "once, then partially.",
                layers=names[:1000],
            )


def _from_checkpoint(model: LoadedModel, keys: set[Key]) -> dict[Key, torch.Tensor]:
    """The bytes of these storages of the twin as vLLM's loader leaves them, by loading the weights that go there.

    Errors: PlanRefused when they are not those from which the server started.
    """
    twin, record = model.twin, model.record
    contents = {storage: twin.made_anew(storage) for _, storage in keys if isinstance(storage, int)}
    wanted = [d for d in model.baseline() if d.key in contents]
    names = {name for d in wanted for piece in d.pieces for name in _sources(piece)}
    logger.info("a partial push leaves parts of these layers as they are: loading %d of their weights anew", len(names))
    twin.restore()
    twin.fill_tensors(contents)
    try:
        with config_context(twin.config), torch.no_grad():
            twin.load_weights((name, w) for name, w in read_checkpoint(record, model.model) if name in names)
        tensors = twin.destination_tensors()
        for destination in wanted:
            _keep(contents[destination.key], destination, tensors, record.digests)
    finally:
        twin.restore()
    _finish(contents.values())
    return {(model.number, storage): raw for storage, raw in contents.items()}


def _finish(memory: Iterable[torch.Tensor]) -> None:
    """The streams of threads are apart: one ends what it does with this memory before another goes on with it."""
    for device in {raw.device for raw in memory if raw.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


def _keep(
    raw: torch.Tensor, destination: TracedDestination, tensors: Mapping[str, torch.Tensor], digests: Mapping[str, int]
) -> None:
    """Take what was loaded for a destination, also where the loader made another tensor, if it is what it was then."""
    whole = not any(isinstance(piece.root, Creation) for piece in destination.pieces)
    for name in destination.names:
        tensor = tensors[name]
        if whole and digests.get(name, found := digest(tensor)) != found:
            raise PlanRefused(
                f"the server's checkpoint has changed since the server started: {name} differs, so a partial push "
                "cannot be completed from it. Push all weights once, then partially.", layers=[name],
            )  # fmt: skip
        if tensor.untyped_storage().data_ptr() != raw.data_ptr():
            raw.copy_(graph.raw_bytes(tensor))


def _sources(piece: Piece) -> Iterable[str]:
    if isinstance(piece.root, Source):
        return (piece.root.name,)
    return piece.root.sources if isinstance(piece.root, Opaque) else ()
