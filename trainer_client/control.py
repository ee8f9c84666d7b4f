"""The HTTP side of one server: each method is one request of docs/protocol.md.

`WeightClient` has one `Control` per server and calls, in this order: `plan`, `begin`, `renew` (from a thread of its
own), `commit`, `update` until the update is over, or `abort`. Errors come back as the exceptions that the server
raised; httpx's own become `ServerUnreachable` and `DeadlineExceeded`. Every request is repeated after a broken
connection. Where the first had come through, that changes nothing, but for `begin`: the update whose answer was lost is
in the way of the second, whose `LeaseHeld` names it; `delivery` ends it and begins again.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from trainer_client.environment import trainer_settings
from vllm_nixl_plugin.errors import (
    DeadlineExceeded,
    InvalidRequest,
    PushWeightsError,
    ServerUnreachable,
    Unauthorized,
    from_wire,
)
from vllm_nixl_plugin.wire import (
    MAX_BODY_BYTES,
    PREFIX,
    BeginRequest,
    CatchUpRequest,
    CatchUpStatus,
    Checkpoint,
    CommitRequest,
    Fingerprint,
    KvCachePolicy,
    Manifest,
    PauseMode,
    Record,
    ServerStatus,
    SumsRequest,
    UpdateOpened,
    UpdateStatus,
    WeightSpec,
)

CONNECT_S = 10.0
ANSWER_S = 30.0
"""How much longer than a request's own wait its answer may take."""
READING_S = 600.0
"""How long a server may take to read all its weights."""
LATE_S = 10.0
"""How long a request may take when the time of the push is over: those that clear up."""
CATCH_UP_S = 30.0
"""How long one request waits for a catch-up."""
ATTEMPTS = 3
RETRY_S = 0.2

_R = TypeVar("_R", bound=Record)


def checkpoints(controls: Iterable[Control]) -> list[tuple[WeightSpec, ...]]:
    """What each server started from; those that do not answer are left out, unless none does.

    Errors: that of the last one.
    """
    found: list[tuple[WeightSpec, ...]] = []
    failure: PushWeightsError | None = None
    for control in controls:
        try:
            found.append(control.checkpoint().weights)
        except PushWeightsError as error:
            failure = error
    if failure is not None and not found:
        raise failure
    return found


def tls() -> ssl.SSLContext | bool:
    """How to check servers and who to be, by the environment: PUSH_WEIGHTS_CA_FILE, PUSH_WEIGHTS_CERT_FILE (and
    PUSH_WEIGHTS_KEY_FILE). Errors: InvalidRequest, for files that cannot be used.
    """
    settings = trainer_settings()
    authorities, certificate, key = settings.ca_file, settings.cert_file, settings.key_file
    if authorities is None and certificate is None:
        return True
    try:
        context = ssl.create_default_context(cafile=authorities)
        if certificate is not None:
            context.load_cert_chain(certificate, key)
    except OSError as error:
        names = "PUSH_WEIGHTS_CA_FILE or PUSH_WEIGHTS_CERT_FILE or PUSH_WEIGHTS_KEY_FILE"
        raise InvalidRequest(f"{names} names a file that cannot be used: {error}") from None
    return context


class Control:
    """One server. ``timeout_s`` bounds every request that has no time limit of its own."""

    def __init__(
        self,
        server: str,
        *,
        token: str | None = None,
        timeout_s: float = 60.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        try:
            url = httpx.URL(server)
        except (httpx.InvalidURL, TypeError) as error:
            raise InvalidRequest(f"server {server!r} is not a URL ({error}); expected http://host:port") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise InvalidRequest(f"server {server!r} is not an HTTP URL; expected http://host:port")
        if token and not token.isascii():
            raise InvalidRequest("the token has characters beyond ASCII, which an HTTP header cannot carry")
        self.server = server.rstrip("/")
        self._timeout_s = timeout_s
        self.until = float("inf")
        """By when, on time.monotonic, requests have to be answered, `LATE_S` at least; the push sets it."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(
            base_url=self.server + PREFIX, headers=headers, transport=transport, trust_env=False, verify=tls(),
        )  # fmt: skip

    def __enter__(self) -> Control:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Doing it twice is fine."""
        self._http.close()

    def status(self) -> ServerStatus:
        """How the server stands."""
        return self._record(ServerStatus, self._request("GET", "/status"))

    def plan(self, manifest: Manifest, timeout_s: float) -> bytes:
        """The plan of every worker, as `encoding.decode_plans` reads them. Errors: PlanRefused."""
        answer = self._request(
            "POST", "/plan", body=manifest.model_dump_json(), params={"timeout_s": timeout_s}, wait_s=timeout_s,
            headers={"Accept": "application/octet-stream"},
        )  # fmt: skip
        if len(answer.content) > MAX_BODY_BYTES:
            raise InvalidRequest(
                f"{self.server}: plans of {len(answer.content)} bytes are over the cap of {MAX_BODY_BYTES}"
            )
        return answer.content

    def begin(self, request: BeginRequest, timeout_s: float) -> UpdateOpened:
        """Open an update. Errors: LeaseHeld, UnknownPlan, EngineTorn, InsufficientMemory."""
        answer = self._request("POST", "/updates", body=request.model_dump_json(), wait_s=timeout_s)
        return self._record(UpdateOpened, answer)

    def renew(self, update_id: str, lease_s: float) -> None:
        """Hold the update for another ``lease_s``. Errors: StaleUpdate."""
        self._request("POST", f"/updates/{update_id}/renew", json={"lease_s": lease_s})

    def verify(self, update_id: str, sums: Sequence[Sequence[int]], timeout_s: float) -> None:
        """Compare what has arrived with the checksums of what was sent. Errors: Corrupted, naming what differs."""
        body = SumsRequest(sums=tuple(tuple(each) for each in sums), timeout_s=timeout_s).model_dump_json()
        self._request("POST", f"/updates/{update_id}/verify", body=body, wait_s=timeout_s)

    def commit(self, update_id: str, request: CommitRequest, wait_s: float = 0.0) -> UpdateStatus:
        """Start the install, or join the running one; how it stands, at the latest after ``wait_s``."""
        answer = self._request(
            "POST", f"/updates/{update_id}/commit", body=request.model_dump_json(), params={"wait_s": wait_s},
            wait_s=wait_s,
        )  # fmt: skip
        return self._record(UpdateStatus, answer)

    def update(self, update_id: str, wait_s: float) -> UpdateStatus:
        """How an update stands, at the latest after ``wait_s``."""
        answer = self._request("GET", f"/updates/{update_id}", params={"wait_s": wait_s}, wait_s=wait_s)
        return self._record(UpdateStatus, answer)

    def abort(self, update_id: str, *, drained: bool) -> UpdateStatus:
        """End an update. ``drained``: no write of it is under way any more. Errors: StaleUpdate."""
        answer = self._request("DELETE", f"/updates/{update_id}", params={"drained": drained})
        return self._record(UpdateStatus, answer)

    def fingerprint(self, worker: int | None = None, *, paths: bool = True) -> Fingerprint:
        """What every worker's engine can read, or one's. Errors: EngineAsleep, EngineTorn, LeaseHeld, StaleUpdate."""
        asked = {"paths": paths} | ({} if worker is None else {"worker": worker})
        return self._record(Fingerprint, self._request("GET", "/fingerprint", params=asked, wait_s=READING_S))

    def plan_summary(self, digest: str | None = None) -> list[dict[str, Any]]:
        """A plan for people, one summary for each worker: that used last, or that of ``digest``.

        Errors: UnknownPlan, PlanRefused.
        """
        answer = self._request("GET", "/plan", params={} if digest is None else {"digest": digest}, wait_s=READING_S)
        return list(answer.json()["workers"])

    def catch_up(self, peer: str, timeout_s: float) -> CatchUpStatus:
        """Let the server read the weights of a peer; how it stands after a while. Asked again, it joins what runs.

        Errors: LeaseHeld, when it is catching up from another peer.
        """
        body = CatchUpRequest(peer=peer, timeout_s=timeout_s).model_dump_json()
        wait_s = min(timeout_s, CATCH_UP_S)
        answer = self._request("POST", "/catch-up", body=body, params={"wait_s": wait_s}, wait_s=wait_s)
        return self._record(CatchUpStatus, answer)

    def checkpoint(self) -> Checkpoint:
        """The weights that the server started from."""
        return self._record(Checkpoint, self._request("GET", "/checkpoint"))

    def pause(self, mode: PauseMode, kv_cache: KvCachePolicy, timeout_s: float) -> None:
        """Pause generation until `resume`."""
        self._request("POST", "/pause", params={"mode": mode, "kv_cache": kv_cache}, wait_s=timeout_s)

    def resume(self) -> None:
        """Let generation go on. Errors: EngineTorn."""
        self._request("POST", "/resume")

    def _request(
        self,
        method: str,
        path: str,
        *,
        body: str | None = None,
        json: Mapping[str, Any] | None = None,
        params: Mapping[str, str | float | bool] | None = None,
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> httpx.Response:
        read_s = min(max(self._timeout_s, wait_s + ANSWER_S), max(self.until - time.monotonic(), LATE_S))
        timeout = httpx.Timeout(read_s, connect=min(CONNECT_S, read_s))
        sent: dict[str, Any] = {"params": params, "headers": dict(headers or {})}
        if body is not None:
            sent["content"] = body
            sent["headers"]["Content-Type"] = "application/json"
        elif json is not None:
            sent["json"] = json
        for left in reversed(range(ATTEMPTS)):
            try:
                answer = self._http.request(method, path, timeout=timeout, **sent)
            except httpx.TimeoutException as error:
                if isinstance(error, httpx.ConnectTimeout):
                    raise self._unreachable(error) from error
                raise DeadlineExceeded(f"{self.server}: no answer to {method} {path} within {read_s:g} s") from error
            except httpx.HTTPError as error:
                if not left:
                    raise self._unreachable(error) from error
                time.sleep(RETRY_S)
                continue
            if answer.is_success:
                return answer
            raise self._refusal(method, path, answer)
        raise AssertionError("ATTEMPTS is at least 1")

    def _unreachable(self, error: httpx.HTTPError) -> ServerUnreachable:
        return ServerUnreachable(
            f"{self.server} cannot be reached ({type(error).__name__}: {error}): check the address, and that it is up",
            server=self.server,
        )  # fmt: skip

    def _refusal(self, method: str, path: str, answer: httpx.Response) -> PushWeightsError:
        try:
            found = from_wire(answer.json())
        except (ValueError, KeyError, TypeError, AttributeError):
            if answer.status_code == 404:
                return ServerUnreachable(
                    f"{self.server} has no route {PREFIX}{path}: start vLLM with VLLM_PLUGINS=nixl and "
                    "--worker-extension-cls vllm_nixl_plugin.NixlWorkerExtension", server=self.server,
                )  # fmt: skip
            found = PushWeightsError(
                f"{method} {path} was answered with status {answer.status_code}: {answer.text[:200]}"
            )
        if isinstance(found, Unauthorized):
            return Unauthorized(
                f"{self.server} refuses the token: give WeightClient(token=...), or set PUSH_WEIGHTS_TOKEN, to the "
                "PUSH_WEIGHTS_TOKEN of the server", server=self.server,
            )  # fmt: skip
        return found

    def _record(self, kind: type[_R], answer: httpx.Response) -> _R:
        try:
            return kind.model_validate_json(answer.content)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            raise InvalidRequest(
                f"{self.server}: an answer is not a {kind.__name__} ({problem['loc']}: {problem['msg']}): run the same "
                "version of vllm-nixl-plugin on both sides"
            ) from None
