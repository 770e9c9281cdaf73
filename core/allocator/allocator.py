"""The allocator decides which request gets which block. Each command is one commit and succeeds whole or not at all."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..cache_kinds import NULL_BLOCK
from ..errors import MisuseError
from ..events import (
    BlocksAllocated,
    BlocksCached,
    BlocksFreed,
    BlocksShared,
    BlocksUncached,
    CacheReset,
    Commit,
    Event,
    FreeReason,
    Key,
    PoolCreated,
    PrefixAdopted,
    RowsAssigned,
    RowsReleased,
    TokensPlaced,
)
from ..ledger.state import LedgerState
from ..pool.block_pool import BlockPool
from ..pool.block_table import BlockTable
from ..pool.eviction_order import EvictionOrder
from ..types import EventSink, Request, sum_of
from .admission import Admission
from .checks import REASONS_TO_FREE_ALL, CommandChecks, IntOrEach, Rows
from .config import AllocatorConfig
from .orphans import ChainLinks
from .prefix_cache import BatchKeys, Hits, PrefixCache, PrefixMatch, RowKeys
from .prompt_ends import PromptEnd, PromptEnds
from .taking import (
    CopyOnWrite,
    PrivateBlock,
    Shortfall,
    WantedEntries,
    blocks_for_steps,
    events_for,
    taking_events,
    wanted_entries,
)

_NO_PLACES: NDArray[np.intp] = np.empty(0, dtype=np.intp)
# Positions in a request: where it continues, where its external tokens begin, where its new tokens begin and end, and
# where those of them end that are no drafts (told apart for states only).
_Span: TypeAlias = tuple[int, int, int, int, int]
# The keys that a batch registers: by group, and by row for the ends of prompts (empty if no group has any).
_DueKeys: TypeAlias = tuple[list[BatchKeys], list[list[PromptEnd]]]


class KVCacheAllocator:
    """Decides where every token's keys and values live, and records each decision as an event.

    A command asks what it needs to know, checks that it can be carried out, and then emits its events: each event is
    applied to the state by `LedgerState.apply`, the only code that changes anything, and the commit goes to every sink
    once, in order. A command that cannot be carried out changes nothing: it returns None or False where waiting may
    help, and raises where waiting never will.

    Semantics are vLLM V1's, block id for block id (golden/ops), with the sanctioned differences: misuse is refused
    before anything changes, and out-of-window release is a command of its own that runs before `allocate`.

    Attributes:
        config: sizes, groups and rules.
        state: the fold of every event so far.
        sinks: receive every commit once, in order.
    """

    def __init__(
        self, config: AllocatorConfig, sinks: Iterable[EventSink] = (), eviction: EvictionOrder | None = None
    ) -> None:
        """Create the pool and write the first commit.

        Args:
            config: sizes, groups and rules.
            sinks: receive every commit once, in order.
            eviction: an order made by the caller (Belady needs the future); default: made from `config.eviction`.
        """
        created = PoolCreated(
            num_blocks=config.num_blocks,
            groups=config.groups,
            max_num_reqs=config.max_num_reqs,
            max_model_len=config.max_model_len,
            enable_caching=config.enable_caching,
            hash_block_size=config.hash_block_size,
            scheduler_block_size=config.scheduler_block_size,
            eviction=config.eviction if eviction is None else eviction.name,
            key_algorithm=config.key_algorithm,
        )
        self.config = config
        self.sinks = tuple(sinks)
        self.state = LedgerState(created, eviction)
        # The one way to change anything: apply an event and get it back for the commit.
        self._emit = self.state.apply
        self._commit([self._emit(created)])
        self._prefixes = PrefixCache(config, self.state)
        self._prompt_ends = PromptEnds(config, self.state)
        self._admission = Admission(config, self.state)
        self._checks = CommandChecks(config, self.state)
        self._copies = CopyOnWrite(self.state)
        self._links = ChainLinks(config.groups) if config.orphans == "drop" else None
        self._request_in_row: list[Request | None] = [None] * config.max_num_reqs
        # Attributes that every command reads.
        self._block_sizes = [kind.block_size for kind in config.groups]
        self._state_groups = [group for group, kind in enumerate(config.groups) if not kind.holds_tokens]
        self._max_model_len = config.max_model_len
        self._caches = config.enable_caching
        self._defers_release = config.release == "deferred"
        # Arithmetic between two NumPy arrays takes half as long as between an array and a Python number.
        self._longest: NDArray[np.int64] = np.array(config.max_model_len, dtype=np.int64)
        self._one_each: NDArray[np.int64] = np.ones(config.max_num_reqs, dtype=np.int64)
        # One group, whose blocks a request keeps while it runs, and whose hits are unbroken runs.
        self._grows_only = len(config.groups) == 1 and config.groups[0].needs_whole_prefix
        self._never_skips = all(kind.computed_tokens_that_skip(np.ones(1, np.int64)) is None for kind in config.groups)

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def pool(self) -> BlockPool:
        """Return the block pool. Read it, never change it."""
        return self.state.pool

    @property
    def num_free_blocks(self) -> int:
        """Count the blocks that can be taken now, cached content included."""
        return len(self.state.pool.free_queue)

    def row_of(self, request_id: str) -> int:
        """Return the block-table row that a request holds.

        Raises:
            MisuseError: the request holds nothing.
        """
        row = self.state.row_of.get(request_id)
        if row is None:
            raise MisuseError(f"request {request_id!r} holds no blocks: it was never allocated, or freed already")
        return row

    def holds(self, request_id: str) -> bool:
        """Whether the request holds a row."""
        return request_id in self.state.row_of

    def block_ids(self, request_id: str) -> list[list[int]]:
        """Return the request's blocks, by group and logical index."""
        row = self.row_of(request_id)
        return [table.blocks(row) for table in self.state.tables]

    def num_placed_tokens(self, request_id: str) -> int:
        """Count the tokens of the request that have slots (vLLM: num_computed_tokens after the step)."""
        return self.state.placed[self.row_of(request_id)]

    def check_fits(self, num_tokens: int, what: str = "a request") -> None:
        """Raise `DoesNotFitError` with the numbers if a request of this length can never be served (D01)."""
        self._admission.check_fits(num_tokens, what)

    def max_fitting_tokens(self) -> int:
        """Return the length of the longest request that the empty pool can serve."""
        return self._admission.max_fitting_tokens()

    def can_admit(
        self,
        request: Request,
        match: PrefixMatch | None = None,
        *,
        use_watermark: bool = True,
        reserved_blocks: int = 0,
    ) -> bool:
        """Whether the whole known sequence would fit now: the full-sequence gate (rule 16)."""
        missing = self.num_missing_blocks(request, match, use_watermark=use_watermark, reserved_blocks=reserved_blocks)
        return missing <= 0

    def num_missing_blocks(
        self,
        request: Request,
        match: PrefixMatch | None = None,
        *,
        use_watermark: bool = True,
        reserved_blocks: int = 0,
    ) -> int:
        """Return how many more blocks must be free for `can_admit`; 0 or less where it is true."""
        spare = self.num_free_blocks - reserved_blocks - (self.config.watermark_blocks if use_watermark else 0)
        return self._admission.blocks_needed_for_all(request, match) - spare

    # -- prefix lookup -----------------------------------------------------------------------------------------------

    def match_prefix(self, request: Request) -> PrefixMatch:
        """Look up the longest cached prefix. Changes nothing in the ledger and pins no block.

        A boundary worth keeping (rule 14) is stored on the request, where it survives a lookup that finds nothing.
        """
        if not self._caches or request.keys is None:
            empty = ((),) * len(self.config.groups)
            return PrefixMatch(request.request_id, 0, empty, empty, 0, self.state.next_sequence)
        match = self._prefixes.match(request)
        if match.boundary:
            request.cache_boundary = match.boundary
        return match

    def num_dropped_tokens(self, request: Request, match: PrefixMatch) -> int:
        """Count the tokens behind a hit that are cached too, and that EAGLE or MTP computes again."""
        return self._prefixes.num_dropped_tokens(request, match)

    def begin_step(self) -> None:
        """Note that the steps so far have run: the states which they leave can be copied now."""
        self._prefixes.states_of_step.clear()

    def hits_state_of_this_step(self, match: PrefixMatch) -> bool:
        """Whether a hit ends in a state that this step writes: its copy exists only when the step has run."""
        states = self._prefixes.states_of_step
        return bool(states) and any(
            (group, match.keys[group][-1]) in states for group in self._state_groups if match.keys[group]
        )

    def holds_state_of(self, row: int, match: PrefixMatch) -> bool:
        """Whether a row still holds a state with the key of the one in which a hit ends."""
        return any(
            match.keys[group]
            and self.pool.key_of(table.block(row, len(match.keys[group]) - 1)) == match.keys[group][-1]
            for group, table in enumerate(self.state.tables)
            if table.keeps_states
        )

    def key_behind(self, request: Request, match: PrefixMatch) -> Key | None:
        """Return the key of the block behind a hit: the hit grows only if this key becomes findable.

        None where the request has not filled that block or its source withholds the key; without caching; and with
        several groups or windows, whose hits also grow when other groups lose blocks.
        """
        if not (self._caches and self._grows_only):
            return None
        kind, count = self.config.groups[0], len(match.blocks[0])
        if (count + 1) * kind.block_size > request.num_tokens:
            return None
        return next(iter(self._prefixes.block_keys(request, kind, count, count + 1)), None)

    # -- commands for one request ------------------------------------------------------------------------------------

    def allocate(
        self,
        request: Request,
        num_new_tokens: int,
        match: PrefixMatch | None = None,
        *,
        num_computed_tokens: int | None = None,
        num_external_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        reserved_blocks: int = 0,
        use_watermark: bool = False,
    ) -> tuple[tuple[int, ...], ...] | None:
        """Give a request slots for its next tokens (rules 15, 18 to 21).

        Args:
            request: whose tokens; `num_tokens` bounds what is registered.
            num_new_tokens: tokens to compute, drafts included. 0 where the request waits for external tokens: then
                none of its blocks becomes findable before its next command.
            match: from `match_prefix`, for a request that holds nothing yet; its blocks are adopted first.
            num_computed_tokens: where the new tokens start, if not behind the last ones (rejected drafts).
            num_external_tokens: tokens behind the hit whose keys and values are copied in before the step (from host
                memory or another engine). They get blocks of their own, never shared ones (B11).
            num_lookahead_tokens: further slots for drafts to come; clamped to `max_model_len`.
            reserved_blocks: free blocks that are promised to others.
            use_watermark: whether the configured watermark must stay free (admissions).

        Returns:
            The blocks taken, by group, without the adopted ones; None if they are not free now: nothing has changed.

        Raises:
            MisuseError: a stale match or one of another request, no row left, or a start that is not possible.
            InputError: no new tokens, or a count below 0.
            DoesNotFitError: even an empty pool is too small.
        """
        state = self.state
        row = state.row_of.get(request.request_id)
        hits, num_hit_tokens = None, 0
        if match is not None:
            hits, num_hit_tokens = match.checked_blocks(request, row, state), match.num_hit_tokens
        if num_external_tokens:
            self._checks.external(request, num_hit_tokens, num_external_tokens)
        if num_new_tokens < 1 or num_lookahead_tokens or reserved_blocks:
            self._checks.counts(num_new_tokens or min(num_external_tokens, 1), 0, num_lookahead_tokens, reserved_blocks)
        start = 0 if row is None else state.placed[row]
        if num_computed_tokens is not None and num_computed_tokens != start:
            start = num_computed_tokens
            self._checks.start(row, request.request_id, start)
        longest = self._max_model_len
        total = start + num_hit_tokens + num_external_tokens
        if total > longest:
            total = longest
        end = total + num_new_tokens
        if end > longest:
            end = longest
        num_slots = min(end + num_lookahead_tokens, longest) if num_lookahead_tokens else end
        private: Sequence[PrivateBlock] = ()
        if row is not None and (row in state.guarded or start < state.placed[row]):
            private = self._copies.of_row(row, total - num_external_tokens, num_slots)
            if private and self._prompt_ends.are_due:
                private = [block for block in private if not self._prompt_ends.keeps(block, request, start)]
        wanted = [-(-num_slots // size) for size in self._block_sizes]
        known = end
        if self._state_groups:
            known = min(end, max(request.num_tokens, total))
            for group in self._state_groups:  # no state is written for the slots of drafts to come
                wanted[group] = -(-end // self._block_sizes[group])
        span = start, total - num_external_tokens, total, end, known
        spare = len(state.pool.free_queue) - reserved_blocks
        if use_watermark:
            spare -= self.config.watermark_blocks
        # Where even a cold request would fit, it does not matter which of the hit blocks are in use.
        fits = row is None and sum(wanted) <= spare
        if not fits and self._lacks_blocks(request, row, span, hits, wanted, private, spare):
            return None
        # Tokens that are still to be copied in must not be found: another request would read them too early.
        row_keys: Sequence[RowKeys] = ()
        prompt_ends: Sequence[PromptEnd] = ()
        if self._caches and num_new_tokens > 0 and request.keys is not None:
            row_keys = self._prefixes.keys_of_row(request, row, hits, total, end)
            if self._prompt_ends.are_due:
                prompt_ends = self._prompt_ends.of_row(row, request, min(end, request.num_tokens))
        keys = row_keys, prompt_ends
        return self._emit_allocation(request, row, span, hits, private, wanted, keys, num_new_tokens > 0)

    def _lacks_blocks(
        self,
        request: Request,
        row: int | None,
        span: _Span,
        hits: Hits | None,
        wanted: Sequence[int],
        private: Sequence[PrivateBlock],
        spare: int,
    ) -> bool:
        """Whether more than `spare` blocks are needed; raises `DoesNotFitError` if there can never be enough."""
        _, written_from, total, _, known = span
        needed = self._admission.blocks_needed(row, hits, wanted, total, known)
        if written_from < total:  # external tokens bring a state of their own
            tables = [self.state.tables[group] for group in self._state_groups]
            needed += sum([table.first_taken(total) < table.first_taken(known) for table in tables])
        num_copies = sum([copy for *_, copy in private]) if private else 0
        if needed + num_copies <= spare:
            return False
        # Copies are for requests that read the blocks now; once those have ended, nothing need be copied.
        self._admission.check_can_ever_hold(request, row, needed)
        return True

    def _emit_allocation(
        self,
        request: Request,
        row: int | None,
        span: _Span,
        hits: Hits | None,
        private: Sequence[PrivateBlock],
        wanted: Sequence[int],
        keys: tuple[Sequence[RowKeys], Sequence[PromptEnd]],
        has_new_tokens: bool,
    ) -> tuple[tuple[int, ...], ...]:
        """Carry out an allocation whose blocks are free; `wanted` is how many the request then has, by group."""
        state, emit = self.state, self._emit
        start, written_from, total, end, known = span
        events: list[Event] = []
        if row is None:
            row = self._assign_row(request, events)
        elif start < state.placed[row] and self._copies.rolls_back_registered(row, written_from):
            events.append(emit(TokensPlaced.of_row(row, written_from, 0)))
        if hits is not None or (written_from < total and not start):
            self._adopt(row, hits, total, events)
        if private:
            events += [emit(self._copies.event(block)) for block in private]
        taken: list[tuple[int, ...]] = []
        num_held: list[int] = []
        for group, table in enumerate(state.tables):
            blocks = ()
            num_held.append(len(table.rows[row]))
            count = wanted[group] - num_held[group]
            parts: tuple[tuple[int, int], ...] = ((count, 0),) if count > 0 else ()
            if self._state_groups and table.keeps_states:
                parts = self._parts_with_states(table, num_held[group], count, written_from, total, known)
            for part, num_nulls in parts:
                new = state.pool.free_queue.peek(part - num_nulls)
                if num_nulls:
                    new = (NULL_BLOCK,) * num_nulls + new
                lost_keys = state.pool.keys_of(new)
                lost_groups = state.pool.groups_of(new) if lost_keys and len(wanted) > 1 else ()
                events.append(emit(BlocksAllocated.of_row(group, row, new, lost_keys, lost_groups)))
                blocks = blocks + new if blocks else new
            taken.append(blocks)
        row_keys, prompt_ends = keys
        for group_keys in row_keys:
            if self._prompt_ends.are_due:
                group, offset, of_blocks = group_keys
                self._emit_outgrown(group, (row,), ((offset,), (of_blocks,)), events)
            self._note_cached(self._prefixes.register_row(row, group_keys, request, num_held[group_keys[0]]), events)
        if prompt_ends:
            self._emit_prompt_ends(row, prompt_ends, events)
        if written_from < total:
            events.append(emit(TokensPlaced.of_row(row, written_from, total - written_from)))
        if has_new_tokens:
            events.append(emit(TokensPlaced.of_row(row, total, end - total)))
        self._commit(events)
        return tuple(taken)

    @staticmethod
    def _parts_with_states(
        table: BlockTable, num_held: int, count: int, written_from: int, total: int, known: int
    ) -> tuple[tuple[int, int], ...]:
        """Split `count` new entries of a group of states into those to take at once: (entries, null ones before).

        External tokens bring a state that the step starts from; the step leaves one where its known tokens end.
        """
        brought = max(_ceil_div(total, table.block_size) - num_held, 0) if written_from < total else 0
        left = max(count - brought, 0)
        nulls = min(max(table.first_taken(known) - num_held - brought, 0), left)
        return tuple([part for part in ((brought, brought - 1), (left, nulls)) if part[0] > 0])

    def _adopt(self, row: int, hits: Hits | None, total: int, events: list[Event]) -> None:
        """Put the blocks of a hit, and null blocks for what the next token does not attend to, into an empty row."""
        for group, kind in enumerate(self.config.groups):
            blocks = hits[group] if hits is not None else ()
            if not self._never_skips:
                # A window of one token hits blocks that its next token does not attend to, as external tokens may.
                skipped = kind.num_skipped_tokens(total) // kind.block_size
                blocks = (0,) * skipped + blocks[skipped:]
            if blocks:
                events.append(self._emit(PrefixAdopted._make((group, row, blocks))))

    def release_out_of_window(self, request_id: str, num_computed_tokens: int | None = None) -> int:
        """Free the blocks that no later token of the request attends to (rule 17). Returns how many.

        Runs before `allocate`, which is then all-or-nothing; `num_computed_tokens` defaults to the placed tokens.

        Raises:
            MisuseError: the request holds nothing, or `num_computed_tokens` is not within 0 and its placed tokens.
        """
        row = self.row_of(request_id)
        placed = self.state.placed[row]
        total = placed if num_computed_tokens is None else num_computed_tokens
        if not 0 <= total <= placed:
            raise MisuseError(f"request {request_id!r} has {placed} placed tokens, so {total} cannot be computed")
        events: list[Event] = []
        num_released = self._emit_release(row, total, events)
        if events:
            self._commit(events)
        return num_released

    def _emit_release(self, row: int, total: int, events: list[Event]) -> int:
        num_released = 0
        for group, kind in enumerate(self.config.groups):
            stop = min(kind.num_skipped_tokens(total) // kind.block_size, self.state.tables[group].count(row))
            start = self.state.skipped[group][row]
            if stop > start:
                held = self.state.tables[group].rows[row]
                # Between the states that a request holds there may be null blocks.
                indices = tuple([index for index in range(stop - 1, start - 1, -1) if held[index]])
                blocks = tuple([held[index] for index in indices])
                events.append(self._emit(BlocksFreed.of_row(FreeReason.OUT_OF_WINDOW, group, row, blocks, indices)))
                num_released += len(blocks)
        return num_released

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Keep only the first `num_tokens` placed tokens (a crop, rejected drafts); free the blocks behind them.

        Raises:
            MisuseError: the request holds nothing or has fewer tokens, or what its next token attends to has gone out
                of window.
        """
        row = self.row_of(request_id)
        placed = self.state.placed[row]
        if not 0 <= num_tokens <= placed:
            raise MisuseError(f"cannot truncate {request_id!r} to {num_tokens} tokens: it has {placed}")
        self._checks.still_attended(row, request_id, num_tokens)
        events: list[Event] = []
        for group, table in enumerate(self.state.tables):
            keep = _ceil_div(num_tokens, table.block_size)
            indices = tuple(range(table.count(row) - 1, keep - 1, -1))
            if indices:
                blocks = tuple([table.block(row, index) for index in indices])
                events.append(self._emit(BlocksFreed.of_row(FreeReason.TRUNCATED, group, row, blocks, indices)))
        if events or num_tokens < placed:
            events.append(self._emit(TokensPlaced.of_row(row, num_tokens, 0)))
            self._commit(events)

    def fork(self, parent_id: str, child: Request) -> None:
        """Let `child` share every placed token of the parent; the first write into a shared block copies it.

        Raises:
            MisuseError: the parent holds nothing, the child holds blocks already, or no row is left.
        """
        parent_row = self.row_of(parent_id)
        if child.request_id in self.state.row_of:
            raise MisuseError(f"cannot fork into {child.request_id!r}: it holds blocks already")
        placed = self.state.placed[parent_row]
        events: list[Event] = []
        child_row = self._assign_row(child, events)
        for group, table in enumerate(self.state.tables):
            blocks = tuple(table.blocks(parent_row)[: _ceil_div(placed, table.block_size)])
            if blocks:
                events.append(self._emit(BlocksShared(group, parent_row, child_row, blocks)))
        events.append(self._emit(TokensPlaced.of_row(child_row, 0, placed)))
        self._commit(events)

    def free(self, request_id: str, reason: FreeReason = FreeReason.FINISHED) -> None:
        """Free everything that a request holds, its last block first (rule 4).

        Raises:
            MisuseError: the request holds nothing.
            InputError: `reason` is one for freeing a part.
        """
        row = self.state.row_of.get(request_id)
        if row is None:
            row = self.row_of(request_id)  # raises
        if reason not in REASONS_TO_FREE_ALL:
            self._checks.refuse_reason(reason)
        events: list[Event] = []
        segments: list[tuple[int, tuple[int, ...]]] = []
        for group, table in enumerate(self.state.tables):
            blocks = table.rows[row]
            if blocks:
                freed = tuple(blocks[self.state.skipped[group][row] :][::-1])
                if table.keeps_states:
                    freed = tuple(filter(None, freed))
                if self._defers_release:
                    segments.append((group, freed))
                else:
                    events.append(self._emit(BlocksFreed.of_row(reason, group, row, freed)))
        if segments:
            segments.reverse()
            flat = tuple([block for _, blocks in segments for block in blocks])
            groups, counts = tuple([g for g, _ in segments]), tuple([len(blocks) for _, blocks in segments])
            events.append(self._emit(BlocksFreed(reason, groups, (row,) * len(groups), counts, flat)))
        events.append(self._emit(RowsReleased.of(request_id, row)))
        self._request_in_row[row] = None
        self._commit(events)

    def preempt(self, request_id: str) -> None:
        """Free a running request's blocks; it will be allocated again.

        Raises:
            MisuseError: the request holds nothing.
        """
        self.free(request_id, FreeReason.PREEMPTED)

    def abort(self, request_id: str) -> bool:
        """Free what an aborted request holds, if anything; a second abort does nothing and returns False (C06)."""
        if request_id not in self.state.row_of:
            return False
        self.free(request_id, FreeReason.ABORTED)
        return True

    # -- commands for a batch of running requests, named by their rows -----------------------------------------------

    def append(
        self,
        rows: Rows,
        num_new_tokens: IntOrEach = 1,
        *,
        num_draft_tokens: IntOrEach = 0,
        num_lookahead_tokens: int = 0,
        reserved_blocks: int = 0,
        first_positions: NDArray[np.int64] | None = None,
        num_known_tokens: NDArray[np.int64] | None = None,
    ) -> bool:
        """Give many running requests slots for their next tokens: a decode step, one commit.

        Args:
            rows: int64 `[num_reqs]`, distinct rows in batch order (see `row_of`).
            num_new_tokens: tokens per request, drafts included; one number or int64 `[num_reqs]`.
            num_draft_tokens: how many of them are drafts, which are never registered.
            num_lookahead_tokens: further slots for drafts to come.
            reserved_blocks: free blocks that are promised to others.
            first_positions: int64 `[num_reqs]`, where the new tokens start; default: behind the placed ones.
            num_known_tokens: int64 `[num_reqs]`, tokens of which none behind is registered, because a step in flight
                still has to sample them; default: all but the drafts.

        Returns:
            False, and nothing has changed, if there are not enough free blocks for all of them.

        Raises:
            MisuseError: no request holds a row, a row is named twice, or `allocate` would refuse a first position.
            InputError: no new tokens, or a count below 0.
        """
        first, end, may_roll_back, private, shortfalls, num_missing = self._demand(
            rows, num_new_tokens, num_draft_tokens, num_lookahead_tokens, reserved_blocks, first_positions
        )
        if num_missing > len(self.state.pool.free_queue) - reserved_blocks:
            return False
        known = _known(end, num_draft_tokens, num_known_tokens)
        self._emit_append(rows, first, end, known, shortfalls, private, may_roll_back=may_roll_back)
        return True

    def append_in_turn(
        self,
        rows: Rows,
        num_new_tokens: IntOrEach = 1,
        *,
        num_draft_tokens: IntOrEach = 0,
        num_lookahead_tokens: int = 0,
        reserved_blocks: int = 0,
        first_positions: NDArray[np.int64] | None = None,
        num_known_tokens: NDArray[np.int64] | None = None,
        num_processed_tokens: NDArray[np.int64] | None = None,
    ) -> int:
        """`append` to one request after the other, as far as the free blocks reach: one commit (rule 17).

        Each request first releases its blocks out of window, so that they can be taken by itself and by those behind
        it. The first request that finds too few free blocks has released its own as well.

        Args:
            rows: int64 `[num_reqs]`, distinct rows in batch order.
            num_new_tokens: tokens per request, drafts included; one number or int64 `[num_reqs]`.
            num_draft_tokens: how many of them are drafts, which are never registered.
            num_lookahead_tokens: further slots for drafts to come.
            reserved_blocks: free blocks that are promised to others.
            first_positions: int64 `[num_reqs]`, where the new tokens start; default: behind the placed ones.
            num_known_tokens: int64 `[num_reqs]`, tokens behind which none is registered; default: all but drafts.
            num_processed_tokens: int64 `[num_reqs]`, the tokens that no step in flight computes: a window may be left
                behind as far as they reach; default: `first_positions`.

        Returns:
            How many of the rows, from the first one on, got their slots.

        Raises:
            MisuseError, InputError: as `append`.
        """
        first, end, may_roll_back, private, shortfalls, num_missing = self._demand(
            rows, num_new_tokens, num_draft_tokens, num_lookahead_tokens, reserved_blocks, first_positions
        )
        processed = first if num_processed_tokens is None else num_processed_tokens
        due = [] if self._never_skips else self._out_of_window(rows, processed)
        free_queue = self.state.pool.free_queue
        known = _known(end, num_draft_tokens, num_known_tokens)
        if not due and num_missing <= len(free_queue) - reserved_blocks:
            self._emit_append(rows, first, end, known, shortfalls, private, may_roll_back=may_roll_back)
            return len(rows)
        wanted = wanted_entries(shortfalls)
        at = [entry[0] for entry in wanted]
        place_of = {row: place for place, row in enumerate(rows.tolist())} if private else {}
        all_fit = num_missing <= len(free_queue) - reserved_blocks
        up_to = (
            [] if all_fit else self._blocks_up_to(len(rows), wanted, [place_of[row] for _, row, _, c in private if c])
        )
        due_places, batch_keys = self._keys_to_append(rows, first, known, may_roll_back)
        events: list[Event] = []
        num_served = 0
        ends = [*due[bool(due) and due[0] == 0 :], len(rows)]
        releases = dict(zip(due, zip(rows[due].tolist(), processed[due].tolist(), strict=True), strict=True))
        start = 0
        for stop in ends:
            if start in releases:
                self._emit_release(*releases[start], events)
            num_served = stop
            if not all_fit:
                reach = up_to[start] + len(free_queue) - reserved_blocks
                num_served = max(min(bisect_right(up_to, reach) - 1, stop), start)
            part = wanted[bisect_left(at, start) : bisect_left(at, num_served)]
            own = [block for block in private if start <= place_of[block[1]] < num_served]
            if may_roll_back:
                self._emit_rollbacks(rows[start:num_served], first[start:num_served], events)
            if part or own:
                events += [self._emit(self._copies.event(block)) for block in own]
                events += [self._emit(event) for event in events_for(self.state, rows, part, len(shortfalls))]
            if num_served < stop:
                break
            start = stop
        if num_served:
            places = slice(num_served)
            count = int(np.searchsorted(due_places, num_served))
            by_group, prompt_ends = batch_keys
            cut = [(offsets[:count], keys[:count]) for offsets, keys in by_group], prompt_ends[:count]
            self._emit_placed(rows[places], first[places].copy(), end[places], due_places[:count], cut, events)
        if events:
            self._commit(events)
        return num_served

    @staticmethod
    def _blocks_up_to(num_rows: int, wanted: Sequence[WantedEntries], copying: Sequence[int]) -> list[int]:
        """Count the blocks that the places of a batch need before each of them, and before its end."""
        missing = [0] * num_rows
        for place, _, count, null in wanted:
            missing[place] += count - null
        for place in copying:
            missing[place] += 1
        return list(accumulate(missing, initial=0))

    def _demand(
        self,
        rows: Rows,
        num_new_tokens: IntOrEach,
        num_draft_tokens: IntOrEach,
        num_lookahead_tokens: int,
        reserved_blocks: int,
        first_positions: NDArray[np.int64] | None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], bool, list[PrivateBlock], list[Shortfall], int]:
        """Check the arguments of an append and count what it needs.

        Returns:
            Where the new tokens start and end; whether some start before the placed ones; the blocks to make private;
            what each group lacks; and how many blocks have to be free.
        """
        state = self.state
        self._checks.rows(rows)
        self._checks.counts(num_new_tokens, num_draft_tokens, num_lookahead_tokens, reserved_blocks)
        placed = state.num_placed[rows]
        first = placed if first_positions is None else first_positions
        if first is not placed:
            self._checks.starts(rows, first, placed)
        new: IntOrEach | NDArray[np.int64] = num_new_tokens
        if isinstance(num_new_tokens, int) and num_new_tokens == 1:
            new = self._one_each[: len(rows)]
        end = np.minimum(first + new, self._longest)
        num_slots = np.minimum(end + num_lookahead_tokens, self._longest) if num_lookahead_tokens else end
        private = self._copies.of_batch(rows, first, placed, num_slots)
        if private and self._prompt_ends.are_due:
            first_of = dict(zip(rows.tolist(), first.tolist(), strict=True))
            requests, keeps = self._request_in_row, self._prompt_ends.keeps
            private = [block for block in private if not keeps(block, requests[block[1]], first_of[block[1]])]
        if self._state_groups:
            shortfalls: list[Shortfall] = self._shortfalls(rows, end, num_slots, num_draft_tokens)
        else:
            shortfalls = [(*table.shortfall(rows, num_slots), None) for table in state.tables]
        num_missing = sum([sum_of(counts) for which, counts, _ in shortfalls if len(which)])
        if self._state_groups:
            num_missing -= sum([sum_of(nulls) for *_, nulls in shortfalls if nulls is not None])
        num_missing += sum([copy for *_, copy in private])
        return first, end, first is not placed, private, shortfalls, num_missing

    def _shortfalls(
        self, rows: Rows, end: NDArray[np.int64], num_slots: NDArray[np.int64], num_draft_tokens: IntOrEach
    ) -> list[Shortfall]:
        """What each group lacks for `num_slots` slots; no state is written for those of drafts to come."""
        shortfalls: list[Shortfall] = []
        for table in self.state.tables:
            if table.keeps_states:
                short = table.shortfall(rows, end)
                shortfalls.append((*short, table.num_nulls(rows, short, end - num_draft_tokens)))
            else:
                shortfalls.append((*table.shortfall(rows, num_slots), None))
        return shortfalls

    def _emit_append(
        self,
        rows: Rows,
        first: NDArray[np.int64],
        end: NDArray[np.int64],
        known: NDArray[np.int64],
        shortfalls: list[Shortfall],
        private: list[PrivateBlock],
        blocks: tuple[int, ...] | None = None,
        may_roll_back: bool = False,
    ) -> None:
        """Carry out an append whose blocks are free; only blocks of the `known` tokens are registered.

        `blocks` gives the ids of the blocks where they differ from the queue's order.

        The keys are asked for before the first event: if a key source fails, nothing has changed.
        """
        due, batch_keys = self._keys_to_append(rows, first, known, may_roll_back)
        events: list[Event] = []
        if may_roll_back:
            self._emit_rollbacks(rows, first, events)
        events += [self._emit(self._copies.event(block)) for block in private]
        events += [self._emit(event) for event in taking_events(self.state, rows, shortfalls, blocks)]
        # The event owns its columns: arrays of the caller are copied, those that this command made are not.
        self._emit_placed(rows, first.copy() if may_roll_back else first, end, due, batch_keys, events)
        self._commit(events)

    def _keys_to_append(
        self,
        rows: Rows,
        first: NDArray[np.int64],
        known: NDArray[np.int64],
        may_roll_back: bool,
    ) -> tuple[NDArray[np.intp], _DueKeys]:
        """Return the places of a batch that fill blocks, and the keys of these blocks, by group."""
        if not self._caches:
            return _NO_PLACES, ([], [])
        ends, requests = self._prompt_ends, self._request_in_row
        also = ends.due(rows, known) if ends.are_due else None
        due = self._prefixes.due(rows, known, first if may_roll_back else None, also)
        if not len(due):
            return due, ([], [])
        due_rows: list[int] = rows[due].tolist()
        due_known: list[int] = known[due].tolist()
        keys = self._prefixes.keys_of_batch(due_rows, first[due].tolist(), due_known, requests)
        prompt_ends: list[list[PromptEnd]] = []
        if ends.are_due:
            prompt_ends = [ends.of_row(row, requests[row], k) for row, k in zip(due_rows, due_known, strict=True)]
        return due, (keys, prompt_ends)

    def _emit_rollbacks(self, rows: Rows, first: NDArray[np.int64], events: list[Event]) -> None:
        for row, position in self._copies.rollbacks(rows, first):
            events.append(self._emit(TokensPlaced.of_row(row, position, 0)))

    def _emit_placed(
        self,
        rows: Rows,
        first: NDArray[np.int64],
        end: NDArray[np.int64],
        due: NDArray[np.intp],
        batch_keys: _DueKeys,
        events: list[Event],
    ) -> None:
        """Register the blocks that are filled at the places `due`, and place the tokens of all rows."""
        self._emit_cached(rows[due].tolist() if batch_keys[0] else [], batch_keys, events)
        events.append(self._emit(TokensPlaced.of_batch(rows.copy(), first, end - first)))

    def _emit_cached(self, due_rows: list[int], batch_keys: _DueKeys, events: list[Event]) -> None:
        by_group, prompt_ends = batch_keys
        for group, keys in enumerate(by_group):
            if self._prompt_ends.are_due:
                self._emit_outgrown(group, due_rows, keys, events)
            self._note_cached(self._prefixes.register_batch(group, due_rows, keys, self._request_in_row), events)
        if prompt_ends:
            for row, ends in zip(due_rows, prompt_ends, strict=True):
                self._emit_prompt_ends(row, ends, events)

    def _note_cached(self, cached: BlocksCached | None, events: list[Event]) -> None:
        if cached is not None:
            events.append(self._emit(cached))
            if self._links is not None:
                self._links.note(cached, self.state.pool)

    def _emit_outgrown(self, group: int, rows: Sequence[int], keys: BatchKeys, events: list[Event]) -> None:
        outgrown = self._prompt_ends.outgrown(group, rows, keys)
        if outgrown is not None:
            events.append(self._emit(outgrown))

    def _emit_prompt_ends(self, row: int, prompt_ends: Sequence[PromptEnd], events: list[Event]) -> None:
        request = self._request_in_row[row]
        if request is None:
            return
        for prompt_end in prompt_ends:
            group, index, key, _ = prompt_end
            self._emit_outgrown(group, (row,), ((index,), ((key,),)), events)
            cached = self._prompt_ends.register(row, prompt_end, request)
            self._note_cached(cached, events)
            if cached is not None and group in self._state_groups:
                self._prefixes.states_of_step.add((group, key))

    def register(self, rows: Rows, num_tokens: NDArray[np.int64]) -> None:
        """Register the complete blocks among the first `num_tokens` tokens of each row, where they are not yet.

        An append leaves out the blocks whose tokens a step in flight still has to sample; this is for those that no
        later append registers in time.

        Raises:
            MisuseError: no request holds a row, or a row is named twice.
        """
        self._checks.rows(rows)
        due, batch_keys = self._keys_to_append(rows, num_tokens, num_tokens, may_roll_back=False)
        events: list[Event] = []
        self._emit_cached(rows[due].tolist(), batch_keys, events)
        if events:
            self._commit(events)

    @property
    def can_append_several_steps(self) -> bool:
        """Whether `append_steps` is available: one group that never frees blocks while a request runs."""
        return self._grows_only

    def could_append(self, rows: Rows, num_new_tokens: int) -> bool:
        """Whether there are enough free blocks for `num_new_tokens` further tokens of every row.

        False where a row would write into a block that others read or a key names: one `append` makes it private.
        """
        state = self.state
        num_free = len(state.pool.free_queue)
        at_most = len(rows) * sum([num_new_tokens // size + 1 for size in self._block_sizes])
        if at_most <= num_free and not state.guarded:
            return True  # even if every row were at the end of a block
        placed = state.num_placed[rows]
        num_slots = np.minimum(placed + num_new_tokens, self._longest)
        if self._copies.of_batch(rows, placed, placed, num_slots):
            return False
        shortfalls = self._shortfalls(rows, num_slots, num_slots, 0)
        nulls = sum([sum_of(nulls) for *_, nulls in shortfalls if nulls is not None])
        return sum([sum_of(counts) for _, counts, _ in shortfalls]) - nulls <= num_free

    def append_steps(self, rows: Rows, num_steps: int, num_unknown_tokens: int = 0) -> tuple[int, ...]:
        """`append` one token to every row, `num_steps` times, as one commit with the same block ids.

        `num_unknown_tokens` says how many of the last tokens a step in flight still has to sample, so that their blocks
        are not registered.

        Returns:
            For each step, how many blocks it is the first to use.

        Raises:
            MisuseError: `could_append` or `can_append_several_steps` is false.
            InputError: no step, or one behind `max_model_len`.
        """
        state = self.state
        self._checks.rows(rows)
        first = state.num_placed[rows]
        self._checks.steps(num_steps, first)
        table, end = state.tables[0], first + num_steps
        shortfall = table.shortfall(rows, end)
        if not self.can_append_several_steps or sum_of(shortfall[1]) > len(state.pool.free_queue):
            raise MisuseError(f"cannot append {num_steps} steps to {len(rows)} rows; ask could_append first")
        for _, row, index, _ in self._copies.of_batch(rows, first, first, end):
            raise MisuseError(
                f"cannot append {num_steps} steps to row {row}: others read its block {index}, or a key names it; "
                "append one first"
            )
        blocks, first_used = blocks_for_steps(state.pool, table, rows, first, shortfall, num_steps)
        self._emit_append(rows, first, end, end - num_unknown_tokens, [(*shortfall, None)], [], blocks)
        return first_used

    def release_out_of_window_among(self, rows: Rows, num_processed_tokens: NDArray[np.int64] | None = None) -> None:
        """`release_out_of_window` for many running requests, as one commit; cheap where no block is due."""
        if self._never_skips:
            return
        self._checks.rows(rows)
        processed = self.state.num_placed[rows] if num_processed_tokens is None else num_processed_tokens
        events: list[Event] = []
        for place in self._out_of_window(rows, processed):
            self._emit_release(int(rows[place]), int(processed[place]), events)
        if events:
            self._commit(events)

    def _out_of_window(self, rows: Rows, num_processed_tokens: NDArray[np.int64]) -> list[int]:
        """Return the places of a batch whose requests hold blocks that no later token attends to."""
        due = np.zeros(len(rows), dtype=np.bool_)
        for kind, skipped in zip(self.config.groups, self.state.num_skipped, strict=True):
            needed = kind.computed_tokens_that_skip(skipped[rows].astype(np.int64) + 1)
            if needed is not None:
                due |= num_processed_tokens >= needed
        places: list[int] = due.nonzero()[0].tolist()
        return places

    # -- commands about cached content -------------------------------------------------------------------------------

    def evict(self, blocks: Sequence[int]) -> int:
        """Drop the keys of blocks by id; ref counts and queue positions stay. Returns how many keys were dropped.

        Dropping every key that there is while requests run is a `reset_prefix_cache(while_running=True)`.

        Raises:
            MisuseError: there is no such block.
        """
        pool = self.state.pool
        keyed = [block for block in dict.fromkeys(blocks) if pool.key_of(block) is not None]
        if self._links is not None:
            keyed += self._links.descendants(keyed, pool)
        if keyed and self.state.row_of and len(keyed) == self.state.pool.num_keyed_blocks:
            self._commit([self._emit(CacheReset())])
        elif keyed:
            keys: list[Key] = [pool.key_of(block) for block in keyed]
            self._commit([self._emit(BlocksUncached(tuple(keyed), tuple(keys), pool.groups_of(keyed)))])
            held = [(row, self._request_in_row[row]) for row in self.state.row_of.values()]
            self._prompt_ends.expect_again([(row, request) for row, request in held if request is not None])
        return len(keyed)

    def reset_prefix_cache(self, *, while_running: bool = False) -> None:
        """Drop every key: new weights, for example, make all content outdated.

        Args:
            while_running: whether requests that hold blocks go on. What they have computed and what they compute from
                now on is never registered, because it depends on outdated content (B16).

        Raises:
            MisuseError: a block is in use and `while_running` is false (B10).
        """
        held = self.state.pool.num_held_blocks
        if held and not while_running:
            raise MisuseError(
                f"cannot reset the prefix cache: {held} blocks in use by {len(self.state.row_of)} requests; "
                "finish, abort or preempt them first, or reset with while_running=True"
            )
        self._commit([self._emit(CacheReset())])

    # -- what several commands emit ----------------------------------------------------------------------------------

    def _assign_row(self, request: Request, events: list[Event]) -> int:
        if not self.state.free_rows:
            raise MisuseError(
                f"no row for request {request.request_id!r}: all {self.config.max_num_reqs} rows (max_num_reqs) "
                "are held"
            )
        row = self.state.free_rows[-1]
        events.append(self._emit(RowsAssigned.of(request.request_id, row)))
        self._request_in_row[row] = request
        if self._prompt_ends.are_due:
            self._prompt_ends.expect(row, request)
        return row

    def _commit(self, events: list[Event]) -> None:
        state = self.state
        commit = Commit._make((state.next_sequence, tuple(events)))
        state.next_sequence += 1
        failure: Exception | None = None
        for sink in self.sinks:
            try:
                sink.apply(commit)
            except Exception as error:  # the commit stands; every sink receives it before the first failure is raised
                failure = failure or error
        if failure is not None:
            raise failure


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _known(
    end: NDArray[np.int64], num_draft_tokens: IntOrEach, num_known_tokens: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """Where the tokens end whose blocks may be registered."""
    has_drafts = not isinstance(num_draft_tokens, int) or num_draft_tokens > 0
    known = end - num_draft_tokens if has_drafts else end
    return known if num_known_tokens is None else np.minimum(known, num_known_tokens)
