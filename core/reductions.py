"""Sums and extremes of short columns: the ufuncs' own reductions, without the Python layer of ndarray's methods.

A step asks for a dozen of them over a few hundred entries, and the methods' layer costs more than the work.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def sum_of(column: NDArray[Any]) -> int:
    """The sum of a column of integers; 0 for an empty one."""
    return int(np.add.reduce(column))


def smallest(column: NDArray[Any]) -> int:
    """The smallest entry of a column that is not empty."""
    return int(np.minimum.reduce(column))


def largest(column: NDArray[Any]) -> int:
    """The largest entry of a column that is not empty."""
    return int(np.maximum.reduce(column))


def all_are(column: NDArray[Any], value: int) -> bool:
    """Whether every entry is `value`."""
    return np.count_nonzero(column == value) == len(column)
