"""The stages of an update on one worker, as `session` calls them. `plane` has the real ones.

    make_plan -> bind -> notifications -> prepare_install -> install          otherwise: discard, and fence if need be

In mode ``streamed`` `install_group` is called for each group as it lands, before the last two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from vllm_nixl_plugin.wire import Binding, Manifest, Mode, WeightSpec, WorkerPlan

if TYPE_CHECKING:
    from vllm_nixl_plugin.offering import Fetch


class Plane(Protocol):
    """What a worker can do with weights and memory."""

    def describe(self) -> dict[str, Any]:
        """Plain values: ``worker`` (data_parallel_index * world_size + rank), ranks and sizes, model, dtype, device."""

    def make_plan(self, manifest: Manifest) -> WorkerPlan:
        """Takes seconds and runs in a thread. Errors: PlanRefused."""

    def bind(self, plan: WorkerPlan, mode: Mode, contacts: Sequence[bytes] = ()) -> Binding:
        """Allocate and register; ``contacts``: the agents that a window is handed back to.

        Errors: InsufficientMemory, RegistrationFailed, EngineAsleep; then nothing is left."""

    def notifications(self) -> list[tuple[str, bytes]]:
        """Agent name and message of every notification since the last call."""

    def offer(self, plan: WorkerPlan) -> Binding:
        """Where a peer may read what serves, in the layout of this plan. Errors: PeerRefused, EngineAsleep."""

    def fetch(self, plan: WorkerPlan, mode: Mode, source: Binding) -> Fetch:
        """Begin to read what a peer offers into the memory of an update by this plan. Errors: PeerRefused."""

    def sums(self, plan: WorkerPlan, mode: Mode) -> Iterator[int]:
        """The checksum (`checksums`) of what has arrived for each destination of an update that is open, in order."""

    def prepare_install(self, plan: WorkerPlan, mode: Mode, *, whole: bool) -> bool:
        """All bytes are there: make the install ready, changing nothing that serves; a slice of that, if not ``whole``.
        Returns whether it is ready. Errors: those of `install`."""

    def install_group(self, plan: WorkerPlan, number: int, credit: bytes | None) -> None:
        """Mode ``streamed``: install a group that is all there, after those before it, and tell the writers the credit
        when its place in the window is free. Errors: those of `install`, never ``untouched``."""

    def install(self, plan: WorkerPlan, mode: Mode) -> dict[str, float]:
        """Put the weights in place, the engine being paused; seconds by stage. Errors: InstallFailed, NeedsRestart,
        with ``untouched=True`` among the details when nothing was changed yet."""

    def discard(self, plan: WorkerPlan, mode: Mode) -> None:
        """The update is over without an install. Memory that an undrained writer may reach waits for `fence`."""

    def fence(self, writers: Sequence[str]) -> None:
        """Destroy the NIXL agent and take a new name: no earlier writer reaches memory any more, but for what these
        processes had mapped. That is not used again until they are gone; never, where there is none to ask for."""

    def may_write(self, writer: str) -> bool:
        """Whether this process (`processes.this_process`) could write to memory of this worker in spite of a fence."""

    def incarnation(self) -> str:
        """Changes at worker start and at each fence."""

    def summary(self, plan: WorkerPlan) -> dict[str, Any]:
        """The plan for people."""

    def checkpoint(self) -> Sequence[WeightSpec]:
        """Weights of the checkpoint that vLLM loaded the model from, in its order; none where there was none."""

    def fingerprint(self) -> Iterator[list[tuple[str, str]]]:
        """Path and checksum of everything that the engine can read, in slices of a fraction of a second each.

        Errors: EngineAsleep, at each slice.
        """
