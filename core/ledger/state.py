"""The state of a ledger: the fold of its events.

`LedgerState.apply` is the only code that changes the state. The allocator calls it with the events that it decides;
a replay calls it with the events of a log, checked or not (see `replay_checks`).
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import events
from ..cache_kinds import NULL_BLOCK
from ..errors import CorruptLedgerError
from ..events import SCHEMA_VERSION, FreeReason, Key, as_ints, without_nulls
from ..pool.block_pool import BlockPool
from ..pool.block_table import BlockTable
from ..pool.eviction_order import EvictionOrder, make_eviction_order

E = TypeVar("E", bound=events.Event)


class LedgerState:
    """Pool, block tables and rows, as the events so far leave them.

    Where a column has two names, the first is an `array` and the second a NumPy view of the same memory: single
    entries are read and written faster in an `array`, batches faster in NumPy.

    Attributes:
        created: the first event of the log.
        pool: ref counts, index of block hashes, free queue.
        tables: one `BlockTable` per group.
        placed, num_placed: int64 `[max_num_reqs]`, the tokens of each row that have slots.
        considered, num_considered: for each group int64 `[max_num_reqs]`, how many logical blocks of each row
            registration has considered (vLLM: num_cached_block). -1 until the row's first hit or registration, which
            fixes how vLLM counts the blocks that it still needs.
        skipped, num_skipped: for each group int32 `[max_num_reqs]`, how many null blocks each row begins with: those
            that went out of window or that a hit skipped.
        guarded: rows that may write into a block that is shared or findable (after a fork or a rollback).
        outdated: rows that were held when every key was dropped; what they compute on top of that is never registered.
        row_of: request id -> row, for requests that hold one.
        request_of: row -> request id or None.
        row_is_held: bool `[max_num_reqs]`, which rows a request holds.
        free_rows: rows that no request holds; the last one is assigned next.
        next_sequence: the sequence number of the next commit.
        num_gains: how many references were given back and keys dropped so far; only these events can end a lack of
            blocks (`RefusedAdmission`).
    """

    def __init__(self, created: events.PoolCreated, eviction: EvictionOrder | None = None) -> None:
        if created.schema_version != SCHEMA_VERSION:
            raise CorruptLedgerError(
                f"this log has schema version {created.schema_version}; this kvledger reads {SCHEMA_VERSION}"
            )
        self.created = created
        order = make_eviction_order(created.eviction, created.num_blocks) if eviction is None else eviction
        self.pool = BlockPool(created.num_blocks, len(created.groups), order)
        self.tables = [
            BlockTable(
                created.max_num_reqs,
                -(-created.max_model_len // kind.block_size),
                kind.block_size,
                keeps_states=not kind.holds_tokens,
            )
            for kind in created.groups
        ]
        rows = created.max_num_reqs
        self.placed = array("q", bytes(8 * rows))
        self.num_placed: NDArray[np.int64] = np.frombuffer(self.placed, dtype=np.int64)
        self._held = bytearray(rows)
        self.row_is_held: NDArray[np.bool_] = np.frombuffer(self._held, dtype=np.bool_)
        self.considered = [array("q", [-1]) * rows for _ in created.groups]
        self.num_considered: list[NDArray[np.int64]] = [np.frombuffer(c, dtype=np.int64) for c in self.considered]
        self.skipped = [array("i", bytes(4 * rows)) for _ in created.groups]
        self.num_skipped: list[NDArray[np.int32]] = [np.frombuffer(s, dtype=np.int32) for s in self.skipped]
        self.guarded: set[int] = set()
        self.outdated: set[int] = set()
        self.row_of: dict[str, int] = {}
        self.request_of: list[str | None] = [None] * rows
        self.free_rows = list(range(rows - 1, -1, -1))
        self.next_sequence = 0
        self.num_gains = 0
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.PoolCreated: self._pool_created,
            events.RowsAssigned: self._rows_assigned,
            events.RowsReleased: self._rows_released,
            events.PrefixAdopted: self._prefix_adopted,
            events.BlocksAllocated: self._blocks_allocated,
            events.BlocksCached: self._blocks_cached,
            events.TokensPlaced: self._tokens_placed,
            events.BlocksShared: self._blocks_shared,
            events.BlockCopied: self._block_copied,
            events.BlocksFreed: self._blocks_freed,
            events.BlocksUncached: self._blocks_uncached,
            events.CacheReset: self._cache_reset,
        }

    def apply(self, event: E) -> E:
        """Change the state by one event and return the event.

        The event is trusted: the allocator has decided it, or the replay of a log answers for it.
        """
        self._handlers[type(event)](event)
        return event

    # -- one handler per event ---------------------------------------------------------------------------------------

    def _pool_created(self, event: events.PoolCreated) -> None:
        if event != self.created or self.next_sequence:
            raise CorruptLedgerError(f"a log creates its pool once, in its first commit; found {event}")

    def _rows_assigned(self, event: events.RowsAssigned) -> None:
        requests, rows = event
        for place, request_id in enumerate(requests):
            row = int(rows[place])
            if self.free_rows[-1] == row:
                self.free_rows.pop()
            else:
                self.free_rows.remove(row)
            self.row_of[request_id] = row
            self.request_of[row] = request_id
            self._held[row] = True
            self.placed[row] = 0
            for considered in self.considered:
                considered[row] = -1
            for skipped in self.skipped:
                skipped[row] = 0

    def _rows_released(self, event: events.RowsReleased) -> None:
        requests, rows = event
        for place, request_id in enumerate(requests):
            row = int(rows[place])
            del self.row_of[request_id]
            self.request_of[row] = None
            self._held[row] = False
            self.free_rows.append(row)
            self.guarded.discard(row)
            self.outdated.discard(row)

    def _prefix_adopted(self, event: events.PrefixAdopted) -> None:
        group, row, blocks = event
        if not isinstance(blocks, tuple):
            blocks = as_ints(blocks)
        self.pool.apply_adopt(blocks)
        self.tables[group].extend(row, blocks)
        self.considered[group][row] = len(blocks)
        if not blocks[0]:
            self.skipped[group][row] = _num_leading_nulls(blocks)

    def _blocks_allocated(self, event: events.BlocksAllocated) -> None:
        group, rows, counts, blocks, lost_keys, _ = event
        if not isinstance(blocks, tuple):
            blocks = as_ints(blocks)
        table = self.tables[group]
        if table.keeps_states:
            self._states_allocated(group, as_ints(rows), as_ints(counts), blocks, lost_keys)
            return
        self.pool.apply_take(blocks, lost_keys)
        if len(rows) == 1:
            table.extend(rows[0], blocks)
        elif len(rows) == len(blocks):
            table.extend_each(as_ints(rows), blocks)
        else:
            start = 0
            for row, count in zip(as_ints(rows), as_ints(counts), strict=True):
                table.extend(row, blocks[start : start + count])
                start += count

    def _states_allocated(
        self,
        group: int,
        rows: tuple[int, ...],
        counts: tuple[int, ...],
        blocks: tuple[int, ...],
        lost_keys: tuple[Key | None, ...],
    ) -> None:
        """Blocks of a group of states: null blocks stand before the one where the step ends."""
        self.pool.apply_take(*without_nulls(blocks, lost_keys))
        start = 0
        for row, count in zip(rows, counts, strict=True):
            self.tables[group].extend(row, blocks[start : start + count])
            self._skip_nulls(group, row)
            start += count

    def _skip_nulls(self, group: int, row: int) -> None:
        """Count the null blocks at the start of a row anew, where more may have joined."""
        held, skipped = self.tables[group].rows[row], self.skipped[group][row]
        while skipped < len(held) and not held[skipped]:
            skipped += 1
        self.skipped[group][row] = skipped

    def _blocks_cached(self, event: events.BlocksCached) -> None:
        group, rows, starts, stops, _, indices, blocks, keys, _ = event
        if keys:
            self.pool.apply_cache(group, blocks if isinstance(blocks, tuple) else as_ints(blocks), keys, indices)
        considered = self.considered[group]
        if len(rows) == 1:
            if not keys or starts[0] != stops[0]:  # else it is the end of a prompt, inside a block
                considered[rows[0]] = stops[0]
            return
        for row, stop in zip(as_ints(rows), as_ints(stops), strict=True):
            considered[row] = stop

    def _tokens_placed(self, event: events.TokensPlaced) -> None:
        rows, firsts, counts = event
        if len(rows) == 1:
            row, end = rows[0], firsts[0] + counts[0]
            if row in self.guarded or end < self.placed[row]:
                self._place(int(row), int(firsts[0]), int(counts[0]))
            else:
                self.placed[row] = end
            return
        if not len(rows):
            return  # a step that placed nothing
        places, starts = np.asarray(rows), np.asarray(firsts)
        careful = self.guarded and not self.guarded.isdisjoint(as_ints(rows))
        if careful or np.count_nonzero(starts < self.num_placed[places]):
            for row, first, count in zip(as_ints(rows), as_ints(firsts), as_ints(counts), strict=True):
                self._place(row, first, count)
        else:
            self.num_placed[places] = starts + np.asarray(counts)

    def _place(self, row: int, first: int, count: int) -> None:
        end = first + count
        if end < self.placed[row]:
            # The row keeps its blocks behind the new end, and these may be shared or findable.
            self.guarded.add(row)
            if not count:
                for table, considered in zip(self.tables, self.considered, strict=True):
                    considered[row] = min(considered[row], first // table.block_size)
        elif row in self.guarded and self._is_private_behind(row, end):
            self.guarded.discard(row)
        self.placed[row] = end

    def _is_private_behind(self, row: int, end: int) -> bool:
        """Whether the blocks that the row's next tokens go into are neither shared nor findable."""
        for table in self.tables:
            index = end // table.block_size
            held = table.count(row) - index
            if held > 1:
                return False
            if held == 1:
                block = table.block(row, index)
                if self.pool.ref_cnt(block) > 1 or self.pool.key_of(block) is not None:
                    return False
        return True

    def _blocks_shared(self, event: events.BlocksShared) -> None:
        blocks = as_ints(event.blocks)
        self.pool.apply_adopt(blocks)
        group, parent, child = event.group, event.parent_row, event.child_row
        self.tables[group].extend(child, blocks)
        self.considered[group][child] = self.considered[group][parent]
        self.skipped[group][child] = _num_leading_nulls(blocks)
        self.guarded.update((parent, child))
        if parent in self.outdated:
            self.outdated.add(child)

    def _block_copied(self, event: events.BlockCopied) -> None:
        self.pool.apply_take((event.target,), (event.lost_key,))
        self.pool.apply_release((event.source,))
        self.tables[event.group].replace(event.row, (event.index,), event.target)

    def _blocks_freed(self, event: events.BlocksFreed) -> None:
        reason, groups, rows, counts, blocks, indices = event
        if not isinstance(blocks, tuple):
            blocks = as_ints(blocks)
        self.num_gains += len(blocks)
        self.pool.apply_release(blocks if reason is not FreeReason.TRUNCATED else tuple(filter(None, blocks)))
        if len(rows) == 1 and not len(indices):  # all blocks of a request in one group
            self.tables[groups[0]].clear(rows[0])
            return
        start = 0
        for group, row, count in zip(as_ints(groups), as_ints(rows), as_ints(counts), strict=True):
            table = self.tables[group]
            if reason is FreeReason.OUT_OF_WINDOW:
                out = as_ints(indices)[start : start + count]
                table.replace(row, out, NULL_BLOCK)
                self._skip_nulls(group, row)
            elif reason is FreeReason.TRUNCATED:
                table.shrink(row, min(as_ints(indices)[start : start + count]))
            else:
                table.clear(row)
            start += count

    def _blocks_uncached(self, event: events.BlocksUncached) -> None:
        self.num_gains += len(event.blocks)
        self.pool.apply_uncache(as_ints(event.blocks))

    def _cache_reset(self, event: events.CacheReset) -> None:
        self.num_gains += self.pool.num_blocks
        self.pool.apply_reset()
        self.outdated.update(self.row_of.values())

    # -- comparison --------------------------------------------------------------------------------------------------

    def _copies(self, group: int) -> list[list[Any]]:
        """Every key of a group with its blocks: by block, since equal states may differ in the order of their keys."""
        copies = [(list(self.pool.copies(key, group)), key) for key in self.pool.index(group)]
        return [[key, blocks] for blocks, key in sorted(copies, key=lambda each: each[0])]

    def snapshot(self) -> dict[str, Any]:
        """Return the whole state as dicts, lists, ints, strings and keys. O(blocks + table entries).

        Two states are equal if and only if their snapshots are.
        """
        pool, rows = self.pool, sorted((row, request_id) for request_id, row in self.row_of.items())
        groups = range(len(self.tables))
        return {
            "next_sequence": self.next_sequence,
            "free_queue": pool.free_queue.order(),
            "referenced": [[block, count] for block, count in enumerate(pool.ref_cnts()) if count],
            "copies": [self._copies(group) for group in groups],
            "rows": [[row, request_id, self.placed[row]] for row, request_id in rows],
            "free_rows": list(self.free_rows),
            "tables": [[table.blocks(row) for row, _ in rows] for table in self.tables],
            "considered": [[considered[row] for row, _ in rows] for considered in self.considered],
            "skipped": [[skipped[row] for row, _ in rows] for skipped in self.skipped],
            "guarded": sorted(self.guarded),
            "outdated": sorted(self.outdated),
        }


def _num_leading_nulls(blocks: Sequence[int]) -> int:
    return next((place for place, block in enumerate(blocks) if block != NULL_BLOCK), len(blocks))
