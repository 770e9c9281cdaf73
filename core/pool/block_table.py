"""The block table of one group: which block holds which part of a request. One row per request; rows are reused."""

from array import array
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from ..errors import MisuseError

_NO_BLOCKS: NDArray[np.int64] = np.empty(0, dtype=np.int64)


class BlockTable:
    """Rows of at most `max_num_blocks_per_req` blocks each.

    A row only grows, except at its end (truncation); an entry changes only to the null block (out of window) or to a
    private copy (copy on write). Rows are lists, so that block ids move in and out without conversion; backends hold
    the arrays that kernels read.

    Attributes:
        block_size: tokens per block.
        keeps_states: whether a step leaves one state, in the block where its known tokens end: the entries that it adds
            to a row before that one are null.
        rows: the blocks of each row by logical index, null blocks included; read-only for callers.
        num_blocks_per_row: int32 `[max_num_reqs]`, how many entries each row has.
    """

    def __init__(
        self, max_num_reqs: int, max_num_blocks_per_req: int, block_size: int, keeps_states: bool = False
    ) -> None:
        self.block_size = block_size
        self.keeps_states = keeps_states
        self._block_size: NDArray[np.int64] = np.array(block_size, dtype=np.int64)
        self._width = max_num_blocks_per_req
        self.rows: list[list[int]] = [[] for _ in range(max_num_reqs)]
        # Two views of one buffer: array.array reads and writes a single count faster, NumPy those of a batch.
        self._counts = array("i", bytes(4 * max_num_reqs))
        self.num_blocks_per_row: NDArray[np.int32] = np.frombuffer(self._counts, dtype=np.int32)

    def count(self, row: int) -> int:
        """Count the blocks of the row, null blocks included."""
        return len(self.rows[row])

    def blocks(self, row: int, start: int = 0, stop: int | None = None) -> list[int]:
        """Return the row's blocks with logical index `start <= index < stop` (default: all), null blocks included."""
        return self.rows[row][start:stop]

    def block(self, row: int, index: int) -> int:
        """Return the block at one logical index."""
        return self.rows[row][index]

    def block_of_each(self, rows: Sequence[int], indices: Sequence[int]) -> list[int]:
        """Return one block from each of several rows."""
        return [self.rows[row][index] for row, index in zip(rows, indices, strict=True)]

    def shortfall(
        self, rows: NDArray[np.int64], num_slots: NDArray[np.int64]
    ) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Return which places of a batch need more blocks for `num_slots` slots, and how many each of them needs."""
        short = num_slots - self.num_blocks_per_row[rows] * self._block_size
        which = (short > 0).nonzero()[0]
        if not len(which):
            return which, _NO_BLOCKS
        return which, -(-short[which] // self.block_size)

    def first_taken(self, num_known: int) -> int:
        """Return the first entry that takes a block in a step whose known tokens, drafts apart, end at `num_known`."""
        return (num_known - 1) // self.block_size if self.keeps_states else 0

    def num_nulls(
        self, rows: NDArray[np.int64], shortfall: tuple[NDArray[np.intp], NDArray[np.int64]], known: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return how many of the new entries of a shortfall come before that, for each of its places."""
        which, counts = shortfall
        held = self.num_blocks_per_row[rows[which]].astype(np.int64)
        return np.clip((known[which] - 1) // self.block_size - held, 0, counts)

    def extend(self, row: int, blocks: Sequence[int]) -> None:
        """Append blocks to one row."""
        held = self.rows[row]
        if len(held) + len(blocks) > self._width:
            self._refuse(row, len(held) + len(blocks))
        held += blocks
        self._counts[row] = len(held)

    def extend_each(self, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Append one block to each of several distinct rows."""
        counts = self.num_blocks_per_row
        places = np.array(rows, dtype=np.intp)
        full = places[counts[places] >= self._width]
        if len(full):
            self._refuse(int(full[0]), self._width + 1)
        held_in = self.rows
        for row, block in zip(rows, blocks, strict=True):
            held_in[row].append(block)
        counts[places] += 1

    def replace(self, row: int, indices: Sequence[int], block: int) -> None:
        """Put one block at the given logical indices (the null block when they went out of window)."""
        held = self.rows[row]
        for index in indices:
            held[index] = block

    def shrink(self, row: int, num_blocks: int) -> None:
        """Keep only the first `num_blocks` entries."""
        del self.rows[row][num_blocks:]
        self._counts[row] = len(self.rows[row])

    def clear(self, row: int) -> None:
        """Empty the row for its next request."""
        self.rows[row] = []
        self._counts[row] = 0

    def _refuse(self, row: int, num_blocks: int) -> NoReturn:
        raise MisuseError(
            f"row {row} would hold {num_blocks} blocks of {self.block_size}; its table has {self._width} entries"
        )
