"""Every cell of the table that `make faults` prints; `make test` runs those of SAMPLE."""

from __future__ import annotations

import pytest

from faults.__main__ import told
from faults.cells import Cell, all_cells
from faults.page import PAGE, table
from faults.runner import World, run

SAMPLE = (
    Cell("trainer", "kill", "writing", "shadow"),
    Cell("trainer", "kill", "paused", "in_place"),
    Cell("trainer", "stop", "writing", "shadow"),
    Cell("trainer", "stop", "writing", "in_place"),
    Cell("rank", "kill", "writing", "in_place"),
    Cell("api", "kill", "installing", "shadow"),
    Cell("api", "kill", "writing", "streamed"),
    Cell("server", "kill", "written", "shadow"),
)


def _params() -> list[object]:
    return [
        pytest.param(cell, id=cell.name.replace(", ", "-").replace(" ", "_"),
                     marks=[] if cell in SAMPLE else [pytest.mark.thorough])
        for cell in all_cells()
    ]  # fmt: skip


@pytest.mark.server
@pytest.mark.parametrize("cell", _params())
def test_a_fault_at_a_stage_has_the_outcome_that_the_table_promises(world: World, cell: Cell) -> None:
    row = run(world, cell)
    print(told(row))
    assert not row.wrong


def test_the_page_has_the_table_that_the_cells_promise() -> None:
    assert table(all_cells()) in PAGE.read_text(encoding="utf-8"), "make faults ARGS=--write"
