"""Validates a recorded log: each event must be legal in the state left by the events before it."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import events
from ..errors import CorruptLedgerError
from ..events import Commit, FreeReason, IntColumn, Key, as_ints, without_nulls
from .state import LedgerState


class CheckedReplay:
    """Replays commits of a log onto a state, each event checked before it is applied.

        replay = CheckedReplay(LedgerState(log.created))
        for commit in log:
            replay.apply(commit)

    A check reads the state before its event and changes nothing.

    Attributes:
        state: the state after the commits so far.
    """

    def __init__(self, state: LedgerState) -> None:
        self.state = state
        self._checks: dict[type, Callable[[Any], None]] = {
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
        }

    def apply(self, commit: Commit) -> None:
        """Check and apply one commit; its sequence number must be the next one.

        Raises:
            CorruptLedgerError: a commit before this one is missing; or an event names a group, row, index or position
                that is not possible in the state before it, or its columns contradict each other or the tables.
            MisuseError: an event takes, adopts, frees or registers a block that is in no state for it.
        """
        state = self.state
        if commit.sequence != state.next_sequence:
            raise CorruptLedgerError(
                f"commit {commit.sequence} follows commit {state.next_sequence - 1}: one is missing"
            )
        for event in commit.events:
            check = self._checks.get(type(event))
            if check is not None:
                check(event)
            state.apply(event)
        state.next_sequence += 1

    # -- one check per event -----------------------------------------------------------------------------------------

    def _rows_assigned(self, event: events.RowsAssigned) -> None:
        requests, rows = event.requests, as_ints(event.rows)
        _check_same_length(requests=requests, rows=rows)
        request_of = self.state.request_of
        for request_id, row in zip(requests, rows, strict=True):
            if not 0 <= row < len(request_of) or request_of[row] is not None:
                raise CorruptLedgerError(f"row {row} is assigned to request {request_id!r}, and is not free")
            if request_id in self.state.row_of:
                raise CorruptLedgerError(f"request {request_id!r} is assigned row {row}, and holds another")
        if len(set(rows)) < len(rows) or len(set(requests)) < len(requests):
            raise CorruptLedgerError(f"requests {requests} are assigned rows {rows}: one is named twice")

    def _rows_released(self, event: events.RowsReleased) -> None:
        rows = as_ints(event.rows)
        _check_same_length(requests=event.requests, rows=rows)
        self._check_held(rows)
        for request_id, row in zip(event.requests, rows, strict=True):
            if self.state.request_of[row] != request_id:
                raise CorruptLedgerError(f"request {request_id!r} releases row {row}, which it does not hold")
            if any(table.count(row) for table in self.state.tables):
                raise CorruptLedgerError(f"request {request_id!r} releases row {row} before its blocks")

    def _prefix_adopted(self, event: events.PrefixAdopted) -> None:
        blocks = as_ints(event.blocks)
        self._check_empty(event.group, event.row)
        if not blocks:
            raise CorruptLedgerError(f"row {event.row} adopts no block")
        self.state.pool.check_adopt(blocks)

    def _blocks_allocated(self, event: events.BlocksAllocated) -> None:
        rows, counts, blocks = as_ints(event.rows), as_ints(event.counts), as_ints(event.blocks)
        self._check_group(event.group)
        self._check_held(rows)
        _check_same_length(rows=rows, counts=counts)
        _check_counts(counts, blocks=blocks)
        lost_keys = event.lost_keys
        if self.state.tables[event.group].keeps_states and len(lost_keys) in (0, len(blocks)):
            self._check_states(counts, blocks)
            blocks, lost_keys = without_nulls(blocks, lost_keys)
        self.state.pool.check_take(blocks, lost_keys)
        self._check_lost_groups(as_ints(event.blocks), event.lost_keys, event.lost_groups)

    def _check_states(self, counts: tuple[int, ...], blocks: tuple[int, ...]) -> None:
        """Raise unless each row takes null blocks first, and then at least one block for the state of its step."""
        start = 0
        for count in counts:
            entries = blocks[start : start + count]
            taken = tuple(filter(None, entries))
            if not taken or entries[count - len(taken) :] != taken:
                raise CorruptLedgerError(f"a step leaves its state in the last of its blocks, not in {entries}")
            start += count

    def _blocks_cached(self, event: events.BlocksCached) -> None:
        rows, starts, stops = as_ints(event.rows), as_ints(event.starts), as_ints(event.stops)
        counts, indices, blocks = as_ints(event.counts), as_ints(event.indices), as_ints(event.blocks)
        self._check_group(event.group)
        self._check_held(rows)
        _check_same_length(rows=rows, starts=starts, stops=stops, counts=counts, parents=event.parents)
        _check_counts(counts, indices=indices, blocks=blocks, keys=event.keys)
        if not self.state.outdated.isdisjoint(rows):
            raise CorruptLedgerError(f"rows {rows} register blocks; one was held when every key was dropped")
        table = self.state.tables[event.group]
        at = 0
        for row, start, stop, count in zip(rows, starts, stops, counts, strict=True):
            held = table.rows[row]
            if not 0 <= start <= stop <= len(held):
                raise CorruptLedgerError(f"row {row} registers blocks {start} to {stop}; it holds {len(held)}")
            at_indices, its_blocks = indices[at : at + count], blocks[at : at + count]
            at += count
            if its_blocks == tuple(held[start:stop]) and at_indices == tuple(range(start, stop)):
                continue  # the usual case: all of them
            stop += start == stop and count == 1  # the end of a prompt inside a block
            for index, block in zip(at_indices, its_blocks, strict=True):
                if not start <= index < stop or held[index] != block:
                    raise CorruptLedgerError(f"row {row} does not hold block {block} at index {index}")
        self.state.pool.check_cache(blocks)

    def _tokens_placed(self, event: events.TokensPlaced) -> None:
        _check_same_length(rows=event.rows, first_positions=event.first_positions, counts=event.counts)
        if not len(event.rows):
            return
        self._check_held(as_ints(event.rows))
        if len(event.rows) == 1:  # the usual case for a prompt, faster without NumPy
            self._check_slots(int(event.rows[0]), int(event.first_positions[0]), int(event.counts[0]))
            return
        rows, firsts, counts = _int64(event.rows), _int64(event.first_positions), _int64(event.counts)
        state = self.state
        placed = state.num_placed[rows]
        num_slots: NDArray[np.int64] = np.full(len(rows), state.created.max_model_len, dtype=np.int64)
        for table in state.tables:
            np.minimum(num_slots, table.num_blocks_per_row[rows].astype(np.int64) * table.block_size, out=num_slots)
        # A request's first tokens follow those of its prefix hit, which are not placed.
        leaves_gap = (firsts > placed) & (placed > 0)
        wrong = (firsts < 0) | (counts < 0) | leaves_gap | (counts > num_slots - firsts)
        if np.count_nonzero(wrong):
            at = wrong.argmax()
            self._check_slots(rows.item(at), firsts.item(at), counts.item(at))

    def _check_slots(self, row: int, first: int, count: int) -> None:
        """Raise unless a row's tokens start at or before the end of its placed tokens and have slots."""
        state = self.state
        placed = state.placed[row]
        num_slots = state.created.max_model_len
        for table in state.tables:
            num_slots = min(num_slots, len(table.rows[row]) * table.block_size)
        if first < 0 or count < 0 or first > placed > 0 or first + count > num_slots:
            raise CorruptLedgerError(
                f"row {row} places {count} tokens at position {first}, behind {placed} placed ones; it has "
                f"{num_slots} slots"
            )

    def _blocks_shared(self, event: events.BlocksShared) -> None:
        group, parent, blocks = event.group, event.parent_row, as_ints(event.blocks)
        self._check_empty(group, event.child_row)
        self._check_held((parent,))
        if tuple(self.state.tables[group].blocks(parent, 0, len(blocks))) != blocks:
            raise CorruptLedgerError(f"row {parent} shares blocks {blocks}, and does not begin with them")
        self.state.pool.check_adopt(blocks)

    def _block_copied(self, event: events.BlockCopied) -> None:
        self._check_group(event.group)
        self._check_held((event.row,))
        held = self.state.tables[event.group].rows[event.row]
        if not 0 <= event.index < len(held) or held[event.index] != event.source:
            raise CorruptLedgerError(f"row {event.row} does not hold block {event.source} at index {event.index}")
        pool = self.state.pool
        pool.check_take((event.target,), (event.lost_key,))
        pool.check_release((event.source,))
        if event.lost_key is not None and event.lost_group != pool.group_of(event.target):
            raise CorruptLedgerError(f"block {event.target} loses a key of another group than {event.lost_group}")

    def _blocks_freed(self, event: events.BlocksFreed) -> None:
        """Does not look for blocks that a request held and did not give back: `ConservationAudit` counts those."""
        groups, rows, counts = as_ints(event.groups), as_ints(event.rows), as_ints(event.counts)
        blocks, indices = as_ints(event.blocks), as_ints(event.indices)
        _check_same_length(groups=groups, rows=rows, counts=counts)
        keeps_a_part = event.reason in (FreeReason.OUT_OF_WINDOW, FreeReason.TRUNCATED)
        _check_counts(counts, blocks=blocks, indices=indices if keeps_a_part else blocks)
        if len(set(zip(groups, rows, strict=True))) < len(rows):
            raise CorruptLedgerError(f"rows {rows} of groups {groups} are freed: one is named twice")
        truncates = event.reason is FreeReason.TRUNCATED
        self.state.pool.check_release(tuple(filter(None, blocks)) if truncates else blocks)
        at = 0
        for group, row, count in zip(groups, rows, counts, strict=True):
            self._check_group(group)
            self._check_held((row,))
            if keeps_a_part:
                self._check_part(event.reason, group, row, blocks[at : at + count], indices[at : at + count])
            at += count

    def _check_part(
        self, reason: FreeReason, group: int, row: int, blocks: tuple[int, ...], indices: tuple[int, ...]
    ) -> None:
        """Raise unless these are, last one first, the row's first blocks (out of window) or its last (truncated)."""
        held, skipped = self.state.tables[group].rows[row], self.state.skipped[group][row]
        part = list(range(max(skipped, len(held) - len(blocks)), len(held)))
        if reason is FreeReason.OUT_OF_WINDOW:  # between the states that a request holds there may be null blocks
            part = list(islice(filter(held.__getitem__, range(skipped, len(held))), len(blocks)))
        if not blocks or tuple([held[index] for index in reversed(part)]) != blocks:
            raise CorruptLedgerError(f"row {row} of group {group} does not hold blocks {blocks} where they go {reason}")
        if indices != tuple(reversed(part)):
            raise CorruptLedgerError(f"row {row} of group {group} does not hold blocks {blocks} at {indices}")

    def _blocks_uncached(self, event: events.BlocksUncached) -> None:
        pool, blocks = self.state.pool, as_ints(event.blocks)
        _check_same_length(blocks=blocks, keys=event.keys, groups=event.groups)
        pool.check_ids(blocks, "drop the key of")
        for block, key, group in zip(blocks, event.keys, as_ints(event.groups), strict=True):
            if key is None or pool.key_of(block) != key or pool.group_of(block) != group:
                raise CorruptLedgerError(
                    f"block {block} loses the key {key!r} of group {group}, and carries {pool.key_of(block)!r} of "
                    f"group {pool.group_of(block)}"
                )
        if len(set(blocks)) < len(blocks):
            raise CorruptLedgerError(f"blocks {blocks} lose their keys: one is named twice")

    # -- checks that several events share ----------------------------------------------------------------------------

    def _check_group(self, group: int) -> None:
        if not 0 <= group < len(self.state.tables):
            raise CorruptLedgerError(f"no group {group}: this pool has {len(self.state.tables)}")

    def _check_held(self, rows: tuple[int, ...]) -> None:
        """Raise unless requests hold these rows and each row is named once."""
        request_of = self.state.request_of
        for row in rows:
            if not 0 <= row < len(request_of) or request_of[row] is None:
                raise CorruptLedgerError(f"row {row} is held by no request")
        if len(set(rows)) < len(rows):
            raise CorruptLedgerError(f"rows {rows}: one is named twice")

    def _check_empty(self, group: int, row: int) -> None:
        self._check_group(group)
        self._check_held((row,))
        if self.state.tables[group].count(row):
            raise CorruptLedgerError(f"row {row} of group {group} holds blocks already, and adopts others in front")

    def _check_lost_groups(
        self, blocks: tuple[int, ...], keys: tuple[Key | None, ...], groups: tuple[int, ...]
    ) -> None:
        """Raise unless these are the groups of the lost keys; the column is empty where there is one group."""
        if len(groups) != (len(keys) if len(self.state.tables) > 1 else 0):
            raise CorruptLedgerError(f"blocks {blocks} lose {len(keys)} keys of the groups {groups}")
        if not groups:
            return
        for block, key, group in zip(blocks, keys, groups, strict=True):
            if key is not None and group != self.state.pool.group_of(block):
                raise CorruptLedgerError(f"block {block} loses a key of another group than {group}")


def _check_same_length(**columns: tuple[Any, ...] | IntColumn) -> None:
    if len({len(column) for column in columns.values()}) > 1:
        lengths = {name: len(column) for name, column in columns.items()}
        raise CorruptLedgerError(f"the columns of an event differ in length: {lengths}")


def _check_counts(counts: tuple[int, ...], **columns: tuple[Any, ...]) -> None:
    """Raise unless no count is below 0 and the counts add up to the length of each of these flat columns."""
    total = sum(counts)
    if min(counts, default=0) < 0 or {len(column) for column in columns.values()} != {total}:
        lengths = {name: len(column) for name, column in columns.items()}
        raise CorruptLedgerError(f"counts {counts} do not add up to the lengths of the columns: {lengths}")


def _int64(column: IntColumn) -> NDArray[np.int64]:
    try:
        return np.asarray(column, dtype=np.int64)
    except OverflowError as error:
        raise CorruptLedgerError(f"a number in an event does not fit in 64 bits: {error}") from error
