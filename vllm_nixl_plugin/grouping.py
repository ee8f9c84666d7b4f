"""The order in which mode ``streamed`` brings weights to a worker: groups of destinations (the stage: plan). Pure.

`group` puts together what has to be processed together: modules that share memory, modules whose processing reads that
of others (attention that derives its weights from a projection), and what vLLM's loader makes of the same whole
weights. Nothing is known of layers or names: all of it comes from the twin's object graph and from the trace. What is
left alone by processing goes with its neighbours. The order is that of the module tree, so it depends on the structure
of the model alone, and all ranks have the same.

`lay_out` gives each group its place in the window: a ring, in which a group may take the place of earlier ones once
they have been handed back. Called by `composition` and `binding`; `streaming` installs the groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_nixl_plugin.errors import InsufficientMemory
from vllm_nixl_plugin.wire import Destination, Group, Window

ALIGNMENT = 256
NONE = -1


@dataclass(frozen=True, slots=True)
class Unit:
    """A module that vLLM processes. ``reads``: the destinations that it owns or can come by, by their number.

    ``position``: its place in the module tree; ``working_nbytes``: memory that processing it takes.
    """

    path: str
    position: int
    reads: frozenset[int]
    working_nbytes: int


@dataclass(frozen=True, slots=True)
class Grouped:
    """A group, and the modules to process in it."""

    group: Group
    paths: tuple[str, ...]


def aligned(nbytes: int) -> int:
    """Bytes that a destination takes of the window."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def group(
    destinations: Sequence[Destination], positions: Sequence[int], units: Sequence[Unit],
    together: Iterable[Iterable[int]] = (), first: int = 0,
) -> list[Grouped]:  # fmt: skip
    """The groups in their order; every destination is in one.

    ``positions``: the place of each destination in the module tree. ``together``: destinations that nothing may part.
    Destinations are numbered from ``first`` in the groups.
    """
    root = list(range(len(destinations) + len(units)))

    def find(node: int) -> int:
        while root[node] != node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    def join(a: int, b: int) -> None:
        one, other = sorted((find(a), find(b)))
        root[other] = one

    bound: set[int] = set()
    for number, unit in enumerate(units, len(destinations)):
        for read in unit.reads:
            join(read, number)
            bound.add(read)
    for members in together:
        ordered = sorted(members)
        bound.update(ordered)
        for member in ordered[1:]:
            join(ordered[0], member)
    found: dict[int, list[int]] = {}
    for node in sorted(bound):
        found.setdefault(find(node), []).append(node)
    of_root: dict[int, list[Unit]] = {}
    idle: list[Unit] = []
    for number, unit in enumerate(units, len(destinations)):
        (of_root.setdefault(find(number), []) if unit.reads else idle).append(unit)
    made = sorted((min(positions[i] for i in of), of, of_root.get(top, [])) for top, of in found.items())
    if not made and (destinations or units):
        made = [(0, [], [])]
    for i in (i for i in range(len(destinations)) if i not in bound):
        _before(made, positions[i])[1].append(i)
    for unit in idle:
        _before(made, unit.position)[2].append(unit)
    return [_grouped(destinations, of, sorted(mine, key=lambda unit: unit.position), first) for _, of, mine in made]


def _before(
    made: list[tuple[int, list[int], list[Unit]]], position: int
) -> tuple[int, list[int], list[Unit]]:
    """The last group that begins at or before a position, else the first."""
    return next((each for each in reversed(made) if each[0] <= position), made[0])


def _grouped(destinations: Sequence[Destination], of: list[int], units: list[Unit], first: int) -> Grouped:
    window = sum(aligned(destinations[i].nbytes) for i in of if destinations[i].home != "live")
    working = sum(unit.working_nbytes for unit in units)
    made = Group(destinations=tuple(first + i for i in sorted(of)), window_nbytes=window, working_nbytes=working)
    return Grouped(made, tuple(unit.path for unit in units))


def smallest(groups: Sequence[Group]) -> int:
    """Bytes of the smallest budget: a window that holds any one group, and the memory to process any one."""
    return _most_window(groups) + _most_working(groups)


def largest(groups: Sequence[Group]) -> int:
    """The number of the group that takes most."""
    return max(range(len(groups)), key=lambda i: (groups[i].window_nbytes, groups[i].working_nbytes))


def lay_out(groups: Sequence[Group], budget: int | None, name: str = "") -> tuple[Window, list[int]]:
    """The window of a plan, and where in it each group begins. Without a budget the largest group fits twice.

    ``name``: of the largest group, for people. Errors: InsufficientMemory naming it, when the budget is too small.
    """
    working, least, whole = _most_working(groups), _most_window(groups), sum(g.window_nbytes for g in groups)
    nbytes = min(2 * least if budget is None else budget - working, whole)
    if nbytes < least:
        assert budget is not None
        lacking = least + working - budget
        raise InsufficientMemory(
            f"mode 'streamed' needs {least + working} bytes: {least} for the largest group ({name}) and {working} to "
            f"process one; PUSH_WEIGHTS_SHADOW_BYTES allows {budget}, {lacking} are lacking. Set it to at least "
            f"{least + working} on the server, or push with mode='in_place' if there is more memory than that.",
            needed_nbytes=least + working, free_nbytes=budget,
        )  # fmt: skip
    after: list[int] = []
    offsets: list[int] = []
    taken: list[tuple[int, int, int]] = []
    at = 0
    for number, of in enumerate(groups):
        size = of.window_nbytes
        if at + size > nbytes:
            at = 0
        under = [each for each in taken if size and each[0] < at + size and each[1] > at]
        before = after[-1] if after else NONE  # some writers have nothing to write to the groups before
        after.append(max([before, *(each[2] for each in under)]))
        offsets.append(at)
        if size:
            taken = [each for each in taken if each not in under] + [(at, at + size, number)]
        at += size
    return Window(nbytes=nbytes, working_nbytes=working, budget_nbytes=budget, after=tuple(after)), offsets


def _most_window(groups: Sequence[Group]) -> int:
    return max((g.window_nbytes for g in groups), default=0)


def _most_working(groups: Sequence[Group]) -> int:
    return max((g.working_nbytes for g in groups), default=0)
