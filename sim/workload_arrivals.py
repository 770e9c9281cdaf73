"""When requests come: a point process fitted to recorded times, and seeded draws from it.

Recorded times are taken apart into batches (requests with one timestamp) and the gaps between them. Long gaps follow
long gaps in bursty traffic, so a gap is drawn in two steps: its class (one of a few, by size) from the class before
it, as a Markov chain, and its length from the lengths seen in that class. Batch sizes are independent.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ..core.errors import InputError
from .random_draws import Draws

NUM_CLASSES = 8
# Quantiles kept of the gaps of a class and of the batch sizes.
NUM_QUANTILES = 128


@attrs.frozen
class ArrivalModel:
    """The process. Each table lists equally likely values, smallest first.

    Attributes:
        gaps_s: for each class of gaps, seconds between two batches.
        next_class: for each class, the chances of the class that follows it, added up.
        batch_sizes: requests that share a timestamp.
    """

    gaps_s: tuple[tuple[float, ...], ...]
    next_class: tuple[tuple[float, ...], ...]
    batch_sizes: tuple[int, ...]

    def times(self, draws: Draws) -> Iterator[float]:
        """Arrivals for ever, from 0 s on."""
        now, kind = 0.0, 0
        while True:
            for _ in range(_drawn(self.batch_sizes, draws)):
                yield now
            if not self.gaps_s:
                continue
            kind = bisect_right(self.next_class[kind], draws.uniform())
            now += _drawn(self.gaps_s[kind], draws)

    def as_dict(self) -> dict[str, Any]:
        """Its size and means, for the report."""
        return {
            "gap_classes": len(self.gaps_s),
            "mean_gap_s_of_class": [sum(gaps) / len(gaps) for gaps in self.gaps_s],
            "mean_batch_size": sum(self.batch_sizes) / len(self.batch_sizes),
        }


def fit_arrivals(times_s: npt.NDArray[np.float64]) -> ArrivalModel:
    """The model of recorded arrivals (seconds, not decreasing). Raises `InputError` where there are none."""
    if not len(times_s):
        raise InputError("there are no arrivals to fit a workload to")
    batches, sizes = np.unique(times_s, return_counts=True)
    gaps = np.diff(batches)
    batch_sizes = tuple(int(size) for size in _quantiles(np.sort(sizes)))
    if not len(gaps):
        return ArrivalModel((), (), batch_sizes)
    # Classes of equal share; equal gaps share a class.
    edges = np.unique(np.quantile(gaps, np.arange(1, NUM_CLASSES) / NUM_CLASSES, method="higher"))
    _, kinds = np.unique(np.searchsorted(edges, gaps, side="left"), return_inverse=True)
    num_kinds = int(kinds.max()) + 1
    counts = np.zeros((num_kinds, num_kinds))
    np.add.at(counts, (kinds[:-1], kinds[1:]), 1)
    shares = np.bincount(kinds, minlength=num_kinds) / len(kinds)
    followed = counts.sum(axis=1, keepdims=True)
    chances = np.where(followed > 0, counts / np.maximum(followed, 1), shares)
    return ArrivalModel(
        tuple(tuple(float(gap) for gap in _quantiles(np.sort(gaps[kinds == kind]))) for kind in range(num_kinds)),
        tuple(_added_up(row.tolist()) for row in chances),
        batch_sizes,
    )


def _added_up(chances: Sequence[float]) -> tuple[float, ...]:
    """Cumulative chances without the last one, which is 1: what a uniform draw is compared with."""
    return tuple(accumulate(chances))[:-1]


def _quantiles(ordered: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """At most NUM_QUANTILES equally likely values, each the mean of its share, so that the mean is kept."""
    if len(ordered) <= NUM_QUANTILES:
        return ordered
    if ordered.dtype.kind == "i":
        at = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
        return ordered[(at * len(ordered)).astype(np.int64)]
    return np.array([piece.mean() for piece in np.array_split(ordered, NUM_QUANTILES)])


def _drawn(values: Sequence[Any], draws: Draws) -> Any:
    return values[int(draws.uniform() * len(values))]
