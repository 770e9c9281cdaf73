"""Samples counted many at a time are counted as if each had been counted when it came."""

from hypothesis import given, settings
from hypothesis import strategies as st
from kvledger.sim.engine.distributions import (
    MAX_PENDING,
    FinishedRequest,
    Histogram,
    LatencySamples,
    QuantileSketch,
    RunHistograms,
)
from kvledger.sim.engine.metrics import MAX_POINTS, TimeSeries

SAMPLES = st.lists(st.integers(0, 10**12) | st.floats(0, 1e12), max_size=30)
TIMES = st.lists(st.integers(0, 10**11), min_size=4, max_size=4).map(sorted)
REQUESTS = st.builds(
    lambda times, *counts: FinishedRequest(
        times[0], times[1] - times[0], *times[1:], (times[3] - times[2]) / 3 if counts[1] > 1 else None, *counts
    ),
    TIMES,
    *[st.integers(0, 5000)] * 4,
)


@given(batches=st.lists(SAMPLES, max_size=4))
def test_many_samples_at_once_make_the_same_sketch_and_histogram_to_the_last_digit(batches) -> None:
    counters = [QuantileSketch(), QuantileSketch(), Histogram((10, 10**6)), Histogram((10, 10**6))]
    for batch in batches:
        for at_once, one_by_one in (counters[:2], counters[2:]):
            at_once.add_all(batch)
            for sample in batch:
                one_by_one.add(sample)
    assert vars(counters[0]) == vars(counters[1])
    assert vars(counters[2]) == vars(counters[3])


def _state(histograms: RunHistograms) -> dict:
    return {name: vars(histogram) for name, histogram in vars(histograms).items()}


@given(requests=st.lists(REQUESTS, max_size=8), asked_after=st.sets(st.integers(0, 7)))
def test_asking_in_between_changes_no_figure(requests, asked_after) -> None:
    asked, at_the_end = LatencySamples(RunHistograms(4096)), LatencySamples(RunHistograms(4096))
    for number, request in enumerate(requests):
        for samples in (asked, at_the_end):
            samples.first_tokens.append(request.first_ns - request.arrival_ns)
            samples.gaps[request.num_output_tokens] += 1 + number
            samples.steps[request.num_prompt_tokens] += 1
            samples.finished.append(request)
        if number in asked_after:
            assert asked.sketches.e2e_ns.count == sum(asked.histograms.e2e_ns.counts) == number + 1
    assert _state(asked.histograms) == _state(at_the_end.histograms)
    for name in ("ttft_ns", "itl_ns", "tpot_ns", "e2e_ns"):
        assert vars(getattr(asked.sketches, name)) == vars(getattr(at_the_end.sketches, name))


def test_what_waits_to_be_counted_stays_within_bounds() -> None:
    samples = LatencySamples(None)
    for nanoseconds in range(5 * MAX_PENDING):
        samples.gaps[nanoseconds] += 2
        samples.count_when_many()
        assert len(samples.gaps) < MAX_PENDING
    gaps = samples.sketches.itl_ns
    assert (gaps.count, gaps.maximum) == (10 * MAX_PENDING, 5 * MAX_PENDING - 1)


@settings(max_examples=10)
@given(num_samples=st.integers(0, 3 * MAX_POINTS))
def test_a_series_that_is_asked_first_keeps_the_same_points(num_samples) -> None:
    offered, asked = TimeSeries(["figure"]), TimeSeries(["figure"])
    for time in range(num_samples):
        offered.add(time, (time,))
        if not asked.passes_over():
            asked.add(time, (time,))
    assert vars(asked) == vars(offered)
