"""The servers of a client, which may come and go between pushes.

    given   URLs, a function that returns them, a file, or a name with several addresses (`vllm_nixl_plugin.addresses`)
    add     and remove: by hand, beside what is given
    refresh at the start of each push, on rank 0: who is new gets a `Server` and a `Link`, who has gone loses them

What a push prepares is kept for the servers that stay. A server that has restarted, or failed at the last push, is no
new one: `delivery` plans for it again when it says that it does not know a plan.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Literal

from trainer_client.control import Control
from trainer_client.delivery import Server
from trainer_client.link import Link
from vllm_nixl_plugin.addresses import is_list, listed
from vllm_nixl_plugin.errors import InvalidRequest, ServerUnreachable

logger = logging.getLogger("vllm.nixl_plugin")

Servers = Sequence[str] | str | Callable[[], Iterable[str]]
Require = Literal["all"] | int | float


class Fleet:
    """``connect``: makes the control of a URL; ``links``: those of this rank, shared with its `Stockroom`.

    Errors: InvalidRequest, for a list that has a server twice, or none.
    """

    def __init__(
        self, given: Servers, connect: Callable[[str], Control], links: MutableMapping[str, Link],
        retire: Callable[[Link], None],
    ) -> None:
        self._connect, self._links, self._retire = connect, links, retire
        self._servers: dict[str, Server] = {}
        self._lock = threading.Lock()
        self._listing = given if callable(given) else None
        urls = [] if callable(given) else [given] if isinstance(given, str) else list(given)
        if not callable(given) and (not urls or len({url.rstrip("/") for url in urls}) != len(urls)):
            raise InvalidRequest(f"servers is {urls}; expected the URL of each server once")
        self._urls = urls
        self._removed: set[str] = set()
        if self.is_fixed:
            self._settle(listed(urls))

    @property
    def is_fixed(self) -> bool:
        """Whether only `add` and `remove` change it."""
        return self._listing is None and not any(is_list(url) for url in self._urls)

    @property
    def servers(self) -> tuple[Server, ...]:
        """Those of the last `refresh`, in order."""
        with self._lock:
            return tuple(self._servers.values())

    def add(self, url: str) -> None:
        """From the next push on. Errors: InvalidRequest, for what is no URL."""
        [url] = listed([url]) if not is_list(url) else [url]
        with self._lock:
            self._removed.discard(url)
            if url not in self._urls:
                self._urls = [*self._urls, url]

    def remove(self, url: str) -> None:
        """From the next push on, also if a list still has it. Errors: InvalidRequest, for one that is not known."""
        url = url.rstrip("/")
        with self._lock:
            kept = [one for one in self._urls if one.rstrip("/") != url]
            if len(kept) == len(self._urls) and url not in self._servers:
                raise InvalidRequest(f"{url} is no server of this client, which has {', '.join(self._servers)}")
            self._urls = kept
            self._removed.add(url)

    def refresh(self) -> tuple[Server, ...]:
        """The servers as they are listed now. A list that cannot be read now is as it was last.

        Errors: InvalidRequest, when there is none; ServerUnreachable, when a list could never be read.
        """
        with self._lock:
            given, removed = tuple(self._urls), set(self._removed)
        try:
            found = listed([*given, *(self._listing() if self._listing is not None else ())])
        except ServerUnreachable as error:
            if not self._servers:
                raise
            logger.warning("pushing to the servers of the last push: %s", error)
            return self.servers
        urls = [url for url in found if url not in removed]
        if not urls:
            raise InvalidRequest("there is no server to push to: the list is empty")
        self._settle(urls)
        return self.servers

    def close(self) -> None:
        """Close all connections."""
        for server in self.servers:
            server.control.close()

    def _settle(self, urls: Iterable[str]) -> None:
        with self._lock:
            before, self._servers = self._servers, {}
            for url in urls:
                server = before.pop(url, None)
                if server is None:
                    link = self._links[url] = Link(url)
                    server = Server(self._connect(url), link)
                self._servers[url] = server
        for url, server in before.items():
            self._retire(self._links.pop(url))
            server.control.close()


def check_require(require: Require, servers: int | None) -> None:
    """``servers``: their number, where it does not change. Errors: InvalidRequest."""
    if require == "all":
        return
    most = 1 if isinstance(require, float) else servers
    if isinstance(require, str | bool) or require <= 0 or (most is not None and require > most):
        upto = "" if servers is None else f" to {servers}"
        raise InvalidRequest(f"require is {require!r}; expected 'all', a number from 1{upto}, or a share such as 0.5")


def required(require: Require, servers: int) -> int:
    """How many of so many servers have to take a push."""
    if isinstance(require, str):
        return servers
    return math.ceil(require * servers - 1e-9) if isinstance(require, float) else require
