"""Sums and extremes of short columns, without the Python layer of ndarray's methods.

A step asks for a few of them over a few hundred entries, and the methods' layer costs more than the work. So does a
ufunc's reduction where finding the place of an extreme is all that is needed.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def sum_of(column: NDArray[Any]) -> int:
    """The sum of a column of integers; 0 for an empty one."""
    return int(np.add.reduce(column))


def smallest(column: NDArray[Any]) -> int:
    """The smallest entry of a column of integers that is not empty."""
    return column.item(column.argmin())


def largest(column: NDArray[Any]) -> int:
    """The largest entry of a column of integers that is not empty."""
    return column.item(column.argmax())
