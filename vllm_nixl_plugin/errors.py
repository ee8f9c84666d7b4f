"""Every error this project raises, on the server and in the trainer, and the code each has on the wire.

    PushWeightsError
    ├── Unauthorized            the bearer token is missing or wrong
    ├── TooManyRequests         too many requests without the token
    ├── InvalidRequest          a body, name or setting that is not understood
    ├── PlanRefused             weights are missing, extra, misshaped or wrongly typed
    ├── UnknownPlan             the worker does not hold the plan that the caller names: plan again
    ├── LeaseHeld               another update is open
    ├── StaleUpdate             the update is over, or never was
    ├── IncarnationChanged      the worker restarted since the plan was made
    ├── Incomplete              not all bytes of the update have arrived
    ├── EngineTorn              an update broke off half-way; only a full push leads out
    ├── EngineAsleep            the engine's weights are put to sleep
    ├── NeedsRestart            the update would change something a compiled engine has baked in
    ├── InsufficientMemory      the shadow memory does not fit
    ├── InstallFailed           the new weights could not be put in place
    ├── WorkerFailed            a worker answered with something else than was asked
    ├── ServerUnreachable       no HTTP answer
    ├── DeadlineExceeded        a wait ran out
    ├── PeerRefused             a server cannot catch up from this peer
    ├── Corrupted               what arrived is not what was sent
    ├── RankLost                a rank of the trainer died or stopped in the middle of a push
    ├── PushFailed              fewer servers than required have the pushed version
    └── FabricError             NIXL reported a failure
        └── RegistrationFailed  memory that NIXL cannot register

Messages name the object, what was expected, what was found and the remedy. On the wire an error is the JSON object
``{"error": {"code": ..., "message": ..., "details": {...}}}``; `from_wire` turns it back into the same class.
"""

from __future__ import annotations

from typing import Any, ClassVar

MAX_TEXT = 500


class PushWeightsError(Exception):
    """Base of all errors. ``details`` holds plain JSON values only."""

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def to_wire(self) -> dict[str, Any]:
        """The JSON object that stands for this error in answers of the server and of the workers."""
        return {"error": {"code": self.code, "message": self.message, "details": self.details}}


class Unauthorized(PushWeightsError):
    """The bearer token is missing or wrong."""

    code, http_status = "unauthorized", 401


class TooManyRequests(PushWeightsError):
    """Too many requests without the token from one address. ``details``: ``retry_after_s``."""

    code, http_status = "too_many_requests", 429


class InvalidRequest(PushWeightsError):
    """A body, name or setting that is not understood."""

    code, http_status = "invalid_request", 400


class PlanRefused(PushWeightsError):
    """``details`` may hold ``missing``, ``unused``, ``misshaped`` and ``mistyped``: lists of names with reasons."""

    code, http_status = "plan_refused", 422


class UnknownPlan(PushWeightsError):
    """The worker does not hold the plan that the caller names: plan again."""

    code, http_status = "unknown_plan", 409


class LeaseHeld(PushWeightsError):
    """``details``: ``holder`` and ``expires_in_s`` (seconds) of the update that is open."""

    code, http_status = "lease_held", 409


class StaleUpdate(PushWeightsError):
    """The update is over, or never was."""

    code, http_status = "stale_update", 409


class IncarnationChanged(PushWeightsError):
    """The worker restarted, or fenced itself off, since the plan was made."""

    code, http_status = "incarnation_changed", 409


class Incomplete(PushWeightsError):
    """``details``: ``expected_nbytes`` and ``arrived_nbytes`` of the worker that lacks some."""

    code, http_status = "incomplete", 409


class EngineTorn(PushWeightsError):
    """An update broke off half-way; only a full push leads out."""

    code, http_status = "torn", 409


class EngineAsleep(PushWeightsError):
    """The engine's weights are put to sleep."""

    code, http_status = "asleep", 409


class NeedsRestart(PushWeightsError):
    """The update would change something that a compiled engine has baked in; ``details``: its ``path``."""

    code, http_status = "needs_restart", 409


class InsufficientMemory(PushWeightsError):
    """The shadow memory does not fit. ``details``: ``needed_nbytes``, ``free_nbytes``."""

    code, http_status = "insufficient_memory", 507


class InstallFailed(PushWeightsError):
    """The new weights could not be put in place. ``details``: ``untouched`` when nothing was changed."""

    code, http_status = "install_failed", 500


class WorkerFailed(PushWeightsError):
    """A worker answered with something else than was asked."""

    code, http_status = "worker_failed", 500


class ServerUnreachable(PushWeightsError):
    """No HTTP answer."""

    code, http_status = "unreachable", 503


class DeadlineExceeded(PushWeightsError):
    """A wait ran out."""

    code, http_status = "deadline", 504


class PeerRefused(PushWeightsError):
    """A server cannot catch up from this peer. ``details``: ``retry`` when it may be able to a moment later."""

    code, http_status = "peer_refused", 409


class Corrupted(PushWeightsError):
    """What arrived is not what was sent. ``details``: ``differing``, by worker, the names of what differs."""

    code, http_status = "corrupted", 409


class RankLost(PushWeightsError):
    """A rank of the trainer died or stopped in the middle of a push. ``details``: its ``rank``, where it is known."""

    code, http_status = "rank_lost", 503


class PushFailed(PushWeightsError):
    """``report``: the trainer's `PushReport`, which says who has which version; ``details`` hold the same as JSON."""

    code, http_status = "push_failed", 502

    def __init__(self, message: str, *, report: Any = None, **details: Any) -> None:
        super().__init__(message, **details)
        self.report = report


class FabricError(PushWeightsError):
    """NIXL reported a failure."""

    code, http_status = "fabric", 502


class RegistrationFailed(FabricError):
    """Memory that NIXL cannot register."""

    code = "registration_failed"


def said(error: BaseException) -> str:
    """An unexpected error of a worker in one line, for the holder of the token: class and message, no traceback."""
    line = next(iter(str(error).strip().splitlines()), "")[:MAX_TEXT]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _classes() -> dict[str, type[PushWeightsError]]:
    found: dict[str, type[PushWeightsError]] = {}
    todo: list[type[PushWeightsError]] = [PushWeightsError]
    while todo:
        cls = todo.pop()
        found[cls.code] = cls
        todo.extend(cls.__subclasses__())
    return found


def from_wire(answer: dict[str, Any]) -> PushWeightsError:
    """Rebuild the exception from an error object; a code that this version does not know gives the base class."""
    error = answer["error"]
    cls = _classes().get(error.get("code", ""), PushWeightsError)
    return cls(str(error.get("message", "")), **dict(error.get("details") or {}))
