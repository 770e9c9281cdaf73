"""Which blocks a request must not write as they are: others read them, or a key names their content."""

from collections import Counter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .command_checks import Rows
from .events import BlockCopied, BlocksUncached, Event
from .ledger_state import LedgerState

# (group, row, logical index, whether to copy: else its key is dropped)
PrivateBlock: TypeAlias = tuple[int, int, int, bool]


class CopyOnWrite:
    """Finds the blocks that have to become private before a write, and the events that make them so.

    A block is written by a request that goes on inside it, after a fork or a rollback; rows where that may be are
    `LedgerState.guarded`, so the others cost nothing.
    """

    def __init__(self, state: LedgerState) -> None:
        self._state = state

    def rollbacks(self, rows: Rows, first: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Rows that go on before a registered block's end, with the position; never those that just go on."""
        behind = np.flatnonzero(first < self._state.num_placed[rows])
        pairs = zip(rows[behind].tolist(), first[behind].tolist(), strict=True)
        return [(row, position) for row, position in pairs if self.rolls_back_registered(row, position)]

    def rolls_back_registered(self, row: int, first: int) -> bool:
        """Whether going on at `first` overwrites a registered block; drafts never do, a crop may."""
        return first < self._state.placed[row] and any(
            considered[row] > first // table.block_size
            for considered, table in zip(self._state.considered, self._state.tables, strict=True)
        )

    def of_row(self, row: int, first: int, num_slots: int, copied: Counter[int]) -> list[PrivateBlock]:
        """Blocks that the row is about to write and must not as they are: (group, row, index, whether to copy).

        `copied` counts, by source block, the copies that earlier rows of the same command make: the last holder
        needs none.
        """
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

    def among(
        self, rows: Rows, first: NDArray[np.int64], placed: NDArray[np.int64], num_slots: NDArray[np.int64]
    ) -> list[PrivateBlock]:
        """`of_row` for a batch: rows that go on at `first` where `placed` tokens are placed."""
        guarded = self._state.guarded
        if first is placed and not guarded:
            return []
        found: list[PrivateBlock] = []
        copied: Counter[int] = Counter()
        for i, row in enumerate(rows.tolist()):
            if row in guarded or first[i] < placed[i]:
                found += self.of_row(row, int(first[i]), int(num_slots[i]), copied)
        return found

    def event(self, group: int, row: int, index: int, copy: bool) -> Event:
        """The event that makes one block private; to be applied before the next one is asked for."""
        pool = self._state.pool
        source = self._state.tables[group].block(row, index)
        if not copy:
            return BlocksUncached((source,), (pool.key_of(source),), (group,))
        (target,) = pool.free_queue.peek(1)
        lost_key, lost_group = pool.key_of(target), pool.group_of(target)
        return BlockCopied(group, row, index, source, target, lost_key, lost_group)
