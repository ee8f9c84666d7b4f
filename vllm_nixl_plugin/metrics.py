"""Metrics on vLLM's own ``/metrics``: how the server stands, and what its updates took. Names begin with vllm_nixl_.

    start (plugin) -> every `PERIOD_S`: the judge's status -> gauges; its history -> counters and the histogram

They live in prometheus_client's default registry, as vLLM's own do. With several API servers vLLM collects the files of
all processes in PROMETHEUS_MULTIPROC_DIR: there, one process at a time observes (it holds a lock in that folder), and
the others take over when it is gone. Nothing here is on the path of an update.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram

from vllm_nixl_plugin import __version__

if TYPE_CHECKING:
    from vllm_nixl_plugin.updates import Updates
    from vllm_nixl_plugin.wire import ServerStatus

logger = logging.getLogger("vllm.nixl_plugin")

PERIOD_S = 1.0
STATES = ("serving", "receiving", "installing", "torn")
BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
STAGES = {"wait_s": "prepare", "pause_s": "pause", "install_s": "install", "resume_s": "resume", "total_s": "total"}
"""Timings of an update on the wire, and the stages that they are in reports; ``install.copy`` and such keep theirs."""


class Metrics:
    """All metrics of this process. Make one (`metrics`): prometheus_client refuses a second of the same name."""

    def __init__(self) -> None:
        recent: dict[str, Any] = {"multiprocess_mode": "mostrecent"}
        self.info = Gauge("vllm_nixl_info", "The plugin that runs here; always 1.", ["plugin", "protocol"], **recent)
        self.state = Gauge(
            "vllm_nixl_state", "1 for the state that the server is in, 0 for the others.", ["state"], **recent
        )
        self.ready = Gauge(
            "vllm_nixl_ready", "Whether the server generates with the weights that it should have.", **recent
        )
        self.torn = Gauge("vllm_nixl_torn", "Whether the engine holds half of an update: push all weights.", **recent)
        self.held = Gauge("vllm_nixl_held", "Whether generation was paused by hand.", **recent)
        self.workers = Gauge("vllm_nixl_workers", "Workers that updates go to.", **recent)
        self.epoch = Gauge("vllm_nixl_epoch", "How many updates were begun.", **recent)
        self.version = Gauge(
            "vllm_nixl_weight_version",
            "The version of the weights that serve, where that is a number; else NaN.",
            **recent,
        )
        self.served = Gauge(
            "vllm_nixl_weight_version_info",
            "The version of the weights that serve, as a label; always 1. Not with several API servers.", ["version"],
        )  # fmt: skip
        self.lease = Gauge("vllm_nixl_lease_held", "Whether somebody has the right to write.", **recent)
        self.lease_left = Gauge(
            "vllm_nixl_lease_expires_seconds",
            "Seconds until the lease is over; negative when it is; 0 without one.",
            **recent,
        )
        self.arrived = Gauge("vllm_nixl_arrived_bytes", "Bytes of the open update at the first worker.", **recent)
        self.expected = Gauge("vllm_nixl_expected_bytes", "Bytes that the open update will bring there.", **recent)
        self.last = Gauge(
            "vllm_nixl_last_update_timestamp_seconds", "When the weights that serve were installed.", **recent
        )
        self.updates = Counter("vllm_nixl_updates", "Updates that are over, by mode and result.", ["mode", "result"])
        self.failures = Counter("vllm_nixl_update_failures", "Updates that failed, by the code of the error.", ["code"])
        self.nbytes = Counter(
            "vllm_nixl_received_bytes", "Bytes of updates at the first worker, when they were over.", ["mode"]
        )
        self.seconds = Histogram(
            "vllm_nixl_update_seconds", "Seconds of an installed update, by stage.", ["stage"], buckets=BUCKETS
        )
        for state in STATES:
            self.state.labels(state)
        for result in ("done", "aborted", "expired", "failed", "torn"):
            self.updates.labels("shadow", result)
        self._served: str | None = None

    def stands(self, status: ServerStatus) -> None:
        """Set the gauges to how the server stands."""
        self.info.labels(__version__, str(status.protocol)).set(1)
        for state in STATES:
            self.state.labels(state).set(state == status.state)
        for gauge, value in (
            (self.ready, status.ready), (self.torn, status.torn), (self.held, status.held), (self.epoch, status.epoch),
            (self.workers, len(status.workers)), (self.lease, status.lease is not None),
            (self.lease_left, status.lease.expires_in_s if status.lease else 0),
            (self.arrived, status.update.arrived_nbytes if status.update else 0),
            (self.expected, status.update.nbytes if status.update else 0),
        ):  # fmt: skip
            gauge.set(value)
        version = status.weight_version
        self.version.set(int(version) if version.isdecimal() else float("nan"))
        if version != self._served and shared_folder() is None:
            self.served.clear()
            self.served.labels(version).set(1)
            self._served = version

    def ended(self, record: dict[str, Any]) -> None:
        """Count an update that is over, as the judge's history has it."""
        self.updates.labels(record["mode"], record["state"]).inc()
        self.nbytes.labels(record["mode"]).inc(record["arrived_nbytes"])
        if record["state"] == "done":
            self.last.set(record["at"])
            for name, seconds in record["timings"].items():
                stage = STAGES.get(name, name)
                if stage in STAGES.values() or stage.startswith("install."):
                    self.seconds.labels(stage).observe(seconds)
        elif record["error"]:
            self.failures.labels(record["error"]["code"]).inc()


@cache
def metrics() -> Metrics:
    """The metrics of this process."""
    return Metrics()


def shared_folder() -> Path | None:
    """Where the processes of a server with several API servers keep their metrics together."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    return Path(folder) if folder else None


class Observer:
    """Asks the judge again and again, and keeps `Metrics` true. Runs in the event loop of an API process."""

    def __init__(self, updates: Updates) -> None:
        self._updates = updates
        self._metrics = metrics()
        self._seen: set[str] = set()
        self._lock: IO[bytes] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """From now on, until the loop ends."""
        self._task = asyncio.create_task(self._run(), name="nixl-metrics")

    async def observe(self) -> None:
        """Once. Errors: those of the judge."""
        history = (await self._updates.engine.ask_judge("status"))["history"]
        new = [record for record in history if record["update_id"] not in self._seen]
        self._seen = {record["update_id"] for record in history}
        if not self._is_mine():
            return
        self._metrics.stands(await self._updates.status())
        for record in new:
            self._metrics.ended(record)

    def _is_mine(self) -> bool:
        """Whether this process is the one that observes. The lock goes with the process."""
        folder = shared_folder()
        if folder is None or self._lock is not None:
            return True
        lock = (folder / "vllm_nixl.lock").open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return False
        self._lock = lock
        return True

    async def _run(self) -> None:
        while True:
            try:
                await self.observe()
            except Exception as error:  # noqa: BLE001 - metrics are told as well as can be, and never end
                logger.debug("metrics: %s: %s", type(error).__name__, error)
            await asyncio.sleep(PERIOD_S)
