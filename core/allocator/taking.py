"""Which blocks are taken from the head of the free queue, and what they lose by it."""

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, MisuseError
from ..events import BlockCopied, BlocksAllocated, BlocksUncached, Event, FreeReason, named_tuple
from ..ledger.state import LedgerState
from ..pool.block_table import BlockTable
from ..types import Request, largest, smallest, sum_of
from .config import AllocatorConfig
from .prefix_match import PrefixMatch

# What a command refuses before it changes anything: rows that nobody holds, wrong positions, counts below 0.

Rows: TypeAlias = NDArray[np.int64]
IntOrEach: TypeAlias = int | NDArray[np.int64]

_NO_TIMES: NDArray[np.intp] = np.empty(0, dtype=np.intp)

# The other reasons belong to `release_out_of_window` and `truncate`, which keep a part of the request.
REASONS_TO_FREE_ALL = (FreeReason.FINISHED, FreeReason.PREEMPTED, FreeReason.ABORTED)


class CommandChecks:
    """The edge of the allocator: each check raises before the first event, so that a refusal changes nothing."""

    def __init__(self, config: AllocatorConfig, state: LedgerState) -> None:
        self._config = config
        self._state = state

    def rows(self, rows: Rows) -> None:
        """Distinct rows that requests hold. Fancy indexing alone would wrap -1 and write a row twice."""
        try:
            times = np.bincount(rows, minlength=self._config.max_num_reqs)
        except ValueError:
            times = _NO_TIMES
        if len(times) != self._config.max_num_reqs:
            row = int(rows.min()) if int(rows.min()) < 0 else int(rows.max())
            raise MisuseError(f"no row {row}: rows are 0 to {self._config.max_num_reqs - 1}")
        held = self._state.row_is_held[rows]
        if len(rows) and not (held.item(held.argmin()) and times.item(times.argmax()) == 1):
            row = int((times > self._state.row_is_held).argmax())
            if self._state.row_is_held[row]:
                raise MisuseError(f"row {row} is named {int(times[row])} times in one batch; name each request once")
            raise MisuseError(f"row {row} is held by no request: it was never allocated, or freed already")

    def counts(self, new: IntOrEach, drafts: IntOrEach = 0, lookahead: int = 0, reserved: int = 0) -> None:
        """At least one new token each, and nothing below 0."""
        fewest_new = new if isinstance(new, int) else smallest(new) if len(new) else 1
        if isinstance(drafts, int) and 0 <= drafts <= fewest_new >= 1 and lookahead >= 0 and reserved >= 0:
            return
        if np.count_nonzero(np.less(new, 1)):
            raise InputError(f"num_new_tokens must be at least 1, not {int(np.min(new))}")
        if np.count_nonzero(np.less(drafts, 0)) or np.count_nonzero(np.greater(drafts, new)):
            raise InputError(f"num_draft_tokens {drafts} must be within 0 and num_new_tokens {new}")
        if lookahead < 0 or reserved < 0:
            raise InputError(f"num_lookahead_tokens {lookahead} and reserved_blocks {reserved} must not be below 0")

    def steps(self, num_steps: int, placed: NDArray[np.int64]) -> None:
        """At least one step of a token each, and room for all of them behind the placed tokens."""
        if num_steps < 1:
            raise InputError(f"num_steps must be at least 1, not {num_steps}")
        room = self._config.max_model_len - largest(placed) if len(placed) else num_steps
        if num_steps > room:
            raise InputError(
                f"num_steps {num_steps}: max_model_len {self._config.max_model_len} leaves room for {room}"
            )

    def match(self, request: Request, row: int | None, match: PrefixMatch | None) -> tuple[tuple[int, ...], ...] | None:
        """The blocks of a match, or None: its own request's, fresh, and for a request that holds nothing yet."""
        if match is None:
            return None
        if match.request_id != request.request_id:
            raise MisuseError(f"a match of {match.request_id!r} is handed in for {request.request_id!r}")
        if not match.num_hit_tokens:
            return None
        if row is not None:
            raise MisuseError(
                f"request {request.request_id!r} holds blocks already; a prefix is adopted once, with the first blocks"
            )
        if match.sequence != self._state.next_sequence:
            stale = match.stale_block(self._state.pool)
            if stale is not None:
                raise MisuseError(
                    f"stale match for {request.request_id!r}: block {stale} has lost the content it was found by "
                    f"since commit {match.sequence}; call match_prefix again"
                )
        return match.blocks

    def external(self, request: Request, num_hit_tokens: int, num_external_tokens: int) -> None:
        """Tokens from elsewhere: part of the known ones, and at least one is left to be computed."""
        if num_external_tokens < 0 or num_hit_tokens + num_external_tokens >= request.num_tokens:
            raise InputError(
                f"request {request.request_id!r} has {request.num_tokens} tokens; a hit of {num_hit_tokens} and "
                f"{num_external_tokens} external ones must leave one to be computed"
            )

    def start(self, row: int | None, request_id: str, start: int) -> None:
        """A place to go on from: within the placed tokens, and with everything that its tokens attend to."""
        placed = 0 if row is None else self._state.placed[row]
        if not 0 <= start <= placed:
            raise MisuseError(f"request {request_id!r} cannot go on at position {start}: {placed} tokens are placed")
        if row is not None and start < placed:
            self.still_attended(row, request_id, start)

    def still_attended(self, row: int, request_id: str, start: int) -> None:
        """That no block which position `start` attends to has gone out of window."""
        for kind, skipped in zip(self._config.groups, self._state.skipped, strict=True):
            gone = skipped[row] * kind.block_size
            if kind.num_skipped_tokens(start) < gone:
                raise MisuseError(
                    f"request {request_id!r} cannot go back to {start} tokens: {kind} has released the first {gone}, "
                    "which the next token would attend to"
                )

    def starts(self, rows: Rows, first: NDArray[np.int64], placed: NDArray[np.int64]) -> None:
        """The same as `start` for a batch."""
        for place in np.flatnonzero((first < placed) | (first < 0) | (first > placed)).tolist():
            row = int(rows[place])
            self.start(row, str(self._state.request_of[row]), int(first[place]))

    @staticmethod
    def frees_all(reason: FreeReason) -> None:
        """That the reason is one for giving back everything."""
        if reason not in REASONS_TO_FREE_ALL:
            raise InputError(
                f"a request is freed because it is {', '.join(sorted(REASONS_TO_FREE_ALL))}, not {reason}; "
                "release_out_of_window and truncate give back a part"
            )


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


# Which blocks a request must not write as they are: others read them, or a key names their content.

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
