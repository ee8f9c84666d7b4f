"""The client: `WeightClient.push_weights` is the path of a push from the trainer's side, in order.

    sources -> conversion -> manifest -> for every server at once: plan -> route -> begin -> transfer -> commit
    -> report

It belongs to one training process and outlives its pushes: plans, routes, registered memory and prepared writes are
kept while model and servers stay as they are, so that from the second push on only bytes move. Each stage is described
in the module of its name; `delivery` has those that happen once per server, and `link` keeps what they prepare.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial as bind
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, get_args

from trainer_client.batching import ALIGNMENT
from trainer_client.control import Control
from trainer_client.conversion import Conversion, Convert, checkpoint_converter, convert_shards
from trainer_client.delivery import Options, deliver, gather
from trainer_client.link import Link, Offering
from trainer_client.progress import Progress
from trainer_client.registration import SourceMemory
from trainer_client.report import PushReport
from trainer_client.sources import Sources, collect, unwrap
from trainer_client.transfer import synchronize
from vllm_nixl_plugin.agent import NixlAgent
from vllm_nixl_plugin.errors import InvalidRequest, PushFailed, PushWeightsError
from vllm_nixl_plugin.fabric import Fabric
from vllm_nixl_plugin.wire import KvCachePolicy, Mode, PauseMode, ServerStatus

if TYPE_CHECKING:
    import httpx
    from torch import Tensor, nn

Require = Literal["all"] | int

DIRECT_RUN_BYTES = 16 << 10
"""Shorter runs are packed: below this a copy into the send buffer costs less than one more descriptor on the wire."""


@dataclass(frozen=True)
class _Offered:
    """What was last offered, and from which memory.

    ``key`` says what conversion and routes depend on besides shards.
    """

    key: tuple[Any, ...]
    conversion: Conversion
    offering: Offering
    memory: SourceMemory


class WeightClient:
    """Pushes the weights of a trainer to vLLM servers that run vllm-nixl-plugin.

    Args:
        servers: a sequence of their base URLs, ``http://host:port``.
        token: their PUSH_WEIGHTS_TOKEN; default: this process's environment variable of that name.
        timeout_s: how long one push may take on each server, from plan to the end of the install.
        lease_s: how long a server keeps an update open for a trainer that fell silent; renewed while the push runs.
        interfaces: network devices the data may use, ``("mlx5_0:1", "eth0")`` or ``("all",)``; default: loopback only.
        backend: NIXL's plug-in.
        send_buffer_bytes: size of one send buffer; there are two for each server and source device.
        direct_run_bytes: contiguous runs from this length on are written straight from parameter memory.
        progress: show a bar; default: when standard error is a terminal.
        require: how many servers must take the push, else `PushFailed` is raised: ``"all"`` or a number.
        fabric: makes the agent of a name; for tests without NIXL.
        transport: carries the HTTP requests; for tests without servers.
    """

    def __init__(
        self,
        servers: Sequence[str],
        *,
        token: str | None = None,
        timeout_s: float = 600.0,
        lease_s: float = 60.0,
        interfaces: Sequence[str] | None = None,
        backend: str = "UCX",
        send_buffer_bytes: int = 64 << 20,
        direct_run_bytes: int = DIRECT_RUN_BYTES,
        progress: bool | None = None,
        require: Require = "all",
        fabric: Callable[[str], Fabric] | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        urls = [servers] if isinstance(servers, str) else list(servers)
        if not urls or len({url.rstrip("/") for url in urls}) != len(urls):
            raise InvalidRequest(f"servers is {urls}; expected the URL of each server once")
        if require != "all" and not (1 <= require <= len(urls)):
            raise InvalidRequest(f"require is {require!r}; expected 'all' or a number from 1 to {len(urls)}")
        least = {"timeout_s": timeout_s, "lease_s": lease_s, "direct_run_bytes": direct_run_bytes}
        for name, number in least.items():
            if number <= 0:
                raise InvalidRequest(f"{name} is {number}; expected a positive number")
        if send_buffer_bytes < ALIGNMENT:
            raise InvalidRequest(f"send_buffer_bytes is {send_buffer_bytes}; expected at least {ALIGNMENT}")
        self._timeout_s, self._lease_s = timeout_s, lease_s
        self._required = len(urls) if require == "all" else require
        self._show_progress = progress
        self._limits = {"direct_run_bytes": direct_run_bytes, "buffer_bytes": send_buffer_bytes}
        self._make_fabric = fabric or bind(
            NixlAgent, backend=backend, interfaces=None if interfaces is None else tuple(interfaces)
        )
        token = token if token is not None else os.environ.get("PUSH_WEIGHTS_TOKEN", "").strip() or None
        self._links = [Link(Control(url, token=token, transport=transport)) for url in urls]
        self._identity = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._agents = itertools.count()
        self._fabric: Fabric | None = None
        self._offered: _Offered | None = None
        self._number: int | None = None
        self._busy = threading.Lock()
        self._closed = False

    def __enter__(self) -> WeightClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def push_weights(
        self,
        model: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        *,
        version: str | None = None,
        mode: Mode = "shadow",
        kv_cache: KvCachePolicy = "recompute",
        pause: PauseMode = "keep",
        partial: bool = False,
        convert: Convert | None = None,
    ) -> PushReport:
        """Bring all servers to the present weights of ``model``, and return who has them now.

        Args:
            model: a module (for transformers models: what ``save_pretrained`` would save), a state dict, or pairs of
                name and tensor. The tensors must not be written to before this returns. Those of a module or state
                dict are held until the next push; an iterable's are let go at once.
            version: what the servers will call these weights. Default: a whole number, one above the highest that a
                server had at the first push of this client, and counting up from there.
            mode: ``shadow`` (lands beside the live weights, short pause) or ``in_place`` (no extra memory, long pause).
            kv_cache: ``recompute`` what running requests have cached, or ``keep`` it although the weights changed.
            pause: what happens to running requests at the install: ``keep`` them, ``wait`` for them, ``abort`` them.
            partial: weights that are not pushed keep their present values; else they are an error.
            convert: from a dict of the model's tensors to named checkpoint tensors; runs once, without data. Default:
                the model's own way back to its checkpoint for transformers models, nothing for others.

        Errors: PushFailed with the report, when fewer servers than required took the push; InvalidRequest.
        """
        if not self._busy.acquire(blocking=False):
            raise InvalidRequest("another push of this client is running: wait for it, or make a client per thread")
        begin, cancel = time.monotonic(), threading.Event()
        try:
            if self._closed:
                raise InvalidRequest("the client is closed: make a new one")
            sources = collect(model)
            offered = self._offer(model, sources, convert, partial)
            options = self._options(version, mode, kv_cache, pause)
            for device in {storage.device for storage in sources.storages}:
                synchronize(device)
            with Progress(tuple(link.control.server for link in self._links), enabled=self._show_progress) as progress:
                deliveries = [
                    bind(deliver, link, offered.offering, offered.memory, self._agent(), options, progress, cancel)
                    for link in self._links
                ]
                servers = gather(deliveries, cancel)
            nbytes, seconds = sum(server.nbytes for server in servers), time.monotonic() - begin
            report = PushReport(options.version, mode, tuple(servers), nbytes, seconds)
        finally:
            self._settle(keep=hasattr(model, "keys") or hasattr(model, "state_dict"))
            self._busy.release()
        return self._judged(report)

    def status(self) -> dict[str, ServerStatus | PushWeightsError]:
        """How every server stands, or why it does not say so."""
        return {link.control.server: _status(link.control) for link in self._links}

    def close(self) -> None:
        """Release all memory and connections. Doing it twice is fine."""
        self._closed = True
        self._drop_fabric()
        for link in self._links:
            link.control.close()

    def _offer(self, model: Any, sources: Sources, convert: Convert | None, partial: bool) -> _Offered:
        """Conversion and offering for these sources: those of the last push where nothing has changed."""
        from torch import nn

        own = None if convert is not None or not isinstance(model, nn.Module) else weakref.ref(unwrap(model))
        key = (sources.geometry(), partial, convert, own)
        last = self._offered
        if last is not None and last.key == key:
            if last.memory.sources.places() == sources.places():
                return last
            conversion, offering = last.conversion, last.offering
        else:
            conversion = convert_shards(sources.shards, convert or checkpoint_converter(model))
            offering = Offering(sources, conversion, partial=partial, **self._limits)
        self._release()
        self._offered = _Offered(key, conversion, offering, SourceMemory(self._agent(), sources))
        return self._offered

    def _options(self, version: str | None, mode: Mode, kv_cache: KvCachePolicy, pause: PauseMode) -> Options:
        given = (("mode", mode, Mode), ("kv_cache", kv_cache, KvCachePolicy), ("pause", pause, PauseMode))
        for name, value, kind in given:
            if value not in get_args(kind):
                raise InvalidRequest(f"{name} is {value!r}; expected one of {', '.join(get_args(kind))}")
        if version is not None and not 0 < len(version) <= 256:
            raise InvalidRequest(f"version is {version!r}; expected a string of 1 to 256 characters")
        return Options(
            version or self._next_version(), mode, kv_cache, pause, self._lease_s, self._timeout_s, self._identity
        )

    def _next_version(self) -> str:
        if self._number is None:
            found = [status.weight_version for status in self.status().values() if isinstance(status, ServerStatus)]
            self._number = max((int(name) for name in found if name.isdecimal()), default=0)
        self._number += 1
        return str(self._number)

    def _judged(self, report: PushReport) -> PushReport:
        if len(report.succeeded) >= self._required:
            return report
        failed = [f"{s.server}: {s.error_code}: {s.error}" for s in report.servers if not s.ok]
        raise PushFailed(
            f"{len(report.succeeded)} of {len(report.servers)} servers have version {report.version}, required are "
            f"{self._required}. {'; '.join(failed)}", report=report, **report.to_dict(),
        )  # fmt: skip

    def _agent(self) -> Fabric:
        """The agent of this process; a new one after `_drop_fabric`."""
        if self._fabric is None:
            self._fabric = self._make_fabric(f"trainer-{self._identity}-{next(self._agents)}")
        return self._fabric

    def _settle(self, *, keep: bool) -> None:
        """After a push nothing moves any more. ``keep``: its tensors live on, so what was prepared on them is kept."""
        if any(link.in_flight for link in self._links):
            self._drop_fabric()
        elif not keep:
            self._release()

    def _release(self) -> None:
        for link in self._links:
            link.release()
        if self._offered is not None:
            self._offered.memory.release()
            self._offered = None

    def _drop_fabric(self) -> None:
        """Destroy the agent: the only way to stop writes that are under way."""
        if self._fabric is not None:
            self._fabric.close()
        self._fabric, self._offered = None, None
        for link in self._links:
            link.forget()


def _status(control: Control) -> ServerStatus | PushWeightsError:
    try:
        return control.status()
    except PushWeightsError as error:
        return error
