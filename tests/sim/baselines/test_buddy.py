"""The buddy allocator: chunks do not overlap, nothing is lost, and what was split is merged again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvledger.core.errors import InputError, MisuseError
from kvledger.sim.baselines.placement import BuddyAllocator, Chunk

# Positive: allocate that much. Negative or zero: release the live chunk of that index.
STEPS = st.lists(st.integers(-10, 70), max_size=60)


def after(num_slots: int, steps: list[int]) -> tuple[BuddyAllocator, list[Chunk]]:
    buddy, live = BuddyAllocator(num_slots), []
    for step in steps:
        if step > 0:
            chunk = buddy.allocate(step)
            if chunk is not None:
                assert chunk.size >= step
                live.append(chunk)
        elif live:
            buddy.release(live.pop(-step % len(live)))
    return buddy, live


@given(num_slots=st.integers(1, 300), steps=STEPS)
def test_live_and_free_chunks_tile_the_pool(num_slots: int, steps: list[int]) -> None:
    buddy, live = after(num_slots, steps)
    tiles = sorted([*live, *buddy.free_chunks()], key=lambda chunk: chunk.address)
    address = 0
    for chunk in tiles:
        assert chunk.address == address, "chunks overlap, or slots were lost"
        address += chunk.size
    assert address == num_slots
    assert buddy.num_free == num_slots - sum(chunk.size for chunk in live)


@given(num_slots=st.integers(1, 300), steps=STEPS)
def test_chunks_are_powers_of_two_on_their_own_boundary(num_slots: int, steps: list[int]) -> None:
    buddy, live = after(num_slots, steps)
    for chunk in [*live, *buddy.free_chunks()]:
        assert chunk.size.bit_count() == 1
        assert chunk.address % chunk.size == 0


@given(num_slots=st.integers(1, 300), steps=STEPS)
def test_no_two_free_buddies_stay_apart(num_slots: int, steps: list[int]) -> None:
    buddy, _ = after(num_slots, steps)
    free = set(buddy.free_chunks())
    assert not any(Chunk(chunk.address ^ chunk.size, chunk.size) in free for chunk in free)


@given(num_slots=st.integers(1, 300), steps=STEPS)
def test_releasing_everything_gives_the_pool_of_the_start(num_slots: int, steps: list[int]) -> None:
    buddy, live = after(num_slots, steps)
    for chunk in live:
        buddy.release(chunk)
    assert buddy.free_chunks() == BuddyAllocator(num_slots).free_chunks()
    assert buddy.num_free == num_slots


@given(order=st.integers(0, 9), steps=STEPS)
def test_a_pool_of_a_power_of_two_coalesces_into_one_chunk(order: int, steps: list[int]) -> None:
    buddy, live = after(1 << order, steps)
    for chunk in live:
        buddy.release(chunk)
    assert buddy.free_chunks() == [Chunk(0, 1 << order)]


@given(num_slots=st.integers(1, 300), steps=STEPS, wanted=st.integers(1, 300))
def test_it_refuses_only_where_no_free_chunk_is_large_enough(num_slots: int, steps: list[int], wanted: int) -> None:
    buddy, _ = after(num_slots, steps)
    before = buddy.free_chunks()
    chunk = buddy.allocate(wanted)
    if chunk is None:
        assert all(free.size < wanted for free in before)
        assert buddy.free_chunks() == before
    else:
        assert wanted <= chunk.size < 2 * wanted


def test_15700_slots_hold_seven_sequences_of_2048() -> None:
    buddy = BuddyAllocator(15_700)
    assert [chunk.size for chunk in buddy.free_chunks()] == [8192, 4096, 2048, 1024, 256, 64, 16, 4]
    chunks = [buddy.allocate(2048) for _ in range(8)]
    assert [chunk.address for chunk in chunks if chunk] == [12288, 8192, 10240, 0, 2048, 4096, 6144]
    assert chunks[-1] is None


def test_releasing_what_is_not_allocated_is_misuse_and_changes_nothing() -> None:
    buddy = BuddyAllocator(16)
    chunk = buddy.allocate(4)
    assert chunk is not None
    with pytest.raises(MisuseError, match="not allocated"):
        buddy.release(Chunk(chunk.address, 8))
    buddy.release(chunk)
    with pytest.raises(MisuseError):
        buddy.release(chunk)
    assert buddy.free_chunks() == [Chunk(0, 16)]


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(InputError, match="at least 1"):
        BuddyAllocator(0)
    with pytest.raises(InputError, match="0 slots"):
        BuddyAllocator(4).allocate(0)
