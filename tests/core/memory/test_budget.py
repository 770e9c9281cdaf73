"""What a fraction of a device's memory means, and what is checked before an engine starts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvledger.core.errors import DoesNotFitError, InputError
from kvledger.core.memory.budget import (
    MemoryCondition,
    MemoryShortfallError,
    check_explicit_kv_bytes,
    largest_utilization,
    neighbour_warnings,
    request_memory,
    requested_bytes,
    smallest_utilization,
)

GIB = 1 << 30
sizes = st.integers(min_value=1000, max_value=1 << 40)


@pytest.mark.parametrize("utilization", [0, -0.1, 1.001, 90, float("nan")])
def test_a_utilization_is_a_fraction_above_0_and_at_most_1(utilization: float) -> None:
    with pytest.raises(InputError, match="above 0 and at most 1"):
        request_memory(total_bytes=GIB, free_bytes=GIB, gpu_memory_utilization=utilization)


def test_a_refusal_at_startup_tells_both_sides_the_shortfall_and_the_largest_utilization() -> None:
    with pytest.raises(DoesNotFitError) as refused:
        request_memory(total_bytes=80 * GIB, free_bytes=16 * GIB, gpu_memory_utilization=0.4)
    error = refused.value
    assert isinstance(error, MemoryShortfallError)
    assert error.condition is MemoryCondition.FREE_BELOW_REQUESTED
    assert (error.needed_bytes, error.available_bytes) == (32 * GIB, 16 * GIB)
    assert error.shortfall_bytes == 16 * GIB
    assert error.largest == {"gpu_memory_utilization": 0.2}
    for figure in ("32.00 GiB", "16.00 GiB", "0.2"):
        assert figure in str(error)


@given(total_bytes=sizes, free_share=st.floats(0, 1))
def test_the_largest_utilization_starts_and_a_thousandth_more_does_not(total_bytes: int, free_share: float) -> None:
    free_bytes = int(total_bytes * free_share)
    largest = largest_utilization(total_bytes, free_bytes)
    if largest > 0:
        assert request_memory(total_bytes=total_bytes, free_bytes=free_bytes, gpu_memory_utilization=largest)
    if largest < 1:
        with pytest.raises(MemoryShortfallError):
            request_memory(
                total_bytes=total_bytes, free_bytes=free_bytes, gpu_memory_utilization=round(largest + 0.001, 3)
            )


@given(total_bytes=sizes, wanted_share=st.floats(0.0001, 1.2))
def test_the_smallest_utilization_requests_enough_and_a_thousandth_less_does_not(
    total_bytes: int, wanted_share: float
) -> None:
    wanted = max(int(total_bytes * wanted_share), 1)
    smallest = smallest_utilization(total_bytes, wanted)
    if smallest is None:
        assert requested_bytes(total_bytes, 1.0) < wanted
    else:
        assert requested_bytes(total_bytes, smallest) >= wanted
        if smallest > 0.001:
            assert requested_bytes(total_bytes, round(smallest - 0.001, 3)) < wanted


def test_weights_held_elsewhere_come_off_the_request_and_may_not_use_it_up() -> None:
    assert request_memory(total_bytes=100, free_bytes=60, gpu_memory_utilization=0.9, externally_held_bytes=30) == 60
    with pytest.raises(MemoryShortfallError, match="Smallest gpu_memory_utilization") as refused:
        request_memory(total_bytes=1000, free_bytes=900, gpu_memory_utilization=0.5, externally_held_bytes=500)
    assert refused.value.condition is MemoryCondition.EXTERNAL_EXCEEDS_BUDGET


@pytest.mark.parametrize("size", [0, -1])
def test_pinned_bytes_of_zero_or_less_are_bad_input(size: int) -> None:
    with pytest.raises(InputError, match="above 0"):
        check_explicit_kv_bytes(kv_cache_memory_bytes=size, free_bytes=GIB, non_kv_bytes=0, bytes_per_block=1)


@given(free_bytes=sizes, non_kv_share=st.floats(0, 1.2), bytes_per_block=st.integers(1, 1 << 22))
def test_the_largest_pinned_size_is_accepted_and_a_block_more_is_refused(
    free_bytes: int, non_kv_share: float, bytes_per_block: int
) -> None:
    non_kv_bytes = int(free_bytes * non_kv_share)

    def check(size: int) -> int:
        return check_explicit_kv_bytes(
            kv_cache_memory_bytes=size,
            free_bytes=free_bytes,
            non_kv_bytes=non_kv_bytes,
            bytes_per_block=bytes_per_block,
        )

    with pytest.raises(MemoryShortfallError) as refused:
        check(free_bytes + 1)
    largest = int(refused.value.largest["kv_cache_memory_bytes"])
    assert largest % bytes_per_block == 0
    if largest:
        assert check(largest) == largest
    with pytest.raises(MemoryShortfallError):
        check(largest + bytes_per_block)


def test_neighbours_that_declare_more_than_the_whole_card_are_warned_of() -> None:
    assert neighbour_warnings([0.4, 0.6]) == ()
    (warning,) = neighbour_warnings([0.4, 0.4, 0.4])
    assert "1.2" in warning
