"""Seeded draws from the few distributions that the workloads use, identical on every machine and Python version.

Only `random.Random.random()` is drawn from: it is the one method whose sequence for a seed Python promises to keep.
Everything else is computed from it here, so that no library upgrade changes a workload.
"""

import math
from random import Random
from statistics import NormalDist

_STANDARD_NORMAL = NormalDist()


class Draws:
    """A stream of random numbers; the same seed gives the same stream."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed).random

    def uniform(self) -> float:
        """In [0, 1)."""
        return self._random()

    def happens(self, probability: float) -> bool:
        """True with this probability."""
        return self._random() < probability

    def normal(self, mean: float = 0.0, deviation: float = 1.0) -> float:
        """Gaussian, by the inverse of its distribution function."""
        return mean + deviation * _STANDARD_NORMAL.inv_cdf(self._open_uniform())

    def lognormal(self, median: float, sigma: float) -> float:
        """A Gaussian of mean ln(median) and deviation sigma, exponentiated."""
        return median * math.exp(sigma * self.normal())

    def exponential(self, mean: float) -> float:
        """Time between events that happen 1/mean times per unit."""
        return -mean * math.log(self._open_uniform())

    def gamma(self, shape: float, mean: float) -> float:
        """Gamma with this shape and mean (Marsaglia and Tsang 2000; below shape 1 by their power of a uniform)."""
        boost = 1.0
        scale = mean / shape
        if shape < 1:
            boost = self._open_uniform() ** (1 / shape)
            shape += 1
        d = shape - 1 / 3
        c = 1 / math.sqrt(9 * d)
        while True:
            x = self.normal()
            v = (1 + c * x) ** 3
            if v > 0 and math.log(self._open_uniform()) < 0.5 * x * x + d - d * v + d * math.log(v):
                return d * v * scale * boost

    def beta(self, a: float, b: float) -> float:
        """Beta(a, b), as the share of one of two gammas."""
        first, second = self.gamma(a, a), self.gamma(b, b)
        return first / (first + second)

    def _open_uniform(self) -> float:
        """In (0, 1): logarithms and inverse distribution functions have no value at the ends."""
        while True:
            value = self._random()
            if value > 0:
                return value
