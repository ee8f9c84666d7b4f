"""`make faults`: every cell as a row; ends with 1 when one is not as expected. See `cells`.

    python -m faults [--write] [--only WORDS] [--mode MODE]

--write puts the table, and what was measured, into docs/faults.md. --only: cells whose name has all these words.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from faults.cells import Cell, all_cells
from faults.page import write
from faults.runner import Row, World, run
from harness import close_launcher

HEAD = f"{'fault':12} {'mode':9} {'stage':13} {'push ends':14} {'s':>5}  {'server':18} {'s':>5}  next push     {'s':>5}"


def told(row: Row) -> str:
    """A row of the table on the terminal."""
    after = ("waits, " if row.blocked else "") + row.next + (", equal" if row.equal else ", DIFFERENT")
    fault = f"{row.cell.how} {row.cell.victim}"
    return (
        f"{fault:12} {row.cell.mode:9} {row.cell.stage:13} {row.push:14} {row.push_s:5.1f}  "
        f"{row.server:18} {row.server_s:5.1f}  {after:13} {row.next_s:5.1f}  {row.wrong or 'as expected'}"
    )


def main() -> int:
    """Print a row for each cell as it is done."""
    parser = argparse.ArgumentParser(prog="make faults")
    parser.add_argument("--write", action="store_true", help="put the table into docs/faults.md")
    parser.add_argument("--only", default="", help="cells whose name has all these words")
    parser.add_argument("--mode", default="")
    given = parser.parse_args()
    cells = [c for c in all_cells() if all(word in c.name for word in given.only.split()) and given.mode in c.mode]
    rows, bad, begin = [], 0, time.monotonic()
    print(HEAD, flush=True)
    try:
        with tempfile.TemporaryDirectory() as folder, World(Path(folder)) as world:
            for cell in cells:
                row = _run(world, cell)
                if row is None:
                    bad += 1
                    continue
                rows.append(row)
                bad += bool(row.wrong)
                print(told(row), flush=True)
    finally:
        close_launcher()
    if given.write:
        write(all_cells(), rows)
    print(f"{bad} of {len(cells)} cells are not as expected; {time.monotonic() - begin:.0f} s")
    return 1 if bad else 0


def _run(world: World, cell: Cell) -> Row | None:
    try:
        return run(world, cell)
    except Exception as error:  # noqa: BLE001 - the other cells go on
        print(f"{cell.name}: {type(error).__name__}: {str(error).partition(chr(10))[0][:500]}", flush=True)
        return None


if __name__ == "__main__":
    sys.exit(main())
