"""Slots of a batch from block tables in NumPy: one group's, into a buffer that is kept."""

import numpy as np
from numpy.typing import NDArray

from ..core.errors import InputError
from ..core.reductions import largest
from ..core.types import TokenBatch
from .context_rank import ContextRank

PADDING_SLOT = -1
# With fewer tokens a request than this, working out runs costs more than it saves.
_TOKENS_A_RUN = 4


class GroupSlots:
    """Slots of one group's tokens. What is as long as a batch is kept, and the next batch overwrites it."""

    def __init__(self, table: NDArray[np.int32], block_size: int, context: ContextRank) -> None:
        """Read `table`, int32 `[max_num_reqs, max_num_blocks_per_req]`, as it stands at each call.

        `context` is rank 0 of 1 for a group whose blocks are not dealt out.
        """
        self._table = table
        self._flat_table = table.reshape(-1)
        self._block_size = block_size
        self._context = context
        self._make_room_for_tokens(0)
        self._make_room_for_runs(0)

    def of(self, batch: TokenBatch, num_padded_tokens: int) -> NDArray[np.int64]:
        """As `SimBackend.slot_mapping`."""
        num_tokens = batch.num_tokens
        if num_tokens > num_padded_tokens > 0:
            raise InputError(f"a batch of {num_tokens} tokens cannot be padded to {num_padded_tokens}")
        length = max(num_tokens, num_padded_tokens)
        if length > len(self._slots):
            self._make_room_for_tokens(2 * length)
        slots = self._slots[:num_tokens]
        num_reqs = len(batch.rows)
        has_all = np.count_nonzero(batch.counts) == num_reqs
        if self._context.size > 1:
            self._dealt_out(batch.row_of_token(), batch.positions(), slots)
        elif has_all and num_tokens > _TOKENS_A_RUN * num_reqs:
            self._run_by_run(batch, slots)
        elif has_all and num_tokens == num_reqs:
            self._one_by_one(batch.rows, batch.first_positions, slots)
        else:
            self._one_by_one(batch.row_of_token(), batch.positions(), slots)
        if length > num_tokens:
            self._slots[num_tokens:length] = PADDING_SLOT
        view = self._slots[:length]
        view.flags.writeable = False
        return view

    def _make_room_for_tokens(self, num_tokens: int) -> None:
        self._slots: NDArray[np.int64] = np.empty(num_tokens, dtype=np.int64)
        self._numbers: NDArray[np.int64] = np.arange(num_tokens, dtype=np.int64)
        self._offsets: NDArray[np.int64] = self._numbers % self._block_size

    def _make_room_for_runs(self, num_runs: int) -> None:
        self._index: NDArray[np.int64] = np.empty(num_runs, dtype=np.int64)
        self._blocks: NDArray[np.int32] = np.empty(num_runs, dtype=np.int32)

    def _one_by_one(self, rows: NDArray[np.int64], positions: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        size = self._block_size
        np.multiply(self._blocks_of(rows, positions), size, out=slots)
        slots += positions % size

    def _dealt_out(self, rows: NDArray[np.int64], positions: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Under decode context parallelism -1 for tokens that another rank holds."""
        size, ranks, stripe = self._block_size, self._context.size, self._context.interleave_tokens
        offsets = positions % size
        local = offsets // (stripe * ranks) * stripe + offsets % stripe
        is_here = offsets // stripe % ranks == self._context.rank
        blocks = self._blocks_of(rows, positions).astype(np.int64)
        slots[:] = np.where(is_here, blocks * (size // ranks) + local, PADDING_SLOT)

    def _blocks_of(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
        try:
            return self._table[rows, positions // self._block_size]
        except IndexError:
            raise self._not_there(largest(rows), largest(positions)) from None

    def _not_there(self, row: int, position: int) -> InputError:
        """Of a batch with this largest row and this largest position, one of them beyond the table."""
        num_rows, width = self._table.shape
        if row >= num_rows:
            return InputError(f"no row {row}: the block tables have rows 0 to {num_rows - 1}")
        return InputError(
            f"position {position} lies beyond a block table of {width} blocks of {self._block_size} tokens"
        )

    def _run_by_run(self, batch: TokenBatch, slots: NDArray[np.int64]) -> None:
        """Slots run on inside a block: along such a run they stand equally far from the tokens' places in the batch.

        A batch of n tokens has about n / block_size runs, and only the last two lines of each case touch every token.
        """
        size, width = self._block_size, self._table.shape[1]
        firsts, counts = batch.first_positions, batch.counts
        ends_at = firsts + counts
        first_index = firsts // size
        end_index = (ends_at + (size - 1)) // size
        if largest(batch.rows) >= len(self._table) or largest(end_index) > width:
            raise self._not_there(largest(batch.rows), largest(ends_at) - 1)
        num_runs = end_index - first_index
        ends = np.add.accumulate(num_runs)
        total = ends.item(-1)
        if total > len(self._blocks):
            self._make_room_for_runs(2 * total)
        of_run = self._numbers[:total]
        # Run r of a request holds its block number r + ahead.
        ahead = end_index - ends
        index = np.add((batch.rows * width + ahead).repeat(num_runs), of_run, out=self._index[:total])
        # Every one is there; "clip" spares NumPy the buffer that "raise" needs beside `out`.
        blocks = self._flat_table.take(index, out=self._blocks[:total], mode="clip")
        if total * size == len(slots):
            # Whole blocks, one behind the other.
            slots.reshape(total, size)[...] = np.multiply(blocks, size, out=index)[:, np.newaxis]
            slots += self._offsets[: len(slots)]
            return
        distances = np.subtract(blocks, of_run, out=index)
        distances *= size
        distances += (firsts - np.add.accumulate(counts) + counts - ahead * size).repeat(num_runs)
        lengths = np.full(total, size, dtype=np.int64)
        lengths[ends - num_runs] -= firsts - first_index * size
        lengths[ends - 1] -= end_index * size - ends_at
        np.add(distances.repeat(lengths), self._numbers[: len(slots)], out=slots)
