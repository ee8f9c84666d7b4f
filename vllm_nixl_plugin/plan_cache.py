"""The plans one worker has made, by manifest and by digest. Planning takes seconds and runs in a thread of its own."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm_nixl_plugin.encoding import encode_plan
from vllm_nixl_plugin.errors import PushWeightsError, UnknownPlan, said
from vllm_nixl_plugin.wire import Manifest, WorkerPlan

logger = logging.getLogger("vllm.nixl_plugin")

CHUNK_NBYTES = 8 << 20
"""A plan leaves the worker in pieces of this size: each piece is one RPC, and an RPC holds up generation."""


@dataclass(frozen=True)
class CachedPlan:
    """``full``: the manifest was not partial, so a push by this plan writes every weight of the worker."""

    plan: WorkerPlan
    digest: str
    blob: bytes
    full: bool

    @cached_property
    def nbytes(self) -> int:
        """`WorkerPlan.nbytes`, counted once."""
        return self.plan.nbytes

    @cached_property
    def group_nbytes(self) -> list[int]:
        """`WorkerPlan.group_nbytes`, counted once."""
        return self.plan.group_nbytes()


@dataclass
class _Job:
    made: CachedPlan | None = None
    error: PushWeightsError | None = None


class PlanCache:
    """Thread-safe; holds the ``capacity`` plans used last. ``make``: from a manifest to its plan, or PlanRefused."""

    def __init__(self, make: Callable[[Manifest], WorkerPlan], capacity: int = 8) -> None:
        self._make = make
        self._capacity = capacity
        self._jobs: OrderedDict[str, _Job] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nixl-plan")

    def start(self, digest: str, manifest: bytes) -> None:
        """Begin to plan, unless a plan for this manifest is there or being made. A refused one is tried again."""
        with self._lock:
            job = self._jobs.get(digest)
            if job is None or job.error is not None:
                job = self._jobs[digest] = _Job()
                self._thread.submit(self._run, job, digest, manifest)
            self._jobs.move_to_end(digest)
            finished = [key for key, old in self._jobs.items() if old.made or old.error]
            for key in finished[: max(0, len(self._jobs) - self._capacity)]:
                if key != digest:
                    del self._jobs[key]

    def poll(self, digest: str) -> CachedPlan | None:
        """The plan for a manifest, or None while it is being made. Errors: PlanRefused and whatever else ended it."""
        with self._lock:
            job = self._jobs.get(digest)
        if job is None:
            raise UnknownPlan(f"no plan for manifest {digest[:16]} is being made: post the manifest again")
        if job.error is not None:
            raise job.error
        return job.made

    def get(self, plan: str) -> CachedPlan:
        """The plan of this digest. A full one is preferred to a partial one of the same bytes. Errors: UnknownPlan."""
        with self._lock:
            found = [(key, job.made) for key, job in self._jobs.items() if job.made and job.made.digest == plan]
            if not found:
                raise UnknownPlan(f"this worker does not hold plan {plan[:16]}: post the manifest to /plan again")
            key, made = max(found, key=lambda item: item[1].full)
            self._jobs.move_to_end(key)
        return made

    def drop(self, plan: str) -> None:
        """Plan anew when the manifest comes again: the worker is no longer as it was planned for."""
        with self._lock:
            for key in [key for key, job in self._jobs.items() if job.made and job.made.digest == plan]:
                del self._jobs[key]

    def read(self, plan: str, offset: int) -> dict[str, Any]:
        """A piece of the encoded plan: ``{"data": bytes, "nbytes": total}``."""
        blob = self.get(plan).blob
        return {"data": blob[offset : offset + CHUNK_NBYTES], "nbytes": len(blob)}

    def latest(self) -> CachedPlan:
        """The plan used last. Errors: UnknownPlan when there is none."""
        with self._lock:
            made = [job.made for job in self._jobs.values() if job.made]
        if not made:
            raise UnknownPlan("this worker has made no plan yet: post a manifest to /plan")
        return made[-1]

    def _run(self, job: _Job, digest: str, text: bytes) -> None:
        try:
            manifest = Manifest.model_validate_json(text)
            plan = self._make(manifest)
            blob = encode_plan(plan)
            job.made = CachedPlan(plan, hashlib.sha256(blob).hexdigest(), blob, not manifest.partial)
        except PushWeightsError as error:
            job.error = error
        except Exception as error:
            logger.exception("planning for manifest %s failed", digest[:16])
            job.error = PushWeightsError(f"planning failed: {said(error)}; see the log of the worker")
