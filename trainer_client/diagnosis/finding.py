"""One thing that was looked at, what was found, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How a finding is meant. ``BAD``: something would fail. ``WARNING``: something is slow, open or about to fail."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """``what`` was looked at, ``found`` is how it is; ``remedy`` where something is to be done."""

    section: str
    what: str
    found: str
    level: Level = Level.OK
    remedy: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"level": self.level.value}
