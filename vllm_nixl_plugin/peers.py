"""Other servers of the fleet, as a server that joins late asks them: how they stand, and what they let it read.

    survey   every peer that is listed -> the one to catch up from, or why there is none yet
    Peer     one of them, by HTTP with our own token; its errors come back as its exceptions

Called by `catch_up`. The only file of the plugin that makes HTTP requests.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Self, TypeVar

import httpx
from pydantic import ValidationError

from vllm_nixl_plugin import settings
from vllm_nixl_plugin.errors import InvalidRequest, PeerRefused, PushWeightsError, ServerUnreachable, from_wire
from vllm_nixl_plugin.wire import PREFIX, Fingerprint, Offer, Record, ServerStatus

CONNECT_S = 5.0
ANSWER_S = 60.0
READING_S = 600.0

R = TypeVar("R", bound=Record)


class Peer:
    """Another server. An asynchronous context manager closes its connections."""

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidRequest(f"peer {url!r} is not an HTTP URL; expected http://host:port")
        self.url = url.rstrip("/")
        token = settings.own_token()
        self._http = httpx.AsyncClient(
            base_url=self.url + PREFIX, headers={"Authorization": f"Bearer {token}"} if token else {},
            trust_env=False, verify=_tls(), transport=transport, timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
        )  # fmt: skip

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *of: object) -> None:
        await self._http.aclose()

    async def status(self) -> ServerStatus:
        """How it stands."""
        return await self._get(ServerStatus, "/status")

    async def offer(self) -> Offer:
        """What it lets its peers read now. Errors: PeerRefused, EngineTorn, EngineAsleep."""
        return await self._get(Offer, "/offer")

    async def fingerprint(self, *, paths: bool, worker: int | None = None) -> Fingerprint:
        """What its engine can read."""
        asked = {"paths": paths} | ({} if worker is None else {"worker": worker})
        return await self._get(Fingerprint, "/fingerprint", asked, READING_S)

    async def _get(self, kind: type[R], path: str, params: dict[str, Any] | None = None, wait_s: float = ANSWER_S) -> R:
        try:
            timeout = httpx.Timeout(wait_s, connect=CONNECT_S)
            answer = await self._http.get(path, params=params, timeout=timeout)
        except httpx.HTTPError as error:
            raise ServerUnreachable(f"peer {self.url} cannot be reached ({type(error).__name__}: {error})") from None
        try:
            if not answer.is_success:
                raise from_wire(answer.json())
            return kind.model_validate_json(answer.content)
        except ValidationError:
            raise PeerRefused(
                f"peer {self.url} answers {PREFIX}{path} in another form: run the same version of vllm-nixl-plugin"
            ) from None
        except (ValueError, KeyError, TypeError):
            raise ServerUnreachable(
                f"peer {self.url} has no {PREFIX}{path} (status {answer.status_code}): it does not run this plugin"
            ) from None


class NothingNewer(Exception):
    """All peers answer, and none has got weights since its start."""


async def survey(urls: Sequence[str], ours: str, first_version: str) -> str:
    """The peer to catch up from, by URL. ``ours``: our incarnation, by which we are told from our peers.

    Of different versions that is the highest number; where they are no numbers, the one that most peers have.
    Errors: NothingNewer; PeerRefused, with why there is none now.
    """
    answers = dict(zip(urls, await asyncio.gather(*(_standing(url) for url in urls)), strict=True))
    found: dict[str, str] = {}
    wrong: list[str] = []
    for url, answer in answers.items():
        if isinstance(answer, PushWeightsError):
            wrong.append(f"{url}: {answer.code}: {answer.message}")
        elif answer.incarnation == ours:
            continue
        elif answer.torn:
            wrong.append(f"{url}: torn: its weights are half of an update")
        elif answer.weight_version != first_version:
            found[url] = answer.weight_version
    if found:
        version = newest(found.values())
        return next(url for url, has in found.items() if has == version)
    if wrong or not answers:
        raise PeerRefused("no peer has weights to catch up with: " + ("; ".join(wrong) or "none is listed"), retry=True)
    raise NothingNewer


def newest(versions: Iterable[str]) -> str:
    """The highest number, or else the most frequent."""
    counted = Counter(versions)
    numbers = [version for version in counted if version.isdecimal()]
    return max(numbers, key=int) if len(numbers) == len(counted) else counted.most_common(1)[0][0]


async def _standing(url: str) -> ServerStatus | PushWeightsError:
    try:
        async with Peer(url) as peer:
            return await peer.status()
    except PushWeightsError as error:
        return error


def _tls() -> ssl.SSLContext | bool:
    """How to check peers and who to be: by the same settings as a trainer. Errors: InvalidRequest."""
    given = settings.TrainerSettings()
    if given.ca_file is None and given.cert_file is None:
        return True
    try:
        context = ssl.create_default_context(cafile=given.ca_file)
        if given.cert_file is not None:
            context.load_cert_chain(given.cert_file, given.key_file)
    except OSError as error:
        raise InvalidRequest(f"the certificates that the environment names cannot be used: {error}") from None
    return context
