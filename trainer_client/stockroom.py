"""What a rank holds on to between pushes: its agent, the registered memory of the last push, and a `Link` per server.

`WeightClient` has one `Stockroom` and asks it in every push for the `Stock` to send from, and at the end to `settle`.
Things go in the order in which they depend on each other: writes before memory, memory before the agent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from trainer_client.credits import Credits
from trainer_client.exchange import Exchange
from trainer_client.link import Link, Stock
from trainer_client.meeting import Offered
from trainer_client.registration import SourceMemory
from trainer_client.sources import Sources
from trainer_client.transfer import apart
from vllm_nixl_plugin.fabric import Fabric


class Stockroom:
    """``links`` may grow. ``make_fabric`` makes an agent under a name that it has not had before."""

    def __init__(self, links: Mapping[str, Link], make_fabric: Callable[[], Fabric]) -> None:
        self.fabric: Fabric | None = None
        self.memory: SourceMemory | None = None
        self._links, self._make_fabric = links, make_fabric
        self._credits: Credits | None = None
        self.measured_s = 0.0

    def stock(self, sources: Sources, offered: Offered, exchange: Exchange) -> Stock:
        """The offering, its memory and the agent; memory that lies where it did stays registered.

        ``measured_s`` is what looking at the values has taken, where they are quantized. Errors: FabricError; those of
        the exchange, where ranks quantize together.
        """
        self.measured_s = 0.0
        fabric = self._opened()
        quantizer = offered.quantizer
        with apart(sources.devices):
            if self.memory is None or not self.memory.holds(sources):
                self.release()
                self.memory = SourceMemory(fabric, sources if quantizer is None else quantizer.bind(sources))
            if quantizer is not None:
                begin = time.monotonic()
                quantizer.measure(exchange)
                self.measured_s = time.monotonic() - begin
        return Stock(offered.offering, self.memory, fabric, self._credits)

    def contact(self) -> bytes:
        """How workers reach the agent with their credits. Errors: FabricError."""
        return self._opened().contact()

    def _opened(self) -> Fabric:
        if self.fabric is None:
            self.fabric = self._make_fabric()
            self._credits = Credits(self.fabric)
        return self.fabric

    def settle(self, *, keep: bool) -> None:
        """After a push nothing moves any more. ``keep``: its tensors live on, so what was prepared on them is kept."""
        if any(link.in_flight for link in self._links.values()):
            self.close()
        elif not keep:
            self.release()

    def retire(self, link: Link) -> None:
        """A server has gone. Errors: FabricError."""
        link.leave(self.fabric)

    def release(self) -> None:
        """Let go of the memory of the last push."""
        for link in self._links.values():
            link.release()
        if self.memory is not None:
            self.memory.release()
            self.memory = None

    def close(self) -> None:
        """Destroy the agent: the only way to stop writes that are under way. The next `stock` makes another."""
        if self.fabric is not None:
            self.fabric.close()
        self.fabric, self.memory, self._credits = None, None, None
        for link in self._links.values():
            link.forget()
