"""`make trainers`: all layouts against all servers, as a table. Ends with 1 when a case fails."""

import sys
import tempfile
from pathlib import Path

from harness import close_launcher
from trainers.runner import HEAD, LAYOUTS, MODELS, run
from trainers.world import World


def main() -> int:
    """Print a row for each case as it is done."""
    print(HEAD, flush=True)
    bad = 0
    try:
        with tempfile.TemporaryDirectory() as folder, World(2) as two, World(4) as four:
            for row in run(Path(folder), [two, four], LAYOUTS, list(MODELS), (1, 2)):
                print(row, flush=True)
                bad += not row.good
    finally:
        close_launcher()
    print(f"{bad} cases do not show what they have to" if bad else "every case shows what it has to")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
