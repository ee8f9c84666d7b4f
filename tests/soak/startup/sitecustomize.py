"""Lets the processes of a server under test say what they hold; `soak` puts this folder on its PYTHONPATH."""

import sys
from pathlib import Path

TESTS = str(Path(__file__).parent.parent.parent)
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)

from soak import counts  # noqa: E402

counts.install()
