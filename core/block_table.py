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
        self._width = max_num_blocks_per_req
        # One buffer, two faces: memoryview and array.array read and write a single row several times as fast, NumPy
        # whole batches.
        self._entries = self.table.reshape(-1).data
        self._nulls = np.zeros(max_num_blocks_per_req, dtype=np.int32).data
        self._counts = array("i", bytes(4 * max_num_reqs))
        self.num_blocks_per_row: NDArray[np.int32] = np.frombuffer(self._counts, dtype=np.int32)

    def count(self, row: int) -> int:
        """How many blocks the row holds, null blocks included."""
        return self._counts[row]

    def blocks(self, row: int, start: int = 0, stop: int | None = None) -> list[int]:
        """The row's blocks with logical index `start <= index < stop` (all by default), null blocks included."""
        first = row * self._width
        return self._entries[first + start : first + (self._counts[row] if stop is None else stop)].tolist()

    def block(self, row: int, index: int) -> int:
        """The block at one logical index."""
        return self._entries[row * self._width + index]

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
        if stop > self._width:
            raise MisuseError(
                f"row {row} would hold {stop} blocks of {self.block_size}; its table has {self._width} entries"
            )
        first = row * self._width
        self._entries[first + start : first + stop] = array("i", blocks)
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
        first, count = row * self._width, self._counts[row]
        if num_blocks < count:
            self._entries[first + num_blocks : first + count] = self._nulls[: count - num_blocks]
        self._counts[row] = num_blocks

    def clear(self, row: int) -> None:
        """Empty the row for its next request."""
        self.shrink(row, 0)
