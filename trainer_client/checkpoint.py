"""A safetensors checkpoint as a source of weights: what `vllm-nixl push` sends. The only file that imports safetensors.

`read_checkpoint` maps the files into memory and copies nothing: the pages are read from disk when they are sent. NIXL
registers such private mappings of a file like any other memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_nixl_plugin.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DRAFT_PREFIX = "draft:"
"""Stands before the names of a draft model that has a checkpoint of its own."""


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint: a folder as transformers saves it (one file, or several with an index), or one file.

    Errors: InvalidRequest that names the file and what is wrong with it.
    """
    if not path.exists():
        raise InvalidRequest(f"{path} does not exist: give the folder of a checkpoint")
    if path.is_file():
        return _read([path])
    index = path / INDEX
    if index.is_file():
        return _indexed(path, index)
    files = [path / SINGLE] if (path / SINGLE).is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise InvalidRequest(f"{path} has no safetensors file: give the folder of a checkpoint saved as safetensors")
    return _read(files)


def read_with_draft(path: Path, draft: Path | None) -> dict[str, Tensor]:
    """`read_checkpoint`, and that of a draft model under the names that servers know it by. Errors: InvalidRequest."""
    weights = read_checkpoint(path)
    if draft is not None:
        weights |= {DRAFT_PREFIX + name: weight for name, weight in read_checkpoint(draft).items()}
    return weights


def _indexed(folder: Path, index: Path) -> dict[str, Tensor]:
    try:
        places = {str(name): str(file) for name, file in json.loads(index.read_text("utf-8"))["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{index} is no index of a checkpoint ({type(error).__name__}: {error})") from None
    files = [folder / file for file in sorted(set(places.values()))]
    if absent := [file.name for file in files if not file.is_file() or file.parent != folder]:
        raise InvalidRequest(f"{index} names files that are not there: {', '.join(absent[:5])}")
    found = _read(files)
    if absent := sorted(places.keys() - found.keys()):
        raise InvalidRequest(f"{folder} lacks {len(absent)} tensors that its index names: {', '.join(absent[:5])}")
    return found


def _read(files: Iterable[Path]) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    found: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a mapping
                    if name in found:
                        raise InvalidRequest(f"{file} has {name}, which another file of the checkpoint has too")
                    found[name] = tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InvalidRequest(f"{file} cannot be read as safetensors: {error}") from None
    return found
