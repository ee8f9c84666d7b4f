"""Who may update a server, as its judge decides: one lease at a time, and within it one claim on the update's end.

    grant   (begin)                     nobody else is at work, or their lease is over; numbers the update (epoch)
    claim   (commit, abort, watchdog)   one API process has the end of the update in its hands; numbered, too

A lease is judged only when somebody else wants in: until then, an update whose lease is over stays good. Once its end
is claimed, nobody gets in however long that takes; a claim whose process has died, which its heartbeat shows, is taken
over. `session` calls all of this under its lock; every worker has a `Judge`, and only that of the first is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_nixl_plugin import errors
from vllm_nixl_plugin.opened import PAUSED_STEPS

STALE_HEARTBEAT_S = 10.0


@dataclass
class Lease:
    """``claimant`` is the API process whose task commits; its heartbeat shows that it lives.

    ``request`` names the request that got the last claim: asked again, because the answer was lost, it gets the same.
    """

    update_id: str
    holder: str
    until: float
    heartbeat: float
    epoch: int
    claim: int = 0
    claimant: str = ""
    request: str = ""
    options: dict[str, Any] = field(default_factory=dict)


class Judge:
    """The lease, and the rules on it. ``clock``: seconds, this process's own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.lease: Lease | None = None
        self._granted = 0
        self._clock = clock

    def holds(self, update_id: str) -> bool:
        """Whether the lease is that of this update."""
        return self.lease is not None and self.lease.update_id == update_id

    def check_free(self, opening: str | None) -> None:
        """Errors: LeaseHeld, while somebody is at work. ``opening``: the update whose begin still pauses the engine."""
        now, lease = self._clock(), self.lease
        if lease is None or (lease.until <= now and not lease.claim and lease.update_id != opening):
            return
        wait = max(lease.until - now, 0.0) or STALE_HEARTBEAT_S
        who = lease.holder or "an unnamed holder"
        raise errors.LeaseHeld(
            f"update {lease.update_id} of {who} is open for another {wait:.1f} s",
            holder=lease.holder, expires_in_s=wait, update_id=lease.update_id,
        )  # fmt: skip

    def grant(self, update_id: str, holder: str, lease_s: float, epoch: int) -> int:
        """The number of an update that may begin, above ``epoch`` and all before; asked again, the same."""
        if self.lease is None or self.lease.update_id != update_id:
            now = self._clock()
            self._granted = max(self._granted, epoch) + 1
            self.lease = Lease(update_id, holder, now + lease_s, now, self._granted)
        return self.lease.epoch

    def claim(
        self, update_id: str, purpose: str, claimant: str, request: str, options: dict[str, Any], *,
        opened: bool, step: str | None,
    ) -> dict[str, Any]:  # fmt: skip
        """Put the end of an update into the hands of one API process; number it. ``opened``, ``step``: how it stands.

        ``purpose``: ``commit`` (joins a living commit, takes over a dead one), ``abort`` (also takes over a commit
        that still waits for bytes), ``recover`` (takes over only what is dead). The answer has ``claim`` and the
        ``step`` and ``options`` to go on with, or ``joined``. Errors: StaleUpdate.
        """
        lease = self._of(update_id)
        alive = self._clock() - lease.heartbeat <= STALE_HEARTBEAT_S
        if lease.request == request:
            return {"claim": lease.claim, "step": step, "options": lease.options}
        if (purpose == "commit" and not opened) or (purpose != "recover" and step == "opening"):
            raise errors.StaleUpdate(f"update {update_id} has not been opened yet: wait for the answer of begin")
        if purpose == "abort" and step in PAUSED_STEPS:
            raise errors.StaleUpdate(f"update {update_id} is at step {step!r}: too late to abort", step=step)
        if alive and (purpose == "recover" or (purpose == "commit" and lease.claim)):
            return {"joined": lease.claimant}
        if purpose == "abort" or not lease.options:
            lease.options = options | {"purpose": purpose}
        lease.claim, lease.claimant, lease.request = lease.claim + 1, claimant, request
        lease.heartbeat = self._clock()
        return {"claim": lease.claim, "step": step, "options": lease.options}

    def renew(self, update_id: str, lease_s: float) -> None:
        """The lease ends ``lease_s`` from now. Errors: StaleUpdate."""
        self._of(update_id).until = self._clock() + lease_s

    def is_over(self, update_id: str) -> bool:
        """Whether nobody has renewed the lease of this update in time."""
        return self.lease is not None and self.holds(update_id) and self.lease.until <= self._clock()

    def beat(self, update_id: str, claim: int) -> None:
        """The process with this claim lives. Errors: StaleUpdate."""
        lease = self._of(update_id)
        if claim != lease.claim:
            raise superseded(update_id, claim, lease.claim)
        lease.heartbeat = self._clock()

    def seen(self, update_id: str, claim: int) -> None:
        """`beat`, for a call that shows it by the way."""
        if self.lease is not None and self.holds(update_id) and claim == self.lease.claim:
            self.lease.heartbeat = self._clock()

    def last_claim(self, update_id: str) -> int:
        """The last claim on this update, 0 when there is none here."""
        return self.lease.claim if self.lease is not None and self.holds(update_id) else 0

    def end(self, update_id: str, claim: int | None = None) -> None:
        """The update is over, as far as who has ``claim`` may say so."""
        if self.holds(update_id) and (claim is None or self.last_claim(update_id) <= claim):
            self.lease = None

    def status(self) -> dict[str, Any] | None:
        """The lease as plain values."""
        if (lease := self.lease) is None:
            return None
        now = self._clock()
        return {
            "update_id": lease.update_id, "holder": lease.holder, "expires_in_s": lease.until - now,
            "claim": lease.claim, "claimant": lease.claimant, "options": lease.options,
            "heartbeat_age_s": now - lease.heartbeat, "alive": now - lease.heartbeat <= STALE_HEARTBEAT_S,
        }  # fmt: skip

    def _of(self, update_id: str) -> Lease:
        if self.lease is None or self.lease.update_id != update_id:
            raise errors.StaleUpdate(f"update {update_id} is over, or never was", update_id=update_id)
        return self.lease


def superseded(update_id: str, claim: int, now: int) -> errors.StaleUpdate:
    """The error for who has an older claim."""
    return errors.StaleUpdate(
        f"claim {claim} on update {update_id} was taken over by claim {now}", update_id=update_id, superseded=True
    )
