"""Where the destinations of a plan lie, made reachable for NIXL (the stage: register).

    Binder.bind    reserve shadows -> prefill what no weight writes -> register -> addresses
                   in mode `streamed` a window in place of shadows, in which places follow each other (`grouping`)
    Binder.fence   a new agent and new memory: no earlier writer reaches what is in use

Owns the worker's agent, its arena of shadows and all registrations. Called by `plane`; `install` reads the shadows.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from vllm_nixl_plugin import replay
from vllm_nixl_plugin.agent import NixlAgent
from vllm_nixl_plugin.composition import Held, Key, Place
from vllm_nixl_plugin.errors import InsufficientMemory, InvalidRequest
from vllm_nixl_plugin.fabric import Fabric
from vllm_nixl_plugin.grouping import aligned, largest, lay_out, smallest
from vllm_nixl_plugin.memory import Arena, Registrations, allocation_of, available_nbytes
from vllm_nixl_plugin.planning import Fill
from vllm_nixl_plugin.processes import is_gone
from vllm_nixl_plugin.remainder import Remainder
from vllm_nixl_plugin.settings import WorkerSettings
from vllm_nixl_plugin.wire import Binding, Mode

_WINDOW = "window"


class Binder:
    """See the module. Called from the worker's main thread, but for `open_agent`."""

    def __init__(self, worker: int, settings: WorkerSettings, device: Callable[[], torch.device]) -> None:
        self.worker = worker
        self.settings = settings
        self.device = device
        self.agent: Fabric | None = None
        self.incarnation = uuid.uuid4().hex
        self.arena: Arena | None = None
        self.remainder = Remainder()
        self._registrations: Registrations | None = None
        self._bound: dict[tuple[int, Mode], tuple[tuple[tuple[int, int], ...], Binding]] = {}
        self._condemned: list[tuple[list[torch.Tensor], tuple[str, ...]]] = []
        self._prefilled: dict[Key, tuple[int, int]] = {}
        self._places_in_window: dict[Key, torch.Tensor] | None = None
        self._creditors: tuple[str, ...] = ()
        self._budget = None if settings.shadow_bytes is None else int(settings.shadow_bytes)
        self._lock = threading.Lock()

    def open_agent(self) -> Fabric:
        """The agent; making one takes half a second, that no request has to wait for when a thread has done it."""
        with self._lock:
            if self.agent is None:
                s = self.settings
                self.agent = NixlAgent(
                    f"vllm-{self.worker}-{self.incarnation}", backend=s.backend, backend_params=s.backend_params,
                    num_threads=s.num_threads, interfaces=s.interfaces,
                )  # fmt: skip
            return self.agent

    def forget(self, held: Held) -> None:
        """A plan is no longer held."""
        self._bound = {key: bound for key, bound in self._bound.items() if key[0] != id(held)}

    def bind(self, held: Held, mode: Mode, contacts: Sequence[bytes] = ()) -> Binding:
        """Addresses of all destinations for one mode; memory is reserved and registered when it was not yet.

        ``contacts``: the agents to which a window is handed back. Errors: InsufficientMemory, RegistrationFailed,
        UnknownPlan (a live home is no longer one), InvalidRequest (a partial push has no window).
        """
        self._condemned = [(blocks, writers) for blocks, writers in self._condemned if not _are_gone(writers)]
        if mode == "streamed":
            return self._bind_window(held, contacts)
        if self._places_in_window is not None:
            self._drop_arena()
        arena = self.arena = self.arena or Arena(self.device(), self.settings.shadow)
        places = held.places
        served = {p.key: p.model.live_storage(p.destination) for p in places if p.live}
        found = tuple((t.data_ptr(), allocation_of(t) if mode == "in_place" else 0) for t in served.values())
        in_arena = [p for p in places if mode == "shadow" or not p.live]
        beyond = self.remainder.check(held)
        self.open_agent()
        arena.reserve([*((p.key, p.destination.nbytes) for p in in_arena), *beyond])
        self.remainder.fill(held, arena)
        self._prefill(held, in_arena, served)
        self.remainder.exposed(held, mode)
        before = self._bound.get((id(held), mode))
        if before is not None and before[0] == found:
            return before[1]
        memory: dict[Hashable, torch.Tensor] = {}
        if mode == "in_place":
            memory = {p.key: served[p.key] for p in places if p.live and served[p.key].numel()}
        binding = self.expose(self.homes(held, mode), memory)
        self._bound[id(held), mode] = (found, binding)
        return binding

    def homes(self, held: Held, mode: Mode) -> list[torch.Tensor]:
        """The memory of all destinations of a plan that is bound, in their order."""
        assert self.arena is not None
        shadows = [mode == "shadow" or not place.live for place in held.places]
        return [
            self.arena[place.key] if shadow else place.model.live_storage(place.destination)
            for place, shadow in zip(held.places, shadows, strict=True)
        ]

    def expose(self, homes: Sequence[torch.Tensor], served: Mapping[Hashable, torch.Tensor]) -> Binding:
        """Register the arena and what ``served`` holds, unless they are, and say where these homes lie.

        Errors: RegistrationFailed.
        """
        assert self.arena is not None
        agent = self.open_agent()
        self._registrations = self._registrations or Registrations(agent)
        self._registrations.keep({block.data_ptr(): block for block in self.arena.blocks} | dict(served))
        on_device = [t for t in homes if t.device.type == "cuda"]
        gpu = self.arena.device.type == "cuda"
        return Binding(
            worker=self.worker,
            incarnation=self.incarnation,
            agent=agent.name,
            agent_metadata=agent.metadata(),
            memory="VRAM" if gpu else "DRAM",
            device_id=on_device[0].get_device() if on_device else 0,
            addresses=tuple(t.data_ptr() for t in homes),
            memories=tuple(i for i, t in enumerate(homes) if gpu and t.device.type != "cuda"),
        )

    def _bind_window(self, held: Held, contacts: Sequence[bytes]) -> Binding:
        groups, places = held.plan.groups, held.places
        if not groups:
            raise InvalidRequest("mode 'streamed' takes all weights at once: push partially with mode='shadow'")
        most = groups[largest(groups)].destinations
        window, offsets = lay_out(groups, self._budget, ", ".join(places[most[0]].destination.names[:2]))
        served = {p.key: p.model.live_storage(p.destination) for p in places if p.live}
        if self.arena is not None and (
            self._places_in_window is None or self.arena[_WINDOW].numel() != window.nbytes
        ):
            self._drop_arena()
        agent = self.open_agent()
        arena = self.arena = self.arena or Arena(self.device(), self.settings.shadow)
        arena.reserve([(_WINDOW, window.nbytes)])
        if (free := available_nbytes(arena.device)) < window.working_nbytes:
            self._drop_arena()
            raise InsufficientMemory(
                f"mode 'streamed' takes {window.working_nbytes} bytes beside its window to process a group, and {free} "
                f"are free on {arena.device}: lower vLLM's memory share by the difference.",
                needed_nbytes=window.working_nbytes, free_nbytes=free,
            )  # fmt: skip
        self._places_in_window = {}
        for group, at in zip(groups, offsets, strict=True):
            for place in (places[i] for i in group.destinations if not places[i].live):
                self._places_in_window[place.key] = arena[_WINDOW][at : at + place.destination.nbytes]
                at += aligned(place.destination.nbytes)
        homes = [served[p.key] if p.live else self._places_in_window[p.key] for p in places]
        self._meet(agent, contacts)
        self.remainder.exposed(held, "streamed")
        found = ((arena[_WINDOW].data_ptr(), 0), *((t.data_ptr(), allocation_of(t)) for t in served.values()))
        before = self._bound.get((id(held), "streamed"))
        if before is not None and before[0] == found:
            return before[1]
        binding = self.expose(homes, {key: t for key, t in served.items() if t.numel()})
        binding = binding.model_copy(update={"window": window})
        self._bound[id(held), "streamed"] = (found, binding)
        return binding

    def foresee(self, held: Held) -> dict[str, Any] | None:
        """What mode `streamed` would take for a plan, in bytes; None for a partial one."""
        groups = held.plan.groups
        if not groups:
            return None
        budget, most = self._budget, groups[largest(groups)]
        least = smallest(groups)
        window = lay_out(groups, budget)[0] if budget is None or budget >= least else None
        return {
            "groups": len(groups),
            "group_nbytes": [each.window_nbytes for each in groups],
            "largest": [n for i in most.destinations for n in held.places[i].destination.names[:1]][:10],
            "largest_nbytes": most.window_nbytes,
            "smallest_budget_nbytes": least,
            "budget_nbytes": budget,
            "takes_nbytes": window and window.nbytes + window.working_nbytes,
            "window_nbytes": window and window.nbytes,
            "lacking_nbytes": max(least - budget, 0) if budget is not None else 0,
        }

    def _drop_arena(self) -> None:
        """Shadows make room for a window, or the other way round; no update is open that might reach either."""
        assert self.arena is not None
        for block in self.arena.blocks:
            if self._registrations is not None:
                self._registrations.drop(block.data_ptr())
        self.arena, self._places_in_window = None, None
        self._bound, self._prefilled = {}, {}
        self.remainder.forget()

    def _meet(self, agent: Fabric, contacts: Sequence[bytes]) -> None:
        """Know the writers of this update, and them alone. Errors: FabricError."""
        before, self._creditors = self._creditors, tuple(agent.connect(contact) for contact in contacts)
        for name in set(before) - set(self._creditors):
            agent.disconnect(name)

    def hand_back(self, credit: bytes) -> None:
        """Tell all writers that there is room in the window. Errors: FabricError."""
        agent = self.open_agent()
        for name in self._creditors:
            agent.notify(name, credit)

    def shadow(self, key: Key) -> torch.Tensor:
        """What has arrived for a destination that is not written where it serves."""
        if self._places_in_window is not None:
            return self._places_in_window[key]
        assert self.arena is not None
        return self.arena[key]

    def _prefill(self, held: Held, places: list[Place], served: Mapping[Key, torch.Tensor]) -> None:
        """Write into shadows, once per plan and memory, the bytes that no weight writes.

        Under a partial plan these are today's: already there in a shadow that is whole, else those of the live home.
        """
        assert self.arena is not None
        for place in places:
            key = place.key
            if not place.fills or (held.partial and self.remainder.is_whole(key)):
                continue
            target = self.arena[key]
            done = (id(held), target.data_ptr())
            if self._prefilled.get(key) == done and not held.partial:
                continue
            info = place.model.twin.storages[key[1]] if isinstance(key[1], int) else None
            before: torch.Tensor | float | None = served.get(key)
            if before is None and info is not None:
                before = info.value
            for fill in place.fills:
                of = Fill(fill.copy, None) if held.partial else fill
                replay.fill(target, of, before, info.dtype if info is not None else None)
            self._prefilled[key] = done

    def notifications(self) -> list[tuple[str, bytes]]:
        """Agent and message of what has landed since the last call."""
        return self.agent.notifications() if self.agent is not None else []

    def fence(self, writers: Sequence[str]) -> None:
        """Destroy the agent and take a new name. Shadow memory is set aside until its ``writers`` are gone, since one
        that was stopped on the same host can go on after deregistration; for good, where they are not known."""
        with self._lock:
            if self.agent is not None:
                self.agent.close()
            self.agent, self._registrations, self._bound = None, None, {}
            self.incarnation = uuid.uuid4().hex
        if self.arena is not None:
            self._condemned.append((self.arena.blocks, tuple(writers)))
            self.arena = None
        self._places_in_window, self._creditors = None, ()
        self._prefilled = {}
        self.remainder.forget()


def _are_gone(writers: tuple[str, ...]) -> bool:
    return bool(writers) and all(is_gone(writer) for writer in writers)
