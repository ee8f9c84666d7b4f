"""Lists of servers that may change: URLs, a file that is read each time, or a name that is resolved each time.

    http://host:port          that server
    dns+http://name:port      every address that the name has now (a headless service of Kubernetes, for example)
    file:/path or /path       a line for each of these; ``#`` begins a comment

Shared by both packages: the trainer's list of servers and a server's list of peers. The standard library only.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

from vllm_nixl_plugin.errors import InvalidRequest, ServerUnreachable

FORMS = "expected http://host:port, dns+http://name:port, or the path of a file with such lines"


def is_list(given: str) -> bool:
    """Whether what it stands for may change: a file, or a name with several addresses."""
    return given.startswith(("dns+", "file:", "/"))


def listed(given: Iterable[str]) -> tuple[str, ...]:
    """The base URLs that these stand for now, each once, in order.

    Errors: InvalidRequest, for what is none of the forms; ServerUnreachable, for a file or name that cannot be read.
    """
    return tuple(dict.fromkeys(url for one in given for url in _urls(one.strip())))


def _urls(one: str) -> Iterable[str]:
    if one.startswith(("file:", "/")):
        path = Path(one.removeprefix("file:").removeprefix("//"))
        try:
            lines = [line.partition("#")[0].strip() for line in path.read_text("utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ServerUnreachable(f"the list of servers {path} cannot be read ({type(error).__name__})") from None
        return [url for line in lines if line for url in _url_lines(line, path)]
    parts = urlsplit(one)
    if parts.scheme in ("http", "https") and parts.hostname:
        return [one.rstrip("/")]
    if parts.scheme in ("dns+http", "dns+https") and parts.hostname:
        return _resolved(parts.scheme.removeprefix("dns+"), parts.hostname, parts.port or 8000)
    raise InvalidRequest(f"{one!r} is not an address of servers: {FORMS}")


def _url_lines(line: str, path: Path) -> Iterable[str]:
    if line.startswith(("file:", "/")):
        raise InvalidRequest(f"{path} names another file: {line!r}; {FORMS}")
    return _urls(line)


def _resolved(scheme: str, name: str, port: int) -> list[str]:
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ServerUnreachable(f"the name {name!r} has no address now: {error}") from None
    hosts = sorted({str(address[0]) for *_, address in found})
    return [f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}" for host in hosts]
