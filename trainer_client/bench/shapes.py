"""Models to measure with: a configuration and the names and shapes of weights, of as many layers as bytes are wanted.

A shape is a JSON file, one of those in ``shapes/`` or the user's own: ``config`` (of the checkpoint, but for the
number of layers), ``outer`` (weights by name), ``layer`` and ``expert`` (weights of each, below their prefixes),
``layers`` and ``experts`` (how many). All weights are bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_nixl_plugin.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = Path(__file__).parent / "shapes"
TOKENIZER = Path(__file__).parent / "tokenizer.json"
ITEM_NBYTES = 2
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))
"""Shapes that come with the package."""


@dataclass(frozen=True)
class Shape:
    """A model of ``layers`` layers. See the module."""

    name: str
    layers: int
    values: dict[str, Any]

    @classmethod
    def read(cls, name: str) -> Shape:
        """The shape of this name, or of this file. Errors: InvalidRequest."""
        path = FOLDER / f"{name}.json" if name in NAMES else Path(name)
        try:
            values = json.loads(path.read_text("utf-8"))
            made = cls(path.stem, int(values["layers"]), values)
            made.nbytes  # noqa: B018 - finds what is missing
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidRequest(
                f"no model shape {name!r} ({type(error).__name__}: {error}): name one of {', '.join(NAMES)}, or a JSON "
                "file like theirs (trainer_client/bench/shapes)"
            ) from None
        return made

    def of_nbytes(self, nbytes: int) -> Shape:
        """The same with as many layers, at least one, as come nearest to so many bytes."""
        none, one = replace(self, layers=0).nbytes, replace(self, layers=1).nbytes
        return replace(self, layers=max(1, round((nbytes - none) / (one - none))))

    def weights(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Checkpoint names and shapes, in the order of the layers."""
        values = self.values
        names = list(values["outer"].items())
        for layer in range(self.layers):
            prefix = values["layer_prefix"].format(layer=layer)
            names += [(prefix + name, shape) for name, shape in values["layer"].items()]
            for expert in range(values["experts"]):
                inner = prefix + values["expert_prefix"].format(expert=expert)
                names += [(inner + name, shape) for name, shape in values["expert"].items()]
        for name, shape in names:
            yield name, tuple(int(n) for n in shape)

    @property
    def nbytes(self) -> int:
        """Of all weights."""
        return sum(prod(shape) for _, shape in self.weights()) * ITEM_NBYTES

    @property
    def n_weights(self) -> int:
        """How many weights there are."""
        return sum(1 for _ in self.weights())

    def write_config(self, folder: Path) -> Path:
        """Configuration and tokenizer of a checkpoint, without weights. Returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        config = self.values["config"] | {"num_hidden_layers": self.layers}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_bytes(TOKENIZER.read_bytes())
        tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<unk>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
        return folder


def random_weights(shape: Shape, device: str, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Random weights by name, each in memory of its own: whole, or this rank's rows of each as `LocalShard`s."""
    from trainer_client.sharding import LocalShard

    made: dict[str, Any] = {}
    for name, dims in shape.weights():
        begin, end = rank * dims[0] // world, (rank + 1) * dims[0] // world
        tensor = _random((end - begin, *dims[1:]), device)
        if world == 1:
            made[name] = tensor
        elif begin < end:
            made[name] = LocalShard(tensor, dims, (begin, *(0 for _ in dims[1:])))
    return made


def _random(dims: tuple[int, ...], device: str) -> Tensor:
    import torch

    if len(dims) < 2:
        return torch.empty(dims, dtype=torch.bfloat16, device=device).uniform_(0.9, 1.1)
    return torch.empty(dims, dtype=torch.bfloat16, device=device).uniform_(-0.03, 0.03)
