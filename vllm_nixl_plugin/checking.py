"""Whether what arrived is what was sent: a worker's part in ``push_weights(verify=True)``; `session` has one.

When all bytes of the open update are there and before anything is prepared, the checksum of each destination is worked
out where it lies, of the bytes that the plan writes, and compared with the sum that all writers together tell. In
slices, as the engine serves meanwhile. No vLLM, no device here; the plane does the work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm_nixl_plugin.errors import InvalidRequest, StaleUpdate

if TYPE_CHECKING:
    from vllm_nixl_plugin.session import WorkerSession

SLICE_S = 0.05


class Checking:
    """See the module. Called from the worker's main thread."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._update = ""
        self._left: Iterator[tuple[str, int, int]] = iter(())
        self._differing: list[str] = []

    def verify(self, update_id: str, sums: dict[str, Sequence[int]] | None = None) -> dict[str, Any]:
        """Begin with ``sums`` (of the destinations in order, by worker), go on without: a slice of the comparison.

        ``done``, and then ``differing``: names of the destinations that differ. Errors: StaleUpdate, InvalidRequest,
        those of counting what has arrived.
        """
        session = self._session
        update = session.update
        if update is None or update.id != update_id or update.prepared or update.stages is not None:
            raise StaleUpdate(f"update {update_id} is over or being installed: verify before the commit")
        got = session.collected(update)
        if sums is not None:
            told = sums[str(session.worker)]
            if len(told) != len(update.plan.destinations):
                raise InvalidRequest(
                    f"worker {session.worker} has {len(update.plan.destinations)} destinations, not {len(told)}"
                )
            names = (d.names[0] for d in update.plan.destinations)
            self._left = zip(names, told, session.plane.sums(update.plan, update.mode), strict=True)
            self._update, self._differing = update_id, []
        elif self._update != update_id:
            raise InvalidRequest(f"worker {session.worker} was not told what was sent for update {update_id}")
        if got["arrived_nbytes"] != got["expected_nbytes"]:
            return {"done": False, "differing": []}
        until = time.monotonic() + SLICE_S
        for name, sent, found in self._left:
            if sent != found:
                self._differing.append(name)
            if time.monotonic() >= until:
                return {"done": False, "differing": []}
        return {"done": True, "differing": self._differing}
