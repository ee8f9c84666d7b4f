"""Check the trace against reality, on random data (between the stages trace and plan).

A loader may do what a trace does not see: write through raw pointers, ask for the class of a tensor, go past the
dispatcher. So for each kind of unit of the model (`loadunits`) random weights are loaded twice into memory of the same
content, once by vLLM's own `load_weights` on the twin, once by the plan: fills, copies, programs, and the loader again
for what the plan leaves to it. Every storage of the unit, written or not, must have the same bytes then.

Where they differ, what the trace connects with it is *demoted* to the fallback: its weights are sent whole, and vLLM's
loader runs on them at install. Called by `loaded` in the thread that plans; a unit at a time, so that little memory is
taken, on the worker's device, or on the CPU where the device has no room. The twin is as it was afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import torch

from vllm_nixl_plugin import graph, replay
from vllm_nixl_plugin.dispatch import Writes
from vllm_nixl_plugin.errors import PlanRefused
from vllm_nixl_plugin.findings import Demotion, Findings
from vllm_nixl_plugin.loadunits import LoadUnits, Unit
from vllm_nixl_plugin.memory import available_nbytes
from vllm_nixl_plugin.noise import Noise
from vllm_nixl_plugin.planning import Planned, TracedDestination
from vllm_nixl_plugin.scratch import Scratch
from vllm_nixl_plugin.twin import Twin, config_context
from vllm_nixl_plugin.wire import WeightSpec

logger = logging.getLogger("vllm.nixl_plugin")

THIN_NBYTES = 256 << 20
"""Of units with more bytes of weights than this, a sample checks only first and last of weights that are alike."""
_SPARE_NBYTES = 512 << 20


class _NotAlone(Exception):
    """A unit cannot be loaded without others. ``storages``: what it wrote outside of it."""

    def __init__(self, reason: str, storages: frozenset[int] = frozenset()) -> None:
        super().__init__(reason)
        self.storages = storages


class SelfCheck:
    """Checks the traces of one twin. ``mode``: ``sample`` (of units that are alike, the first and the last), ``full``
    (every unit) or ``off``. What has passed once is not checked again. One thread at a time."""

    def __init__(self, twin: Twin, mode: str) -> None:
        self.twin = twin
        self.mode = mode
        self._device = twin.device
        self._passed: set[Hashable] = set()
        self.paths: dict[int, tuple[str, ...]] = {}
        self.noise = Noise()
        self.scratch = Scratch()

    def check(self, weights: Sequence[WeightSpec], traced: Sequence[TracedDestination], planned: Planned) -> Findings:
        """Compare loading with the plan. Errors: PlanRefused, where not even the loader itself can be relied on."""
        findings = Findings(self.mode)
        if self.mode == "off":
            return findings
        begin = time.perf_counter()
        self.paths = _paths(self.twin)
        units = LoadUnits(weights, traced, planned, self.paths, _kinds(self.twin, self.paths))
        findings.units = len(units.all)
        self.noise.make(max((units.nbytes(Unit((n,), ()), _SIZES) for n in range(len(weights))), default=0))
        self.scratch.reserve(max((self._nbytes(units, unit) for unit in units.all), default=0))
        comparison = _Comparison(self, units, planned, findings)
        try:
            with self._stream():
                for signature, alike in _by_signature(units):
                    if self.mode == "full" or signature not in self._passed:
                        self._check_kind(signature, alike, comparison)
        finally:
            self.twin.restore()
            self.noise.release()
            self.scratch.reserve(0)
            if self.twin.device.type == "cuda":
                torch.cuda.empty_cache()
        findings.seconds = time.perf_counter() - begin
        for demotion in findings.demoted:
            logger.warning(
                "the trace of %s was not right (%s): vLLM's loader will place %d weights at each install",
                ", ".join(demotion.names[:5]), demotion.reason, len(demotion.weights),
            )  # fmt: skip
        return findings

    def _nbytes(self, units: LoadUnits, unit: Unit) -> int:
        """Of a unit's storages twice and its weights once."""
        return 2 * sum(self.twin.storages[key].nbytes for key in unit.storages) + units.nbytes(unit, _SIZES)

    def _check_kind(self, signature: Hashable, alike: Sequence[Unit], comparison: _Comparison) -> None:
        picked = alike if self.mode == "full" else list(dict.fromkeys((alike[0], alike[-1])))
        found = [comparison.verify(unit) for unit in picked]
        if not any(found):
            self._passed.add(signature)
        elif self.mode != "full":
            found += [comparison.verify(unit) for unit in alike if unit not in picked]
        for demotions in found:
            comparison.findings.demoted += [d for d in demotions if d not in comparison.findings.demoted]

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        """A stream of its own on a GPU, so that the engine's is not held up."""
        if self.twin.device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(self.twin.device)
        with torch.cuda.device(self.twin.device), torch.cuda.stream(stream):
            yield
            stream.synchronize()

    def room_for(self, nbytes: int) -> torch.device:
        """The worker's device, or the CPU where it has no room for so many bytes."""
        if self._device.type == "cuda" and nbytes + _SPARE_NBYTES > available_nbytes(self._device):
            return torch.device("cpu")
        return self._device



class _Comparison:
    """Loads units of one plan twice and compares."""

    def __init__(self, owner: SelfCheck, units: LoadUnits, planned: Planned, findings: Findings) -> None:
        self.owner, self.twin, self.units, self.planned, self.findings = owner, owner.twin, units, planned, findings
        self._fallback = set(planned.plan.fallback)
        self._fills = dict(zip(planned.keys, planned.fills, strict=True))
        self._covered: list[tuple[set[int], set[int], list[Demotion]]] = []

    def verify(self, unit: Unit) -> list[Demotion]:
        """What of a unit has to be demoted. A unit that the loader does not take alone is taken with others."""
        for weights, storages, found in self._covered:
            if weights.issuperset(unit.weights) and storages.issuperset(unit.storages):
                return found
        reason = ""
        widened = unit
        for others in (list, self.units.outside, lambda: self.units.all):
            widened = self.units.merged([widened, *others()])
            for _ in range(3):
                try:
                    found = self._settle(widened)
                    self._covered.append((set(widened.weights), set(widened.storages), found))
                    return found
                except _NotAlone as error:
                    reason = str(error)
                    met = [u for u in self.units.all if error.storages & set(u.storages)]
                    if not met:
                        break
                    widened = self.units.merged([widened, *met])
        everything = self.units.merged(self.units.all)
        return [self._demotion(everything, set(), f"vLLM's loader fails on random data: {reason}")]

    def _settle(self, unit: Unit) -> list[Demotion]:
        thin = self.units.thinned(unit)
        if self.owner.mode != "full" and thin != unit and self.units.nbytes(unit, _SIZES) > THIN_NBYTES:
            with contextlib.suppress(_NotAlone):
                if not self._differing(unit, thin.weights):
                    self._count(unit)
                    return []
        differing = self._differing(unit, unit.weights)
        self._count(unit)
        if not differing:
            return []
        parts = self.units.components(unit)
        bad = [p for p in parts if differing & set(p.storages)]
        unused = [p for p in parts if not p.storages]
        for attempt in (self.units.merged(bad), self.units.merged(bad + unused), unit):
            names = {self.units.weights[w].name for w in attempt.weights}
            if names and not self._differing(unit, unit.weights, names, frozenset(attempt.storages)):
                return [self._demotion(attempt, differing, "loading random data gave other bytes than the trace")]
        at = self._names(self.units.merged(bad))
        raise PlanRefused(
            f"loading {', '.join(at[:5])} twice from the same weights gives different bytes; this model cannot be "
            "updated",
            layers=at[:1000],
        )

    def _count(self, unit: Unit) -> None:
        self.findings.checked_units += 1
        self.findings.checked_nbytes += sum(self.twin.storages[key].nbytes for key in unit.storages)

    def _demotion(self, unit: Unit, differing: set[int], reason: str) -> Demotion:
        weights = tuple(self.units.weights[w].name for w in unit.weights)
        storages = tuple(k for k in unit.storages if self.units.is_written(k) or k in differing)
        return Demotion(weights, storages, tuple(self._names(Unit((), storages))), reason)

    def _names(self, unit: Unit) -> list[str]:
        return [path for key in unit.storages for path in self.owner.paths[key]]

    def _differing(
        self, unit: Unit, chosen: Sequence[int], more: set[str] | frozenset[str] = frozenset(),
        demoted: frozenset[int] = frozenset(),
    ) -> set[int]:
        """Storages of a unit that differ after the chosen weights were loaded for real, and by the plan with ``more``
        weights left to the loader, which write the ``demoted`` storages. Errors: _NotAlone."""
        owner, twin = self.owner, self.twin
        nbytes = sum(twin.storages[key].nbytes for key in unit.storages)
        device = owner.room_for(3 * nbytes)
        whole = len(chosen) == len(unit.weights)
        owner.scratch.reset()
        real = {key: self._created(key, device, whole=whole) for key in unit.storages}
        by_plan = {key: self._created(key, device, whole=whole) for key in unit.storages}
        fallback = self._fallback | more
        for key in unit.storages if whole else ():
            info = twin.storages[key]
            for of in self._fills.get(key, ()) if key not in demoted else ():
                replay.fill(by_plan[key], of, None, info.dtype)

        def offered(names: Callable[[str], bool], *, also_by_plan: bool) -> Iterator[tuple[str, torch.Tensor]]:
            for number in chosen:
                spec = self.units.weights[number]
                if names(spec.name):
                    quiet = spec.name in self._fallback
                    value = owner.noise.tensor(spec, number, owner.scratch.take, quiet=quiet)
                    if also_by_plan and spec.name not in fallback:
                        self._carry_out(number, value, by_plan)
                    yield spec.name, value

        real = self._load(offered(lambda _: True, also_by_plan=True), real, unit)
        if any(self.units.weights[number].name in fallback for number in chosen):
            by_plan = self._load(offered(fallback.__contains__, also_by_plan=False), by_plan, unit)
        return {key for key in unit.storages if not _same_bytes(real[key], by_plan[key])}

    def _created(self, key: int, device: torch.device, *, whole: bool) -> torch.Tensor:
        """What a storage holds at creation. Where that is undefined it is the same each time, or anything at all if
        the plan writes every byte."""
        info = self.twin.storages[key]
        device = device if info.device.type == self.twin.device.type else info.device
        if isinstance(info.value, torch.Tensor):
            return info.value.to(device, copy=True)
        if device.type == "cpu":
            memory = self.owner.scratch.take(info.nbytes)
        else:
            memory = torch.empty(info.nbytes, dtype=torch.uint8, device=device)
        if info.value is not None:
            memory.view(info.dtype).fill_(info.value)
        elif not (whole and self.units.covers(key, info.nbytes)):
            memory.fill_(0xA5)
        return memory

    def _carry_out(self, number: int, value: torch.Tensor, memory: Mapping[int, torch.Tensor]) -> None:
        sent: dict[torch.device, torch.Tensor] = {}
        raw = graph.raw_bytes(value)
        for copy in self.units.copies.get(number, ()):
            key = self.planned.keys[copy.destination]
            assert isinstance(key, int)
            target = memory[key]
            source = sent.setdefault(target.device, raw.to(target.device))
            replay.carry_out(source, value.dtype, target, copy.copy_, copy.program)

    def _load(
        self, weights: Iterator[tuple[str, torch.Tensor]], memory: dict[int, torch.Tensor], unit: Unit
    ) -> dict[int, torch.Tensor]:
        """vLLM's loader on the twin with the given memory; what the storages of the unit hold then."""
        twin, writes = self.twin, Writes()
        twin.restore()
        others = {k: _unused(i.nbytes) for k, i in twin.storages.items() if not isinstance(i.value, torch.Tensor)}
        twin.fill_tensors(others | memory)
        outside = {c: key for c, key in twin.storages_in_use().items() if key not in memory}
        try:
            with config_context(twin.config, twin.record.model_config), writes:
                twin.load_weights(weights)
                for _ in weights:  # a loader that does not take all of them
                    pass
        except Exception as error:
            raise _NotAlone(f"{type(error).__name__}: {str(error)[:300]}") from error
        if escaped := frozenset(outside[c] for c in writes.written if c in outside):
            raise _NotAlone("the loader writes to other modules", escaped)
        tensors = twin.destination_tensors()
        out = dict(memory)
        for key, made in memory.items():
            for path in self.owner.paths[key]:
                tensor = tensors.get(path)
                if tensor is not None and tensor.untyped_storage()._cdata != made.untyped_storage()._cdata:
                    out[key] = tensor.detach().contiguous().view(-1).view(torch.uint8)
        return out


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.numel() != b.numel():
        return False
    b, wide = b.to(a.device), a.numel() // 8 * 8
    if (int(a.storage_offset()) | int(b.storage_offset())) % 8:
        return torch.equal(a, b)
    same = torch.equal(a[:wide].view(torch.int64), b[:wide].view(torch.int64))
    return same and torch.equal(a[wide:], b[wide:])


def _unused(nbytes: int) -> torch.Tensor:
    """Memory that is not to be touched: it costs nothing as long as nobody does, and may be if somebody has to."""
    return torch.empty(nbytes, dtype=torch.uint8)


def _by_signature(units: LoadUnits) -> list[tuple[Hashable, list[Unit]]]:
    kinds: dict[Hashable, list[Unit]] = {}
    for unit in units.all:
        if unit.weights:
            kinds.setdefault(units.signature(unit), []).append(unit)
    return list(kinds.items())


def _paths(twin: Twin) -> dict[int, tuple[str, ...]]:
    """Where each storage of the twin can be found; plain tensors of modules too."""
    return {key: tuple(info.names) for key, info in twin.storages.items()}


def _kinds(twin: Twin, paths: Mapping[int, Sequence[str]]) -> dict[int, Hashable]:
    """Size, dtype, creation, module classes and loaders of each storage."""
    tensors = twin.destination_tensors()
    out: dict[int, Hashable] = {}
    for key, names in paths.items():
        info = twin.storages[key]
        value = info.value if isinstance(info.value, int | float) else type(info.value)
        at = []
        for name in names:
            module, tensor = twin.modules.get(name.rpartition(".")[0]), tensors.get(name)
            loader = getattr(tensor, "weight_loader", None)
            at.append((type(module), type(tensor), getattr(loader, "__qualname__", type(loader))))
        out[key] = (info.nbytes, info.dtype, value, tuple(at))
    return out


_SIZES = {str(t).removeprefix("torch."): t.itemsize for t in vars(torch).values() if isinstance(t, torch.dtype)}
