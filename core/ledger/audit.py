"""Audits the block balance: held + evictable + clean + null == num_blocks after every commit.

The audit keeps counts of its own and trusts no event, so that it can continue where a checked replay stops, and can say
whether blocks were lost (a leak) or counted twice (a double free).
"""

from collections.abc import Iterable
from typing import Literal

import attrs

from .. import events
from ..cache_kinds import NULL_BLOCK
from ..errors import CorruptLedgerError
from ..events import Commit, FreeReason, as_ints


@attrs.frozen
class Balance:
    """A count of the pool's blocks or tokens by their use, which must add up to the total (field report C02)."""

    total: int  # the size of the pool
    held: int  # referenced by a request
    evictable: int  # unreferenced, with reusable content
    clean: int  # unreferenced, without content
    null: int = 0  # reserved, never handed out
    unit: str = "blocks"  # what these numbers count

    @property
    def difference(self) -> int:
        """Return how many are counted twice (above 0) or missing (below 0)."""
        return self.held + self.evictable + self.clean + self.null - self.total

    @property
    def kind(self) -> Literal["leak", "double free"] | None:
        """Name the fault by the sign of the difference; None if the sum is right."""
        if not self.difference:
            return None
        return "double free" if self.difference > 0 else "leak"

    def describe(self, tokens_per_block: int | None = None) -> str:
        """Return the sum and the verdict in one line; `tokens_per_block` adds an amount of tokens in blocks."""
        parts = f"held {self.held:,} + evictable {self.evictable:,} + clean {self.clean:,} + null {self.null:,}"
        total = f"{self.total:,} {self.unit}"
        if not self.difference:
            return f"{parts} == {total}"
        amount = f"{abs(self.difference):,} {self.unit}"
        if tokens_per_block:
            amount += f" ({abs(self.difference) / tokens_per_block:,g} blocks of {tokens_per_block})"
        verdict = "too many: a double free" if self.difference > 0 else "missing: a leak"
        return f"{parts} = {self.total + self.difference:,}, not {total}: {amount} {verdict}"


@attrs.frozen
class ConservationFault:
    """The first commit after which the sum is wrong, and the blocks that are counted twice or not at all."""

    sequence: int
    balance: Balance
    blocks: tuple[int, ...]

    def describe(self) -> str:
        """Return one line with the commit, the sign, the amount and the blocks."""
        shown = ", ".join(map(str, self.blocks[:8])) + (", ..." if len(self.blocks) > 8 else "")
        return f"commit {self.sequence}: {self.balance.describe()} (block {shown})"


class ConservationAudit:
    """Counts blocks commit by commit. O(blocks named by the events), whatever the size of the pool.

    `held` counts the blocks that the block tables name and ignores the ref counts. A block with a wrong ref count is
    then either in a table and in the free queue (counted twice) or in neither (missing).
    """

    def __init__(self, created: events.PoolCreated) -> None:
        self._num_blocks = created.num_blocks
        self._refs = [0] * created.num_blocks
        self._uses = [0] * created.num_blocks
        self._queued = [0] + [1] * (created.num_blocks - 1)
        self._keyed = [False] * created.num_blocks
        self._tables: dict[tuple[int, int], list[int]] = {}
        self._num_held = 0
        self._num_evictable = 0
        self._num_clean = created.num_blocks - 1

    @property
    def balance(self) -> Balance:
        """Return the sum after the events so far."""
        return Balance(self._num_blocks, self._num_held, self._num_evictable, self._num_clean, null=1)

    def miscounted_blocks(self) -> tuple[int, ...]:
        """Return the blocks that are not in exactly one place. O(num_blocks)."""
        places = zip(self._queued[1:], self._uses[1:], strict=True)
        return tuple([block for block, (queued, uses) in enumerate(places, 1) if queued + (uses > 0) != 1])

    def apply(self, commit: Commit) -> None:
        """Count one commit.

        Raises:
            CorruptLedgerError: an event names a block that the pool does not have, or its columns differ in length.
        """
        for event in commit.events:
            try:
                self._apply(event)
            except (CorruptLedgerError, ValueError) as error:
                raise CorruptLedgerError(f"commit {commit.sequence} cannot be counted: {error}") from error

    def _apply(self, event: events.Event) -> None:
        match event:
            case events.BlocksAllocated():
                self._allocated(event)
            case events.BlocksFreed():
                self._freed(event)
            case events.PrefixAdopted(group=group, row=row) | events.BlocksShared(group=group, child_row=row):
                self._adopted(group, row, as_ints(event.blocks))
            case events.BlocksCached():
                for block in as_ints(event.blocks):
                    self._mark(block, True)
            case events.BlocksUncached():
                for block in as_ints(event.blocks):
                    self._mark(block, False)
            case events.CacheReset():
                for block in range(1, self._num_blocks):
                    self._mark(block, False)
            case events.BlockCopied():
                self._take(event.target)
                self._give_back(event.source)
                self._replace(event.group, event.row, event.index, event.target)
            case events.RowsReleased():
                released = set(as_ints(event.rows))
                for group, row in [place for place in self._tables if place[1] in released]:
                    self._shrink(group, row, 0)
            case _:
                pass

    # -- events ------------------------------------------------------------------------------------------------------

    def _allocated(self, event: events.BlocksAllocated) -> None:
        blocks = as_ints(event.blocks)
        start = 0
        for row, count in zip(as_ints(event.rows), as_ints(event.counts), strict=True):
            for block in blocks[start : start + count]:
                if block != NULL_BLOCK:
                    self._take(block)
                self._hold(event.group, row, block)
            start += count

    def _adopted(self, group: int, row: int, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block != NULL_BLOCK:
                if self._refs[self._checked(block)] <= 0:
                    self._queue(block, -1)
                self._refs[block] += 1
            self._hold(group, row, block)

    def _freed(self, event: events.BlocksFreed) -> None:
        blocks, indices = as_ints(event.blocks), as_ints(event.indices)
        for block in blocks:
            if block != NULL_BLOCK:
                self._give_back(block)
        start = 0
        for group, row, count in zip(as_ints(event.groups), as_ints(event.rows), as_ints(event.counts), strict=True):
            if event.reason is FreeReason.OUT_OF_WINDOW:
                for index in indices[start : start + count]:
                    self._replace(group, row, index, NULL_BLOCK)
            elif event.reason is FreeReason.TRUNCATED:
                self._shrink(group, row, min(indices[start : start + count], default=0))
            else:
                self._shrink(group, row, 0)
            start += count

    # -- counts ------------------------------------------------------------------------------------------------------

    def _checked(self, block: int) -> int:
        if not 0 <= block < self._num_blocks:
            raise CorruptLedgerError(f"no block {block}: this pool has blocks 0 to {self._num_blocks - 1}")
        return block

    def _take(self, block: int) -> None:
        self._mark(block, False)
        self._queue(block, -1)
        self._refs[block] += 1

    def _give_back(self, block: int) -> None:
        self._refs[self._checked(block)] -= 1
        if self._refs[block] <= 0:
            self._queue(block, 1)

    def _queue(self, block: int, entries: int) -> None:
        if self._queued[block] + entries < 0:
            return
        self._queued[block] += entries
        if self._keyed[block]:
            self._num_evictable += entries
        else:
            self._num_clean += entries

    def _mark(self, block: int, keyed: bool) -> None:
        if self._keyed[self._checked(block)] != keyed:
            self._keyed[block] = keyed
            moved = self._queued[block] if keyed else -self._queued[block]
            self._num_evictable += moved
            self._num_clean -= moved

    def _hold(self, group: int, row: int, block: int) -> None:
        self._tables.setdefault((group, row), []).append(block)
        self._use(block, 1)

    def _replace(self, group: int, row: int, index: int, block: int) -> None:
        table = self._tables.get((group, row), [])
        if not 0 <= index < len(table):
            raise CorruptLedgerError(f"row {row} of group {group} has no block at index {index}; it holds {len(table)}")
        self._use(table[index], -1)
        table[index] = block
        self._use(block, 1)

    def _shrink(self, group: int, row: int, length: int) -> None:
        table = self._tables.get((group, row), [])
        for block in table[length:]:
            self._use(block, -1)
        del table[length:]

    def _use(self, block: int, uses: int) -> None:
        if self._checked(block) != NULL_BLOCK:
            self._num_held -= self._uses[block] > 0
            self._uses[block] += uses
            self._num_held += self._uses[block] > 0
