"""Which blocks a batch takes from the head of the free queue, and which blocks it must not write into as they are."""

from collections import Counter
from collections.abc import Sequence
from itertools import repeat
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..cache_kinds import NULL_BLOCK
from ..events import BlockCopied, BlocksAllocated, BlocksUncached, Event
from ..ledger.state import LedgerState
from ..pool.block_pool import BlockPool
from ..pool.block_table import BlockTable
from ..types import sum_of
from .checks import Rows

# Places in a batch that need more table entries, how many each of them needs, and how many of these are null blocks
# before the others (None: none, as everywhere but in groups of states).
Shortfall: TypeAlias = tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.int64] | None]
# Entries that a place in a batch lacks in a group: (place, group, how many, how many of these are null blocks).
WantedEntries: TypeAlias = tuple[int, int, int, int]
# A block that a row is about to write into and must not as it is: (group, row, logical index, whether to copy it).
PrivateBlock: TypeAlias = tuple[int, int, int, bool]


def taking_events(
    state: LedgerState, rows: Rows, shortfalls: Sequence[Shortfall], blocks: tuple[int, ...] | None = None
) -> list[BlocksAllocated]:
    """Make one event per group. Blocks go request by request, group by group, as single calls would take them.

    The caller made sure that enough blocks are free.

    Args:
        state: whose pool gives the blocks.
        rows: the rows of the batch.
        shortfalls: for each group, what it lacks.
        blocks: the blocks for a single group's shortfall, if not in the order of the queue.
    """
    pool = state.pool
    if len(shortfalls) == 1 and shortfalls[0][2] is None:
        which, counts, _ = shortfalls[0]
        if not len(which):
            return []
        taken = pool.free_queue.peek(sum_of(counts)) if blocks is None else blocks
        return [BlocksAllocated(0, tuple(rows[which].tolist()), tuple(counts.tolist()), taken, pool.keys_of(taken))]
    return events_for(state, rows, wanted_entries(shortfalls), len(shortfalls))


def wanted_entries(shortfalls: Sequence[Shortfall]) -> list[WantedEntries]:
    """List what a batch lacks in the order in which single calls would take it: request by request, group by group."""
    return sorted(
        (place, group, count, null)
        for group, (which, counts, nulls) in enumerate(shortfalls)
        for place, count, null in zip(
            which.tolist(), counts.tolist(), repeat(0, len(which)) if nulls is None else nulls.tolist(), strict=True
        )
    )


def events_for(
    state: LedgerState, rows: Rows, wanted: Sequence[WantedEntries], num_groups: int
) -> list[BlocksAllocated]:
    """Make one event per group that takes the wanted entries from the head of the free queue."""
    pool = state.pool
    head = pool.free_queue.peek(sum([count - null for *_, count, null in wanted]))
    shares: list[tuple[list[int], list[int], list[int]]] = [([], [], []) for _ in range(num_groups)]
    start = 0
    for place, group, count, null in wanted:
        share_rows, share_counts, share_blocks = shares[group]
        share_rows.append(int(rows[place]))
        share_counts.append(count)
        share_blocks += (NULL_BLOCK,) * null + head[start : start + count - null]
        start += count - null
    events: list[BlocksAllocated] = []
    for group, (share_rows, share_counts, share_blocks) in enumerate(shares):
        if share_rows:
            lost_keys = pool.keys_of(share_blocks)
            lost_groups = pool.groups_of(share_blocks) if lost_keys and num_groups > 1 else ()
            columns = tuple(share_rows), tuple(share_counts), tuple(share_blocks)
            events.append(BlocksAllocated(group, *columns, lost_keys, lost_groups))
    return events


def blocks_for_steps(
    pool: BlockPool,
    table: BlockTable,
    rows: Rows,
    first: NDArray[np.int64],
    shortfall: tuple[NDArray[np.intp], NDArray[np.int64]],
    num_steps: int,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Choose the blocks for several decode steps at once, each block as the step that first uses it would take it.

    Returns:
        The blocks in the order of the shortfall; and for each step, how many blocks it is the first to use.
    """
    which, counts = shortfall
    held_tokens = table.num_blocks_per_row[rows].astype(np.int64) * table.block_size - first
    # For each missing block, place by place: (the step, from 0, that first writes into it, the place).
    uses = [
        (int(held_tokens[place]) + i * table.block_size, place)
        for place, count in zip(which.tolist(), counts.tolist(), strict=True)
        for i in range(count)
    ]
    blocks = [0] * len(uses)
    order = sorted(range(len(uses)), key=uses.__getitem__)
    for block, position in zip(pool.free_queue.peek(len(uses)), order, strict=True):
        blocks[position] = block
    per_step = Counter(step for step, _ in uses)
    return tuple(blocks), tuple([per_step[step] for step in range(num_steps)])


class CopyOnWrite:
    """Finds the blocks that must become private before a write, and makes the events for it.

    After a fork or a rollback, a request may continue inside a block that is shared or findable. The rows where that
    is possible are in `LedgerState.guarded`, so the other rows cost nothing.
    """

    def __init__(self, state: LedgerState) -> None:
        self._state = state

    def rollbacks(self, rows: Rows, first: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return the rows that continue before the end of a registered block, each with its position."""
        behind = np.flatnonzero(first < self._state.num_placed[rows])
        pairs = zip(rows[behind].tolist(), first[behind].tolist(), strict=True)
        return [(row, position) for row, position in pairs if self.rolls_back_registered(row, position)]

    def rolls_back_registered(self, row: int, first: int) -> bool:
        """Whether continuing at `first` overwrites a registered block; drafts never do, a crop may."""
        return first < self._state.placed[row] and any(
            considered[row] > first // table.block_size
            for considered, table in zip(self._state.considered, self._state.tables, strict=True)
        )

    def of_row(self, row: int, first: int, num_slots: int, copied: Counter[int] | None = None) -> list[PrivateBlock]:
        """Find the blocks between `first` and `num_slots` that the row must not write into as they are.

        `copied` counts, by source block, the copies that earlier rows of the same command make: the last holder of a
        block needs no copy.
        """
        copied = Counter() if copied is None else copied
        found: list[PrivateBlock] = []
        pool = self._state.pool
        for group, table in enumerate(self._state.tables):
            stop = min(-(-num_slots // table.block_size), table.count(row))
            for index in range(first // table.block_size, stop):
                block = table.block(row, index)
                if pool.ref_cnt(block) - copied[block] > 1:
                    copied[block] += 1
                    found.append((group, row, index, True))
                elif pool.key_of(block) is not None:
                    found.append((group, row, index, False))
        return found

    def of_batch(
        self, rows: Rows, first: NDArray[np.int64], placed: NDArray[np.int64], num_slots: NDArray[np.int64]
    ) -> list[PrivateBlock]:
        """Do `of_row` for a batch whose rows have `placed` tokens and continue at `first`."""
        guarded = self._state.guarded
        if first is placed and not guarded:
            return []
        found: list[PrivateBlock] = []
        copied: Counter[int] = Counter()
        for i, row in enumerate(rows.tolist()):
            if row in guarded or first[i] < placed[i]:
                found += self.of_row(row, int(first[i]), int(num_slots[i]), copied)
        return found

    def event(self, private: PrivateBlock) -> Event:
        """Make the event that makes one block private. Apply it before asking for the next one."""
        group, row, index, copy = private
        pool = self._state.pool
        source = self._state.tables[group].block(row, index)
        if not copy:
            return BlocksUncached((source,), (pool.key_of(source),), (group,))
        (target,) = pool.free_queue.peek(1)
        lost_key, lost_group = pool.key_of(target), pool.group_of(target)
        return BlockCopied(group, row, index, source, target, lost_key, lost_group)
