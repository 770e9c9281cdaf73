"""Who gets which block: the commands that decide, each one commit, each whole or not at all."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import MisuseError
from ..events import (
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
    ShortColumns,
    TokensPlaced,
    frozen_column,
    named_tuple,
)
from ..ledger.state import LedgerState
from ..pool.block_pool import BlockPool
from ..pool.eviction_order import EvictionOrder
from ..types import EventSink, Request, sum_of
from .admission import Admission
from .config import AllocatorConfig
from .orphans import ChainLinks
from .prefix_match import PrefixMatch, PrefixMatcher
from .registration import AskedKeys, AskedRun, Registrar
from .taking import (
    BlockTaking,
    CommandChecks,
    CopyOnWrite,
    IntOrEach,
    PrivateBlock,
    Rows,
    Shortfall,
    steps_of_first_use,
)

# Writing to the ledger: apply an event, close a commit, tell every sink; and reading what the ledger says.


class LedgerWriter:
    """A ledger that is being written: the state so far, and who hears of every commit.

    Attributes:
        state: the fold of every event so far.
        sinks: who hears of every commit, once, in order.
    """

    def __init__(self, created: PoolCreated, sinks: Iterable[EventSink], eviction: EvictionOrder | None) -> None:
        self.state = LedgerState(created, eviction)
        # The one way to change anything: a decided event is applied, and handed back for the commit.
        self._emit = self.state.apply
        self.sinks = tuple(sinks)
        self._commit([self._emit(created)])

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def pool(self) -> BlockPool:
        """The block pool, to be read."""
        return self.state.pool

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be taken now, cached content included."""
        return len(self.state.pool.free_queue)

    def row_of(self, request_id: str) -> int:
        """The block-table row that a request holds."""
        row = self.state.row_of.get(request_id)
        if row is None:
            raise MisuseError(f"request {request_id!r} holds no blocks: it was never allocated, or freed already")
        return row

    def holds(self, request_id: str) -> bool:
        """Whether the request holds a row."""
        return request_id in self.state.row_of

    def block_ids(self, request_id: str) -> list[list[int]]:
        """The request's blocks, by group and logical index."""
        row = self.row_of(request_id)
        return [table.blocks(row) for table in self.state.tables]

    def num_placed_tokens(self, request_id: str) -> int:
        """Tokens of the request that have slots."""
        return self.state.placed[self.row_of(request_id)]

    # -- the commit --------------------------------------------------------------------------------------------------

    def _commit(self, events: list[Event]) -> None:
        state = self.state
        commit = named_tuple(Commit, (state.next_sequence, tuple(events)))
        state.next_sequence += 1
        failure: Exception | None = None
        for sink in self.sinks:
            try:
                sink.apply(commit)
            except Exception as error:  # the commit stands; every sink hears of it before the first failure is raised
                failure = failure or error
        if failure is not None:
            raise failure


# Commands about many running requests at once: what a decode step asks of the ledger is one commit.


class BatchCommands(LedgerWriter):
    """The parts that decide, and the commands that serve a batch of running requests, named by their rows."""

    def __init__(
        self,
        config: AllocatorConfig,
        sinks: Iterable[EventSink] = (),
        eviction: EvictionOrder | None = None,
    ) -> None:
        """Create the pool and write its first commit.

        Args:
            config: sizes, groups and rules.
            sinks: who hears of every commit.
            eviction: an order made by the caller (Belady needs the future); else made from `config.eviction`.
        """
        self.config = config
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
        super().__init__(created, sinks, eviction)
        self._matcher = PrefixMatcher(
            config.groups, config.hash_block_size, config.scheduler_block_size, config.use_eagle
        )
        self._admission = Admission(config, self.state)
        self._registrar = Registrar(config, self.state, self._matcher)
        self._checks = CommandChecks(config, self.state)
        self._copies = CopyOnWrite(self.state)
        self._taking = BlockTaking(self.state)
        self._links = ChainLinks(config.groups)
        self._request_in_row: list[Request | None] = [None] * config.max_num_reqs
        self._column_of = ShortColumns()
        # What every command asks, at hand.
        self._block_sizes = [kind.block_size for kind in config.groups]
        self._max_model_len = config.max_model_len
        # Between arrays NumPy's arithmetic takes half as long as between an array and a Python number.
        self._longest: NDArray[np.int64] = np.array(config.max_model_len, dtype=np.int64)
        self._one_each: NDArray[np.int64] = np.ones(config.max_num_reqs, dtype=np.int64)
        self._caches = config.enable_caching
        self._drops_orphans = config.orphans == "drop"
        # One group, whose blocks a request keeps while it runs, and whose hits are unbroken runs.
        self._grows_only = len(config.groups) == 1 and config.groups[0].needs_whole_prefix
        self._never_skips = all(kind.computed_tokens_that_skip(np.ones(1, np.int64)) is None for kind in config.groups)

    # -- tokens for running requests ---------------------------------------------------------------------------------

    def append(
        self,
        rows: Rows,
        num_new_tokens: IntOrEach = 1,
        *,
        num_draft_tokens: IntOrEach = 0,
        num_lookahead_tokens: int = 0,
        reserved_blocks: int = 0,
        first_positions: NDArray[np.int64] | None = None,
    ) -> bool:
        """Give many running requests slots for their next tokens: a decode step, one commit.

        Args:
            rows: int64 `[num_reqs]`, distinct rows in batch order (see `row_of`).
            num_new_tokens: tokens a request, drafts included; one number or int64 `[num_reqs]`.
            num_draft_tokens: how many of them are drafts, which are never registered.
            num_lookahead_tokens: further slots for drafts to come.
            reserved_blocks: free blocks that are promised to others.
            first_positions: int64 `[num_reqs]`, where the new tokens start; default: behind the placed ones.

        Returns:
            False, and nothing has changed, if the free blocks do not suffice for all of them.

        Raises:
            MisuseError: a row that no request holds, a row named twice, a first position as `allocate` refuses it.
            InputError: no new tokens, or a count below 0.
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
        private = self._copies.among(rows, first, placed, num_slots)
        shortfalls = [table.shortfall(rows, num_slots) for table in state.tables]
        total_short = sum([sum_of(counts) for which, counts in shortfalls if len(which)])
        total_short += sum([copy for *_, copy in private])
        if total_short > len(state.pool.free_queue) - reserved_blocks:
            return False

        self._append_planned(rows, first, end, num_draft_tokens, shortfalls, private, may_roll_back=first is not placed)
        return True

    def _append_planned(
        self,
        rows: Rows,
        first: NDArray[np.int64],
        end: NDArray[np.int64],
        num_draft_tokens: IntOrEach,
        shortfalls: list[Shortfall],
        private: list[PrivateBlock],
        blocks: tuple[int, ...] | None = None,
        may_roll_back: bool = False,
    ) -> None:
        """Carry out an append whose blocks are known to be there; `blocks` gives their ids where order matters."""
        due_rows: list[int] = []
        asked: list[AskedKeys] = []
        if self._caches:
            has_drafts = not isinstance(num_draft_tokens, int) or num_draft_tokens > 0
            known = end - num_draft_tokens if has_drafts else end
            due = self._registrar.due(rows, known, first if may_roll_back else None)
            if len(due):
                due_rows = rows[due].tolist()
                asked = self._registrar.ask_for_keys_of_batch(
                    due_rows, first[due].tolist(), known[due].tolist(), self._request_in_row
                )
        events: list[Event] = []
        if may_roll_back:
            for row, position in self._copies.rollbacks(rows, first):
                events.append(self._emit(TokensPlaced((row,), (position,), (0,))))
        for group, row, index, copy in private:
            events.append(self._emit(self._copies.event(group, row, index, copy)))
        events += [self._emit(event) for event in self._taking.events_for_batch(rows, shortfalls, blocks)]
        if due_rows:
            self._register(due_rows, asked, events)
        counts = end - first
        # The caller goes on using its arrays; what was read out of the state for this command is its own.
        own_first = first.copy() if may_roll_back else first
        columns = (frozen_column(rows.copy()), frozen_column(own_first), frozen_column(counts))
        events.append(self._emit(named_tuple(TokensPlaced, columns)))
        self._commit(events)

    @property
    def can_append_several_steps(self) -> bool:
        """Whether `append_steps` is available: one group that never gives blocks back while it runs."""
        return self._grows_only

    def could_append(self, rows: Rows, num_new_tokens: int) -> bool:
        """Whether the free blocks suffice for `num_new_tokens` further tokens of every row, as its blocks are.

        False where a row would write into a block that others read or a key names: one `append` makes it private.
        """
        state = self.state
        num_free = len(state.pool.free_queue)
        at_most = len(rows) * sum([num_new_tokens // size + 1 for size in self._block_sizes])
        if at_most <= num_free and not state.guarded:
            return True  # even if every row stood at the end of a block
        placed = state.num_placed[rows]
        num_slots = np.minimum(placed + num_new_tokens, self._longest)
        if self._copies.among(rows, placed, placed, num_slots):
            return False
        return sum([sum_of(table.shortfall(rows, num_slots)[1]) for table in state.tables]) <= num_free

    def append_steps(self, rows: Rows, num_steps: int) -> tuple[int, ...]:
        """`append` one token to every row, `num_steps` times over, as one commit with the same block ids.

        Returns:
            For each step, how many blocks are first used in it.

        Raises:
            MisuseError: `could_append` or `can_append_several_steps` is false.
            InputError: no step, or one behind `max_model_len`.
        """
        self._checks.rows(rows)
        first = self.state.num_placed[rows]
        self._checks.steps(num_steps, first)
        table, end = self.state.tables[0], first + num_steps
        which, counts = table.shortfall(rows, end)
        if not self.can_append_several_steps or sum_of(counts) > len(self.state.pool.free_queue):
            raise MisuseError(f"cannot append {num_steps} steps to {len(rows)} rows; ask could_append first")
        for _, row, index, _ in self._copies.among(rows, first, first, end):
            raise MisuseError(
                f"cannot append {num_steps} steps to row {row}: others read its block {index}, or a key names it; "
                "append one first"
            )
        steps = steps_of_first_use(table, rows, first, which, counts)
        blocks = self._taking.in_order_of_use(steps)
        self._append_planned(rows, first, end, 0, [(which, counts)], [], blocks)
        per_step = Counter(step for step, _ in steps)
        return tuple([per_step[step] for step in range(num_steps)])

    def num_appendable(
        self,
        rows: Rows,
        num_new_tokens: IntOrEach = 1,
        *,
        num_lookahead_tokens: int = 0,
        reserved_blocks: int = 0,
        first_positions: NDArray[np.int64] | None = None,
    ) -> int:
        """How many of the rows, in order, an `append` with these arguments could serve with the blocks free now."""
        state = self.state
        self._checks.rows(rows)
        self._checks.counts(num_new_tokens, 0, num_lookahead_tokens, reserved_blocks)
        placed = state.num_placed[rows]
        first = placed if first_positions is None else first_positions
        end = np.minimum(first + num_new_tokens, self.config.max_model_len)
        num_slots = np.minimum(end + num_lookahead_tokens, self.config.max_model_len)
        need = np.zeros(len(rows), dtype=np.int64)
        for table in state.tables:
            which, counts = table.shortfall(rows, num_slots)
            need[which] += counts
        for _, row, _, copy in self._copies.among(rows, first, placed, num_slots):
            need[(rows == row).nonzero()[0]] += copy
        spare = len(state.pool.free_queue) - reserved_blocks
        return int(np.searchsorted(np.cumsum(need), spare, side="right"))

    # -- what went out of window -------------------------------------------------------------------------------------

    def release_out_of_window(self, request_id: str, num_computed_tokens: int | None = None) -> int:
        """Give back the blocks that no later token of the request attends to (rule 17). Returns how many.

        Runs before `allocate`, which is then all-or-nothing; `num_computed_tokens` defaults to the placed tokens.

        Raises:
            MisuseError: the request holds nothing, or `num_computed_tokens` is not within 0 and its placed tokens.
        """
        row = self.row_of(request_id)
        placed = self.state.placed[row]
        total = placed if num_computed_tokens is None else num_computed_tokens
        if not 0 <= total <= placed:
            raise MisuseError(f"request {request_id!r} has {placed} placed tokens, so {total} cannot be computed")
        events = self._release_events(row, total)
        if events:
            self._commit(events)
        return sum([len(event.blocks) for event in events if isinstance(event, BlocksFreed)])

    def release_out_of_window_among(self, rows: Rows, num_computed_tokens: NDArray[np.int64] | None = None) -> None:
        """`release_out_of_window` for many running requests, as one commit; cheap where nothing is due."""
        if self._never_skips:
            return
        self._checks.rows(rows)
        placed = self.state.num_placed[rows]
        computed = placed if num_computed_tokens is None else num_computed_tokens
        if computed is not placed:
            self._checks.starts(rows, computed, placed)
        due = np.zeros(len(rows), dtype=np.bool_)
        for kind, skipped in zip(self.config.groups, self.state.num_skipped, strict=True):
            needed = kind.computed_tokens_that_skip(skipped[rows].astype(np.int64) + 1)
            if needed is not None:
                due |= computed >= needed
        events: list[Event] = []
        for row, num_computed in zip(rows[due].tolist(), computed[due].tolist(), strict=True):
            events += self._release_events(row, num_computed)
        if events:
            self._commit(events)

    def _release_events(self, row: int, total: int) -> list[Event]:
        events: list[Event] = []
        for group, kind in enumerate(self.config.groups):
            stop = min(kind.num_skipped_tokens(total) // kind.block_size, self.state.tables[group].count(row))
            start = self.state.skipped[group][row]
            if stop > start:
                indices = tuple(range(stop - 1, start - 1, -1))
                blocks = tuple(self.state.tables[group].blocks(row, start, stop)[::-1])
                events.append(
                    self._emit(BlocksFreed(FreeReason.OUT_OF_WINDOW, (group,), (row,), (len(blocks),), blocks, indices))
                )
        return events

    # -- decisions that several commands share -----------------------------------------------------------------------

    def _register(self, rows: Sequence[int], asked: Sequence[AskedKeys], events: list[Event]) -> None:
        for group, keys in enumerate(asked):
            cached = self._registrar.decide(group, rows, keys, self._request_in_row)
            if cached is not None:
                self._note_registered(cached, events)

    def _note_registered(self, cached: BlocksCached, events: list[Event]) -> None:
        events.append(self._emit(cached))
        if self._drops_orphans:
            self._links.note(cached, self.state.pool)


class KVCacheAllocator(BatchCommands):
    """Decides where every token's keys and values live, and writes each decision down.

    A command reads the state, decides, and then applies its events through `LedgerState.apply`, the only code that
    changes anything; the commit goes to every sink once, in order. A command that cannot be carried out changes
    nothing: it returns None or False where waiting may help, and raises where it never will.

    Semantics are vLLM V1's, block id for block id (golden/ops), with the sanctioned differences: misuse is refused
    before anything changes, and out-of-window release is a command of its own that runs before `allocate`.
    """

    # -- questions ---------------------------------------------------------------------------------------------------

    def check_fits(self, num_tokens: int, what: str = "a request") -> None:
        """Raise `DoesNotFitError` with the numbers if a request of this length can never be served (D01)."""
        self._admission.check_fits(num_tokens, what)

    def max_fitting_tokens(self) -> int:
        """The longest request that the pool serves alone."""
        return self._admission.max_fitting_tokens()

    def match_prefix(self, request: Request) -> PrefixMatch:
        """Look up the longest cached prefix. Changes nothing in the ledger and pins nothing.

        A boundary worth keeping (rule 14) is noted on the request, where it outlives a lookup that leads nowhere.
        """
        if not self._caches or request.keys is None:
            empty = ((),) * len(self.config.groups)
            return PrefixMatch(request.request_id, 0, empty, empty, 0, self.state.next_sequence)
        match = self._matcher.match(request, self.state.pool, self.state.next_sequence)
        if match.boundary:
            request.cache_boundary = match.boundary
        return match

    def key_behind(self, request: Request, match: PrefixMatch) -> Key | None:
        """The key under which the block behind a hit would be found, so that the hit grows only if it is.

        None where the request has not filled that block or its source withholds the key; without caching; and where
        there are several groups or windows, whose hits also grow by what others lose.
        """
        if not (self._caches and self._grows_only):
            return None
        kind, count = self.config.groups[0], len(match.blocks[0])
        if (count + 1) * kind.block_size > request.num_tokens:
            return None
        return next(iter(self._matcher.block_keys(request, kind, count, count + 1)), None)

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
        """How many more blocks would have to be free for `can_admit`; 0 or less where it is true."""
        spare = self.num_free_blocks - reserved_blocks - (self.config.watermark_blocks if use_watermark else 0)
        return self._admission.blocks_needed_for_all(request, match) - spare

    # -- commands ----------------------------------------------------------------------------------------------------

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
            num_new_tokens: tokens to be computed, drafts included. 0 where external tokens are to be waited for: then
                no block of the request becomes findable before its next command.
            match: what `match_prefix` found, for a request that holds nothing yet; its blocks are adopted first.
            num_computed_tokens: where the new tokens start, if not behind the last ones (rejected drafts).
            num_external_tokens: tokens behind the hit whose keys and values come from elsewhere (host memory, another
                engine) and are copied in before the step; they get blocks of their own, never shared ones (B11).
            num_lookahead_tokens: further slots for drafts to come; clamped to `max_model_len`.
            reserved_blocks: free blocks that are promised to others.
            use_watermark: whether the configured watermark must stay free (admissions).

        Returns:
            The blocks taken, by group (adopted ones not among them), or None if they are not free now; then nothing
            has changed.

        Raises:
            MisuseError: a stale match, a match of another request, no row left, a start beyond the placed tokens or
                behind what has gone out of window.
            InputError: no new tokens, or a count below 0.
            DoesNotFitError: not even an empty pool would do.
        """
        state = self.state
        row = state.row_of.get(request.request_id)
        hits = None
        num_hit_tokens = 0
        if match is not None:
            hits = self._checks.match(request, row, match)
            num_hit_tokens = match.num_hit_tokens
        if num_external_tokens:
            self._checks.external(request, num_hit_tokens, num_external_tokens)
        if num_new_tokens < 1 or num_lookahead_tokens or reserved_blocks:
            self._checks.counts(num_new_tokens or min(num_external_tokens, 1), 0, num_lookahead_tokens, reserved_blocks)
        placed = start = 0 if row is None else state.placed[row]
        if num_computed_tokens is not None and num_computed_tokens != placed:
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
        written_from = total - num_external_tokens
        private: Sequence[PrivateBlock] = ()
        num_copies = 0
        if row is not None and (row in state.guarded or start < placed):
            private = self._copies.of_row(row, written_from, num_slots, Counter())
            num_copies = sum([copy for *_, copy in private])
        spare = len(state.pool.free_queue) - reserved_blocks
        if use_watermark:
            spare -= self.config.watermark_blocks
        wanted = [-(-num_slots // size) for size in self._block_sizes]
        # Where even a cold request would fit, which of the hit blocks are in use need not be looked at.
        if row is not None or sum(wanted) > spare:
            needed = self._admission.blocks_needed(row, hits, wanted, total)
            if needed + num_copies > spare:
                # Copies are for those who read the blocks now; once they have ended, nothing need be copied.
                self._admission.check_can_ever_hold(request, row, needed)
                return None

        # What is still to be copied in must not be found: another request would read it too early.
        asked: list[AskedRun] = []
        if self._caches and num_new_tokens > 0 and request.keys is not None:
            asked = self._registrar.ask_for_runs(request, row, hits, total, end)
        emit = self._emit
        events: list[Event] = []
        if row is None:
            row = self._assign_row(request, events)
        elif start < placed and self._copies.rolls_back_registered(row, written_from):
            events.append(emit(TokensPlaced((row,), (written_from,), (0,))))
        if hits is not None or (num_external_tokens and not start):
            for group, kind in enumerate(self.config.groups):
                blocks = hits[group] if hits is not None else ()
                if not self._never_skips:
                    # A window of one token hits blocks that its next token does not attend to, as external tokens may.
                    skipped = kind.num_skipped_tokens(total) // kind.block_size
                    blocks = (0,) * skipped + blocks[skipped:]
                if blocks:
                    events.append(emit(named_tuple(PrefixAdopted, (group, row, blocks))))
        for group, _, index, copy in private:
            events.append(emit(self._copies.event(group, row, index, copy)))
        taken: list[tuple[int, ...]] = []
        num_held: list[int] = []
        rows = self._column_of[row]
        for group, table in enumerate(state.tables):
            blocks = ()
            num_held.append(len(table.rows[row]))
            count = wanted[group] - num_held[group]
            if count > 0:
                blocks = state.pool.free_queue.peek(count)
                events.append(emit(self._taking.event(group, rows, self._column_of[count], blocks)))
            taken.append(blocks)
        for run in asked:
            cached = self._registrar.decide_run(rows, run, request, num_held[run[0]])
            if cached is not None:
                self._note_registered(cached, events)
        if num_external_tokens:
            events.append(emit(TokensPlaced(rows, (written_from,), (num_external_tokens,))))
        if num_new_tokens:
            events.append(emit(named_tuple(TokensPlaced, (rows, (total,), (end - total,)))))
        self._commit(events)
        return tuple(taken)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Keep only the first `num_tokens` placed tokens (a crop, rejected drafts); blocks behind them are freed.

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
                events.append(
                    self._emit(BlocksFreed(FreeReason.TRUNCATED, (group,), (row,), (len(blocks),), blocks, indices))
                )
        if events or num_tokens < placed:
            events.append(self._emit(TokensPlaced((row,), (num_tokens,), (0,))))
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
        events.append(self._emit(TokensPlaced((child_row,), (0,), (placed,))))
        self._commit(events)

    def free(self, request_id: str, reason: FreeReason = FreeReason.FINISHED) -> None:
        """Give back everything that a request holds, its last block first (rule 4).

        Raises:
            MisuseError: the request holds nothing.
            InputError: a reason for giving back a part.
        """
        row = self.row_of(request_id)
        self._checks.frees_all(reason)
        rows = self._column_of[row]
        events: list[Event] = []
        segments: list[tuple[int, tuple[int, ...]]] = []
        for group, table in enumerate(self.state.tables):
            blocks = table.rows[row]
            if blocks:
                segments.append((group, tuple(blocks[self.state.skipped[group][row] :][::-1])))
        if len(segments) > 1 and self.config.release == "deferred":
            segments.reverse()
            flat = tuple([block for _, blocks in segments for block in blocks])
            groups, counts = tuple([g for g, _ in segments]), tuple([len(blocks) for _, blocks in segments])
            events.append(self._emit(BlocksFreed(reason, groups, rows * len(groups), counts, flat)))
        else:
            for group, blocks in segments:
                counts = self._column_of[len(blocks)]
                columns = (reason, self._column_of[group], rows, counts, blocks, ())
                events.append(self._emit(named_tuple(BlocksFreed, columns)))
        events.append(self._emit(named_tuple(RowsReleased, ((request_id,), rows))))
        self._request_in_row[row] = None
        self._commit(events)

    def preempt(self, request_id: str) -> None:
        """Give back a running request's blocks; it will be allocated anew.

        Raises:
            MisuseError: the request holds nothing.
        """
        self.free(request_id, FreeReason.PREEMPTED)

    def abort(self, request_id: str) -> bool:
        """Give back what an aborted request holds, if anything; a second abort is a no-op (C06)."""
        if request_id not in self.state.row_of:
            return False
        self.free(request_id, FreeReason.ABORTED)
        return True

    def evict(self, blocks: Sequence[int]) -> int:
        """Drop the keys of blocks by id; counts and queue positions stay. Returns how many keys were dropped.

        Raises:
            MisuseError: there is no such block.
        """
        pool = self.state.pool
        keyed = [block for block in dict.fromkeys(blocks) if pool.key_of(block) is not None]
        if self.config.orphans == "drop":
            keyed += self._links.descendants(keyed, pool)
        if keyed:
            keys: list[Key] = [pool.key_of(block) for block in keyed]
            self._commit([self._emit(BlocksUncached(tuple(keyed), tuple(keys), pool.groups_of(keyed)))])
        return len(keyed)

    def reset_prefix_cache(self) -> None:
        """Forget every key.

        Raises:
            MisuseError: a block is in use (B10).
        """
        held = self.state.pool.num_held_blocks
        if held:
            raise MisuseError(
                f"cannot reset the prefix cache: {held} blocks in use by {len(self.state.row_of)} requests; "
                "finish, abort or preempt them first"
            )
        self._commit([self._emit(CacheReset())])

    # -- decisions that several commands share -----------------------------------------------------------------------

    def _assign_row(self, request: Request, events: list[Event]) -> int:
        if not self.state.free_rows:
            raise MisuseError(
                f"no row for request {request.request_id!r}: all {self.config.max_num_reqs} rows (max_num_reqs) "
                "are held"
            )
        row = self.state.free_rows[-1]
        events.append(self._emit(named_tuple(RowsAssigned, ((request.request_id,), self._column_of[row]))))
        self._request_in_row[row] = request
        return row


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
