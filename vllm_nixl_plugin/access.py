"""Who may ask: the token, and how often somebody without it may try. `api` and `guard` call `check` before all else.

A wrong token costs one comparison; after `LIMIT` of them from one address within `WINDOW_S` seconds the answer is 429,
and the log says so once. Who has the right token always gets in, also from behind an address that others misuse.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from vllm_nixl_plugin import settings
from vllm_nixl_plugin.errors import TooManyRequests, Unauthorized

logger = logging.getLogger("vllm.nixl_plugin")

LIMIT = 30
WINDOW_S = 10.0
MAX_ADDRESSES = 4096


@dataclass
class _Window:
    ends: float
    n: int = 0


class Failures:
    """Wrong tokens by address, the `MAX_ADDRESSES` seen last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._windows: OrderedDict[str, _Window] = OrderedDict()
        self._clock = clock

    def note(self, address: str) -> None:
        """One more. Errors: TooManyRequests, over the limit."""
        now = self._clock()
        window = self._windows.get(address)
        if window is None or window.ends <= now:
            window = self._windows[address] = _Window(now + WINDOW_S)
        self._windows.move_to_end(address)
        while len(self._windows) > MAX_ADDRESSES:
            self._windows.popitem(last=False)
        window.n += 1
        if window.n > LIMIT:
            if window.n == LIMIT + 1:
                logger.warning("%s sends requests without the token: more than %d in %g s", address, LIMIT, WINDOW_S)
            raise TooManyRequests(
                "too many requests without the token from this address", retry_after_s=max(window.ends - now, 0.0)
            )


failures = Failures()


def check(authorization: str | None, address: str | None) -> None:
    """``authorization``: the header; ``address``: of the client. Errors: Unauthorized, TooManyRequests."""
    try:
        settings.authorize(authorization)
    except Unauthorized:
        failures.note(address or "")
        raise
