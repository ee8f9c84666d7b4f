"""Puts the places of `faults.server_hooks` into a server under test; the runner puts this folder on its PYTHONPATH."""

import sys
from pathlib import Path

TESTS = str(Path(__file__).parent.parent.parent)
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)

from faults import server_hooks  # noqa: E402

server_hooks.install()
