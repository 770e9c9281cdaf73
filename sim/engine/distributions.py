"""Latencies of a run: quantile sketches for the report and, if wanted, the histograms of vLLM's metrics."""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import reduce
from itertools import repeat
from operator import add
from typing import NamedTuple

import attrs
import numpy as np

from ...backends.sinks.metrics import boundaries
from ...core.errors import InputError

NANOSECONDS = 1_000_000_000
# Samples of each kind that wait to be counted at most: counting many at once costs a fraction of one by one.
MAX_PENDING = 1024

RELATIVE_ERROR = 0.001
_SMALLEST = 1e-3
_LOG_GAMMA = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))
_NUM_BUCKETS = math.ceil(math.log(1e18) / _LOG_GAMMA) + 2


class QuantileSketch:
    """Mean and percentiles of any number of samples in constant memory; a percentile is off by at most 0.1 % of itself.

    It is a histogram with logarithmic buckets from 1e-3 to 1e15. Count, minimum and maximum are exact, and so is the
    total if the samples are whole numbers. Samples are positive numbers, or 0, which counts in the smallest bucket.
    """

    def __init__(self) -> None:
        self.count = 0
        self.total: float = 0
        self.minimum = math.inf
        self.maximum = -math.inf
        # A list, since entries are read one at a time and an array would box each.
        self._buckets = [0] * _NUM_BUCKETS

    def add(self, value: float, weight: int = 1) -> None:
        """Add one sample `weight` times."""
        self.count += weight
        self.total += value * weight
        if value < self.minimum:
            self.minimum = value
        if value > self.maximum:
            self.maximum = value
        self._buckets[_bucket_of(value)] += weight

    def add_all(self, values: Sequence[float]) -> None:
        """Add many samples; the same as adding them one by one."""
        if not values:
            return
        self.count += len(values)
        # Sample by sample, as `add` does: the last digit of a sum depends on the order.
        self.total = reduce(add, values, self.total)
        self.minimum = min(self.minimum, min(values))
        self.maximum = max(self.maximum, max(values))
        for bucket in map(_bucket_of, values):
            self._buckets[bucket] += 1

    def merge(self, other: "QuantileSketch") -> None:
        """Add every sample of another sketch."""
        self.count += other.count
        self.total += other.total
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)
        self._buckets = [mine + theirs for mine, theirs in zip(self._buckets, other._buckets, strict=True)]

    @property
    def mean(self) -> float | None:
        """The mean, or None without samples."""
        return self.total / self.count if self.count else None

    def percentile(self, percent: float) -> float | None:
        """The smallest value that at least `percent` % of the samples do not exceed (nearest rank), or None."""
        if not self.count:
            return None
        rank = max(1, math.ceil(percent / 100 * self.count))
        if rank == self.count:
            return self.maximum
        bucket = int(np.searchsorted(np.cumsum(self._buckets), rank))
        middle = _SMALLEST * math.exp((bucket - 0.5) * _LOG_GAMMA) if bucket else 0.0
        return min(max(middle, self.minimum), self.maximum)

    def summary(self, unit: float = 1.0) -> dict[str, float | int | None]:
        """`mean`, `p50`, `p90`, `p99` and `max` in units of `unit`, and `count`; None without samples."""
        percentiles = {f"p{percent}": self.percentile(percent) for percent in (50, 90, 99)}
        figures = {"mean": self.mean, **percentiles, "max": self.maximum if self.count else None}
        scaled = {name: None if value is None else value / unit for name, value in figures.items()}
        return {**scaled, "count": self.count}


def _bucket_of(value: float) -> int:
    if value <= _SMALLEST:
        return 0
    return min(math.ceil(math.log(value / _SMALLEST) / _LOG_GAMMA), _NUM_BUCKETS - 1)


class Histogram:
    """Counts whole numbers up to fixed boundaries, as a Prometheus histogram does. Counts and total are exact."""

    def __init__(self, boundaries: Sequence[int]) -> None:
        if list(boundaries) != sorted(set(boundaries)):
            raise InputError(f"the boundaries of a histogram must ascend, not be {list(boundaries)}")
        self.boundaries = tuple(boundaries)  # a sample that equals a boundary counts in it ("le")
        self.counts = [0] * (len(boundaries) + 1)  # one per boundary, and one for samples above; not cumulated
        self.total: float = 0  # the sum of the samples

    def add(self, value: float, weight: int = 1) -> None:
        """Count one sample `weight` times."""
        self.counts[bisect_left(self.boundaries, value)] += weight
        self.total += value * weight

    def add_all(self, values: Sequence[float]) -> None:
        """Count many samples; the same as adding them one by one."""
        for place, number in Counter(map(bisect_left, repeat(self.boundaries), values)).items():
            self.counts[place] += number
        self.total = reduce(add, values, self.total)


def _of_ms(boundaries_ms: tuple[int, ...]) -> Histogram:
    return Histogram([boundary * 1_000_000 for boundary in boundaries_ms])


class FinishedRequest(NamedTuple):
    """The figures of a finished request that are counted; times from the start of the run. See `RequestRecord`."""

    arrival_ns: int
    queue_ns: int  # from the engine's queue to the first admission
    admitted_ns: int  # when it was first admitted
    first_ns: int  # when it got its first token
    last_ns: int
    tpot_ns: float | None  # None for a single token
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int


class RunHistograms:
    """The histograms of a run, with the boundaries of vLLM's metrics. Times are in nanoseconds, sizes in tokens.

    Each counts one sample per request, except `itl_ns` (per gap between tokens) and `step_tokens` (per engine step).
    """

    def __init__(self, max_model_len: int) -> None:
        """Empty histograms for requests of up to `max_model_len` tokens."""
        self.ttft_ns = _of_ms(boundaries.FIRST_TOKEN_MS)
        self.itl_ns, self.tpot_ns = (_of_ms(boundaries.TOKEN_MS) for _ in range(2))
        self.e2e_ns, self.queue_ns, self.prefill_ns, self.decode_ns, self.inference_ns = (
            _of_ms(boundaries.REQUEST_MS) for _ in range(5)
        )
        tokens = boundaries.token_boundaries(max_model_len)
        self.prompt_tokens, self.output_tokens, self.prefill_computed_tokens = (Histogram(tokens) for _ in range(3))
        self.preemptions = Histogram(boundaries.PREEMPTIONS)
        self.step_tokens = Histogram(boundaries.STEP_TOKENS)

    def count_finished(self, finished: Sequence[FinishedRequest]) -> None:
        """Count finished requests."""
        self.e2e_ns.add_all([one.last_ns - one.arrival_ns for one in finished])
        self.queue_ns.add_all([one.queue_ns for one in finished])
        self.prefill_ns.add_all([one.first_ns - one.admitted_ns for one in finished])
        self.decode_ns.add_all([one.last_ns - one.first_ns for one in finished])
        self.inference_ns.add_all([one.last_ns - one.admitted_ns for one in finished])
        self.tpot_ns.add_all([one.tpot_ns for one in finished if one.tpot_ns is not None])
        self.prompt_tokens.add_all([one.num_prompt_tokens for one in finished])
        self.output_tokens.add_all([one.num_output_tokens for one in finished])
        self.prefill_computed_tokens.add_all([one.num_prompt_tokens - one.num_cached_tokens for one in finished])
        self.preemptions.add_all([one.num_preemptions for one in finished])


@attrs.define
class LatencySketches:
    """Sketches of the latencies of a run, in nanoseconds."""

    ttft_ns: QuantileSketch = attrs.field(factory=QuantileSketch)  # from arrival to the first token
    tpot_ns: QuantileSketch = attrs.field(factory=QuantileSketch)  # per later output token, one sample per request
    itl_ns: QuantileSketch = attrs.field(factory=QuantileSketch)  # between successive tokens of a request
    e2e_ns: QuantileSketch = attrs.field(factory=QuantileSketch)  # from arrival to the last token

    def merge(self, other: "LatencySketches") -> None:
        """Add every sample of other sketches."""
        for field in attrs.fields(LatencySketches):
            getattr(self, field.name).merge(getattr(other, field.name))

    def summaries(self) -> dict[str, dict[str, float | int | None]]:
        """`ttft_s`, `tpot_s`, `itl_s` and `e2e_s`: the summary of each in seconds."""
        names = [field.name for field in attrs.fields(LatencySketches)]
        return {name.replace("_ns", "_s"): getattr(self, name).summary(NANOSECONDS) for name in names}


class LatencySamples:
    """Collects samples and counts them in batches: when there are many, or when the result is read."""

    def __init__(self, histograms: RunHistograms | None) -> None:
        """Count in `histograms` too, if given."""
        self._histograms = histograms
        self._sketches = LatencySketches()
        # Samples that are not counted yet.
        self.gaps: defaultdict[int, int] = defaultdict(int)  # nanoseconds between tokens of a request -> how often
        self.steps: defaultdict[int, int] = defaultdict(int)  # tokens of an engine step -> how many steps
        self.first_tokens: list[int] = []  # nanoseconds from the arrival of a request
        self.finished: list[FinishedRequest] = []

    def count_when_many(self) -> None:
        """Count the pending samples if there are many. Call it regularly to bound their number."""
        if max(map(len, (self.gaps, self.steps, self.first_tokens, self.finished))) >= MAX_PENDING:
            self._count()

    @property
    def histograms(self) -> RunHistograms | None:
        """The given histograms, up to date."""
        self._count()
        return self._histograms

    @property
    def sketches(self) -> LatencySketches:
        """The sketches, up to date."""
        self._count()
        return self._sketches

    def _count(self) -> None:
        gaps, steps, first_tokens, finished = self.gaps, self.steps, self.first_tokens, self.finished
        if not (gaps or steps or first_tokens or finished):
            return
        sketches = self._sketches
        for nanoseconds, times in gaps.items():
            sketches.itl_ns.add(nanoseconds, times)
        sketches.ttft_ns.add_all(first_tokens)
        sketches.tpot_ns.add_all([one.tpot_ns for one in finished if one.tpot_ns is not None])
        sketches.e2e_ns.add_all([one.last_ns - one.arrival_ns for one in finished])
        histograms = self._histograms
        if histograms is not None:
            for nanoseconds, times in gaps.items():
                histograms.itl_ns.add(nanoseconds, times)
            for num_tokens, times in steps.items():
                histograms.step_tokens.add(num_tokens, times)
            histograms.ttft_ns.add_all(first_tokens)
            histograms.count_finished(finished)
        for pending in (gaps, steps, first_tokens, finished):
            pending.clear()
