"""Sizes of the pool: what vLLM suggests, what fits in whole blocks, and which size to pin next time."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvledger.core.memory.budget import (
    applicable_startup_plan,
    check_explicit_kv_bytes,
    graph_utilizations,
    largest_fitting,
)
from kvledger.core.memory.ledger import MemoryBudget, MemoryLedger, RowRole, given_row

GIB = 1 << 30


def test_pinned_bytes_replace_the_utilization_and_a_frontend_reservation_comes_off_either() -> None:
    ledger = MemoryLedger(
        budget=MemoryBudget(total_bytes=24 * GIB, free_bytes=24 * GIB, fraction=0.5),
        non_kv_rows=(given_row("weights", 5 * GIB, RowRole.RESIDENT),),
        frontend_reservation_bytes=GIB,
    )
    assert ledger.available_bytes == 6 * GIB
    assert attrs.evolve(ledger, kv_cache_memory_bytes=9 * GIB).available_bytes == 8 * GIB


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
    consumed = int(total * consumed_share)
    ledger = MemoryLedger(
        budget=MemoryBudget(total_bytes=total, free_bytes=total, fraction=utilization / 1000),
        non_kv_rows=(
            given_row("weights", consumed, RowRole.RESIDENT),
            given_row("peak activation", headroom, RowRole.TRANSIENT),
            given_row("CUDA graphs", graphs, RowRole.GRAPHS),
        ),
    )
    suggestion = ledger.suggested_by_vllm(actual_graphs)
    # The graphs that were really captured are known by the time a suggestion is pinned.
    needed = consumed + headroom + actual_graphs
    for suggested, limit in (
        (suggestion.to_requested_limit_bytes, ledger.budget.requested_bytes),
        (suggestion.to_gpu_limit_bytes, total),
    ):
        if suggested > 0:
            assert needed + suggested <= limit
            check_explicit_kv_bytes(
                kv_cache_memory_bytes=suggested, free_bytes=total, non_kv_bytes=needed, bytes_per_block=1
            )


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
