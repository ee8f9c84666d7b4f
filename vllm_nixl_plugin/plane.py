"""A worker's weights, memory and NIXL agent under one roof: each method is one stage of the path.

    make_plan      trace -> plan      (a thread of the worker; the twin's lock keeps it apart from an install)
    bind           register           (begin)
    notifications  what has landed
    install        install            (the engine is paused)
    discard/fence  an update that ended otherwise

`session` calls it; `create_plane` makes it for a vLLM worker.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vllm_nixl_plugin import graph
from vllm_nixl_plugin.agent import NixlAgent
from vllm_nixl_plugin.errors import EngineAsleep, InstallFailed, PlanRefused, PushWeightsError, UnknownPlan
from vllm_nixl_plugin.fabric import Fabric, Region, Registration
from vllm_nixl_plugin.install import Change, Pairing
from vllm_nixl_plugin.loadtrace import LoadTrace, trace_load
from vllm_nixl_plugin.memory import Arena
from vllm_nixl_plugin.model import LoadRecord, describe_worker, geometry_of, is_asleep, record_of, state_of
from vllm_nixl_plugin.planning import Fill, Planned, check_against_checkpoint, dtype_of, make_plan, refuse_missing
from vllm_nixl_plugin.processes import is_running
from vllm_nixl_plugin.settings import WorkerSettings
from vllm_nixl_plugin.tracing import Constant, Creation, Opaque, Source
from vllm_nixl_plugin.twin import Twin, engine_context
from vllm_nixl_plugin.wire import Binding, Manifest, Mode, WorkerPlan

logger = logging.getLogger("vllm.nixl_plugin")

_MAX_PLANS = 16


def create_plane(worker: Any) -> WorkerPlane:
    """The plane of a vLLM worker that has loaded its model."""
    return WorkerPlane(worker, WorkerSettings())


class WorkerPlane:
    """See the module. All methods but `make_plan` are called from the worker's main thread."""

    def __init__(self, worker: Any, settings: WorkerSettings) -> None:
        self.worker = worker
        self.settings = settings
        self.model: nn.Module = worker.get_model()
        self.record: LoadRecord | None = record_of(self.model)
        self._planned: OrderedDict[int, tuple[Planned, bool]] = OrderedDict()
        self._baseline: LoadTrace | None = None
        self._lock = threading.RLock()
        self._agent: Fabric | None = None
        self._registered: dict[tuple[int, int], Registration] = {}
        self._bound: dict[tuple[int, Mode], tuple[tuple[int, ...], Binding]] = {}
        self._incarnation = uuid.uuid4().hex
        self._arena: Arena | None = None
        self._condemned: list[list[torch.Tensor]] = []
        self._prefilled: dict[int | str, tuple[int, int]] = {}
        self._base_complete = False
        self._prepared: _PreparedInstall | None = None
        self._twin_in_use = False

    # Identity

    def describe(self) -> dict[str, Any]:
        """Who this worker is, as plain values."""
        return describe_worker(self.worker) | {"pid": os.getpid(), "host": socket.gethostname()}

    def incarnation(self) -> str:
        """Changes at every start and fence."""
        return self._incarnation

    @property
    def twin(self) -> Twin:
        """The model as created. Errors: PlanRefused, when it could not be made."""
        if self.record is None:
            raise PlanRefused(
                "this model was not loaded through a vLLM model loader that the plugin could watch. Put 'nixl' into "
                "VLLM_PLUGINS of the server, and use a --load-format whose loader is vLLM's own."
            )
        if self.record.twin is None:
            raise PlanRefused(f"the model as created could not be made a second time: {self.record.twin_error}")
        return self.record.twin

    # Trace and plan

    def make_plan(self, manifest: Manifest) -> WorkerPlan:
        """Errors: PlanRefused naming weights."""
        with self._lock:
            self._refuse_what_would_go_wrong()
            twin, record = self.twin, self.record
            assert record is not None
            check_against_checkpoint(manifest, record.checkpoint)
            found = trace_load(twin, manifest.weights, record.live)
            self._refuse_shared(found)
            same = {(w.name, w.shape) for w in manifest.weights} == {(w.name, w.shape) for w in record.checkpoint}
            baseline = None
            if not manifest.partial and not same:
                if record.checkpoint:
                    if self._baseline is None:
                        self._baseline = trace_load(twin, record.checkpoint, record.live)
                    baseline = {t.key: t.pieces for t in self._baseline.destinations}
                else:
                    refuse_missing(self._unwritten(found))
            ignorable = {w.name for w in record.checkpoint}
            planned = make_plan(manifest, found.destinations, baseline, ignorable)
            self._planned[id(planned.plan)] = (planned, manifest.partial)
            while len(self._planned) > _MAX_PLANS:
                _, (gone, _) = self._planned.popitem(last=False)
                self._bound = {key: bound for key, bound in self._bound.items() if key[0] != id(gone)}
            self._agent = self._agent or self._new_agent()  # half a second that no request has to wait for
            return planned.plan

    def _refuse_what_would_go_wrong(self) -> None:
        if getattr(self.worker.vllm_config.parallel_config, "enable_eplb", False):
            raise PlanRefused(
                "this server balances expert load (--enable-eplb): experts move between ranks while it runs, and a "
                "push would write them where they no longer are. Start it without --enable-eplb.",
                eplb_active=True,
            )
        draft = getattr(self.worker, "get_draft_model", None)
        if draft is not None and not self._planned and isinstance(draft(), nn.Module):
            logger.warning("the draft model of speculative decoding keeps its weights: pushes update the target only")

    def _refuse_shared(self, found: LoadTrace) -> None:
        """Weights that vLLM has tied after loading, because they were equal, cannot take different values again."""
        assert self.record is not None
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
        """Parameters that nothing writes, for a server that started without a checkpoint."""
        written = {
            name
            for d in found.destinations
            if any(isinstance(p.root, Source | Opaque) for p in d.pieces)
            for name in d.names
        }
        parameters = {n for n, t in self.twin.destination_tensors().items() if isinstance(t, nn.Parameter)}
        return parameters - written

    def summary(self, plan: WorkerPlan) -> dict[str, Any]:
        """Bytes by home and by destination, for people."""
        arrived: dict[int, int] = {}
        for c in plan.copies:
            arrived[c.destination] = arrived.get(c.destination, 0) + c.copy_.dst_nbytes
        homes: dict[str, int] = {}
        why = self.record.not_live if self.record is not None else {}
        for d in plan.destinations:
            homes[d.home] = homes.get(d.home, 0) + d.nbytes
        return {
            "nbytes": plan.nbytes,
            "nbytes_by_home": homes,
            "copies": len(plan.copies),
            "unused": list(plan.unused),
            "fallback": list(plan.fallback),
            "destinations": [
                {
                    "names": list(d.names),
                    "nbytes": d.nbytes,
                    "home": d.home,
                    "reason": next((why[n] for n in d.names if n in why), ""),
                    "received_nbytes": arrived.get(i, 0),
                }
                for i, d in enumerate(plan.destinations)
            ],
        }

    def _of(self, plan: WorkerPlan) -> Planned:
        try:
            return self._planned[id(plan)][0]
        except KeyError:
            raise UnknownPlan("the worker no longer holds this plan; plan again") from None

    # Register

    def bind(self, plan: WorkerPlan, mode: Mode) -> Binding:
        """Addresses of all destinations for one mode; memory is reserved and registered when it was not yet.

        Errors: EngineAsleep, InsufficientMemory, RegistrationFailed, UnknownPlan (a live home is no longer one).
        """
        if is_asleep(self.worker):
            raise EngineAsleep("the engine's weights are asleep; wake it up (POST /wake_up) and push again")
        planned = self._of(plan)
        arena = self._arena = self._arena or Arena(self.twin.device)
        served = {key: self._live_storage(planned, i) for i, key in enumerate(planned.keys) if _is_live(plan, i)}
        addresses = tuple(t.data_ptr() for t in served.values())
        in_arena = [
            (key, plan.destinations[i].nbytes)
            for i, key in enumerate(planned.keys)
            if mode == "shadow" or not _is_live(plan, i)
        ]
        self._check_base(plan)
        agent = self._agent = self._agent or self._new_agent()
        arena.reserve(in_arena)
        self._prefill(planned, {key for key, _ in in_arena}, served)
        before = self._bound.get((id(planned), mode))
        if before is not None and before[0] == addresses:
            return before[1]
        homes = [arena[key] if (mode == "shadow" or not _is_live(plan, i)) else served[key]
                 for i, key in enumerate(planned.keys)]  # fmt: skip
        for tensor in (*arena.blocks, *(t for t in homes if t.numel())):
            self._register(agent, tensor)
        device = self.twin.device
        binding = Binding(
            worker=int(self.describe()["worker"]),
            incarnation=self._incarnation,
            agent=agent.name,
            agent_metadata=agent.metadata(),
            memory="VRAM" if device.type == "cuda" else "DRAM",
            device_id=homes[0].get_device() if homes and device.type == "cuda" else 0,
            addresses=tuple(t.data_ptr() for t in homes),
        )
        self._bound[id(planned), mode] = (addresses, binding)
        return binding

    def _check_base(self, plan: WorkerPlan) -> None:
        """A partial plan leaves bytes to what is there now, so there must be shadows that hold them."""
        assert self.record is not None
        if self._base_complete or not self._is_partial(plan):
            return
        lacking = [d.names[0] for d in plan.destinations if d.home == "shadow"]
        if lacking:
            raise PlanRefused(
                f"a partial push into {', '.join(lacking[:5])} needs the other weights of these layers and of their "
                "neighbours as they were loaded, and this worker no longer has them. Push all weights once with "
                "mode='shadow', then partially.",
                layers=lacking[:1000],
            )

    def _is_partial(self, plan: WorkerPlan) -> bool:
        return self._planned[id(plan)][1]

    def _new_agent(self) -> Fabric:
        s = self.settings
        name = f"vllm-{self.describe()['worker']}-{self._incarnation}"
        return NixlAgent(
            name, backend=s.backend, backend_params=s.backend_params, num_threads=s.num_threads, interfaces=s.interfaces
        )

    def _register(self, agent: Fabric, tensor: torch.Tensor) -> None:
        region = Region.of(tensor)
        key = (region.address, region.nbytes)
        if key not in self._registered:
            self._registered[key] = agent.register([region])

    def _live_storage(self, planned: Planned, index: int) -> torch.Tensor:
        """The bytes that kernels read for a live destination. Errors: UnknownPlan when that is no longer so."""
        destination, record = planned.plan.destinations[index], self.record
        assert record is not None
        found: torch.Tensor | None = None
        for path in destination.names:
            tensor = record.tensor_at(path)
            if tensor is None or record.state.get(path) != geometry_of(tensor):
                record.live.discard(path)
                raise UnknownPlan(f"{path} no longer lies where it was loaded; plan again")
            if found is not None and tensor.untyped_storage().data_ptr() != found.untyped_storage().data_ptr():
                record.live.discard(path)
                raise UnknownPlan(f"{path} no longer shares its storage with {destination.names[0]}; plan again")
            found = tensor
        assert found is not None
        if found.untyped_storage().nbytes() != destination.nbytes:
            record.live.difference_update(destination.names)
            raise UnknownPlan(f"{destination.names[0]} is not as large as the weights that belong there; plan again")
        return graph.raw_bytes(found)

    def _prefill(self, planned: Planned, keys: set[int | str], served: dict[Any, torch.Tensor]) -> None:
        """Write into shadows, once per plan and memory, the bytes that no weight writes.

        Under a partial plan these are today's: already there after a full push, else those of the live home.
        """
        assert self._arena is not None
        partial = self._is_partial(planned.plan)
        for key, fills in zip(planned.keys, planned.fills, strict=True):
            if key not in keys or not fills or (partial and self._base_complete):
                continue
            target = self._arena[key]
            done = (id(planned), target.data_ptr())
            if self._prefilled.get(key) == done and not partial:
                continue
            for fill in fills:
                source = fill.value if fill.value is not None and not partial else self._creation(key, served)
                if source is not None:
                    _fill(target, fill, source, self.twin.storages[key].dtype if isinstance(key, int) else None)
            self._prefilled[key] = done

    def _creation(self, key: int | str, served: dict[Any, torch.Tensor]) -> Any:
        if key in served:
            return served[key]
        return self.twin.storages[key].value if isinstance(key, int) else None

    # Transfer

    def notifications(self) -> list[tuple[str, bytes]]:
        """Agent and message of what has landed since the last call."""
        return self._agent.notifications() if self._agent is not None else []

    # Install

    def prepare_install(self, plan: WorkerPlan, mode: Mode) -> None:
        """Run vLLM's processing on the twin and work out what an install will change. Nothing that serves is touched.

        Errors: NeedsRestart, InstallFailed; always ``untouched`` in shadow mode.
        """
        with self._lock:
            planned, record, twin = self._of(plan), self.record, self.twin
            assert record is not None
            self._prepared = None
            seconds: dict[str, float] = {}
            clock = _Clock(seconds)
            captured = self._captured()
            engines = set() if captured else graph.memory_held(getattr(self.worker, "model_runner", None))
            pairing = Pairing(record.state, captured=captured, engines=engines)
            paths = self._processed_paths(plan)
            written = {name.rpartition(".")[0] for d in plan.destinations for name in d.names if d.home != "source"}
            served = record.served()
            try:
                if paths:
                    self._process(planned, mode, paths)
                    clock.lap("process")
                    for path in sorted(paths & set(served)):
                        pairing.module(path, served[path], twin.modules[path])
                for path in () if captured else (written - paths) & set(served):
                    pairing.unprocessed(path, served[path])
                clock.lap("compare")
                self._synchronize()
                live = self._live_copies(planned, paths) if mode == "shadow" else ([], [])
                self._prepared = _PreparedInstall(plan, mode, pairing.change, live, seconds)
            except Exception as error:
                self._release_twin()
                if isinstance(error, PushWeightsError):
                    error.details["untouched"] = mode == "shadow"
                    raise
                logger.exception("worker %s could not prepare an install", self.describe()["worker"])
                raise InstallFailed(
                    f"worker {self.describe()['worker']}: {type(error).__name__}: {error}", untouched=mode == "shadow"
                ) from error

    def install(self, plan: WorkerPlan, mode: Mode) -> dict[str, float]:
        """Put the prepared weights in place; seconds by stage (those of `prepare_install` among them).

        Errors: those of `prepare_install`, and InstallFailed without ``untouched`` when a copy failed half-way.
        """
        with self._lock:
            if self._prepared is None or self._prepared.plan is not plan or self._prepared.mode != mode:
                self.prepare_install(plan, mode)
            prepared, record = self._prepared, self.record
            assert prepared is not None
            assert record is not None
            clock = _Clock(prepared.seconds)
            try:
                for served, shadow in zip(*prepared.live, strict=True):
                    served.copy_(shadow)
                prepared.change.apply()
                self._synchronize()
            except Exception as error:
                logger.exception("worker %s could not finish an install", self.describe()["worker"])
                raise InstallFailed(f"worker {self.describe()['worker']}: {type(error).__name__}: {error}") from error
            finally:
                clock.lap("copy")
                for path, _, value in prepared.change.rebinds:
                    record.state[path] = state_of(value)
                self._release_twin()
            whole = mode == "shadow" or not any(d.home == "live" for d in plan.destinations)
            self._base_complete = whole and (self._base_complete or not self._is_partial(plan))
            clock.lap("release")
            return prepared.seconds

    def _release_twin(self) -> None:
        self._prepared = None
        if self._twin_in_use:
            self._twin_in_use = False
            self.twin.restore()

    def _captured(self) -> bool:
        config = self.worker.vllm_config
        return self.twin.device.type == "cuda" and not config.model_config.enforce_eager

    def _processed_paths(self, plan: WorkerPlan) -> set[str]:
        """Modules on which vLLM's processing has to run: those with a shadow home, and those that derive tensors."""
        assert self.record is not None
        shadows = {n.rpartition(".")[0] for d in plan.destinations if d.home == "shadow" for n in d.names}
        if not shadows and not plan.fallback:
            return set()
        return {p for p in shadows | self.record.derived if p in self.twin.modules}

    def _process(self, planned: Planned, mode: Mode, paths: set[str]) -> None:
        twin, record = self.twin, self.record
        assert record is not None
        self._twin_in_use = True
        twin.restore()
        twin.fill_tensors(self._contents(planned, mode, paths))
        with engine_context(twin.config, record.model_config):
            if planned.plan.fallback:
                specs = {w.name: w for w in planned.plan.weights}
                assert self._arena is not None
                weights = [
                    (n, self._arena[n].cpu().view(dtype_of(specs[n].dtype)).view(specs[n].shape))
                    for n in planned.plan.fallback
                ]
                twin.load_weights(weights)
            twin.process(paths)

    def _contents(self, planned: Planned, mode: Mode, paths: set[str]) -> dict[int, torch.Tensor]:
        """Storages for the modules that are processed: copies of what arrived, else what creation or the engine has."""
        twin, arena, record = self.twin, self._arena, self.record
        assert arena is not None
        assert record is not None
        index = {key: i for i, key in enumerate(planned.keys)}
        partial, served = self._is_partial(planned.plan), record.served()
        wanted: dict[int, torch.Tensor] = {}
        keys = twin.storage_keys()
        for path in paths:
            for name, tensor in graph.tensors(twin.modules[path]):
                key = keys.get(id(tensor))
                if key is None or key in wanted:
                    continue
                info = twin.storages[key]
                if key in index and (mode == "shadow" or not _is_live(planned.plan, index[key])):
                    wanted[key] = arena[key].clone()
                elif key in index:
                    wanted[key] = self._live_storage(planned, index[key]).clone()
                elif partial and key in arena:  # what the last full push brought
                    wanted[key] = arena[key].clone()
                elif info.value is None and path in served:
                    today = dict(graph.tensors(served[path])).get(name)
                    if today is not None and today.untyped_storage().nbytes() == info.nbytes:
                        wanted[key] = graph.raw_bytes(today).clone()
                    else:
                        wanted[key] = torch.empty(info.nbytes, dtype=torch.uint8, device=info.device)
                elif isinstance(info.value, int | float):
                    wanted[key] = torch.empty(info.nbytes, dtype=torch.uint8, device=info.device)
                    wanted[key].view(info.dtype).fill_(info.value)
        return wanted

    def _live_copies(self, planned: Planned, processed: set[str]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Tensors that serve and their shadows, for live homes whose modules are not processed."""
        assert self._arena is not None
        to, of = [], []
        for i, key in enumerate(planned.keys):
            d = planned.plan.destinations[i]
            if d.home == "live" and not any(n.rpartition(".")[0] in processed for n in d.names):
                to.append(self._live_storage(planned, i))
                of.append(self._arena[key])
        return to, of

    def _synchronize(self) -> None:
        if self.twin.device.type == "cuda":
            torch.cuda.synchronize(self.twin.device)

    # Ends of updates

    def discard(self, plan: WorkerPlan, mode: Mode) -> None:
        """The update ended without an install: the shadows hold a mixture, no base for a partial push."""
        self._base_complete = False
        if self._prepared is not None:
            self._release_twin()

    def may_write(self, writer: str) -> bool:
        """Whether a process of this host could go on writing to memory whose agent is destroyed: it runs, or stands."""
        return is_running(writer)

    def fence(self) -> None:
        """Destroy the agent and take a new name. Shadow memory that a stopped writer may still reach is set aside for
        good, since a writer on the same host can go on after deregistration."""
        if self._agent is not None:
            self._agent.close()
        self._agent, self._registered, self._bound = None, {}, {}
        self._incarnation = uuid.uuid4().hex
        if self._arena is not None:
            self._condemned.append(self._arena.blocks)
            self._arena = None
        self._prefilled = {}
        self._base_complete = False


@dataclass(slots=True)
class _PreparedInstall:
    """What `install` carries out: changes from the twin, and live tensors with their shadows."""

    plan: WorkerPlan
    mode: Mode
    change: Change
    live: tuple[list[torch.Tensor], list[torch.Tensor]]
    seconds: dict[str, float]


class _Clock:
    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds, self._at = seconds, time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self._seconds[stage] = now - self._at
        self._at = now


def _is_live(plan: WorkerPlan, index: int) -> bool:
    return plan.destinations[index].home == "live"


def _fill(target: torch.Tensor, fill: Fill, source: Any, dtype: torch.dtype | None) -> None:
    """Write one fill into a destination's bytes; a number is written in the destination's dtype."""
    c = fill.copy
    if not c.numel:
        return
    if isinstance(source, torch.Tensor):
        if c.src_itemsize != c.dst_itemsize:
            raise PlanRefused("a loader casts a tensor of its own into a parameter; this is not supported")
        raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[c.dst_itemsize]
        _strided(target, raw, c.shape, c.dst_strides, c.dst_offset).copy_(
            _strided(source, raw, c.shape, c.src_strides if fill.value is not None else c.dst_strides,
                     c.src_offset if fill.value is not None else c.dst_offset)
        )  # fmt: skip
        return
    assert dtype is not None
    if dtype.itemsize != c.dst_itemsize:
        dtype = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[c.dst_itemsize]
    _strided(target, dtype, c.shape, c.dst_strides, c.dst_offset).fill_(source)


def _strided(raw: torch.Tensor, dtype: torch.dtype, shape: Any, strides: Any, offset: int) -> torch.Tensor:
    size = dtype.itemsize
    view = torch.empty(0, dtype=dtype, device=raw.device)
    start = raw.storage_offset() + offset
    return view.set_(raw.untyped_storage(), start // size, tuple(shape), tuple(s // size for s in strides))
