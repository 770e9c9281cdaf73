"""Which blocks are taken from the head of the free queue, and what they lose by it."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .block_table import BlockTable
from .command_checks import Rows
from .events import BlocksAllocated
from .ledger_state import LedgerState
from .named_tuples import named_tuple
from .reductions import sum_of

# Places in a batch that need more blocks, and how many each.
Shortfall: TypeAlias = tuple[NDArray[np.intp], NDArray[np.int64]]


class BlockTaking:
    """Decides what `BlocksAllocated` says. The caller made sure that enough blocks are free."""

    def __init__(self, state: LedgerState) -> None:
        self._state = state
        self._one_group = len(state.tables) == 1

    def event(
        self, group: int, rows: tuple[int, ...], counts: tuple[int, ...], blocks: tuple[int, ...]
    ) -> BlocksAllocated:
        """`blocks`, from the head of the queue, go to rows; each loses its key, if it has one."""
        pool = self._state.pool
        lost_keys = pool.keys_of(blocks)
        lost_groups = pool.groups_of(blocks) if lost_keys and not self._one_group else ()
        return named_tuple(BlocksAllocated, (group, rows, counts, blocks, lost_keys, lost_groups))

    def events_for_batch(
        self, rows: Rows, shortfalls: Sequence[Shortfall], blocks: tuple[int, ...] | None = None
    ) -> list[BlocksAllocated]:
        """One event a group: blocks go request by request, group by group, as single calls in that order would.

        Args:
            rows: the batch.
            shortfalls: what each group lacks.
            blocks: the blocks in the order of the single group's shortfall, where it is not that of the queue.
        """
        queue = self._state.pool.free_queue
        if self._one_group:
            which, counts = shortfalls[0]
            if not len(which):
                return []
            taken = queue.peek(sum_of(counts)) if blocks is None else blocks
            return [self.event(0, tuple(rows[which].tolist()), tuple(counts.tolist()), taken)]
        wanted = sorted(
            (place, group, count)
            for group, (which, counts) in enumerate(shortfalls)
            for place, count in zip(which.tolist(), counts.tolist(), strict=True)
        )
        head = queue.peek(sum([count for *_, count in wanted]))
        shares: list[tuple[list[int], list[int], list[int]]] = [([], [], []) for _ in shortfalls]
        start = 0
        for place, group, count in wanted:
            share_rows, share_counts, share_blocks = shares[group]
            share_rows.append(int(rows[place]))
            share_counts.append(count)
            share_blocks += head[start : start + count]
            start += count
        return [
            self.event(group, tuple(share_rows), tuple(share_counts), tuple(share_blocks))
            for group, (share_rows, share_counts, share_blocks) in enumerate(shares)
            if share_rows
        ]

    def in_order_of_use(self, steps: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """Blocks for several steps at once: block i is first used in `steps[i]`, (step, place in the batch)."""
        order = sorted(range(len(steps)), key=steps.__getitem__)
        blocks = [0] * len(steps)
        if order:
            for block, position in zip(self._state.pool.free_queue.peek(len(steps)), order, strict=True):
                blocks[position] = block
        return tuple(blocks)


def steps_of_first_use(
    table: BlockTable, rows: Rows, first: NDArray[np.int64], which: NDArray[np.intp], counts: NDArray[np.int64]
) -> list[tuple[int, int]]:
    """For each missing block, place by place: (the step, from 0, that first writes into it, the place)."""
    held_tokens = table.num_blocks_per_row[rows].astype(np.int64) * table.block_size - first
    return [
        (int(held_tokens[place]) + i * table.block_size, place)
        for place, count in zip(which.tolist(), counts.tolist(), strict=True)
        for i in range(count)
    ]
