"""Complete checkpoints as they appear in a folder: what ``vllm-nixl push --watch`` pushes, each once.

A checkpoint is the folder itself, or a folder in it, that holds safetensors. It counts as complete when all files that
its index names are there, each as long as its own header says, no name in it looks unfinished, the marker is there (if
one is asked for), and nothing has changed since the look before. So it may be written in place, file by file, or be
renamed to its final name. One that is written again is a new one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer_client.checkpoint import INDEX
from vllm_nixl_plugin.errors import InvalidRequest

Signature = tuple[tuple[str, int, int, int], ...]
"""Name, inode, size and time of change of every file that counts."""

MAX_HEADER = 100 << 20
UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", ".lock")


@dataclass(frozen=True)
class Found:
    """A complete checkpoint. ``version``: its folder's name, where that is one of several; else None."""

    path: Path
    version: str | None
    signature: Signature


class Watcher:
    """Looks at ``folder`` whenever it is asked; ``marker``: a file that says that a checkpoint is complete.

    Errors: InvalidRequest, when the folder is not there.
    """

    def __init__(self, folder: Path, marker: str | None = None) -> None:
        if not folder.is_dir():
            raise InvalidRequest(f"{folder} is no folder: --watch looks for checkpoints in one")
        self._folder, self._marker = folder, marker
        self._last: dict[Path, Signature] = {}
        self._told: dict[Path, Signature] = {}
        self._looks = 0

    def look(self) -> list[Found]:
        """The complete checkpoints that were not told before, oldest first; of those at the beginning, the newest."""
        now = {path: signature for path in self._candidates() if (signature := self._signature(path))}
        settled = [path for path, signature in now.items() if self._last.get(path) == signature]
        self._last = now
        new = [path for path in settled if self._told.get(path) != now[path] and _whole(path)]
        new.sort(key=lambda path: max(changed for _, _, _, changed in now[path]))
        self._told |= {path: now[path] for path in new}
        self._looks += 1
        if self._looks == 2:
            new = new[-1:]
        return [Found(path, path.name if path != self._folder else None, now[path]) for path in new]

    def _candidates(self) -> Iterator[Path]:
        yield self._folder
        for path in sorted(self._folder.iterdir()):
            if path.is_dir() and not _unfinished(path):
                yield path

    def _signature(self, folder: Path) -> Signature | None:
        """None while the checkpoint is not there, or not finished."""
        try:
            files = [path for path in sorted(folder.iterdir()) if path.is_file()]
            if any(_unfinished(path) for path in files):
                return None
            if self._marker is not None and not (folder / self._marker).exists():
                return None
            counted = [path for path in files if path.suffix == ".safetensors" or path.name in (INDEX, self._marker)]
            if not any(path.suffix == ".safetensors" for path in counted):
                return None
            stats = [(path.name, path.stat()) for path in counted]
        except FileNotFoundError:  # renamed or removed while it was looked at
            return None
        return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _unfinished(path: Path) -> bool:
    return path.name.startswith((".", "tmp")) or path.name.endswith(UNFINISHED)


def _whole(folder: Path) -> bool:
    """Whether all files are there, each as long as its header says."""
    try:
        files = {path.name for path in folder.glob("*.safetensors")}
        if (folder / INDEX).is_file():
            named = set(json.loads((folder / INDEX).read_text("utf-8"))["weight_map"].values())
            if not named <= files:
                return False
            files = named
        return all(_as_long_as_it_says(folder / name) for name in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _as_long_as_it_says(path: Path) -> bool:
    """A file of safetensors: eight bytes of length, a header of JSON with the offsets of all tensors, their bytes."""
    with path.open("rb") as file:
        begin = file.read(8)
        if len(begin) < 8 or (length := struct.unpack("<Q", begin)[0]) > MAX_HEADER:
            return False
        header = json.loads(file.read(length))
    ends = [about["data_offsets"][1] for name, about in header.items() if name != "__metadata__"]
    return bool(path.stat().st_size == 8 + length + max(ends, default=0))
