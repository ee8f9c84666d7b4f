"""Stage 2 of a push: all ranks meet, and settle what they offer together when the layout of any has changed.

    meet     every rank says what it is called with and whether its tensors are laid out as before  -> `Meeting`
    settle   tensors of all ranks -> who sends what (`directory`) -> conversion -> quantizing, if wanted  -> `Offered`

`WeightClient` makes a `Request` of each call and keeps what was offered last. What goes wrong on one rank, in its call
or here, fails the push on all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from trainer_client.block_fp8 import BlockFP8
from trainer_client.conversion import Conversion, Convert, convert_shards
from trainer_client.directory import agree_on_tensors, pack_tensors, share_boxes, tensors_of
from trainer_client.exchange import Exchange
from trainer_client.link import Offering
from trainer_client.quantizing import Quantizer
from trainer_client.sources import Sources
from vllm_nixl_plugin.errors import InvalidRequest
from vllm_nixl_plugin.processes import this_process
from vllm_nixl_plugin.wire import KvCachePolicy, Mode, PauseMode


@dataclass(frozen=True)
class Request:
    """One call of `WeightClient.push_weights` on this rank: what is wanted, and what this rank has.

    ``options`` have to be the same on all ranks. ``key`` says what conversion and routes depend on. ``error``: why the
    call cannot be done; the others learn it when they meet. ``keep``: the tensors live on when the push is over.
    ``ready`` returns when what was queued to make them is done. ``seconds``: what it took to collect and copy them.
    """

    options: Mapping[str, Any]
    sources: Sources
    convert: Convert | None = None
    quantize: BlockFP8 | None = None
    key: tuple[Any, ...] = ()
    keep: bool = False
    ready: Callable[[], None] | None = None
    error: Exception | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Offered:
    """What was last offered. ``layout``: number of the push in which all ranks settled it.

    ``tensors``: those of this rank, as `pack_tensors` gives them.
    """

    key: tuple[Any, ...]
    layout: int
    tensors: bytes
    offering: Offering
    quantizer: Quantizer | None = None


@dataclass(frozen=True)
class Meeting:
    """What all ranks know once they have met.

    ``holders``: see `agree_on_tensors`; None when the layout of no rank has changed. ``writers``, ``contacts``: the
    processes of all ranks, and how their agents are reached in mode ``streamed``; known to rank 0.
    """

    version: str
    servers: tuple[str, ...]
    holders: Mapping[str, int] | None
    writers: tuple[str, ...] = ()
    contacts: tuple[bytes, ...] = ()


def check_options(options: Mapping[str, Any]) -> None:
    """Errors: InvalidRequest that names the option and what may stand there."""
    for name, kind in (("mode", Mode), ("kv_cache", KvCachePolicy), ("pause", PauseMode)):
        if options[name] not in get_args(kind):
            raise InvalidRequest(f"{name} is {options[name]!r}; expected one of {', '.join(get_args(kind))}")
    if options["verify"] and options["mode"] == "streamed":
        raise InvalidRequest("in mode 'streamed' weights are installed while others arrive, so verify=True has no time "
                             "to look: push with mode='shadow', or compare servers afterwards (vllm-nixl verify)")
    version = options["version"]
    if version is not None and not 0 < len(version) <= 256:
        raise InvalidRequest(f"version is {version!r}; expected a string of 1 to 256 characters")


def meet(
    exchange: Exchange, request: Request, last: Offered | None, servers: Sequence[str], next_version: Callable[[], str],
    contact: Callable[[], bytes] = bytes,
) -> Meeting:  # fmt: skip
    """Wait for all ranks, and find out whether they want the same and what has changed since ``last``.

    ``servers`` and ``next_version`` count on rank 0; ``contact`` is asked in mode ``streamed``.

    Errors: the one that is kept in the request of any rank;
    InvalidRequest when ranks want different things; DeadlineExceeded naming the ranks that do not come.
    """
    if request.error is not None:
        raise request.error
    if request.ready is not None:
        request.ready()
    same = last if last is not None and last.key == request.key else None
    tensors = pack_tensors(tensors_of(request.sources.shards)) if same is None else same.tensors
    exchange.post("hello", {
        "options": dict(request.options), "layout": None if same is None else same.layout,
        "tensors": hashlib.sha256(tensors).hexdigest(), "process": this_process(),
        "contact": contact().hex() if request.options["mode"] == "streamed" else "",
    })  # fmt: skip
    if not exchange.is_leader:
        said = exchange.hear()
        exchange.begun()
        return Meeting(said["version"], tuple(said["servers"]), said["holders"])
    hellos = [json.loads(data) for data in exchange.gather("hello")]
    exchange.begun()
    _refuse_differences([hello["options"] for hello in hellos])
    layouts = {hello["layout"] for hello in hellos}
    holders: dict[str, int] = {}
    for rank, hello in enumerate(hellos):
        holders.setdefault(hello["tensors"], rank)
    meeting = Meeting(
        request.options["version"] or next_version(), tuple(servers),
        holders if len(layouts) > 1 or None in layouts else None, tuple(hello["process"] for hello in hellos),
        tuple(bytes.fromhex(hello["contact"]) for hello in hellos if hello["contact"]),
    )  # fmt: skip
    exchange.say({"version": meeting.version, "servers": meeting.servers, "holders": meeting.holders})
    return meeting


def settle(
    exchange: Exchange,
    request: Request,
    meeting: Meeting,
    choose: Callable[[Conversion, BlockFP8], Sequence[str]],
    *,
    direct_run_bytes: int,
    buffer_bytes: int,
) -> Offered:
    """Settle with all ranks what is offered and who sends what. ``choose``: the weights to quantize, on every rank.

    Errors: InvalidRequest when what the ranks have does not fit together.
    """
    sources = request.sources
    packed = pack_tensors(tensors_of(sources.shards))
    tensors = agree_on_tensors(exchange, meeting.holders or {}, packed)
    if not tensors:
        raise InvalidRequest("there is no tensor to push: the model, state dict or iterable is empty")
    shards = share_boxes(exchange, tensors, sources.shards)
    conversion = convert_shards(tensors, request.convert)
    devices: Sequence[str] = [storage.device for storage in sources.storages]
    quantizer: Quantizer | None = None
    if request.quantize is not None:
        chosen = choose(conversion, request.quantize)
        quantizer = Quantizer(replace(sources, shards=shards), conversion, request.quantize, chosen, exchange)
        shards, devices, conversion = quantizer.shards, quantizer.devices, quantizer.conversion
    offering = Offering(
        shards, devices, conversion, partial=bool(request.options["partial"]), direct_run_bytes=direct_run_bytes,
        buffer_bytes=buffer_bytes,
    )  # fmt: skip
    if exchange.is_leader:
        exchange.say({"offers": offering.digest})
    elif exchange.hear()["offers"] != offering.digest:
        raise InvalidRequest(
            f"rank {exchange.rank} makes other checkpoint weights of the trainer's tensors than rank 0: give all "
            "ranks the same kind of model and the same convert", ranks=[0, exchange.rank],
        )  # fmt: skip
    return Offered(request.key, exchange.number, packed, offering, quantizer)


def _refuse_differences(options: Sequence[Mapping[str, Any]]) -> None:
    """Errors: InvalidRequest when a rank wants something else than rank 0."""
    first = options[0]
    for rank, other in enumerate(options):
        for name in first:
            if other[name] != first[name]:
                raise InvalidRequest(
                    f"rank {rank} calls push_weights with {name}={other[name]!r}, rank 0 with {name}={first[name]!r}: "
                    "give all ranks the same", ranks=[0, rank],
                )  # fmt: skip
