"""The ledger's rows: they add up to the device, whatever the figures, and say where they come from."""

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvledger.core.errors import InputError
from kvledger.core.memory.budget import BudgetSemantics
from kvledger.core.memory.ledger import (
    LedgerRow,
    MemoryBudget,
    MemoryLedger,
    RowRole,
    RowSource,
    given_row,
    measured_rows,
    sum_bytes,
)
from kvledger.core.memory.profile import MemoryProfile, MemorySnapshot

GIB = 1 << 30


def rows(weights: int, runtime: int, activation: int) -> tuple[LedgerRow, ...]:
    return (
        given_row("weights", weights, RowRole.RESIDENT),
        given_row("non-torch", runtime, RowRole.RESIDENT),
        given_row("peak activation", activation, RowRole.TRANSIENT),
    )


def budget(total: int, fraction: float, semantics: BudgetSemantics = BudgetSemantics.OF_TOTAL) -> MemoryBudget:
    return MemoryBudget(total_bytes=total, free_bytes=total, fraction=fraction, semantics=semantics)


amounts = st.integers(0, 100 * GIB)


@given(
    total=st.integers(1000, 200 * GIB),
    fraction=st.floats(0.001, 1),
    semantics=st.sampled_from(list(BudgetSemantics)),
    weights=amounts,
    runtime=amounts,
    activation=amounts,
    held=amounts,
    reservation=amounts,
    pool_share=st.floats(0, 1),
    free_share=st.floats(0, 1),
)
def test_the_rows_add_up_to_the_device_and_nothing_is_missing_that_is_there(
    total: int,
    fraction: float,
    semantics: BudgetSemantics,
    weights: int,
    runtime: int,
    activation: int,
    held: int,
    reservation: int,
    pool_share: float,
    free_share: float,
) -> None:
    ledger = MemoryLedger(
        budget=MemoryBudget(
            total_bytes=total,
            free_bytes=int(total * free_share),
            fraction=fraction,
            semantics=semantics,
            externally_held_bytes=held,
        ),
        non_kv_rows=rows(weights, runtime, activation),
        frontend_reservation_bytes=reservation,
    )
    pool_bytes = int(max(ledger.available_bytes, 0) * pool_share)
    shown = ledger.rows(pool_bytes)
    assert sum_bytes(shown) == total
    needed = sum(row.num_bytes for row in shown if row.name not in ("remainder", "outside the budget", "missing"))
    assert [row.name for row in shown if row.num_bytes < 0] == (["missing"] if needed > total else [])


def test_available_memory_is_what_the_rows_leave_of_the_request() -> None:
    ledger = MemoryLedger(budget=budget(80 * GIB, 0.5), non_kv_rows=rows(16 * GIB, GIB, 3 * GIB))
    assert ledger.available_bytes == 20 * GIB
    assert ledger.non_kv_bytes == 20 * GIB
    assert ledger.row("weights").num_bytes == 16 * GIB
    with pytest.raises(InputError, match="no row 'graphs'; it has weights, non-torch, peak activation"):
        ledger.row("graphs")


def test_it_may_be_negative_and_is_told_so() -> None:
    ledger = MemoryLedger(budget=budget(10 * GIB, 0.9), non_kv_rows=rows(16 * GIB, GIB, 3 * GIB))
    assert ledger.available_bytes == -11 * GIB
    assert sum_bytes(ledger.rows(0)) == 10 * GIB
    assert [row.name for row in ledger.rows(0) if row.num_bytes < 0] == ["missing"]


def test_nothing_is_missing_where_the_budget_counts_on_what_others_hold_and_the_pool_does_not() -> None:
    """Blocks that were given are not checked against the budget; what it leaves beside them is not all there."""
    crowded = attrs.evolve(budget(80 * GIB, 0.9), free_bytes=60 * GIB)
    ledger = MemoryLedger(budget=crowded, non_kv_rows=rows(16 * GIB, GIB, 3 * GIB))
    assert ledger.available_bytes == 52 * GIB
    found = {row.name: row.num_bytes for row in ledger.rows(2 * GIB)}
    assert found["remainder"] == 38 * GIB and found["in use before start"] == 20 * GIB
    assert found["outside the budget"] == 0 and "missing" not in found and sum(found.values()) == 80 * GIB
    crowds_out = {row.name: row.num_bytes for row in ledger.rows(45 * GIB)}
    assert crowds_out["missing"] == -5 * GIB and "remainder" not in crowds_out


def test_pinned_bytes_replace_what_the_rows_leave() -> None:
    ledger = MemoryLedger(
        budget=budget(80 * GIB, 0.9),
        non_kv_rows=rows(16 * GIB, GIB, 3 * GIB),
        kv_cache_memory_bytes=5 * GIB,
        frontend_reservation_bytes=GIB,
    )
    assert ledger.available_bytes == 4 * GIB


def test_the_range_of_estimates_carries_over_to_what_is_available() -> None:
    estimate = LedgerRow(
        name="peak activation",
        num_bytes=2 * GIB,
        source=RowSource.ESTIMATE,
        role=RowRole.TRANSIENT,
        formula="2 GiB",
        low_bytes=GIB,
        high_bytes=4 * GIB,
    )
    ledger = MemoryLedger(budget=budget(80 * GIB, 1.0), non_kv_rows=(estimate,))
    assert ledger.available_range_bytes == (76 * GIB, 79 * GIB)
    with pytest.raises(InputError, match="outside the row's own range"):
        LedgerRow(
            name="x",
            num_bytes=5,
            source=RowSource.ESTIMATE,
            role=RowRole.RESIDENT,
            formula="",
            low_bytes=6,
            high_bytes=7,
        )


def test_a_negative_row_is_bad_input() -> None:
    with pytest.raises(InputError, match="weights: -1 bytes"):
        given_row("weights", -1, RowRole.RESIDENT)


def profile(free_after: int, *, allocated: int, peak: int, reserved: int, weights: int | None) -> MemoryProfile:
    def reading(free: int, a: int, p: int, r: int) -> MemorySnapshot:
        return MemorySnapshot(
            total_bytes=80 * GIB,
            free_bytes=free,
            torch_allocated_bytes=a,
            torch_peak_bytes=p,
            torch_reserved_bytes=r,
        )

    return MemoryProfile(
        before=reading(78 * GIB, 0, 0, 0),
        after=reading(free_after, allocated, peak, reserved),
        weights_bytes=weights,
        strict_profiling=True,
    )


def test_a_measured_profile_splits_into_weights_workspace_libraries_and_peak() -> None:
    found = measured_rows(
        profile(58 * GIB, allocated=18 * GIB, peak=21 * GIB, reserved=18 * GIB, weights=15 * GIB),
        given_row("CUDA graphs", GIB, RowRole.GRAPHS),
    )
    assert {row.name: row.num_bytes // GIB for row in found} == {
        "weights": 15,
        "non-torch": 2,
        "sampler and workspace": 3,
        "peak activation": 3,
        "CUDA graphs": 1,
    }
    assert all(row.source is RowSource.MEASURED for row in found[:4])


@given(
    consumed=st.integers(0, 70 * GIB),
    weights=st.integers(0, 80 * GIB),
    reserved=st.integers(-GIB, 80 * GIB),
    peak=st.integers(0, 90 * GIB),
)
def test_measured_rows_tie_out_even_where_readings_contradict(
    consumed: int, weights: int, reserved: int, peak: int
) -> None:
    reading = profile(78 * GIB - consumed, allocated=GIB, peak=peak, reserved=reserved, weights=weights)
    found = measured_rows(reading, None)
    assert sum_bytes(found, RowRole.RESIDENT) == reading.total_consumed_bytes
    assert sum_bytes(found, RowRole.TRANSIENT) == reading.transient_headroom_bytes
    assert all(row.num_bytes >= 0 for row in found if row.name != "freed by other processes")


def test_weights_peak_and_libraries_of_2_2_and_1_gib_are_5_gib_beside_the_pool() -> None:
    # Another process holds 1 GiB before and after: it is in neither category.
    found = measured_rows(profile(75 * GIB, allocated=2 * GIB, peak=4 * GIB, reserved=2 * GIB, weights=2 * GIB), None)
    assert [(row.name, row.num_bytes // GIB) for row in found] == [
        ("weights", 2),
        ("non-torch", 1),
        ("peak activation", 2),
    ]
    ledger = MemoryLedger(budget=budget(80 * GIB, 0.5), non_kv_rows=found)
    assert ledger.non_kv_bytes == 5 * GIB
    assert ledger.available_bytes == 35 * GIB


def test_20_requested_less_6_consumed_less_1_of_headroom_are_13() -> None:
    found = measured_rows(profile(72 * GIB, allocated=6 * GIB, peak=7 * GIB, reserved=6 * GIB, weights=5 * GIB), None)
    ledger = MemoryLedger(budget=budget(80 * GIB, 0.25), non_kv_rows=found)
    assert ledger.budget.requested_bytes == 20 * GIB
    assert ledger.available_bytes == 13 * GIB


def test_a_profile_that_measured_no_weights_needs_them_from_elsewhere() -> None:
    reading = profile(58 * GIB, allocated=0, peak=0, reserved=0, weights=None)
    with pytest.raises(InputError, match="give them as a row"):
        measured_rows(reading, None)
    found = measured_rows(reading, None, given_row("weights", GIB, RowRole.RESIDENT))
    assert found[0].source is RowSource.GIVEN
