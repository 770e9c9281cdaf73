"""Who gets which block: the commands that decide, each one commit, each whole or not at all."""

from collections import Counter
from collections.abc import Sequence

from .batch_commands import BatchCommands
from .copy_on_write import PrivateBlock
from .errors import MisuseError
from .events import (
    BlocksFreed,
    BlocksShared,
    BlocksUncached,
    CacheReset,
    Event,
    FreeReason,
    Key,
    PrefixAdopted,
    RowsAssigned,
    RowsReleased,
    TokensPlaced,
)
from .named_tuples import named_tuple
from .prefix_match import PrefixMatch
from .registration import AskedRun
from .types import Request


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
