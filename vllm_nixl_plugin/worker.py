"""The worker extension: one RPC method that calls the session and never computes.

A request is ``{"nonce", "action", "args", "judge", "only"}``; an answer is
``{"ok", "nonce", "worker", "incarnation", "state", "result" | "error"}``, all of plain msgpack values. vLLM cannot bear
an exception or any other object here: after one, every later call returns stale replies, or none at all. So `answer`
catches everything. Actions in `JUDGE_ONLY` are done by the worker named in ``judge``; ``only`` restricts any action to
some workers; the others answer with their state and ``result`` None.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm_nixl_plugin import errors
from vllm_nixl_plugin.session import WorkerSession

logger = logging.getLogger("vllm.nixl_plugin")

CHANNEL_ACTIONS = frozenset({"status", "renew", "heartbeat", "grant", "claim", "record_step", "hold", "finish"})
JUDGE_ONLY = CHANNEL_ACTIONS - {"status", "finish"} | {"channel"}
PEER_ACTIONS = frozenset({"offer", "fetch"})
CHECK_ACTIONS = frozenset({"verify"})
ACTIONS = CHANNEL_ACTIONS | JUDGE_ONLY | PEER_ACTIONS | CHECK_ACTIONS | {
    "checkpoint", "describe", "fingerprint", "plan_start", "plan_poll", "plan_read", "plan_summary",
    "begin", "mark_torn", "take_over", "prepare", "stream", "install", "finish", "abort",
}  # fmt: skip


class NixlWorkerExtension:
    """For ``--worker-extension-cls``. Every attribute of a worker extension becomes an RPC: there is exactly one."""

    def nixl_push_rpc(self, request: dict[str, Any]) -> dict[str, Any]:
        """See the module. Never raises."""
        try:
            session = self.__dict__.get("_nixl_push_session")
            if session is None:
                session = self.__dict__["_nixl_push_session"] = _new_session(self)
        except Exception as error:
            logger.exception("the weight-update session of this worker cannot start")
            nonce = request.get("nonce")
            return {"ok": False, "nonce": nonce, "worker": -1, "incarnation": "", "state": {}, "error": _error(error)}
        return answer(session, request)


def answer(session: WorkerSession, request: dict[str, Any], allowed: frozenset[str] = ACTIONS) -> dict[str, Any]:
    """Perform one request. Never raises."""
    nonce: Any = None
    body: dict[str, Any] = {}
    try:
        nonce, action = request.get("nonce"), request.get("action")
        if action not in allowed:
            raise errors.InvalidRequest(f"no action {action!r}; this worker knows {sorted(allowed)}")
        addressed = request.get("judge") == session.worker if action in JUDGE_ONLY else True
        addressed &= request.get("only") is None or session.worker in request["only"]
        body["result"] = plain(_perform(session, action, dict(request.get("args") or {}))) if addressed else None
    except errors.PushWeightsError as error:
        body = {"error": _error(error)}
    except Exception as error:
        logger.exception("worker %d failed at a weight-update request", session.worker)
        body = {"error": _error(error)}
    return {
        "ok": "error" not in body, "nonce": nonce, "worker": session.worker, "incarnation": session.incarnation,
        "state": session.state(), **body,
    }  # fmt: skip


def plain(value: Any) -> Any:
    """The value in msgpack's own types; what is foreign becomes its string."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, (int, float, str, bytes)):  # a class of its own, which msgpack does not take
        return next(kind for kind in (int, float, str, bytes) if isinstance(value, kind))(value)  # type: ignore[arg-type]
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    return str(value)


def _new_session(worker: Any) -> WorkerSession:
    from vllm_nixl_plugin.plane import create_plane

    return WorkerSession(create_plane(worker))


def _error(error: Exception) -> dict[str, Any]:
    if not isinstance(error, errors.PushWeightsError):
        error = errors.WorkerFailed(f"unexpected error in a worker: {errors.said(error)}; see its log")
    return dict(plain(error.to_wire()["error"]))


def _perform(session: WorkerSession, action: str, args: dict[str, Any]) -> Any:
    """Workers differ in their plans: ``plans`` and ``reads`` map a worker's index, as a string, to its own argument."""
    mine = str(session.worker)
    if action in ("begin", "grant"):
        plan = args.pop("plans").get(mine)
        if plan is None:
            raise errors.InvalidRequest(f"the request names no plan for worker {mine}")
        return getattr(session, action)(plan=plan, **args)
    if action == "plan_start":
        session.plans.start(args["digest"], args["manifest"])
    if action in ("plan_start", "plan_poll"):
        made = session.plans.poll(args["digest"])
        return made and {"plan": made.digest, "nbytes": len(made.blob)}
    if action == "plan_read":
        return session.plans.read(*args["reads"][mine])
    if action == "plan_summary":
        wanted = args.get("plan")
        made = session.plans.get(wanted) if wanted else session.plans.latest()
        return session.plane.summary(made.plan) | {"plan": made.digest, "partial": not made.full}
    if action in CHECK_ACTIONS:
        return getattr(session.checking, action)(**args)
    if action in PEER_ACTIONS:
        return getattr(session.peering, action)(**args)
    if action == "channel":
        from vllm_nixl_plugin.channel import serve

        return serve(session)
    return getattr(session, action)(**args)
