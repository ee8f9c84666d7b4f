"""One model that a worker serves: its load record and its twin, and the plan for it (the stages: trace, plan).

`plane` has one `LoadedModel` per model of its worker. `LoadedModel.plan` traces vLLM's loader on the twin, makes the
plan and checks it on random data; `live_storage` gives the memory that kernels read for a destination, and proves again
that it is live.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from vllm_nixl_plugin import graph
from vllm_nixl_plugin.errors import PlanRefused, UnknownPlan
from vllm_nixl_plugin.findings import demote
from vllm_nixl_plugin.loadtrace import LoadTrace, trace_load
from vllm_nixl_plugin.model import LoadRecord, geometry_of, record_of
from vllm_nixl_plugin.planning import (
    Planned,
    TracedDestination,
    check_against_checkpoint,
    make_plan,
    refuse_missing,
)
from vllm_nixl_plugin.selfcheck import SelfCheck
from vllm_nixl_plugin.settings import self_check_mode
from vllm_nixl_plugin.tracing import Constant, Creation, Opaque, Source
from vllm_nixl_plugin.twin import Twin
from vllm_nixl_plugin.wire import Destination, Manifest

logger = logging.getLogger("vllm.nixl_plugin")


class LoadedModel:
    """A model that serves. ``number`` tells it from the others of its worker.

    ``label`` comes before the paths of its tensors, as ``label/path``, and ``prefix`` before the names of its weights.
    """

    def __init__(self, number: int, model: nn.Module, *, label: str = "", prefix: str = "") -> None:
        self.number = number
        self.model = model
        self.label = label
        self.prefix = prefix
        self._record = record_of(model)
        if self._record is not None:
            self._record.keep_reachable(model)
        self._baseline: tuple[TracedDestination, ...] | None = None
        self._check: SelfCheck | None = None
        self._reach: dict[str, frozenset[int]] = {}
        self._raw: dict[str, tuple[int, torch.Tensor]] = {}

    @property
    def origin(self) -> str:
        """The name or folder of its checkpoint, as the server was told."""
        return str(self._record.model_config.model) if self._record is not None else ""

    @property
    def can_plan(self) -> bool:
        """Whether the model can be planned for at all."""
        return self._record is not None and self._record.twin is not None

    @property
    def record(self) -> LoadRecord:
        """What was seen while vLLM loaded the model. Errors: PlanRefused, when nothing was."""
        if self._record is None:
            raise PlanRefused(
                "this model was not loaded through a vLLM model loader that the plugin could watch. Put 'nixl' into "
                "VLLM_PLUGINS of the server, and use a --load-format whose loader is vLLM's own."
            )
        return self._record

    @property
    def twin(self) -> Twin:
        """The model as created. Errors: PlanRefused, when it could not be made."""
        if self.record.twin is None:
            raise PlanRefused(f"the model as created could not be made a second time: {self.record.twin_error}")
        return self.record.twin

    def plan(self, manifest: Manifest) -> Planned:
        """The plan of this model for the weights that are meant for it. Errors: PlanRefused naming weights."""
        twin, record = self.twin, self.record
        check_against_checkpoint(manifest, record.checkpoint)
        found = trace_load(twin, manifest.weights, record.live)
        self._refuse_shared(found)
        same = {(w.name, w.shape) for w in manifest.weights} == {(w.name, w.shape) for w in record.checkpoint}
        baseline = None
        if not manifest.partial and not same:
            if record.checkpoint:
                baseline = {t.key: t.pieces for t in self.baseline()}
            else:
                refuse_missing(self._unwritten(found))
        ignorable = {w.name for w in record.checkpoint} | self._taken_from_others(found)
        planned = make_plan(manifest, found.destinations, baseline, ignorable)
        if self._check is None:
            self._check = SelfCheck(twin, self_check_mode())
        findings = self._check.check(manifest.weights, found.destinations, planned)
        destinations = found.destinations
        if findings.demoted:
            destinations = tuple(demote(destinations, findings.demoted, twin))
        served = self._served(destinations)
        if served != found.destinations:
            planned = make_plan(manifest, served, baseline, ignorable)
        return replace(planned, self_check=findings.as_dict())

    def is_meant(self, names: set[str], elsewhere: set[str]) -> bool:
        """Whether a push of these weights is for this model, too. ``elsewhere``: those that another model uses."""
        if not self.prefix and self.record.checkpoint:
            mine = {name for d in self.baseline() for name in d.weights}
            return bool(mine & names - elsewhere) or (bool(mine) and mine <= names)
        return bool(names - elsewhere)

    def baseline(self) -> tuple[TracedDestination, ...]:
        """Where vLLM's loader puts the server's own checkpoint; nothing, where there is none."""
        if self._baseline is None:
            weights = self.record.checkpoint
            found = trace_load(self.twin, weights, self.record.live).destinations if weights else ()
            self._baseline = self._served(found)
        return self._baseline

    def _served(self, traced: tuple[TracedDestination, ...]) -> tuple[TracedDestination, ...]:
        """Without the modules in whose place vLLM has put another model's since loading: that model has the weights."""
        out = []
        for d in traced:
            names = tuple(name for name in d.names if name.rpartition(".")[0] in self.record.modules)
            if names:
                out.append(d if names == d.names else replace(d, names=names))
        return tuple(out)

    def _taken_from_others(self, found: LoadTrace) -> set[str]:
        """Weights that only go to modules in whose place vLLM has put another model's since loading.

        Where it does so in any case, they go nowhere, as they do when it starts. A drafter that tells vLLM which
        modules are its own (``has_own_…``, vLLM's interface) loses them only if they are equal to the other model's:
        what a push brings for them may differ. Errors: PlanRefused naming these.
        """
        served = self._served(found.destinations)
        names = {n for d in found.destinations for n in d.weights} - {n for d in served for n in d.weights}
        if names and any(attribute.startswith("has_own_") for attribute in dir(self.model)):
            shown = sorted(self.prefix + name for name in names)
            raise PlanRefused(
                f"{', '.join(shown[:5])}: the draft model of this server uses the target's in their place, because "
                "its checkpoint has none or equal ones. Leave them out of the push, or restart the server from a "
                "draft checkpoint in which they differ.",
                tied=shown,
            )
        return names

    @property
    def has_hook(self) -> bool:
        """Whether vLLM processes the model as a whole, too, after its modules."""
        return hasattr(self.twin.model, "process_weights_after_loading")

    def within_reach(self, path: str) -> frozenset[int]:
        """Storages of the twin that the processing of a module can come by: its own, and those of all that it holds."""
        if path not in self._reach:
            keys = self.twin.storage_keys()
            seen = {id(t) for t in graph.reachable_tensors(self.twin.modules[path])}
            self._reach[path] = frozenset(keys[key] for key in seen & keys.keys())
        return self._reach[path]

    def is_live(self, names: Iterable[str]) -> bool:
        """Whether kernels read the storage of these parameters as it was loaded."""
        return all(name in self.record.live for name in names)

    def _refuse_shared(self, found: LoadTrace) -> None:
        """Weights that vLLM has tied after loading, because they were equal, cannot take different values again."""
        owners: dict[int, tuple[int, str]] = {}
        for destination in found.destinations:
            if any(not isinstance(p.root, Creation | Constant) for p in destination.pieces):
                for name in destination.names:
                    tensor = self.record.tensor_at(name)
                    if tensor is None or not tensor.numel():
                        continue
                    key, other = owners.setdefault(tensor.untyped_storage().data_ptr(), (destination.key, name))
                    if key != destination.key:
                        raise PlanRefused(
                            f"{name} and {other} were equal in the server's checkpoint, and vLLM has tied them into "
                            "one tensor since: a push would give both the values of one. Restart the server from a "
                            "checkpoint in which they differ.",
                            tied=[other, name],
                        )

    def _unwritten(self, found: LoadTrace) -> set[str]:
        """Parameters that nothing writes, for a server that started without a checkpoint. Not those that have a value
        from their creation and are taken away by processing: a checkpoint may have such scales, or leave them out.
        """
        defined = self.twin.defined()
        written = {
            name
            for d in found.destinations
            if any(isinstance(p.root, Source | Opaque) for p in d.pieces)
            for name in d.names
        }
        return {
            n
            for n, t in self.twin.destination_tensors().items()
            if isinstance(t, nn.Parameter) and n.rpartition(".")[0] in self.record.modules
            and not (id(t) in defined and self.record.tensor_at(n) is None)
        } - written

    def live_storage(self, destination: Destination) -> torch.Tensor:
        """The bytes that kernels read for a live destination. Errors: UnknownPlan when that is no longer so."""
        record, first = self.record, destination.names[0]
        tensor, storage = None, None
        for path in destination.names:
            tensor = record.tensor_at(path)
            if tensor is None or record.state.get(path) != geometry_of(tensor):
                record.live.discard(path)
                raise UnknownPlan(f"{path} no longer lies where it was loaded; plan again")
            if storage is not None and tensor.untyped_storage().data_ptr() != storage.data_ptr():
                record.live.discard(path)
                raise UnknownPlan(f"{path} no longer shares its storage with {first}; plan again")
            storage = tensor.untyped_storage()
        assert tensor is not None
        assert storage is not None
        if storage.nbytes() != destination.nbytes:
            record.live.difference_update(destination.names)
            raise UnknownPlan(f"{first} is not as large as the weights that belong there; plan again")
        known = self._raw.get(first)
        if known is None or known[0] != storage._cdata:  # a view, made once: every begin asks for hundreds
            known = self._raw[first] = storage._cdata, graph.raw_bytes(tensor)
        return known[1]
