"""Which block holds which part of a request: one int32 row a request and group, rows reused."""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .errors import MisuseError


class BlockTable:
    """The block tables of one group: `table` int32 `[max_num_reqs, max_num_blocks_per_req]`.

    Row r holds `num_blocks_per_row[r]` valid entries (int32 `[max_num_reqs]`); what lies behind them is 0, the null
    block. Tables only grow, except at their end (truncation); an entry changes only to the null block (out of window)
    or to a private copy (copy on write).
    """

    def __init__(self, max_num_reqs: int, max_num_blocks_per_req: int, block_size: int) -> None:
        self.block_size = block_size
        self.table: NDArray[np.int32] = np.zeros((max_num_reqs, max_num_blocks_per_req), dtype=np.int32)
        # One buffer, two faces: array.array reads single entries three times as fast, NumPy reads batches.
        self._counts = array("i", bytes(4 * max_num_reqs))
        self.num_blocks_per_row: NDArray[np.int32] = np.frombuffer(self._counts, dtype=np.int32)

    def count(self, row: int) -> int:
        """How many blocks the row holds, null blocks included."""
        return self._counts[row]

    def blocks(self, row: int, start: int = 0, stop: int | None = None) -> list[int]:
        """The row's blocks with logical index `start <= index < stop` (all by default), null blocks included."""
        return self.table[row, start : self._counts[row] if stop is None else stop].tolist()

    def block(self, row: int, index: int) -> int:
        """The block at one logical index."""
        return self.table[row, index].item()

    def shortfall(
        self, rows: NDArray[np.int64], num_slots: NDArray[np.int64]
    ) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Which places of a batch need more blocks for `num_slots` slots, and how many each."""
        short = num_slots - self.num_blocks_per_row[rows] * self.block_size
        which = (short > 0).nonzero()[0]
        return which, -(-short[which] // self.block_size)

    def extend(self, row: int, blocks: Sequence[int]) -> None:
        """Append blocks to one row."""
        start = self._counts[row]
        stop = start + len(blocks)
        if stop > self.table.shape[1]:
            raise MisuseError(
                f"row {row} would hold {stop} blocks of {self.block_size}; its table has {self.table.shape[1]} entries"
            )
        self.table[row, start:stop] = blocks
        self._counts[row] = stop

    def extend_each(self, rows: NDArray[np.integer], blocks: Sequence[int]) -> None:
        """Append one block to each of several distinct rows."""
        self.table[rows, self.num_blocks_per_row[rows]] = blocks
        self.num_blocks_per_row[rows] += 1

    def replace(self, row: int, indices: Sequence[int], block: int) -> None:
        """Put one block at the given logical indices (the null block when they went out of window)."""
        self.table[row, indices] = block

    def shrink(self, row: int, num_blocks: int) -> None:
        """Keep only the first `num_blocks` entries."""
        self.table[row, num_blocks : self._counts[row]] = 0
        self._counts[row] = num_blocks

    def clear(self, row: int) -> None:
        """Empty the row for its next request."""
        self.shrink(row, 0)
