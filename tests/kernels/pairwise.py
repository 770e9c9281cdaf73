"""Few combinations in which every pair of values of any two factors occurs."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise_cover(factors: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Rows that hold every pair, greedily: each starts from a missing pair and takes what covers most others."""
    missing = {
        (i, a, j, b)
        for i, j in combinations(range(len(factors)), 2)
        for a, b in product(range(len(factors[i])), range(len(factors[j])))
    }
    rows = []
    while missing:
        i, a, j, b = min(missing)
        row: dict[int, int] = {i: a, j: b}
        for k in range(len(factors)):
            if k not in row:
                row[k] = max(range(len(factors[k])), key=lambda value, k=k: _num_new_pairs(row, k, value, missing))
        missing -= {(i, row[i], j, row[j]) for i, j in combinations(range(len(factors)), 2)}
        rows.append(tuple(factors[k][row[k]] for k in range(len(factors))))
    return rows


def _num_new_pairs(row: dict[int, int], k: int, value: int, missing: set[tuple[int, int, int, int]]) -> int:
    pairs = ((i, a, k, value) if i < k else (k, value, i, a) for i, a in row.items())
    return sum(pair in missing for pair in pairs)
