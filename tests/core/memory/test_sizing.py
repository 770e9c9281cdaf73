"""From a profile to the bytes of the pool, and which size to pin next time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvledger.core.errors import InputError
from kvledger.core.memory.budget import MemoryCondition, MemoryShortfallError
from kvledger.core.memory.profile import (
    MemoryProfile,
    MemorySnapshot,
    SizingOptions,
    applicable_startup_plan,
    determine_available_memory,
    graph_utilizations,
    largest_fitting,
    suggested_vllm,
)

GIB = 1 << 30


def profile(total: int, free_before: int, consumed: int, headroom: int) -> MemoryProfile:
    def reading(free: int, allocated: int, peak: int) -> MemorySnapshot:
        return MemorySnapshot(
            total_bytes=total,
            free_bytes=free,
            torch_allocated_bytes=allocated,
            torch_peak_bytes=peak,
            torch_reserved_bytes=allocated,
        )

    return MemoryProfile(
        before=reading(free_before, 0, 0),
        after=reading(free_before - consumed, consumed, consumed + headroom),
        weights_bytes=None,
        strict_profiling=True,
    )


def test_pinned_bytes_are_checked_against_the_profile_and_utilization_is_ignored_and_said_so() -> None:
    reading = profile(24 * GIB, 24 * GIB, 15 * GIB, 2 * GIB)
    options = SizingOptions(gpu_memory_utilization=0.9, kv_cache_memory_bytes=6 * GIB)
    sized = determine_available_memory(reading, options, cudagraph_estimate_bytes=GIB)
    assert sized.available_bytes == 6 * GIB
    assert any("0.9 is ignored" in warning for warning in sized.warnings)
    too_large = SizingOptions(gpu_memory_utilization=0.9, kv_cache_memory_bytes=6 * GIB + 1)
    with pytest.raises(MemoryShortfallError) as refused:
        determine_available_memory(reading, too_large, cudagraph_estimate_bytes=GIB)
    assert refused.value.condition is MemoryCondition.EXPLICIT_BYTES_EXCEED_FREE
    assert refused.value.largest == {"--kv-cache-memory-bytes": 6 * GIB}


def test_a_pinned_size_of_zero_is_an_error_unless_validation_is_off() -> None:
    reading = profile(24 * GIB, 24 * GIB, 15 * GIB, 2 * GIB)
    with pytest.raises(InputError, match="above 0"):
        determine_available_memory(
            reading,
            SizingOptions(gpu_memory_utilization=0.9, kv_cache_memory_bytes=0),
            cudagraph_estimate_bytes=0,
        )
    sized = determine_available_memory(
        reading,
        SizingOptions(gpu_memory_utilization=0.9, kv_cache_memory_bytes=0, validate=False),
        cudagraph_estimate_bytes=0,
    )
    assert sized.available_bytes == sized.profiled_available_bytes
    assert sized.is_pinned


def test_a_frontend_reservation_that_leaves_nothing_is_refused_with_the_largest_that_does() -> None:
    reading = profile(24 * GIB, 24 * GIB, 15 * GIB, 2 * GIB)
    options = SizingOptions(gpu_memory_utilization=1.0, frontend_reservation_bytes=7 * GIB)
    with pytest.raises(MemoryShortfallError) as refused:
        determine_available_memory(reading, options, cudagraph_estimate_bytes=0, bytes_per_block=GIB)
    assert refused.value.largest == {"frontend reservation": 6 * GIB}


sizes = st.integers(1 << 20, 1 << 38)


@given(
    total=sizes,
    consumed_share=st.floats(0, 0.9),
    headroom=st.integers(0, 1 << 30),
    graphs=st.integers(0, 1 << 30),
    actual_graphs=st.integers(0, 1 << 30),
    utilization=st.integers(1, 1000),
)
def test_what_vllm_suggests_never_exceeds_the_limit_it_was_derived_from(
    total: int, consumed_share: float, headroom: int, graphs: int, actual_graphs: int, utilization: int
) -> None:
    reading = profile(total, total, int(total * consumed_share), headroom)
    options = SizingOptions(gpu_memory_utilization=utilization / 1000)
    sized = determine_available_memory(reading, options, cudagraph_estimate_bytes=graphs)
    suggestion = suggested_vllm(sized, actual_graphs)
    needed = sized.total_consumed_bytes + headroom + actual_graphs
    for suggested, limit in (
        (suggestion.to_requested_limit_bytes, sized.requested_bytes),
        (suggestion.to_gpu_limit_bytes, sized.free_before_bytes),
    ):
        if suggested <= 0:
            continue
        assert needed + suggested <= limit
        pinned = SizingOptions(gpu_memory_utilization=utilization / 1000, kv_cache_memory_bytes=suggested)
        # The graphs that were really captured are known by the time a suggestion is fed back.
        again = determine_available_memory(reading, pinned, cudagraph_estimate_bytes=actual_graphs)
        assert again.available_bytes == suggested


@given(limit=sizes, non_kv_share=st.floats(0, 1.5), bytes_per_block=st.integers(1, 1 << 24))
def test_largest_fitting_is_whole_blocks_that_come_back_and_one_more_does_not_fit(
    limit: int, non_kv_share: float, bytes_per_block: int
) -> None:
    non_kv = int(limit * non_kv_share)
    pool = largest_fitting(limit, non_kv, bytes_per_block)
    assert pool.num_bytes // bytes_per_block == pool.num_blocks
    if pool.num_blocks:
        assert non_kv + pool.num_bytes <= limit
    assert non_kv + pool.num_bytes + bytes_per_block > limit


def test_graph_memory_has_three_utilizations() -> None:
    found = graph_utilizations(0.82, int(0.36 * GIB), int(23.684 * GIB))
    assert (found.current, found.without_graphs, found.to_keep_the_pool) == (0.82, 0.8048, 0.8352)


@pytest.mark.parametrize(
    ("plan", "reused"),
    [
        ({"kv_cache_memory_bytes": 10, "free_memory_baseline": 100}, 10),
        ({"kv_cache_memory_bytes": True, "free_memory_baseline": 100}, None),
        ({"kv_cache_memory_bytes": 10}, None),
        ({"kv_cache_memory_bytes": 10, "free_memory_baseline": 101}, None),
        ({}, None),
    ],
)
def test_an_earlier_plan_is_reused_only_if_it_is_whole_and_as_much_is_free(plan: dict, reused: int | None) -> None:
    assert applicable_startup_plan(plan, 100) == reused
