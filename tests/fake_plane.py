"""Fakes for the control plane: a plane that moves no bytes, and a vLLM engine client with many workers."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_nixl_plugin.encoding import encode_landed
from vllm_nixl_plugin.layout import Copy
from vllm_nixl_plugin.wire import (
    Binding,
    Destination,
    Landed,
    Manifest,
    PlannedCopy,
    WeightSpec,
    WorkerPlan,
)
from vllm_nixl_plugin.worker import NixlWorkerExtension

NBYTES = 64
MANIFEST = Manifest(weights=(WeightSpec(name="w", shape=(16,), dtype="float32"),))
PARTIAL = MANIFEST.model_copy(update={"partial": True})


def plan_of(manifest: Manifest, worker: int) -> WorkerPlan:
    """One weight to one destination; workers differ by its name."""
    geometry = Copy((16,), 0, (4,), 4, 0, (4,), 4)
    return WorkerPlan(
        weights=manifest.weights,
        destinations=(Destination(names=(f"w.{worker % 2}",), nbytes=NBYTES, home="shadow"),),
        copies=(PlannedCopy(weight=0, destination=0, copy_=geometry),),
    )


class FakePlane:
    """Records its calls in ``log``; raises what ``fail[method]`` holds."""

    def __init__(self, worker: int = 0) -> None:
        self.worker = worker
        self.log: list[str] = []
        self.slices = 1
        self.fenced: tuple[str, ...] = ()
        self.fail: dict[str, Exception] = {}
        self.inbox: list[tuple[str, bytes]] = []
        self.running: set[str] = set()
        self.block = threading.Event()
        self.block.set()
        self._incarnation = uuid.uuid4().hex

    def _call(self, method: str) -> None:
        self.log.append(method)
        if method in self.fail:
            raise self.fail[method]

    def checkpoint(self) -> list[WeightSpec]:
        return [*MANIFEST.weights, WeightSpec(name=f"of-{self.worker}", shape=(2, 3), dtype="bfloat16")]

    def describe(self) -> dict[str, Any]:
        return {"worker": self.worker, "rank": self.worker, "model": "fake", "dtype": "float32"}

    def make_plan(self, manifest: Manifest) -> WorkerPlan:
        self._call("make_plan")
        return plan_of(manifest, self.worker)

    def bind(self, plan: WorkerPlan, mode: str, contacts: Sequence[bytes] = ()) -> Binding:
        self._call("bind")
        self.block.wait(20)
        return Binding(
            worker=self.worker, incarnation=self._incarnation, agent=f"w{self.worker}-{self._incarnation}",
            agent_metadata=b"\x00\xffmeta", memory="DRAM", device_id=0, addresses=(4096,),
        )  # fmt: skip

    def notifications(self) -> list[tuple[str, bytes]]:
        got, self.inbox = self.inbox, []
        return got

    def prepare_install(self, plan: WorkerPlan, mode: str, *, whole: bool) -> bool:
        """``slices``: how many calls it takes, where not the whole is asked for."""
        self._call("prepare")
        self.slices -= 1
        return whole or self.slices <= 0

    def install(self, plan: WorkerPlan, mode: str) -> dict[str, float]:
        self.block.wait(20)
        self._call("install")
        return {"copy": 0.25}

    def discard(self, plan: WorkerPlan, mode: str) -> None:
        self._call("discard")

    def fence(self, writers: Sequence[str]) -> None:
        self._call("fence")
        self.fenced = tuple(writers)
        self._incarnation = uuid.uuid4().hex

    def may_write(self, writer: str) -> bool:
        return writer in self.running

    def incarnation(self) -> str:
        return self._incarnation

    def summary(self, plan: WorkerPlan) -> dict[str, Any]:
        return {"nbytes": plan.nbytes}

    def fingerprint(self) -> Iterator[list[tuple[str, str]]]:
        """One path a slice, after that of the installed update."""
        for path in ("b", "a", "c"):
            self._call("fingerprint")
            yield [(path, f"{self.log.count('install')} of {path}")]

    def land(self, update_id: str, plan: str, nbytes: int = NBYTES, sequence: int = 0, agent: str = "t0") -> None:
        """A writer's notification."""
        message = Landed(update_id=update_id, sequence=sequence, nbytes=nbytes, plan=plan[:16])
        self.inbox.append((agent, encode_landed(message)))


class FakeWorker(NixlWorkerExtension):
    """What vLLM makes of a worker class with our extension."""

    def __init__(self, index: int) -> None:
        self.plane = FakePlane(index)
        self.spoil: Any = None


class FakeEngines:
    """The processes behind all API servers: engines with workers, each engine doing one thing at a time."""

    def __init__(self, engines: int, workers_per_engine: int, monkeypatch: Any) -> None:
        module = types.ModuleType("vllm_nixl_plugin.plane")
        module.create_plane = lambda worker: worker.plane  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm_nixl_plugin.plane", module)
        n = workers_per_engine
        self.workers = [[FakeWorker(e * n + w) for w in range(n)] for e in range(engines)]
        self.paused = False
        self.fail: dict[str, Exception] = {}
        self.log: list[str] = []
        self.calls: list[str] = []
        self.version: str | None = None
        self._locks = [threading.Lock() for _ in range(engines)]

    @property
    def planes(self) -> list[FakePlane]:
        return [w.plane for per_engine in self.workers for w in per_engine]

    def rpc(self, engine: int, method: str, request: dict[str, Any]) -> list[Any]:
        with self._locks[engine]:
            answers = [getattr(worker, method)(request) for worker in self.workers[engine]]
        for worker, answer in zip(self.workers[engine], answers, strict=True):
            if worker.spoil is not None:
                worker.spoil(request, answer)
        return answers

    def control(self, method: str) -> None:
        self.log.append(method)
        self.calls.append(method)
        if method in self.fail:
            raise self.fail[method]


class FakeClient:
    """One API process's `AsyncLLM`."""

    def __init__(self, engines: FakeEngines) -> None:
        self.engines = engines
        self.engine_core = self
        self.core_engines = list(range(len(engines.workers)))

    async def _call_utility_async(self, method: str, *args: Any, engine: int) -> Any:
        if method == "collective_rpc":
            rpc, _, (request,), _ = args
            if engine == 0:
                self.engines.calls.append(f"rpc {request['action']}")
            return await asyncio.to_thread(self.engines.rpc, engine, rpc, request)
        self.engines.control(method)
        return True

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        self.engines.log.append(f"pause:{mode}:{'recompute' if clear_cache else 'keep'}")
        self.engines.control("pause")
        self.engines.paused = True

    async def resume_generation(self) -> None:
        self.engines.control("resume")
        self.engines.paused = False

    async def is_paused(self) -> bool:
        self.engines.calls.append("is_paused")
        return self.engines.paused

    async def reset_mm_cache(self) -> None:
        self.engines.control("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        self.engines.control("reset_encoder_cache")

    async def update_weight_version(self, version: str) -> None:
        self.engines.calls.append("set_weight_version")
        self.engines.version = version
