"""Commands about many running requests at once: what a decode step asks of the ledger is one commit."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from .admission import Admission
from .allocator_config import AllocatorConfig
from .block_taking import BlockTaking, Shortfall, steps_of_first_use
from .command_checks import CommandChecks, IntOrEach, Rows
from .copy_on_write import CopyOnWrite, PrivateBlock
from .errors import MisuseError
from .events import BlocksCached, BlocksFreed, Event, FreeReason, PoolCreated, TokensPlaced, frozen_column
from .eviction import EvictionOrder
from .ledger_writer import LedgerWriter
from .named_tuples import named_tuple
from .orphans import ChainLinks
from .prefix_match import PrefixMatcher
from .reductions import sum_of
from .registration import AskedKeys, Registrar
from .short_columns import ShortColumns
from .types import EventSink, Request


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
