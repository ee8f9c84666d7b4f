"""What a rank keeps for one server from push to push: plans, bindings, and the writes prepared on them.

`delivery` (rank 0) and `team` (the others) run a push over a `Link`, which makes each thing again only when what it was
made from has changed. An `Offering` is the other side of it: what one push offers to all servers; a `Stock` is the
offering with the memory that it lies in and the agent that writes from there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainer_client.conversion import Conversion
from trainer_client.credits import Credits
from trainer_client.registration import SendBuffers, SourceMemory
from trainer_client.routing import Offer, Route, compute_route, cut
from trainer_client.sources import Shard
from trainer_client.transfer import Lane, Transfer
from vllm_nixl_plugin.encoding import decode_plans
from vllm_nixl_plugin.errors import InvalidRequest, PlanRefused, WorkerFailed
from vllm_nixl_plugin.fabric import Fabric
from vllm_nixl_plugin.wire import Binding, Manifest, PlannedWorker, WorkerPlan


class Offering:
    """What this push offers to every server: the weights of all ranks, and routes from what this rank has of them."""

    def __init__(
        self,
        shards: Sequence[Shard],
        devices: Sequence[str],
        conversion: Conversion,
        *,
        partial: bool,
        direct_run_bytes: int,
        buffer_bytes: int,
    ) -> None:
        """``devices``: the device of each storage that the shards lie in."""
        self.manifest = Manifest(weights=conversion.weights, partial=partial)
        self.digest = self.manifest.digest()
        self._offer = Offer(shards, devices, conversion)
        self._limits = direct_run_bytes, buffer_bytes
        self._routes: dict[str, Route] = {}
        self._parts: dict[str, tuple[Route, ...]] = {}
        self._lock = threading.Lock()

    def parts(self, digest: str, plan: WorkerPlan) -> tuple[Route, ...]:
        """`route`, cut at the groups of the plan, in their order."""
        with self._lock:
            if digest not in self._parts:
                direct_run_bytes, buffer_bytes = self._limits
                self._parts[digest] = tuple(
                    compute_route(self._offer, part, direct_run_bytes=direct_run_bytes, buffer_bytes=buffer_bytes)
                    for part in cut(plan)
                )
            return self._parts[digest]

    def route(self, digest: str, plan: WorkerPlan) -> Route:
        """What this rank sends to a worker with this plan. Errors: PlanRefused."""
        with self._lock:
            if digest not in self._routes:
                direct_run_bytes, buffer_bytes = self._limits
                self._routes[digest] = compute_route(
                    self._offer, plan, direct_run_bytes=direct_run_bytes, buffer_bytes=buffer_bytes
                )
            return self._routes[digest]


@dataclass(frozen=True)
class Stock:
    """What this rank sends from: the offering, its memory, and the agent that it is registered with."""

    offering: Offering
    memory: SourceMemory
    fabric: Fabric
    credits: Credits | None = None


@dataclass(frozen=True)
class Plans:
    """The plans of one server, by digest; ``workers`` in the order that begin expects."""

    workers: tuple[PlannedWorker, ...]
    plans: Mapping[str, WorkerPlan]

    def routed_nbytes(self, offering: Offering) -> dict[str, int]:
        """How many bytes this rank sends for each plan; works the routes out. Errors: PlanRefused."""
        return {digest: offering.route(digest, plan).nbytes for digest, plan in self.plans.items()}


Target = tuple[str, str]
"""Digests of the plan and of the binding of a worker."""


@dataclass(frozen=True)
class _Prepared:
    """A transfer and what it was made for."""

    stock: Stock
    targets: tuple[Target, ...]
    transfer: Transfer


class Link:
    """One server and what is prepared for it on this rank. Belongs to one thread at a time."""

    def __init__(self, server: str) -> None:
        self.server = server
        self._plans: dict[str, Plans] = {}
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
        """After a failed push: whether every write is done.

        What is prepared is freed, unless bytes are still under way.
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

    def leave(self, fabric: Fabric | None) -> None:
        """The server is none of ours any more: nothing of it stays with the agent. Errors: FabricError."""
        self.release()
        if self._buffers is not None:
            self._buffers.release()
        if fabric is not None:
            for binding in self._bindings.values():
                fabric.disconnect(binding.agent)
        self.forget()

    def plans(self, digest: str, fetch: Callable[[], bytes]) -> Plans:
        """The plans of this digest, in their encoded form from ``fetch`` unless they are those of the last call."""
        if digest not in self._plans:
            self._plans = {digest: Plans(*decode_plans(fetch()))}
        return self._plans[digest]

    def known_bindings(self) -> tuple[str, ...]:
        """Digests of the bindings that need not be sent again."""
        return tuple(self._bindings)

    def learn(self, bindings: Mapping[str, Binding]) -> None:
        """Bindings by digest. Those that the next `transfer` does not use are forgotten there."""
        self._bindings |= bindings

    def bindings(self, targets: Sequence[Target]) -> list[Binding]:
        """The bindings of these workers. Errors: WorkerFailed when one is not known."""
        if missing := [index for index, (_, digest) in enumerate(targets) if digest not in self._bindings]:
            raise WorkerFailed(f"{self.server} did not say where the memory of workers {missing} is")
        return [self._bindings[digest] for _, digest in targets]

    def transfer(self, stock: Stock, plans: Plans, targets: tuple[Target, ...]) -> Transfer:
        """The prepared writes to the memory that begin gave out."""
        held = self._prepared
        if held is not None and (held.stock, held.targets) == (stock, targets):
            return held.transfer
        bindings = self.bindings(targets)
        self.release()
        gone = {b.agent for b in self._bindings.values()} - {binding.agent for binding in bindings}
        for agent in gone:
            stock.fabric.disconnect(agent)
        self._bindings = {digest: binding for (_, digest), binding in zip(targets, bindings, strict=True)}
        lanes = [_lane(plan, plans.plans[plan], binding, stock.offering)
                 for (plan, _), binding in zip(targets, bindings, strict=True)]  # fmt: skip
        self._buffers = self._buffers or SendBuffers(stock.fabric)
        transfer = Transfer(stock.fabric, stock.memory, self._buffers, lanes, stock.credits)
        self._prepared = _Prepared(stock, targets, transfer)
        return transfer


def _lane(name: str, plan: WorkerPlan, binding: Binding, offering: Offering) -> Lane:
    expected = len(plan.destinations)
    if len(binding.addresses) != expected or any(i >= expected for i in binding.memories):
        raise InvalidRequest(
            f"worker {binding.worker} gives {len(binding.addresses)} addresses for {expected} destinations"
        )
    if binding.window is not None and len(binding.window.after) != len(plan.groups):
        raise InvalidRequest(
            f"worker {binding.worker} has a window for {len(binding.window.after)} groups, its plan {len(plan.groups)}"
        )
    parts = offering.parts(name, plan) if binding.window is not None else ()
    return Lane(name, binding, offering.route(name, plan), parts)


def refuse_unused(plans: Mapping[str, WorkerPlan]) -> None:
    """A weight that no worker of the server uses is a mistake of one side or the other. Errors: PlanRefused."""
    unused = set.intersection(*(set(plan.unused) for plan in plans.values())) if plans else set()
    if unused:
        names = sorted(unused)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise PlanRefused(
            f"{len(names)} weights of this push are used by no worker: {', '.join(names[:5])}{more}. Leave them out, "
            "or check that trainer and server run the same model.", unused=names[:1000],
        )  # fmt: skip
