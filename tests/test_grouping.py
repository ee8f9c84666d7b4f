"""What is installed together in mode `streamed`, in which order, and where it lies in the window. Numbers only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_nixl_plugin.errors import InsufficientMemory
from vllm_nixl_plugin.grouping import ALIGNMENT, Unit, aligned, group, largest, lay_out, smallest
from vllm_nixl_plugin.wire import Destination, Group, Home


def destinations(*homes: Home, nbytes: int = 1000) -> list[Destination]:
    return [Destination(names=(f"d{i}",), nbytes=nbytes, home=home) for i, home in enumerate(homes)]


def unit(position: int, *reads: int, working: int = 10) -> Unit:
    return Unit(f"m{position}", position, frozenset(reads), working)


def shown(found: list) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    return [(each.group.destinations, each.paths) for each in found]


def test_each_processed_module_is_a_group_and_what_is_live_goes_with_the_one_before():
    made = group(destinations("live", "shadow", "live", "shadow"), [0, 1, 2, 3], [unit(1, 1), unit(3, 3)])
    assert shown(made) == [((0, 1, 2), ("m1",)), ((3,), ("m3",))]
    assert [each.group.window_nbytes for each in made] == [aligned(1000)] * 2


def test_modules_that_share_memory_are_one_group():
    made = group(destinations("shadow", "shadow", "shadow"), [0, 1, 2], [unit(0, 0), unit(1, 1), unit(2, 2, 0)])
    assert shown(made) == [((0, 2), ("m0", "m2")), ((1,), ("m1",))]
    assert made[0].group.working_nbytes == 20


def test_a_module_that_reads_the_weights_of_another_is_processed_with_it_and_may_read_live_ones():
    made = group(destinations("shadow", "live", "shadow"), [0, 1, 2], [unit(0, 0), unit(5, 0, 1), unit(2, 2)])
    assert shown(made) == [((0, 1), ("m0", "m5")), ((2,), ("m2",))]
    assert made[0].group.window_nbytes == aligned(1000)


def test_what_the_loader_makes_of_the_same_weights_stays_together():
    found = destinations("shadow", "shadow", "source")
    made = group(found, [0, 1, 9], [unit(0, 0), unit(1, 1)], [(1, 2), (0, 2)])
    assert shown(made) == [((0, 1, 2), ("m0", "m1"))]


def test_a_module_without_weights_goes_with_its_neighbours():
    made = group(destinations("shadow", "shadow"), [1, 3], [unit(0), unit(1, 0), unit(2), unit(3, 1), unit(4)])
    assert shown(made) == [((0,), ("m0", "m1", "m2")), ((1,), ("m3", "m4"))]


def test_a_model_with_nothing_to_process_is_one_group_without_a_window():
    made = group(destinations("live", "live"), [0, 1], [])
    assert shown(made) == [((0, 1), ())]
    window, _ = lay_out([each.group for each in made], None)
    assert (window.nbytes, window.after) == (0, (-1,))


def test_destinations_are_numbered_within_the_whole_plan():
    assert group(destinations("shadow"), [0], [unit(0, 0)], first=7)[0].group.destinations == (7,)


def sized(*nbytes: int, working: int = 5) -> list[Group]:
    return [Group(destinations=(i,), window_nbytes=n, working_nbytes=working) for i, n in enumerate(nbytes)]


def test_the_smallest_budget_holds_one_group_and_what_it_takes_to_process_one():
    groups = sized(100, 300, 200)
    assert smallest(groups) == 305
    assert largest(groups) == 1
    window, offsets = lay_out(groups, 305)
    assert (window.nbytes, window.after, offsets) == (300, (-1, 0, 1), [0, 0, 0])


def test_a_budget_below_that_is_refused_with_the_group_the_bytes_and_the_remedy():
    with pytest.raises(InsufficientMemory, match=r"\(w13\).*allows 300, 5 are lacking.*at least 305") as refused:
        lay_out(sized(100, 300, 200), 300, "w13")
    assert refused.value.details == {"needed_nbytes": 305, "free_nbytes": 300}


def test_with_more_room_groups_follow_each_other_without_waiting():
    window, offsets = lay_out(sized(100, 100, 100, 100), 205)
    assert (window.nbytes, window.after, offsets) == (200, (-1, -1, 0, 1), [0, 100, 0, 100])
    window, _ = lay_out(sized(100, 100, 100, 100), 10_000)
    assert (window.nbytes, window.after) == (400, (-1, -1, -1, -1))


def test_without_a_budget_the_largest_group_fits_twice():
    assert lay_out(sized(100, 300, 200, 300), None)[0].nbytes == 600


@given(st.lists(st.integers(0, 40).map(lambda n: n * ALIGNMENT), min_size=1, max_size=30), st.integers(0, 60))
def test_no_group_lands_on_one_that_has_not_been_handed_back(sizes: list[int], more: int):
    groups = sized(*sizes)
    window, offsets = lay_out(groups, smallest(groups) + more * ALIGNMENT)
    for number, (size, at) in enumerate(zip(sizes, offsets, strict=True)):
        assert at + size <= window.nbytes
        assert window.after[number] < number
        for other in range(window.after[number] + 1, number):
            there, until = offsets[other], offsets[other] + sizes[other]
            assert not size or not sizes[other] or until <= at or at + size <= there
