"""The ranks of a trainer at work on one server: rank 0 gives orders, every other rank obeys and answers.

    rank 0 (`Team`, one per server)                     the others (`follow`, one `_Part` per server)
    order "route"  plans               ------------->   work out routes        -> bytes for each plan
    order "send"   update, bindings    ------------->   write                  -> what was sent
    order "call_off"  (something failed) ----------->   stop, drain            -> whether all is drained
    say "end", with the report         ------------->   return it

Each order but the last two has a number, and every rank answers it once: with what it did, or with its error and
whether its writes are done. A rank that fails raises the alarm of that order first, so that all others stop at once.
One server's failure is not that of the others; the failure of a rank is, by way of `Exchange.check`.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial as bind
from typing import Any

from trainer_client.exchange import LOOK_S, Entry, Exchange
from trainer_client.link import Link, Plans, Stock, Target
from vllm_nixl_plugin.errors import PushWeightsError, RankLost, from_wire
from vllm_nixl_plugin.wire import Binding

DRAIN_S = 30.0
"""How long a rank waits for its writes after a failure before it says that they are not done."""
ANSWER_S = 5.0
"""How much longer rank 0 waits for the others to say so."""


class Team:
    """The other ranks, as the push to one server sees them. Belongs to one thread."""

    def __init__(self, exchange: Exchange, server: int) -> None:
        """``server``: its number."""
        self._exchange, self._server = exchange, server
        self._others = [rank for rank in range(exchange.size) if rank != exchange.rank]
        self._orders = 0
        self._open = False
        self._looked = 0.0

    def order(self, what: str, **details: Any) -> None:
        """Tell every other rank. Its answer to the last order must have come."""
        if self._others:
            self._orders += 1
            self._open = True
            self._exchange.say({"server": self._server, "order": what, "number": self._orders, **details})

    def answers(self, check: Callable[[], None]) -> list[Entry]:
        """What the other ranks answer to the last order. ``check`` is called now and then, and may raise to give up.

        Errors: that of the rank that failed first.
        """
        if not self._others:
            return []
        keys = [f"{self._stage}/{rank}" for rank in self._others]
        answers = [json.loads(data) for data in self._exchange.take(keys, check)]
        for answer in answers:
            if "error" in answer:
                raise from_wire(answer)
        self._open = False
        return answers

    def check(self) -> None:
        """Errors: that of a rank which has failed at the last order, or at the push as a whole."""
        self._exchange.check()
        if self._open and time.monotonic() - self._looked >= LOOK_S:
            self._looked = time.monotonic()
            if (alarm := self._exchange.alarm(self._stage)) is not None:
                raise from_wire(alarm)

    def call_off(self, error: BaseException) -> None:
        """Something failed: the others need not go on with the last order."""
        if self._open:
            wire = self._exchange.wire(error)
            self._exchange.say({"server": self._server, "order": "call_off", "number": self._orders} | wire)

    def drained(self) -> bool:
        """After `call_off`: whether the writes of all other ranks are done. Waits for their answers."""
        deadline = time.monotonic() + DRAIN_S + ANSWER_S
        while self._open:
            here = self._exchange.missing("left", self._others)
            missing = self._exchange.missing(self._stage, self._others)
            if self._exchange.lost & set(missing) or time.monotonic() > deadline:
                return False
            if not set(here) & set(missing):  # who has left without an answer has not begun the order
                self._open = False
                answered = [f"{self._stage}/{rank}" for rank in self._others if rank not in missing]
                return all(json.loads(data).get("drained", True) for data in self._exchange.read(answered))
            time.sleep(LOOK_S)
        return True

    @property
    def _stage(self) -> str:
        return _stage(self._server, self._orders)


def follow(exchange: Exchange, links: Sequence[Link], stock: Stock, cancelled: Callable[[], bool]) -> Entry:
    """Obey rank 0 until it says that the push is over; its last entry. ``links``: one for each of its servers.

    Errors: the failure of the push; then nothing is under way any more that could be waited for.
    """
    parts = [_Part(exchange, number, link, stock, cancelled) for number, link in enumerate(links)]
    with ThreadPoolExecutor(max_workers=len(parts), thread_name_prefix="nixl-push") as pool:
        try:
            while "end" not in (entry := exchange.hear()):
                part = parts[entry["server"]]
                if entry["order"] == "call_off":
                    part.call_off(entry["number"], from_wire(entry))
                else:
                    pool.submit(part.obey, entry)
        except BaseException as error:
            failure: PushWeightsError
            try:
                failure = exchange.fail(error)
            except RankLost as gone:  # the board too: the rank that hosts it has died
                failure = gone
            for part in parts:
                part.call_off(None, failure)
            raise
    return entry


class _Part:
    """This rank's part in the push to one server."""

    def __init__(
        self, exchange: Exchange, server: int, link: Link, stock: Stock, cancelled: Callable[[], bool]
    ) -> None:
        self._exchange, self._server, self._link, self._stock = exchange, server, link, stock
        self._cancelled = cancelled
        self._called_off: dict[int | None, PushWeightsError] = {}
        self._lock = threading.Lock()

    def call_off(self, number: int | None, error: PushWeightsError) -> None:
        """Give order ``number`` up (None: all of them). From any thread."""
        self._called_off[number] = error

    def obey(self, entry: Entry) -> None:
        """Do what the entry says and answer it, well or badly."""
        number = entry["number"]
        stage = _stage(self._server, number)
        with self._lock:
            try:
                done = {"route": self._route, "send": self._send}[entry["order"]](entry)
            except Exception as error:  # noqa: BLE001 - whatever it is, the leader waits for an answer
                self._exchange.raise_alarm(stage, error)
                done = self._exchange.wire(error) | {"drained": self._link.drain(DRAIN_S)}
            self._exchange.post(stage, done)

    def _route(self, entry: Entry) -> Entry:
        return self._plans(entry).routed_nbytes(self._stock.offering)

    def _send(self, entry: Entry) -> Entry:
        begin = time.monotonic()
        check = bind(self._check, entry["number"])
        plans = self._plans(entry)
        targets: tuple[Target, ...] = tuple((plan, binding) for plan, binding in entry["targets"])
        if not {binding for _, binding in targets} <= set(self._link.known_bindings()):
            self._link.learn(unpack_bindings(self._exchange.group.fetch(entry["bindings"])))
        transfer = self._link.transfer(self._stock, plans, targets)
        check()
        sent = transfer.run(
            entry["update_id"], begin + entry["left_s"], check=check, progress=_ignore, verify=entry["verify"]
        )
        return asdict(sent) | {"seconds": time.monotonic() - begin}

    def _plans(self, entry: Entry) -> Plans:
        digest = entry["plans"]
        return self._link.plans(digest, lambda: zlib.decompress(self._exchange.group.fetch(digest)))

    def _check(self, number: int) -> None:
        for key in (number, None):
            if key in self._called_off:
                raise self._called_off[key]
        if self._cancelled():
            raise PushWeightsError("the push was interrupted in the trainer")


def pack_bindings(bindings: Sequence[Binding]) -> bytes:
    """As `unpack_bindings` reads them."""
    return json.dumps([binding.model_dump(mode="json") for binding in bindings]).encode()


def unpack_bindings(data: bytes) -> dict[str, Binding]:
    """By digest."""
    bindings = [Binding.model_validate_json(json.dumps(row)) for row in json.loads(data)]
    return {binding.digest(): binding for binding in bindings}


def _stage(server: int, order: int) -> str:
    return f"server/{server}/{order}"


def _ignore(nbytes: int) -> None:
    pass
