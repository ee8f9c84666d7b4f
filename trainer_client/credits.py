"""What workers say of their windows in mode ``streamed``: which groups have left them, so that others can come.

A worker sends every writer a `Credit` as a NIXL notification. One agent serves the pushes to all servers at once, each
in a thread of its own: `Credits` reads its notifications for all of them, and keeps what is meant for updates that
somebody waits for. Everything else is counted and dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from vllm_nixl_plugin.encoding import decode_credit
from vllm_nixl_plugin.errors import InvalidRequest
from vllm_nixl_plugin.fabric import Fabric


class Credits:
    """The credits that arrive at one agent. From any thread. ``foreign``: notifications that were not for us."""

    def __init__(self, fabric: Fabric) -> None:
        self.foreign = 0
        self._fabric = fabric
        self._left: dict[tuple[str, str], tuple[str, int]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def expect(self, update_id: str, workers: Iterable[tuple[str, str]]) -> Iterator[None]:
        """While entered, credits of this update count. ``workers``: the agent of each, and the digest of its plan."""
        expected = {(update_id, agent): (plan[:16], -1) for agent, plan in workers}
        with self._lock:
            self._left |= expected
        try:
            yield
        finally:
            with self._lock:
                for key in expected:
                    self._left.pop(key, None)

    def look(self, update_id: str, agent: str) -> int:
        """Read what has come; the last group that has left the window of this worker, -1 for none.

        Errors: FabricError.
        """
        with self._lock:
            for sender, data in self._fabric.notifications():
                self._take(sender, data)
            return self._left[update_id, agent][1]

    def _take(self, sender: str, data: bytes) -> None:
        try:
            credit = decode_credit(data)
        except InvalidRequest:
            self.foreign += 1
            return
        key = (credit.update_id, sender)
        plan, last = self._left.get(key, ("", -1))
        if plan != credit.plan:
            self.foreign += 1
            return
        self._left[key] = plan, max(last, credit.group)
