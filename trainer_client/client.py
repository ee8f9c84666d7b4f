"""The client: `WeightClient.push_weights` is the path of a push from the trainer's side, in order.

    sources -> all ranks meet -> conversion -> quantizing, if wanted -> manifest -> for every server at once:
    plan -> route -> begin -> transfer -> commit -> report

It belongs to one training process and outlives its pushes: plans, routes, registered memory and prepared writes are
kept while model and servers stay as they are, so that from the second push on only bytes move. In a trainer of several
ranks each has a client and calls it as often as the others; rank 0 speaks with the servers, and all return the same.
Each stage is described in the module of its name; `meeting` has what the ranks settle together, `exchange` what they
say to each other, `delivery` (rank 0) and `team` (the others) what happens once per server, and `stockroom` and `link`
keep what that prepares.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial as bind
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trainer_client.asynchronous import Pushes, PushHandle, queued
from trainer_client.batching import ALIGNMENT
from trainer_client.block_fp8 import BlockFP8, choose
from trainer_client.collector import Collector
from trainer_client.control import Control, checkpoints
from trainer_client.conversion import Conversion, Convert, checkpoint_converter
from trainer_client.delivery import Options, deliver, gather
from trainer_client.environment import read_token, trainer_settings
from trainer_client.exchange import Exchange
from trainer_client.fleet import Fleet, Require, Servers, check_require, required
from trainer_client.group import RankGroup
from trainer_client.link import Link, Stock
from trainer_client.meeting import Meeting, Offered, Request, check_options, meet, settle
from trainer_client.progress import Progress
from trainer_client.report import PushReport
from trainer_client.sources import Sources, unwrap
from trainer_client.stockroom import Stockroom
from trainer_client.team import Team, follow
from trainer_client.telemetry import Telemetry
from vllm_nixl_plugin.agent import NixlAgent
from vllm_nixl_plugin.errors import InvalidRequest, PushFailed, PushWeightsError
from vllm_nixl_plugin.fabric import Fabric
from vllm_nixl_plugin.wire import KvCachePolicy, Mode, PauseMode, ServerStatus

if TYPE_CHECKING:
    import httpx
    from torch import nn
    from torch.distributed import ProcessGroup

    from trainer_client.sources import Value

DIRECT_RUN_BYTES = 16 << 10
"""Shorter runs are packed: below this a copy into the send buffer costs less than one more descriptor on the wire."""


class WeightClient:
    """Pushes the weights of a trainer to vLLM servers that run vllm-nixl-plugin.

    Args:
        servers: their base URLs, ``http://host:port``; or what lists them at each push: a function, a file with a line
            for each, or ``dns+http://name:port`` for all addresses of a name. Those of rank 0 count.
        token: their PUSH_WEIGHTS_TOKEN; default: what this process's environment has (docs/configuration.md).
        timeout_s: how long one push may take on each server, from plan to the end of the install.
        lease_s: how long a server keeps an update open for a trainer that fell silent; renewed while the push runs.
        interfaces: network devices the data may use, ``("mlx5_0:1", "eth0")`` or ``("all",)``; default: those of
            PUSH_WEIGHTS_INTERFACES, else loopback only.
        backend: NIXL's plug-in.
        send_buffer_bytes: size of one send buffer; there are two for each server and source device.
        direct_run_bytes: contiguous runs from this length on are written straight from parameter memory.
        progress: show a bar; default: when standard error is a terminal.
        require: how many servers must take the push, else `PushFailed` is raised: ``"all"``, a number (2) or a share
            of those that are listed (0.5). Those that fail are tried again at the next push.
        group: the ranks that push together: a ``ProcessGroup`` or a `RankGroup`; default: all of ``torch.distributed``
            where that is initialised, else this process alone.
        rank_timeout_s: how long a rank may give no sign of life during a push before it counts as lost.
        on_report: called with the report of every push, also of one that failed, on rank 0 (`telemetry`, which also
            counts for prometheus_client and makes spans for opentelemetry where the process uses them).
        fabric: makes the agent of a name; for tests without NIXL.
        transport: carries the HTTP requests; for tests without servers.
    """

    def __init__(
        self,
        servers: Servers,
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
        group: RankGroup | ProcessGroup | None = None,
        rank_timeout_s: float = 30.0,
        on_report: Callable[[PushReport], None] | None = None,
        fabric: Callable[[str], Fabric] | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        least = {
            "timeout_s": timeout_s, "lease_s": lease_s, "direct_run_bytes": direct_run_bytes,
            "rank_timeout_s": rank_timeout_s,
        }  # fmt: skip
        for name, number in least.items():
            if number <= 0:
                raise InvalidRequest(f"{name} is {number}; expected a positive number")
        if send_buffer_bytes < ALIGNMENT:
            raise InvalidRequest(f"send_buffer_bytes is {send_buffer_bytes}; expected at least {ALIGNMENT}")
        self._timeout_s, self._lease_s, self._rank_timeout_s = timeout_s, lease_s, rank_timeout_s
        self._require = require
        self._show_progress = progress
        self._limits = {"direct_run_bytes": direct_run_bytes, "buffer_bytes": send_buffer_bytes}
        devices = trainer_settings().interfaces if interfaces is None else tuple(interfaces)
        make_fabric = fabric or bind(NixlAgent, backend=backend, interfaces=devices)
        token = token if token is not None else read_token()
        self._links: dict[str, Link] = {}
        self._identity = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        names = (f"trainer-{self._identity}-{number}" for number in itertools.count())
        self._stockroom = Stockroom(self._links, lambda: make_fabric(next(names)))
        connect = bind(Control, token=token, transport=transport)
        self._fleet = Fleet(servers, connect, self._links, self._stockroom.retire)
        check_require(require, len(self._fleet.servers) if self._fleet.is_fixed else None)
        self._given_group, self._group = group, group if isinstance(group, RankGroup) else None
        self._collector = Collector()
        self._offered: Offered | None = None
        self._number: int | None = None
        self._pushes = Pushes()
        self._telemetry = Telemetry(on_report)
        self._busy = threading.Lock()
        self._closed = False

    def __enter__(self) -> WeightClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(cancel=error is not None)

    def push_weights(
        self,
        model: nn.Module | Mapping[str, Value] | Iterable[tuple[str, Value]],
        *,
        version: str | None = None,
        mode: Mode = "shadow",
        kv_cache: KvCachePolicy = "recompute",
        pause: PauseMode = "keep",
        partial: bool = False,
        verify: bool = False,
        convert: Convert | None = None,
        quantize: BlockFP8 | None = None,
    ) -> PushReport:
        """Bring all servers to the present weights of ``model``, and return who has them now.

        In a trainer of several ranks, all of them call it, with what each has of the model and the same options; no
        rank gathers anything, and all return the same report or raise the same error.

        Args:
            model: a module (for transformers models: what ``save_pretrained`` would save), a state dict, or pairs of
                name and tensor. The tensors must not be written to before this returns. Those of a module or state
                dict are held until the next push; an iterable's are let go at once.
            version: what the servers will call these weights. Default: a whole number, one above the highest that a
                server had at the first push of this client, and counting up from there.
            mode: ``shadow`` (lands beside the live weights, short pause), ``in_place`` (no extra memory but for weights
                that vLLM processes, long pause) or ``streamed`` (as ``in_place``, and those pass through a window of
                bounded size, group by group).
            kv_cache: ``recompute`` what running requests have cached, or ``keep`` it although the weights changed.
            pause: what happens to running requests at the install: ``keep`` them, ``wait`` for them, ``abort`` them.
            partial: weights that are not pushed keep their present values; else they are an error.
            verify: compare checksums of what was sent and of what has arrived, before it is installed. Where they
                differ, the push fails and names the tensors; the old weights serve on (in mode ``in_place``: torn).
            convert: from a dict of the model's tensors to named checkpoint tensors; runs once, without data, on the
                tensors of all ranks with their global shapes. Default: the model's own way back to its checkpoint for
                transformers models, nothing for others.
            quantize: send weights as block FP8, to servers that have loaded such a checkpoint: half the bytes, the same
                values as by quantizing the whole tensor.

        Errors: PushFailed with the report, when fewer servers than required took the push; InvalidRequest; RankLost.
        """
        with self._one_at_a_time():
            request = self._request(
                model, convert, quantize, version=version, mode=mode, kv_cache=kv_cache, pause=pause, partial=partial,
                verify=verify,
            )  # fmt: skip
            self._pushes.settle()
            return self._push(request, self._progress(), threading.Event())

    def push_weights_async(
        self,
        model: nn.Module | Mapping[str, Value] | Iterable[tuple[str, Value]],
        *,
        snapshot: bool = True,
        version: str | None = None,
        mode: Mode = "shadow",
        kv_cache: KvCachePolicy = "recompute",
        pause: PauseMode = "keep",
        partial: bool = False,
        verify: bool = False,
        convert: Convert | None = None,
        quantize: BlockFP8 | None = None,
    ) -> PushHandle:
        """Start a push and return at once; training may go on while the bytes fly.

        Pushes are done in the order of the calls, one after the other, `push_weights` behind those before it. With
        ``snapshot``, the weights are copied before this returns, and may be written to then; the copy takes as much
        memory as this rank's shards, is kept for the next one, and lies on the device of the weights if an eighth of
        that stays free, else in pinned host memory. There is one, so a second call waits until the first push is over.
        Without, the weights must not be written to before ``wait()`` has returned.

        All else is as in `push_weights`. Its errors come from the handle's ``wait()``.
        """
        with self._one_at_a_time():
            request = self._request(
                model, convert, quantize, self._pushes.copy if snapshot else None, version=version, mode=mode,
                kv_cache=kv_cache, pause=pause, partial=partial, verify=verify,
            )  # fmt: skip
            return self._pushes.start(bind(self._push, request), self._progress(), reads_copy=snapshot)

    def status(self) -> dict[str, ServerStatus | PushWeightsError]:
        """How every server stands, or why it does not say so."""
        servers = self._fleet.servers or self._fleet.refresh()
        return {server.control.server: _status(server.control) for server in servers}

    def add_server(self, url: str) -> None:
        """Push to this server, too, from the next push on. It need not have had any push before.

        Errors: InvalidRequest, for what is no URL.
        """
        self._fleet.add(url)

    def remove_server(self, url: str) -> None:
        """Leave this server alone from the next push on; it serves what it has. Errors: InvalidRequest."""
        self._fleet.remove(url)

    def close(self, *, cancel: bool = False) -> None:
        """Release all memory and connections, when the pushes that were started are over. Doing it twice is fine.

        ``cancel``: they give up instead, and the servers keep what they have. Leaving a ``with`` by an error does that.
        """
        self._closed = True
        self._pushes.close(cancel=cancel)
        self._collector.forget()
        self._stockroom.close()
        if self._group is not None:
            self._group.board.close()
        self._fleet.close()

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise InvalidRequest("another push of this client is running: wait for it, or make a client per thread")
        try:
            if self._closed:
                raise InvalidRequest("the client is closed: make a new one")
            yield
        finally:
            self._busy.release()

    def _request(
        self,
        model: Any,
        convert: Convert | None,
        quantize: BlockFP8 | None,
        copy: Callable[[Sources], Sources] | None = None,
        *,
        partial: bool,
        **options: Any,
    ) -> Request:
        """What this rank is called with. An error is kept for when the ranks meet, so that it is that of all."""
        from torch import nn

        begin = time.monotonic()
        blocks = None if quantize is None else list(quantize.block)
        wanted = options | {"partial": partial, "convert": convert is not None, "quantize": blocks}
        try:
            check_options(options)
            collected = self._collector.collect(model, copied=copy is not None)
            sources = collected if copy is None else copy(collected)
            own = None if convert is not None or not isinstance(model, nn.Module) else weakref.ref(unwrap(model))
            key = (sources.geometry(), partial, convert, quantize, own)
            ready = queued(collected.devices)
            convert = convert or checkpoint_converter(model)
        except Exception as error:  # noqa: BLE001 - raised again in the push
            return Request(wanted, Sources((), (), ()), error=error)
        keep = copy is not None or hasattr(model, "keys") or hasattr(model, "state_dict")
        return Request(wanted, sources, convert, quantize, key, keep, ready, seconds=time.monotonic() - begin)

    def _push(self, request: Request, progress: Progress, cancel: threading.Event) -> PushReport:
        """The push itself, from the meeting of the ranks on; may run in a thread of its own."""
        begin = time.monotonic()
        try:
            with Exchange(self._ranks(), timeout_s=self._timeout_s, rank_timeout_s=self._rank_timeout_s) as exchange:
                if exchange.is_leader:
                    self._fleet.refresh()
                urls = tuple(server.control.server for server in self._fleet.servers)
                meeting = meet(exchange, request, self._offered, urls, self._next_version,
                               self._stockroom.contact)  # fmt: skip
                stock = self._stock(exchange, request, meeting)
                if exchange.is_leader:
                    with progress:
                        measured_s = self._stockroom.measured_s
                        before = {"collect": request.seconds, "meet": time.monotonic() - begin - measured_s}
                        before |= {"measure": measured_s} if measured_s else {}
                        report, error = self._lead(exchange, request, meeting, stock, progress, cancel, before)
                else:
                    report, error = self._follow(exchange, meeting, stock, cancel)
        finally:
            self._stockroom.settle(keep=request.keep)
        if error is not None:
            raise error
        return report

    def _stock(self, exchange: Exchange, request: Request, meeting: Meeting) -> Stock:
        """What this rank sends from: that of the last push where nothing has changed."""
        offered = self._offered
        if offered is None or meeting.holders is not None:
            self._stockroom.release()
            self._offered = None
            choosing = bind(self._choose, exchange)
            offered = self._offered = settle(exchange, request, meeting, choosing, **self._limits)
        return self._stockroom.stock(request.sources, offered, exchange)

    def _choose(self, exchange: Exchange, conversion: Conversion, quantize: BlockFP8) -> tuple[str, ...]:
        """The weights to quantize: rank 0 asks its servers and tells the others."""
        if exchange.is_leader:
            controls = [server.control for server in self._fleet.servers]
            names = choose(conversion, quantize, lambda: checkpoints(controls))
            exchange.put("quantized", json.dumps(names).encode())
            return names
        return tuple(json.loads(exchange.take(["quantized"])[0]))

    def _lead(
        self,
        exchange: Exchange,
        request: Request,
        meeting: Meeting,
        stock: Stock,
        progress: Progress,
        cancel: threading.Event,
        before: Mapping[str, float],
    ) -> tuple[PushReport, PushFailed | None]:
        """Rank 0: run the push to every server, tell all ranks how it ended. ``before``: seconds so far, by stage."""
        begin = time.monotonic() - sum(before.values())
        wanted = request.options
        options = Options(
            meeting.version, wanted["mode"], wanted["kv_cache"], wanted["pause"], self._lease_s, self._timeout_s,
            self._identity, meeting.writers, meeting.contacts, wanted["verify"],
        )  # fmt: skip
        deliveries = [
            bind(deliver, server, exchange.group, Team(exchange, number), stock, options, progress, cancel, before)
            for number, server in enumerate(self._fleet.servers)
        ]
        servers = gather(deliveries, cancel)
        exchange.check()
        nbytes, seconds = sum(server.nbytes for server in servers), time.monotonic() - begin
        report = PushReport(options.version, options.mode, tuple(servers), nbytes, seconds)
        self._telemetry.tell(report)
        error = self._judged(report)
        exchange.say({"end": report.to_dict()} | (error.to_wire() if error else {}))
        return report, error

    def _follow(
        self, exchange: Exchange, meeting: Meeting, stock: Stock, cancel: threading.Event
    ) -> tuple[PushReport, PushFailed | None]:
        """Every other rank: do as rank 0 says, until it says how the push ended."""
        for gone in self._links.keys() - set(meeting.servers):
            self._stockroom.retire(self._links.pop(gone))
        links = [self._links.setdefault(server, Link(server)) for server in meeting.servers]
        said = follow(exchange, links, stock, cancel.is_set)
        report = PushReport.from_dict(said["end"])
        if "error" not in said:
            return report, None
        return report, PushFailed(said["error"]["message"], report=report, **said["error"]["details"])

    def _next_version(self) -> str:
        if self._number is None:
            found = [status.weight_version for status in self.status().values() if isinstance(status, ServerStatus)]
            self._number = max((int(name) for name in found if name.isdecimal()), default=0)
        self._number += 1
        return str(self._number)

    def _judged(self, report: PushReport) -> PushFailed | None:
        needed = required(self._require, len(report.servers))
        if len(report.succeeded) >= needed:
            return None
        failed = [f"{s.server}: {s.error_code}: {s.error}" for s in report.servers if not s.ok]
        return PushFailed(
            f"{len(report.succeeded)} of {len(report.servers)} servers have version {report.version}, required are "
            f"{needed}. {'; '.join(failed)}", report=report, **report.to_dict(),
        )  # fmt: skip

    def _ranks(self) -> RankGroup:
        if self._group is None:
            self._group = RankGroup.find(self._given_group)
        return self._group

    def _progress(self) -> Progress:
        return Progress(tuple(self._links), enabled=self._show_progress if self._ranks().rank == 0 else False)


def _status(control: Control) -> ServerStatus | PushWeightsError:
    try:
        return control.status()
    except PushWeightsError as error:
        return error
