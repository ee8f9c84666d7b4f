"""A trainer with random weights: what one rank of it does, and all ranks as processes (`ranks`).

    with Trainer(shape, ["cpu"], token, log) as trainer:
        trainer.all("push", servers=[...], mode="shadow")

With several ranks, each holds its rows of every weight. Started by `parts`, `overhead` and `growth`.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from trainer_client.bench.ranks import ANSWER_S, Place, Ranks
from trainer_client.bench.servers import Served
from trainer_client.bench.shapes import Shape, random_weights
from trainer_client.bench.ways import Broadcast, RawWrite, save_and_reload


class Rank:
    """What one rank has and can do. Every method returns JSON; times are those of `time.perf_counter`."""

    def __init__(self, rank: int, world: int, device: str) -> None:
        self._rank, self._world, self._device = rank, world, device
        self._weights: dict[str, Any] = {}
        self._clients: dict[tuple[str, ...], Any] = {}
        self._broadcast: Broadcast | None = None
        self._raw: RawWrite | None = None

    def make(self, shape: str, layers: int, values: dict[str, Any]) -> None:
        """Random weights of a shape."""
        self._weights = random_weights(Shape(shape, layers, values), self._device, self._rank, self._world)

    def push(self, servers: list[dict[str, Any]], mode: Any) -> dict[str, Any]:
        """Push once: the report, when it began and ended."""
        from trainer_client.client import WeightClient

        given = [Served(**server) for server in servers]
        key = tuple(server.url for server in given)
        if key not in self._clients:
            self._clients[key] = WeightClient(key, token=given[0].token, progress=False, timeout_s=ANSWER_S)
        gc.collect()
        begin = time.perf_counter()
        report = self._clients[key].push_weights(self._weights, mode=mode)
        return {"begin": begin, "end": time.perf_counter(), "report": report.to_dict()}

    def save(self, folder: str) -> None:
        """Write the weights as a checkpoint."""
        from safetensors.torch import save_file

        save_file(self._weights, Path(folder) / "model.safetensors", {"format": "pt"})

    def disk(self, servers: list[dict[str, Any]], folder: str) -> dict[str, Any]:
        """Save and reload once."""
        begin = time.perf_counter()
        seconds = save_and_reload(self._weights, [Served(**server) for server in servers], Path(folder))
        return {"begin": begin, "end": time.perf_counter(), "seconds": seconds}

    def broadcast(self, servers: list[dict[str, Any]]) -> dict[str, Any]:
        """Broadcast and reload once; the group is made at the first time, before the clock runs."""
        if self._broadcast is None:
            self._broadcast = Broadcast([Served(**server) for server in servers])
        begin = time.perf_counter()
        seconds = self._broadcast.send(self._weights)
        return {"begin": begin, "end": time.perf_counter(), "seconds": seconds}

    def raw_open(self, server: dict[str, Any], nbytes: int) -> None:
        """Make ready a raw write, and a copy."""
        self._raw = RawWrite(Served(**server), nbytes, self._device)
        self._raw.write_s()
        self._raw.copy_s()

    def raw_write(self) -> dict[str, float]:
        """Seconds of both."""
        assert self._raw is not None
        return {"write": self._raw.write_s(), "copy": self._raw.copy_s()}

    def raw_close(self) -> None:
        """Give the memory back."""
        assert self._raw is not None
        self._raw.close()
        self._raw = None
        gc.collect()

    def close(self) -> None:
        """Let go of servers and weights."""
        for client in self._clients.values():
            client.close()
        self._clients, self._weights = {}, {}


class Trainer(Ranks):
    """All ranks, with weights of a shape. Errors: RankLost."""

    def __init__(self, shape: Shape, devices: Sequence[str], token: str, log: Path) -> None:
        self.shape = shape
        program = ["-m", "trainer_client.bench.trainer"]
        super().__init__(program, devices, log, lambda rank: {"PUSH_WEIGHTS_TOKEN": token})

    def __enter__(self) -> Self:
        try:
            self.wait()
            self.all("make", shape=self.shape.name, layers=self.shape.layers, values=self.shape.values)
        except BaseException:
            self.close()
            raise
        return self

    def each(self, do: str, arguments: Sequence[Mapping[str, Any]], timeout_s: float = ANSWER_S) -> list[Any]:
        """What each rank answers; servers may be given as they are."""
        return super().each(do, [{name: _as_json(value) for name, value in a.items()} for a in arguments], timeout_s)

    def first(self, do: str, **arguments: Any) -> Any:
        """What rank 0 answers; all are asked."""
        return self.all(do, **arguments)[0]


def _as_json(value: Any) -> Any:
    if isinstance(value, Served):
        return asdict(value)
    return [_as_json(one) for one in value] if isinstance(value, list | tuple) else value


def main() -> None:
    """A rank: answer requests until the pipe is closed."""
    import torch

    place = Place.of_arguments()
    torch.set_num_threads(1)
    if place.device.startswith("cuda"):
        torch.cuda.set_device(place.device)
    if place.world > 1:
        meeting = f"tcp://127.0.0.1:{place.port}"
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=place.rank, world_size=place.world)
    made = Rank(place.rank, place.world, place.device)
    place.serve(made)
    made.close()
    os._exit(0)  # process groups may be broken by now, and their end would wait


if __name__ == "__main__":
    main()
