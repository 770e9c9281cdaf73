"""The GPU benches themselves, run in small on a card of Python: what they time, what they print, and when they fail."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch", reason="the benches need torch")

from bench import test_gpu_kernels as bench  # noqa: E402
from bench.gpu_timing import Run, format_table  # noqa: E402

pytestmark = pytest.mark.torch


@attrs.define
class TurnClock:
    """Runs each thing once, and says how long a run took by whose turn it is."""

    us_by_turn: tuple[float, ...]

    def elapsed_us(self, runs: Sequence[Run]) -> list[float]:
        for run in {id(run): run for run in runs}.values():
            run()
        return [self.us_by_turn[number % len(self.us_by_turn)] for number in range(len(runs))]


@pytest.fixture
def card_of(triton_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A card whose contenders take so many microseconds, in their turns; 16 tokens and two layers."""
    if torch.cuda.is_available():
        pytest.skip("on a card the benches run as they are")
    from bench import gpu_workloads

    monkeypatch.setattr(gpu_workloads, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_workloads, "NUM_LAYERS", 2)
    monkeypatch.setattr(bench, "PREFILL_TOKENS", 16)
    monkeypatch.setattr(bench, "DECODE_TOKENS", 16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))

    def card(*us_by_turn: float) -> Any:
        return SimpleNamespace(
            torch=torch,
            clock=TurnClock(us_by_turn),
            l2_bytes=0,
            kernels=triton_kernels,
            work=gpu_workloads,
            rows=[],
            capture=lambda run: run,
        )

    return card


# Turns: copies, one copy, write in a graph, write without.
def test_a_prefill_write_at_nine_tenths_of_the_copy_passes_and_is_shown(card_of: Any) -> None:
    card = card_of(90.0, 80.0, 100.0, 200.0)
    bench.test_a_prefill_write_of_8192_tokens_in_32_layers_is_nearly_as_fast_as_a_copy(card)
    assert card.rows[2].figure == "0.900 of the copies, 0.800 of the one"
    assert [row.holds for row in card.rows] == [None, None, True, None]


def test_a_prefill_write_below_nine_tenths_of_the_copy_fails_and_is_shown_all_the_same(card_of: Any) -> None:
    card = card_of(89.0, 80.0, 100.0, 200.0)
    with pytest.raises(AssertionError, match=r"0\.890 of the copies"):
        bench.test_a_prefill_write_of_8192_tokens_in_32_layers_is_nearly_as_fast_as_a_copy(card)
    assert card.rows[2].holds is False
    assert "0.890 of the copies" in format_table("card", card.rows)


def test_a_kernel_that_writes_nothing_is_never_timed(card_of: Any) -> None:
    card = card_of(90.0, 80.0, 1.0, 1.0)
    card.kernels = SimpleNamespace(reshape_and_cache=lambda **_: None)
    with pytest.raises(AssertionError, match="layer 0: a key is not at its slot"):
        bench.test_a_prefill_write_of_8192_tokens_in_32_layers_is_nearly_as_fast_as_a_copy(card)
    assert card.rows == []


def test_an_8_bit_write_is_credited_with_the_bytes_that_it_moves(card_of: Any) -> None:
    card = card_of(100.0, 100.0)
    bench.test_other_caches_are_measured_beside_the_copy(card, "fp8 e4m3")
    bench.test_other_caches_are_measured_beside_the_copy(card, "packed K|V, heads first")
    assert [row.figure for row in card.rows] == ["0.750 of the copies", "1.000 of the copies"]


# Turns: the graph of empty kernels, the write.
@pytest.mark.parametrize(("write_us", "holds"), [(80.0, True), (80.1, False)])
def test_a_decode_write_may_cost_two_empty_graphs_and_no_more(card_of: Any, write_us: float, holds: bool) -> None:
    card = card_of(40.0, write_us)
    if holds:
        bench.test_a_decode_write_of_256_tokens_in_32_layers_costs_at_most_two_graphs_of_empty_kernels(card)
    else:
        with pytest.raises(AssertionError, match=r"2\.00 empty graphs"):
            bench.test_a_decode_write_of_256_tokens_in_32_layers_costs_at_most_two_graphs_of_empty_kernels(card)
    assert card.rows[1].holds is holds


@pytest.mark.parametrize(("median_us", "holds"), [(10.0, True), (10.1, False)])
def test_slot_mapping_may_take_10_us_and_no_more(card_of: Any, median_us: float, holds: bool) -> None:
    card = card_of(median_us)
    if holds:
        bench.test_slot_mapping_of_8192_tokens_takes_at_most_10_us(card, 3, 20)
    else:
        with pytest.raises(AssertionError, match=r"10\.1 us"):
            bench.test_slot_mapping_of_8192_tokens_takes_at_most_10_us(card, 3, 20)
    assert card.rows[0].holds is holds
