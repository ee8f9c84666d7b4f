"""The update that is open on a worker: how far it is, and how many of its bytes have landed.

Steps are the commit's, in the order in which `steps` takes them; None before it, and ``opening`` while an in-place
begin pauses the engine. `session` makes an `Update` at begin and drops it at the end.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from vllm_nixl_plugin import errors
from vllm_nixl_plugin.encoding import decode_landed
from vllm_nixl_plugin.plan_cache import CachedPlan
from vllm_nixl_plugin.wire import Landed, Mode, WorkerPlan

logger = logging.getLogger("vllm.nixl_plugin")

PAUSED_STEPS = ("pausing", "installing", "installed", "resuming", "undoing")
MAX_WARNINGS = 10
INSTALLING_STEPS = ("installing", "installed", "resuming")


@dataclass
class Update:
    """``step`` is recorded before it happens; the judge's is the one that counts. ``drained``: no writer is under way;
    ``prepared``: the plane has made the install ready. ``landed``: agent and sequence of the notifications that count.
    ``installed``: how many groups are in place, in mode ``streamed``; ``landed_in``: bytes that came for each;
    ``after``: that of the window.
    """

    id: str
    epoch: int
    version: str
    mode: Mode
    holder: str
    cached: CachedPlan
    incarnation: str
    writers: tuple[str, ...] = ()
    begun_at: float = field(default_factory=time.time)
    claim: int = 0
    step: str | None = None
    drained: bool = False
    prepared: bool = False
    landed: set[tuple[str, int]] = field(default_factory=set)
    arrived_nbytes: int = 0
    foreign: int = 0
    installed: int = 0
    landed_in: dict[int, int] = field(default_factory=dict)
    after: tuple[int, ...] = ()
    stages: dict[str, float] | None = None
    install_error: errors.PushWeightsError | None = None

    @property
    def plan(self) -> WorkerPlan:
        """What has to arrive."""
        return self.cached.plan

    def count(self, agent: str, data: bytes) -> None:
        """Count a notification: each (agent, sequence) once; messages of other updates and plans do not count."""
        try:
            message: Landed | None = decode_landed(data)
        except errors.InvalidRequest:
            message = None
        if message is None or message.update_id != self.id or not self.cached.digest.startswith(message.plan):
            self.foreign += 1
            if self.foreign <= MAX_WARNINGS:
                logger.warning("a notification of %.200r is not of update %s", agent, self.id)
        elif (agent, message.sequence) not in self.landed:
            self.landed.add((agent, message.sequence))
            self.arrived_nbytes += message.nbytes
            if message.group is not None:
                self.landed_in[message.group] = self.landed_in.get(message.group, 0) + message.nbytes

    @property
    def stands(self) -> bool:
        """Whether generation is paused from begin on, and half of the update in what serves is to be feared."""
        return self.mode != "shadow"

    def groups_landed(self) -> int:
        """How many groups, from the first, are all there, in mode ``streamed``.

        Errors: InvalidRequest when more arrived for one than the plan has.
        """
        expected = self.cached.group_nbytes
        for group, nbytes in self.landed_in.items():
            if group >= len(expected) or nbytes > expected[group]:
                raise errors.InvalidRequest(
                    f"{nbytes} bytes arrived for group {group} of update {self.id}, more than its plan has: two "
                    "writers overlap", arrived_nbytes=nbytes,
                )  # fmt: skip
        number = self.installed
        while number < len(expected) and self.landed_in.get(number, 0) == expected[number]:
            number += 1
        return number

    def arrived(self, worker: int) -> dict[str, Any]:
        """The counts. Errors: InvalidRequest when more arrived than the plan has."""
        expected = self.cached.nbytes
        if self.arrived_nbytes > expected:
            raise errors.InvalidRequest(
                f"worker {worker} got {self.arrived_nbytes} bytes, its plan has {expected}: two writers overlap",
                expected_nbytes=expected, arrived_nbytes=self.arrived_nbytes,
            )  # fmt: skip
        return {"arrived_nbytes": self.arrived_nbytes, "expected_nbytes": expected, "foreign": self.foreign}

    def record(self, state: str) -> dict[str, Any]:
        """The update as plain values, for statuses and the history."""
        return {
            "update_id": self.id, "version": self.version, "mode": self.mode, "state": state, "step": self.step,
            "holder": self.holder, "nbytes": self.cached.nbytes, "arrived_nbytes": self.arrived_nbytes,
            "begun_at": self.begun_at,
        }  # fmt: skip
