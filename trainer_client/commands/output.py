"""Where tables go: standard output, as wide as the terminal, or wide enough for everything in a file or pipe."""

from __future__ import annotations

import sys

from rich.console import Console

WIDE = 240


def console() -> Console:
    """A console on the standard output of now."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else WIDE, highlight=False)
