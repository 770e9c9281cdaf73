"""Mean and percentiles of any number of samples in constant memory."""

import math
from collections.abc import Sequence
from functools import reduce
from operator import add

import numpy as np

RELATIVE_ERROR = 0.001
_SMALLEST = 1e-3
_LOG_GAMMA = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))
_NUM_BUCKETS = math.ceil(math.log(1e18) / _LOG_GAMMA) + 2


class QuantileSketch:
    """A histogram over logarithmic buckets from 1e-3 to 1e15, so that a percentile is off by at most 0.1 % of itself.

    Count, minimum and maximum are exact, and so is the total where the samples are whole numbers. Samples are
    positive numbers, or 0, which counts as the smallest bucket.
    """

    def __init__(self) -> None:
        self.count = 0
        self.total: float = 0
        self.minimum = math.inf
        self.maximum = -math.inf
        # A list: one entry at a time is what it is asked for, and an array boxes each.
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
        """Add each of many samples once; the same as adding one after the other."""
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
        """Add every sample of another sketch; the same as having added them here."""
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
        """`mean`, `p50`, `p90`, `p99` and `max` in units of `unit`, and `count`; None where there is no sample."""
        figures = {
            "mean": self.mean,
            "p50": self.percentile(50),
            "p90": self.percentile(90),
            "p99": self.percentile(99),
            "max": self.maximum if self.count else None,
        }
        scaled = {name: None if value is None else value / unit for name, value in figures.items()}
        return {**scaled, "count": self.count}


def _bucket_of(value: float) -> int:
    if value <= _SMALLEST:
        return 0
    return min(math.ceil(math.log(value / _SMALLEST) / _LOG_GAMMA), _NUM_BUCKETS - 1)
