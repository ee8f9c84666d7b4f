"""Checksums of what this rank sends, for ``push_weights(verify=True)``: by worker and destination of its plan.

`transfer` fills a `Tally` from the memory that its writes read, while they are under way; rank 0 adds those of all
ranks up (`added`), and the server compares them with what has arrived. Sums of parts are sums of the whole
(`vllm_nixl_plugin.checksums`), so no rank needs to know what the others send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from trainer_client.batching import Runs

if TYPE_CHECKING:
    from torch import Tensor

MASK = (1 << 64) - 1
Sums = Mapping[str, Sequence[Sequence[int]]]
"""By worker: the destinations that got bytes of a rank, and the checksum of these bytes of each."""


class Tally:
    """Belongs to one run of a transfer."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], list[Tensor]] = {}

    def add(self, worker: int, memory: Callable[[int], Tensor], runs: Runs) -> None:
        """Count these runs to a worker; queued on the current stream. ``memory``: bytes (uint8) of a ``runs.src``."""
        from vllm_nixl_plugin.checksums import checksum

        columns = (runs.src, runs.src_offset, runs.dst, runs.dst_offset, runs.nbytes)
        for src, at, dst, offset, nbytes in zip(*(column.tolist() for column in columns), strict=True):
            self._found.setdefault((worker, dst), []).append(checksum(memory(src)[at : at + nbytes], offset))

    def sums(self) -> dict[str, list[list[int]]]:
        """What has been counted; waits for it."""
        import torch

        devices: dict[str, list[tuple[tuple[int, int], Tensor]]] = {}
        for key, found in self._found.items():
            for each in found:
                devices.setdefault(str(each.device), []).append((key, each))
        total: dict[tuple[int, int], int] = {}
        for pairs in devices.values():
            values = torch.stack([each for _, each in pairs]).tolist()
            for (key, _), value in zip(pairs, values, strict=True):
                total[key] = (total.get(key, 0) + value) & MASK
        out: dict[str, list[list[int]]] = {}
        for (worker, dst), value in sorted(total.items()):
            of = out.setdefault(str(worker), [[], []])
            of[0].append(dst)
            of[1].append(value)
        return out


def added(ranks: Iterable[Sums], destinations: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The sums of all ranks, for each worker (its index, and how many destinations its plan has) in order."""
    total = {str(worker): [0] * count for worker, count in destinations}
    for sums in ranks:
        for worker, (found, values) in sums.items():
            for dst, value in zip(found, values, strict=True):
                total[worker][dst] = (total[worker][dst] + value) & MASK
    return [total[str(worker)] for worker, _ in destinations]
