"""The profiler after its profile: graphs are estimated and captured, the pool allocated, all of it reconciled."""

from contextlib import contextmanager
from typing import Any

import attrs
import pytest
from kvledger.backends.profiling.graph_memory import GraphCaptures
from kvledger.core.errors import InputError
from kvledger.core.memory.ledger import RowSource

from tests.backends.profiling.arithmetic_card import GIB, MIB, Card, bytes_of, graphs, profiled


def test_graphs_are_sampled_largest_first_over_the_smallest_pool_and_let_go() -> None:
    card = Card()
    profiler = profiled(card)
    held = card.context_bytes
    card.calls.clear()

    @contextmanager
    def smallest_pool() -> Any:
        card.calls.append("smallest pool")
        card.allocate(GIB)
        yield
        card.calls.append("end of smallest pool")
        card.free(GIB)

    measured = profiler.estimate_graphs((graphs(card),), smallest_pool=smallest_pool)
    assert [call for call in card.calls if call not in ("read", "release_cached")] == [
        *("inference mode", "smallest pool", "capture 8", "capture 4", "end of smallest pool", "end of inference mode")
    ]
    assert card.context_bytes == held
    row = measured.rows[-1]
    assert (row.name, row.source) == ("CUDA graphs", RowSource.ESTIMATE)
    assert row.num_bytes == (100 + 4 + 2 * 4) * MIB
    assert (row.low_bytes, row.high_bytes) == (104 * MIB, 112 * MIB)
    assert "2 more (full) x 4,194,304" in row.formula


def test_a_graph_that_shows_no_memory_still_takes_a_share() -> None:
    card = Card()
    profiler = profiled(card)
    measured = profiler.estimate_graphs((GraphCaptures(mode="full", sizes=(1, 2, 3), capture=lambda _: None),))
    assert measured.graph_bytes == MIB


def test_two_modes_are_captured_one_after_the_other_and_added() -> None:
    card = Card()
    profiler = profiled(card)
    second = attrs.evolve(graphs(card, sizes=(16, 32), shared=8 * MIB), mode="piecewise")
    measured = profiler.estimate_graphs((graphs(card), second))
    assert measured.graphs is not None
    assert [(s.mode, s.size, s.num_bytes // MIB) for s in measured.graphs.samples] == [
        ("full", 8, 100),
        ("full", 4, 4),
        ("piecewise", 32, 12),
        ("piecewise", 16, 4),
    ]
    assert measured.graph_bytes == (100 + 4 + 8 + 12 + 4) * MIB


def test_memory_that_sampled_graphs_do_not_give_back_is_a_warning_with_its_bytes() -> None:
    card = Card()
    profiler = profiled(card)

    def leak(_: int) -> None:
        card.context_bytes += 3 * MIB

    measured = profiler.estimate_graphs((GraphCaptures(mode="full", sizes=(1, 2), capture=leak),))
    assert measured.warnings == ("6.00 MiB (6,291,456 B) stayed taken after the sampled graphs were dropped",)


@pytest.mark.parametrize(("modes", "count"), [((), 2), ("some", 1)])
def test_an_estimate_of_nothing_or_from_one_graph_is_refused(modes: Any, count: int) -> None:
    card = Card()
    profiler = profiled(card)
    given = (graphs(card),) if modes else ()
    with pytest.raises(InputError, match=r"no graphs|num_captured_sizes is 1"):
        profiler.estimate_graphs(given, num_captured_sizes=count)


def test_start_up_reconciles_to_the_byte_and_every_row_is_measured() -> None:
    card = Card()
    profiler = profiled(card)
    profiler.estimate_graphs((graphs(card),))
    assert profiler.allocate_pool(lambda: card.allocate(20 * GIB) or "pool", planned_bytes=20 * GIB) == "pool"
    mode = graphs(card)
    kept = profiler.capture_graphs(lambda: [mode.capture(size) for size in mode.sizes])
    report = profiler.reconcile()
    assert {row.source for row in report.rows} == {RowSource.MEASURED}
    assert bytes_of(report.rows)["CUDA graphs"] == 112 * MIB
    assert bytes_of(report.rows)["KV cache blocks"] == 20 * GIB
    assert report.actual_bytes == report.expected_bytes == (16 + 20) * GIB + GIB // 2 + 112 * MIB
    assert report.warnings == ()
    assert len(kept) == 4


def test_what_differs_from_the_plan_is_named_with_its_bytes() -> None:
    card = Card()
    profiler = profiled(card)
    profiler.estimate_graphs((graphs(card),))
    profiler.allocate_pool(lambda: card.allocate(20 * GIB), planned_bytes=20 * GIB)
    mode = graphs(card, shared=196 * MIB)
    kept = profiler.capture_graphs(lambda: [mode.capture(size) for size in mode.sizes])
    card.context_bytes += 64 * MIB
    report = profiler.reconcile()
    assert len(kept) == 4
    assert report.unexplained_bytes == 64 * MIB
    graphs_warning, unexplained_warning = report.warnings
    assert "(104,857,600 B) more than the 0.11 GiB (117,440,512 B) set aside" in graphs_warning
    assert "(67,108,864 B) more than the rows explain" in unexplained_warning


def test_an_engine_without_graphs_reconciles_too() -> None:
    card = Card()
    profiler = profiled(card)
    profiler.allocate_pool(lambda: card.allocate(GIB), planned_bytes=GIB)
    report = profiler.reconcile()
    assert "CUDA graphs" not in bytes_of(report.rows)
    assert report.warnings == ()


def test_a_pool_smaller_than_planned_is_refused_with_both_figures() -> None:
    card = Card()
    profiler = profiled(card)
    with pytest.raises(InputError, match=r"planned at 20.00 GiB .* grew by 19.00 GiB"):
        profiler.allocate_pool(lambda: card.allocate(19 * GIB), planned_bytes=20 * GIB)
