"""What is kept for one server from push to push: its plans, the bindings it gave out, and the writes prepared on them.

`delivery` runs one push over a `Link` and asks it, in this order, for `plans`, `known_bindings` and the `transfer`.
Each is made again only when what it was made from has changed. An `Offering` is the other side of it: what one push
offers to all servers.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from trainer_client.control import Control
from trainer_client.conversion import Conversion
from trainer_client.registration import SendBuffers, SourceMemory
from trainer_client.routing import Offer, Route, compute_route
from trainer_client.sources import Sources
from trainer_client.transfer import Lane, Transfer
from vllm_nixl_plugin.errors import InvalidRequest, PlanRefused, WorkerFailed
from vllm_nixl_plugin.fabric import Fabric
from vllm_nixl_plugin.wire import Binding, Manifest, PlannedWorker, UpdateOpened, WorkerPlan


class Offering:
    """What this push offers to every server: weights, their memory, and the routes, worked out once per layout."""

    def __init__(
        self, sources: Sources, conversion: Conversion, *, partial: bool, direct_run_bytes: int, buffer_bytes: int
    ) -> None:
        self.manifest = Manifest(weights=conversion.weights, partial=partial)
        self.digest = self.manifest.digest()
        self._offer = Offer(sources.shards, [storage.device for storage in sources.storages], conversion)
        self._limits = direct_run_bytes, buffer_bytes
        self._routes: dict[str, Route] = {}
        self._lock = threading.Lock()

    def route(self, digest: str, plan: WorkerPlan) -> Route:
        """The route to a worker with this plan. Errors: PlanRefused."""
        with self._lock:
            if digest not in self._routes:
                direct_run_bytes, buffer_bytes = self._limits
                self._routes[digest] = compute_route(
                    self._offer, plan, direct_run_bytes=direct_run_bytes, buffer_bytes=buffer_bytes
                )
            return self._routes[digest]


@dataclass(frozen=True)
class Plans:
    """The plans of one server for one manifest; ``workers`` in the order that begin expects."""

    manifest: str
    workers: tuple[PlannedWorker, ...]
    plans: dict[str, WorkerPlan]


@dataclass(frozen=True)
class _Prepared:
    """A transfer and what it was made for."""

    offering: Offering
    memory: SourceMemory
    bindings: tuple[str, ...]
    plans: tuple[str, ...]
    transfer: Transfer


class Link:
    """One server and what is prepared for it. Belongs to one thread at a time."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self._plans: Plans | None = None
        self._bindings: dict[str, Binding] = {}
        self._prepared: _Prepared | None = None
        self._buffers: SendBuffers | None = None

    @property
    def in_flight(self) -> bool:
        """Whether bytes of a failed push may still be under way: only closing the agent stops them."""
        return self._prepared is not None and self._prepared.transfer.in_flight

    def release(self) -> None:
        """Free the writes over parameter memory. Errors: FabricError while something is in flight."""
        if self._prepared is not None:
            self._prepared.transfer.release()
            self._prepared = None

    def drain(self, timeout_s: float) -> bool:
        """After a failed push:

        whether every write is done. What is prepared is freed, unless bytes are still under way.
        """
        if self._prepared is None:
            return True
        drained = self._prepared.transfer.drain(timeout_s)
        if not self.in_flight:
            self.release()
        return drained

    def forget(self) -> None:
        """The agent is closed: nothing that was prepared on it is of use."""
        self._prepared, self._buffers = None, None
        self._bindings.clear()

    def plans(self, offering: Offering, timeout_s: float) -> Plans:
        """The plans for the offered manifest, asked for when they are not known. Errors: PlanRefused."""
        if self._plans is None or self._plans.manifest != offering.digest:
            workers, plans = self.control.plan(offering.manifest, timeout_s)
            _refuse_unused(plans)
            self._plans = Plans(offering.digest, workers, plans)
        return self._plans

    def forget_plans(self) -> None:
        """The server does not know them any more."""
        self._plans = None

    def known_bindings(self) -> tuple[str, ...]:
        """Digests of the bindings that begin need not send again."""
        return tuple(self._bindings)

    def transfer(
        self, offering: Offering, memory: SourceMemory, fabric: Fabric, plans: Plans, opened: UpdateOpened
    ) -> Transfer:
        """The prepared writes to the memory that begin gave out."""
        digests = tuple(worker.digest for worker in opened.workers)
        names = tuple(worker.plan for worker in plans.workers)
        held = self._prepared
        if held is not None and (held.offering, held.memory, held.bindings, held.plans) == (
            offering,
            memory,
            digests,
            names,
        ):
            return held.transfer
        bindings = self._bindings | {w.digest: w.binding for w in opened.workers if w.binding is not None}
        if missing := [w.worker for w in opened.workers if w.digest not in bindings]:
            raise WorkerFailed(f"{self.control.server} did not say where the memory of workers {missing} is")
        if held is not None:
            self.release()
        gone = {b.agent for b in self._bindings.values()} - {bindings[digest].agent for digest in digests}
        for agent in gone:
            fabric.disconnect(agent)
        self._bindings = {digest: bindings[digest] for digest in digests}
        lanes = [_lane(name, plans.plans[name], bindings[digest], offering)
                 for name, digest in zip(names, digests, strict=True)]  # fmt: skip
        self._buffers = self._buffers or SendBuffers(fabric)
        transfer = Transfer(fabric, memory, self._buffers, lanes)
        self._prepared = _Prepared(offering, memory, digests, names, transfer)
        return transfer


def _lane(name: str, plan: WorkerPlan, binding: Binding, offering: Offering) -> Lane:
    expected = len(plan.destinations)
    if len(binding.addresses) != expected or any(i >= expected for i in binding.memories):
        raise InvalidRequest(
            f"worker {binding.worker} gives {len(binding.addresses)} addresses for {expected} destinations"
        )
    return Lane(name, binding, offering.route(name, plan))


def _refuse_unused(plans: dict[str, WorkerPlan]) -> None:
    """A weight that no worker of the server uses is a mistake of one side or the other."""
    unused = set.intersection(*(set(plan.unused) for plan in plans.values())) if plans else set()
    if unused:
        names = sorted(unused)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise PlanRefused(
            f"{len(names)} weights of this push are used by no worker: {', '.join(names[:5])}{more}. Leave them out, "
            "or check that trainer and server run the same model.", unused=names[:1000],
        )  # fmt: skip
