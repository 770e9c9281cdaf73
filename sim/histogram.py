"""Exact counts of samples up to fixed boundaries: what a Prometheus histogram is made of."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from itertools import repeat
from operator import add

from ..core.errors import InputError


class Histogram:
    """Counts whole numbers by the smallest boundary that is not below them. Counts and total are exact.

    Attributes:
        boundaries: ascending; a sample that equals a boundary counts as up to it ("le").
        counts: one a boundary, and one for what is above the last. Not cumulated.
        total: the sum of the samples.
    """

    def __init__(self, boundaries: Sequence[int]) -> None:
        if list(boundaries) != sorted(set(boundaries)):
            raise InputError(f"the boundaries of a histogram must ascend, not be {list(boundaries)}")
        self.boundaries = tuple(boundaries)
        self.counts = [0] * (len(boundaries) + 1)
        self.total: float = 0

    def add(self, value: float, weight: int = 1) -> None:
        """Count one sample `weight` times."""
        self.counts[bisect_left(self.boundaries, value)] += weight
        self.total += value * weight

    def add_all(self, values: Sequence[float]) -> None:
        """Count each of many samples once; the same as adding one after the other."""
        for place, number in Counter(map(bisect_left, repeat(self.boundaries), values)).items():
            self.counts[place] += number
        self.total = reduce(add, values, self.total)

    @property
    def count(self) -> int:
        """How many samples there were."""
        return sum(self.counts)
