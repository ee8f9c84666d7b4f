"""The simplest layout: each rank has some rows of every matrix, and all of what has no rows to give."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from trainer_client import LocalShard


def rows_of(weights: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """What this rank pushes: boxes that it declares, uneven ones, in memory of their own."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    found: dict[str, Any] = {}
    for name, weight in weights.items():
        if weight.dim() < 2:
            found[name] = weight
            continue
        cuts = [weight.shape[0] * i * (i + 1) // (size * (size + 1)) for i in range(size + 1)]
        rows = weight[cuts[rank] : cuts[rank + 1]].clone()
        found[name] = LocalShard(rows, tuple(weight.shape), (cuts[rank], *(0 for _ in weight.shape[1:])))
    return found
