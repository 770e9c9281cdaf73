"""SLOs and the search for the smallest fleet that keeps them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvledger.core import InputError
from kvledger.sim.engine.metrics import RequestRecord
from kvledger.sim.search.slo import (
    Slo,
    SloTally,
    Trial,
    Verdict,
    confidence_interval,
    highest_meeting,
    smallest_meeting,
)


def record(ttft_s: float, tpot_s: float | None = 0.01) -> RequestRecord:
    return RequestRecord("r", 0.0, 0.0, ttft_s, tpot_s, ttft_s, 10, 1 if tpot_s is None else 5, 0, 0)


def tally(slo: Slo, *records: RequestRecord, lost: int = 0) -> Verdict:
    counted = SloTally(slo)
    for one in records:
        counted.finished(one)
    return counted.verdict(len(records) + lost)


def test_the_99th_percentile_is_a_sample_by_nearest_rank() -> None:
    records = [record(n / 100) for n in range(1, 101)]
    verdict = tally(Slo(ttft_p99_s=0.99), *records)
    assert verdict.figures["ttft_p99_s"] == {"limit": 0.99, "value": 0.99, "met": True}
    assert not tally(Slo(ttft_p99_s=0.989), *records).met


def test_a_refused_request_never_gets_its_token() -> None:
    records = [record(0.1)] * 99
    assert tally(Slo(ttft_p99_s=0.2), *records, lost=1).met
    verdict = tally(Slo(ttft_p99_s=0.2), *records, lost=2)
    assert verdict.figures["ttft_p99_s"] == {"limit": 0.2, "value": None, "met": False}


def test_both_promises_must_hold() -> None:
    slo = Slo(ttft_p99_s=1.0, tpot_p99_s=0.02)
    assert tally(slo, record(0.9, 0.02)).met
    assert not tally(slo, record(0.9, 0.03)).met
    assert not tally(slo, record(1.1, 0.02)).met
    assert tally(slo, record(0.9, None)).figures["tpot_p99_s"] == {"limit": 0.02, "value": None, "met": True}


def test_goodput_counts_requests_that_keep_both_limits() -> None:
    slo = Slo(goodput_share=0.5, ttft_s=1.0, tpot_s=0.02)
    records = record(0.5, 0.01), record(0.5, 0.03), record(2.0, 0.01), record(1.0, None)
    assert tally(slo, *records).figures["goodput_share"] == {"limit": 0.5, "value": 0.5, "met": True}
    assert not tally(slo, *records, lost=1).met


@pytest.mark.parametrize(
    ("promises", "message"),
    [
        ({}, "there is no SLO"),
        ({"goodput_share": 0.9}, "go together"),
        ({"ttft_p99_s": 1.0, "ttft_s": 1.0}, "go together"),
        ({"goodput_share": 1.5, "ttft_s": 1.0}, "a share above 0 and at most 1"),
        ({"ttft_p99_s": 0.0}, "must be a number of seconds above 0"),
    ],
)
def test_promises_that_say_nothing_are_refused(promises: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Slo(**promises)


def trial(value: float, met: bool) -> Trial:
    return Trial(value=value, verdict=Verdict(met=met, figures={}))


@given(st.integers(1, 70), st.integers(1, 64), st.integers(1, 64), st.integers(0, 3))
def test_the_answer_meets_and_the_one_below_does_not(boundary: int, start: int, most: int, probes: int) -> None:
    runs: list[int] = []

    def run(n: int) -> Trial:
        runs.append(n)
        assert 1 <= n <= most
        return trial(n, n >= boundary)

    start = min(start, most)
    found = smallest_meeting(run, start=start, most=most, probes=probes)
    assert len(runs) == len(set(runs))
    assert found.is_monotone
    if boundary > most:
        assert found.answer is None
        return
    assert found.answer == boundary
    assert found.trial(boundary).met
    assert boundary == 1 or not found.trial(boundary - 1).met
    assert [one.value for one in found.trials] == sorted(runs)
    assert found.safe == boundary
    assert len(runs) <= 2 + 2 * probes + 2 * math.log2(abs(boundary - start) + 1)


def test_answers_that_are_not_monotone_are_noticed() -> None:
    found = smallest_meeting(lambda n: trial(n, n in (3, 5, 6, 7, 8)), start=2, most=8)
    assert found.answer == 3
    assert not found.is_monotone
    assert found.contradictions == ((3, 4),)
    assert found.safe == 5


@given(st.floats(0.02, 60.0), st.floats(0.05, 20.0))
def test_the_highest_rate_is_bracketed_within_the_tolerance(boundary: float, start: float) -> None:
    found = highest_meeting(lambda rate: trial(rate, rate <= boundary), start=start)
    assert found.is_monotone
    assert found.answer is not None
    assert found.answer <= boundary
    missed = min(one.value for one in found.trials if not one.met)
    assert boundary < missed <= found.answer * 1.02 * (1 + 1e-9)


def test_a_rate_beyond_the_bounds_is_no_answer() -> None:
    assert highest_meeting(lambda rate: trial(rate, False), lowest=0.5).answer is None
    assert highest_meeting(lambda rate: trial(rate, True), highest=4.0).answer == 4.0


def test_a_confidence_interval_of_three_seeds() -> None:
    found = confidence_interval([4.0, 5.0, 6.0])
    assert found["mean"] == 5.0
    assert found["low"] == pytest.approx(5 - 4.303 / 3**0.5, abs=1e-3)
    assert found["high"] == pytest.approx(5 + 4.303 / 3**0.5, abs=1e-3)
    assert confidence_interval([4.0])["low"] is None


def test_bounds_that_hold_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="at least 1 and at most 4"):
        smallest_meeting(lambda n: trial(n, True), start=5, most=4)
    with pytest.raises(InputError, match="it must be from"):
        highest_meeting(lambda n: trial(n, True), start=100.0)
    with pytest.raises(InputError, match="at least one sample"):
        confidence_interval([])


def test_more_probes_look_farther_on_either_side() -> None:
    runs: list[float] = []

    def run(n: float) -> Trial:
        runs.append(n)
        return trial(n, n in (6, 7, 8, 16) or n > 20)

    near = smallest_meeting(run, most=64, probes=1)
    assert near.answer == 6
    assert near.is_monotone
    assert set(runs) == {1, 2, 4, 8, 6, 5, 7, 3}
    far = smallest_meeting(run, most=64, probes=3)
    assert {9, 10} <= {one.value for one in far.trials}
    assert {(met, missed) for met in (6, 7, 8) for missed in (9, 10)} <= set(far.contradictions)
    assert far.safe == 21  # the search went on until two in a row met
    assert {20, 21, 22} <= {one.value for one in far.trials}


def test_a_probe_finds_a_rate_that_does_worse_than_a_higher_one() -> None:
    def run(rate: float) -> Trial:
        return trial(rate, rate <= 1.0 and not 0.93 < rate < 0.96)

    found = highest_meeting(run, probes=2)
    assert found.answer is not None
    assert 0.98 < found.answer <= 1.0
    assert not found.is_monotone
    assert found.safe is not None
    assert found.safe < 0.93
    assert highest_meeting(run, probes=0).is_monotone


def test_the_runs_left_are_an_upper_bound_that_falls_to_one() -> None:
    told: list[int] = []
    done: list[int] = []

    def run(n: float) -> Trial:
        done.append(0)
        return trial(n, n >= 23)

    smallest_meeting(run, most=64, on_left=lambda left: told.append(left + len(done)))
    assert told
    assert all(total >= len(done) for total in told)
    assert told[-1] == len(done)
