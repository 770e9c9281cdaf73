"""The first-fit heap: regions do not overlap, holes merge, and growth in place moves nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvledger.core.errors import InputError, MisuseError
from kvledger.sim.baselines.placement import ContiguousHeap

STEPS = st.lists(st.tuples(st.sampled_from(["allocate", "extend", "release"]), st.integers(1, 40)), max_size=60)


def after(num_slots: int, steps: list[tuple[str, int]]) -> tuple[ContiguousHeap, dict[int, int]]:
    heap, live = ContiguousHeap(num_slots), {}
    for step, number in steps:
        if step == "allocate":
            address = heap.allocate(number)
            if address is not None:
                live[address] = number
        elif live:
            address = sorted(live)[number % len(live)]
            if step == "release":
                heap.release(address)
                del live[address]
            elif heap.extend(address, live[address] + number):
                live[address] += number
    return heap, live


@given(num_slots=st.integers(1, 200), steps=STEPS)
def test_regions_and_holes_tile_the_heap_and_no_two_holes_touch(num_slots: int, steps: list) -> None:
    heap, live = after(num_slots, steps)
    end, end_is_a_hole = 0, False
    for start, size in sorted([*live.items(), *heap.holes()]):
        assert start == end
        assert not (end_is_a_hole and (start, size) in heap.holes())
        end, end_is_a_hole = start + size, (start, size) in heap.holes()
    assert end == num_slots
    assert heap.num_free == sum(size for _, size in heap.holes())
    assert heap.largest_hole == max((size for _, size in heap.holes()), default=0)


@given(num_slots=st.integers(1, 200), steps=STEPS)
def test_releasing_everything_leaves_one_hole(num_slots: int, steps: list) -> None:
    heap, live = after(num_slots, steps)
    for address in live:
        heap.release(address)
    assert heap.holes() == [(0, num_slots)]
    assert heap.fragmentation == 0.0


@given(num_slots=st.integers(1, 200), steps=STEPS, wanted=st.integers(1, 200))
def test_the_first_hole_that_is_large_enough_is_taken(num_slots: int, steps: list, wanted: int) -> None:
    heap, _ = after(num_slots, steps)
    expected = next((address for address, size in heap.holes() if size >= wanted), None)
    assert heap.allocate(wanted) == expected


def test_a_region_grows_in_place_only_into_the_hole_behind_it() -> None:
    heap = ContiguousHeap(10)
    first, second = heap.allocate(4), heap.allocate(2)
    assert (first, second) == (0, 4)
    assert not heap.extend(0, 5)
    assert not heap.extend(4, 7)
    assert heap.extend(4, 6)
    assert heap.holes() == []


def test_fragmentation_is_the_share_of_free_memory_outside_the_largest_hole() -> None:
    heap = ContiguousHeap(10)
    for _ in range(5):
        heap.allocate(2)
    for address in (0, 4, 8):
        heap.release(address)
    heap.release(6)
    assert heap.holes() == [(0, 2), (4, 6)]
    assert heap.fragmentation == pytest.approx(1 - 6 / 8)


def test_misuse_and_bad_sizes_are_refused() -> None:
    with pytest.raises(InputError):
        ContiguousHeap(0)
    heap = ContiguousHeap(4)
    with pytest.raises(InputError):
        heap.allocate(0)
    with pytest.raises(MisuseError, match="slot 1"):
        heap.release(1)
    with pytest.raises(MisuseError, match="slot 1"):
        heap.extend(1, 2)
