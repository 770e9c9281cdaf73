"""Which requests compute how many tokens in the next step: continuous batching as vLLM V1 does it. Knows no clock."""

from collections.abc import Callable, Collection

import attrs
import numpy as np
from numpy.typing import NDArray

from .allocator import KVCacheAllocator, Rows
from .errors import DoesNotFitError, InputError, MisuseError
from .kv_transfers import IncomingTransfer, IncomingTransfers
from .prefix_match import PrefixMatch
from .reductions import all_are, largest, smallest, sum_of
from .scheduler_config import SchedulerConfig
from .scheduler_stats import SchedulerStats
from .swap_space import SwapSpace
from .types import ExternalTokens, RemoteTokens, Request, ScheduledStep, StepLoad, TokenBatch
from .waiting_queue import WaitingQueue, make_waiting_queue


@attrs.frozen(eq=False)
class StepOutcome:
    """What a completed step changed, by row: int64 arrays.

    Attributes:
        sampled: rows that produced output, in batch order.
        produced: how many output tokens each of them produced (several in a macro-step, or with accepted drafts).
        finished: those of them that produced their last one; their rows are released already.
        finished_requests: the same requests as objects.
    """

    sampled: NDArray[np.int64]
    produced: NDArray[np.int64]
    finished: NDArray[np.int64]
    finished_requests: tuple[Request, ...]


class Scheduler:
    """Running requests first, in the order of their admission, then waiting ones, within a token budget.

    The loop around it is `core/engine.py`. A step's blocks are allocated when it is scheduled; `complete` accounts
    for its tokens. Requests that can never fit are refused at `submit` (D01), so the head of the queue is always
    served in the end; a request that comes back after a preemption keeps its blocks until it has produced a token, so
    no request is preempted twice without progress in between (D02).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: KVCacheAllocator,
        external: ExternalTokens | None = None,
        remote: RemoteTokens | None = None,
        keeps_blocks_of: Callable[[Request], bool] | None = None,
    ) -> None:
        """Start without requests.

        Args:
            config: batch limits and policies.
            allocator: the ledger; no other scheduler writes in it.
            external: where tokens behind a hit may be copied in from, besides the swap space.
            remote: whose tokens a request waits for before its first step. It holds its blocks and its row meanwhile
                and cannot be preempted; `received` ends the wait.
            keeps_blocks_of: asked of each request that finishes: whether its blocks stay until they are `sent`.

        Raises:
            InputError: limits that contradict each other.
        """
        if external is not None and config.swap_space_blocks:
            raise InputError(
                f"swap_space_blocks {config.swap_space_blocks} and an external cache exclude each other: what a "
                "preempted request loses is kept there already"
            )
        if config.max_num_seqs > allocator.config.max_num_reqs:
            raise InputError(
                f"max_num_seqs {config.max_num_seqs} exceeds the allocator's {allocator.config.max_num_reqs} rows "
                "(max_num_reqs)"
            )
        if external is not None and remote is not None:
            raise InputError("tokens come from an external cache or from another engine, not from both")
        self.config = config
        self._external = external
        self._remote = remote
        self._incoming = IncomingTransfers()
        self._keeps_blocks_of = keeps_blocks_of
        self.allocator = allocator
        self.stats = SchedulerStats()
        self.waiting: WaitingQueue = make_waiting_queue(config.policy)
        num_rows = allocator.config.max_num_reqs
        self._running: NDArray[np.int64] = np.empty(num_rows, dtype=np.int64)
        self._num_running = 0
        self._requests: dict[str, Request] = {}
        self._request_in: list[Request | None] = [None] * num_rows
        # By row: tokens known (prompt and outputs), and outputs still to come.
        self._known: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        self._remaining: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        # By row: tokens computed, those of the step in flight included and rejected drafts taken back.
        self._computed: NDArray[np.int64] = np.zeros(num_rows, dtype=np.int64)
        # Rows of requests that came back after a preemption and have not produced a token since.
        self._protected: set[int] = set()
        self._preempted_in_step = False
        self._swapped_blocks = 0
        self._swap_space = SwapSpace(config.swap_space_blocks)
        # Tokens that requests had computed when they were preempted, until they come back.
        self._lost_tokens: dict[str, int] = {}

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def running_rows(self) -> Rows:
        """Rows of running requests in the order of their admission: int64 `[num_running]`."""
        return self._running[: self._num_running]

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return self._num_running

    @property
    def num_waiting(self) -> int:
        """Requests that hold none yet, or none any more."""
        return len(self.waiting)

    @property
    def has_unfinished(self) -> bool:
        """Whether any submitted request is still to end."""
        return bool(self._num_running or len(self.waiting) or len(self._incoming))

    def request_in(self, row: int) -> Request:
        """The running request in a row."""
        request = self._request_in[row]
        if request is None:
            raise MisuseError(f"row {row} holds no running request")
        return request

    def num_preemptions_of(self, request_id: str) -> int:
        """How often a request has been preempted so far; 0 for one that is not being served."""
        request = self._requests.get(request_id)
        return request.num_preemptions if request is not None else 0

    def check_fits(self, request: Request) -> None:
        """Raise `DoesNotFitError` with the numbers if the request can never be served (D01)."""
        # The last output token is never computed, so it needs no slot.
        longest = request.num_prompt_tokens + request.max_tokens - 1
        with_drafts = min(longest + 2 * self.config.num_speculative_tokens, self.allocator.config.max_model_len)
        self.allocator.check_fits(max(longest, with_drafts), f"request {request.request_id!r}")
        if not self.config.enable_chunked_prefill and request.num_prompt_tokens > self.config.max_num_batched_tokens:
            raise DoesNotFitError(
                f"request {request.request_id!r} has {request.num_prompt_tokens:,} prompt tokens, more than "
                f"max_num_batched_tokens {self.config.max_num_batched_tokens:,}, and chunked prefill is off"
            )

    # -- what the outside world does ---------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            DoesNotFitError: its prompt and `max_tokens` can never be held; it is counted as rejected (D01).
            MisuseError: a request of this id is still there.
        """
        if request.request_id in self._requests or request.request_id in self._incoming:
            raise MisuseError(f"a request {request.request_id!r} is still being served")
        try:
            self.check_fits(request)
        except DoesNotFitError:
            self.stats.num_rejected += 1
            raise
        self.stats.num_submitted += 1
        request.num_cached_tokens, request.num_preemptions = None, 0
        self._requests[request.request_id] = request
        self.waiting.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; a second abort, or one after the end, is a no-op (C06)."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if self.allocator.holds(request_id):
            row = self.allocator.row_of(request_id)
            self._leave_running([row])
            if not self._incoming.abort(request_id):
                self.allocator.abort(request_id)
        else:
            self.waiting.remove(request)
        self._forget(request_id)
        self.stats.num_aborted += 1
        return True

    def received(self, request_id: str) -> None:
        """The copy that `RemoteTokens.admitted` asked for has ended: the request runs as soon as there is a place."""
        if not self._incoming.end(request_id):
            self.allocator.abort(request_id)

    def sent(self, request_id: str) -> None:
        """The blocks that a finished request kept were read by another engine: give them back."""
        self.allocator.free(request_id)

    # -- one step ----------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """Decide and allocate the next step; None when nothing can be computed now."""
        self._swapped_blocks = 0
        while self._incoming.are_there and self._num_running < self.config.max_num_seqs:
            transfer = self._incoming.next_there()
            self._enter_running(transfer.request, transfer.row)
            self._computed[transfer.row] = transfer.num_found_tokens
        rows, firsts, counts, preempted = self._schedule_running()
        self._preempted_in_step = preempted
        if not preempted and len(self.waiting):
            rows, firsts, counts = self._admit(rows, firsts, counts)
        if not len(rows):
            return None
        self._computed[rows] = firsts + counts
        return self._describe(TokenBatch(rows, firsts, counts))

    def max_repeats(self, step: ScheduledStep) -> int:
        """How many more steps like this decode-only one could follow before any scheduling decision is due.

        0 unless every running request decodes, none was preempted and none ends in this step; further bounded by the
        blocks that are free. Requests that wait now are blocked, and stay so while nothing is given back. A request
        that arrives later is the caller's to foresee.
        """
        if (
            step.load.num_prefill_tokens
            or self.config.num_speculative_tokens
            or self._preempted_in_step
            or len(step.batch.rows) != self._num_running
            or not self.allocator.can_append_several_steps
        ):
            return 0
        limit = smallest(self._remaining[step.batch.rows]) - 1
        while limit > 0 and not self.allocator.could_append(step.batch.rows, limit):
            limit //= 2
        return limit

    def repeat(self, step: ScheduledStep, times: int) -> ScheduledStep:
        """Allocate `times <= max_repeats(step)` further steps of the same requests; returns the macro-step."""
        batch = step.batch
        taken_at = self.allocator.append_steps(batch.rows, times)
        self._computed[batch.rows] += times
        return ScheduledStep(
            TokenBatch(batch.rows, batch.first_positions, batch.counts + times),
            step.load,
            1 + times,
            blocks_taken_at=taken_at,
        )

    @property
    def head_is_blocked(self) -> bool:
        """Whether arrivals cannot change the next steps: under "fcfs" they queue behind a request that has to wait."""
        return self.config.policy == "fcfs" and len(self.waiting) > 0

    def complete(
        self,
        step: ScheduledStep,
        stopped: Collection[int] = (),
        num_accepted_tokens: NDArray[np.int64] | None = None,
    ) -> StepOutcome:
        """Account for a computed step: tokens produced, requests finished and freed.

        Args:
            step: the step that was scheduled last.
            stopped: rows whose request ends with this step's token (a stop token; live serving).
            num_accepted_tokens: int64 `[num_reqs]`, accepted drafts of each request in the batch; None: none of any.
        """
        batch = step.batch
        rows = batch.rows
        self.stats.computed_tokens += batch.num_tokens
        drafts = 0 if step.num_draft_tokens is None else step.num_draft_tokens
        ends = batch.first_positions + batch.counts
        extra = step.num_steps - 1
        is_sampled = ends - drafts == self._known[rows] + extra
        sampled = rows[is_sampled]
        produced = np.empty(len(sampled), dtype=np.int64)
        produced.fill(1 + extra)
        if step.num_draft_tokens is not None:
            produced += self._accepted(step, is_sampled, num_accepted_tokens)
            produced = np.minimum(produced, self._remaining[sampled])
        self._known[sampled] += produced
        self._remaining[sampled] -= produced
        if step.num_draft_tokens is not None:
            # Rejected drafts are taken back: all known tokens but the newest are computed.
            self._computed[sampled] = self._known[sampled] - 1
        if stopped:
            self._remaining[list(stopped)] = 0
        if self._protected:
            self._protected.difference_update(sampled.tolist())
        finished = sampled[self._remaining[sampled] == 0]
        requests: tuple[Request, ...] = ()
        if len(finished):
            requests = tuple([self._finish(row) for row in finished.tolist()])
            self._leave_running(finished.tolist())
        return StepOutcome(sampled, produced, finished, requests)

    def _accepted(
        self, step: ScheduledStep, is_sampled: NDArray[np.bool_], num_accepted_tokens: NDArray[np.int64] | None
    ) -> NDArray[np.int64]:
        drafts = np.zeros(len(is_sampled), np.int64) if step.num_draft_tokens is None else step.num_draft_tokens
        accepted = np.zeros_like(drafts) if num_accepted_tokens is None else num_accepted_tokens
        if (accepted < 0).any() or (accepted > drafts).any():
            raise MisuseError(
                f"accepted drafts {accepted.tolist()} of {drafts.tolist()}: at most all of them, at least 0"
            )
        self.stats.num_draft_tokens += int(drafts.sum())
        self.stats.num_accepted_tokens += int(accepted.sum())
        return accepted[is_sampled]

    # -- running requests --------------------------------------------------------------------------------------------

    def _schedule_running(self) -> tuple[Rows, Rows, Rows, bool]:
        rows = self.running_rows
        firsts = self._computed[rows]
        wanted = self._known[rows] - firsts
        if self.config.num_speculative_tokens:
            wanted = wanted + self._drafts(wanted, firsts)
        counts = self._within_budget(wanted)
        if np.count_nonzero(counts) < len(counts):
            due = counts > 0
            rows, firsts, counts = rows[due], firsts[due], counts[due]
        if not len(rows):
            return rows.copy(), firsts, counts, False
        self.allocator.release_out_of_window_among(rows, firsts)
        if not self._protected and self._append(rows, firsts, counts, 0):
            return rows.copy(), firsts, counts, False
        return self._schedule_running_under_pressure(rows.copy(), firsts, counts)

    def _drafts(self, missing: NDArray[np.int64], firsts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Drafts for requests that decode, as far as the model's length allows."""
        room = self.allocator.config.max_model_len - firsts - missing
        return np.where(missing == 1, np.clip(room, 0, self.config.num_speculative_tokens), 0)

    def _append(self, rows: Rows, firsts: NDArray[np.int64], counts: NDArray[np.int64], reserved_blocks: int) -> bool:
        lookahead = self.config.num_speculative_tokens
        if not lookahead:
            return self.allocator.append(rows, 1 if all_are(counts, 1) else counts, reserved_blocks=reserved_blocks)
        drafts = np.maximum(counts - (self._known[rows] - firsts), 0)
        return self.allocator.append(
            rows,
            counts,
            num_draft_tokens=drafts,
            num_lookahead_tokens=lookahead,
            reserved_blocks=reserved_blocks,
            first_positions=firsts,
        )

    def _within_budget(self, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens for each running request, in order, until the budget is spent."""
        limit = self.config.long_prefill_token_threshold
        if limit:
            wanted = np.minimum(wanted, limit)
        budget = self.config.max_num_batched_tokens
        if sum_of(wanted) <= budget:
            return wanted
        before = np.cumsum(wanted) - wanted
        return np.clip(budget - before, 0, wanted)

    def _schedule_running_under_pressure(
        self, rows: Rows, firsts: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> tuple[Rows, Rows, Rows, bool]:
        """Serve requests while blocks last, and preempt for the one that finds none.

        Protected requests go first: the blocks they need were free when they were admitted and are kept for them.
        The others go in the reverse order of their sacrifice, so that nobody is preempted who was served in this
        step: its newest blocks are findable already, and would be found without ever having been computed.
        """
        place_of = {row: place for place, row in enumerate(rows.tolist())}
        guaranteed = [place for row, place in place_of.items() if row in self._protected]
        order = self._last_is_preempted_first()
        pending = [place_of[row] for row in order if row in place_of]
        scheduled = self._append_places(rows, firsts, counts, guaranteed, 0)
        reserved = self._blocks_reserved()
        preempted = False
        while pending:
            served = self._append_places(rows, firsts, counts, pending, reserved)
            scheduled += served
            pending = pending[len(served) :]
            if not pending:
                break
            needy = int(rows[pending[0]])
            free = self.allocator.num_free_blocks
            victim = order.pop()
            self._preempt(victim)
            preempted = True
            pending = [place for place in pending if int(rows[place]) != victim]
            if victim != needy and self.allocator.num_free_blocks == free:
                # The victim's blocks are all shared: sacrificing a second request would be in vain as well.
                pending.remove(place_of[needy])
        scheduled.sort()
        return rows[scheduled], firsts[scheduled], counts[scheduled], preempted

    def _last_is_preempted_first(self) -> list[int]:
        """Unprotected running rows, by the policy's order of sacrifice: the last one gives way first."""
        rows = [row for row in self.running_rows.tolist() if row not in self._protected]
        if self.config.policy == "priority":
            rows.sort(key=self._urgency)
        elif self.config.preemption_victim == "least-computed":
            rows.sort(key=self.allocator.state.placed.__getitem__, reverse=True)
        return rows

    def _append_places(
        self,
        rows: Rows,
        firsts: NDArray[np.int64],
        counts: NDArray[np.int64],
        places: list[int],
        reserved_blocks: int,
    ) -> list[int]:
        """Allocate for as many of these places in the batch, in order, as the free blocks allow."""
        if not places:
            return []
        index = np.array(places)
        fits = self.allocator.num_appendable(
            rows[index],
            counts[index],
            num_lookahead_tokens=self.config.num_speculative_tokens,
            reserved_blocks=reserved_blocks,
            first_positions=firsts[index],
        )
        index = index[:fits]
        if fits and not self._append(rows[index], firsts[index], counts[index], reserved_blocks):
            raise MisuseError(f"append refused {fits} requests that num_appendable had counted as fitting")
        return places[:fits]

    def _urgency(self, row: int) -> tuple[int, float]:
        request = self.request_in(row)
        return request.priority, request.arrival

    def _preempt(self, row: int) -> None:
        request = self.request_in(row)
        request_id = request.request_id
        request.num_output_tokens = int(self._known[row]) - request.num_prompt_tokens
        self._lost_tokens[request_id] = int(self._computed[row])
        self._swap_out(request_id, int(self._computed[row]), row)
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.stats.max_preemptions_per_request = max(self.stats.max_preemptions_per_request, request.num_preemptions)
        self.allocator.preempt(request_id)
        self._leave_running([row])
        self.waiting.add_preempted(request)

    def _swap_out(self, request_id: str, num_tokens: int, row: int) -> None:
        """Keep a copy of a victim's tokens in host memory, if there is room for its blocks."""
        num_blocks = sum([table.count(row) for table in self.allocator.state.tables])
        if self._swap_space.keep(request_id, num_tokens, num_blocks):
            self._swapped_blocks += num_blocks
            self.stats.swapped_out_tokens += num_tokens

    def _blocks_reserved(self) -> int:
        """Free blocks that protected requests still need to produce their next token."""
        return sum([self._blocks_to_go_on(int(self._known[row]), row) for row in self._protected])

    def _blocks_to_go_on(self, num_tokens: int, row: int | None = None) -> int:
        """Blocks for `num_tokens` tokens with the drafts and lookahead of a decode step, less those of the row."""
        with_drafts = num_tokens + 2 * self.config.num_speculative_tokens
        num_slots = max(num_tokens, min(with_drafts, self.allocator.config.max_model_len))
        tables = self.allocator.state.tables
        held = [0 if row is None else table.count(row) for table in tables]
        return sum([max(-(-num_slots // t.block_size) - count, 0) for t, count in zip(tables, held, strict=True)])

    # -- waiting requests --------------------------------------------------------------------------------------------

    def _admit(
        self, rows: Rows, firsts: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> tuple[Rows, NDArray[np.int64], NDArray[np.int64]]:
        """Admit waiting requests in order until tokens, sequences or blocks run out, and add them to the batch."""
        budget = self.config.max_num_batched_tokens - sum_of(counts)
        admitted: list[tuple[int, int, int]] = []
        free_rows = self.allocator.state.free_rows
        while budget > 0 and len(self.waiting) and self._num_running < self.config.max_num_seqs and free_rows:
            request = self.waiting.head()
            match = self.allocator.match_prefix(request)
            remote = self._num_remote_tokens(request, match)
            if remote:
                if not self._try_to_admit(request, match, 0, remote):
                    break
                self.waiting.pop()
                self._begin_transfer(request, match, remote)
                continue
            # What a swap kept beyond the hit is copied back, not computed.
            external = max(self._swap_space.num_tokens_of(request.request_id) - match.num_hit_tokens, 0)
            if self._external is not None:
                external = self._external.num_tokens_after(request, match.num_hit_tokens)
            found = match.num_hit_tokens + external
            num_new_tokens = self._first_chunk(request.num_tokens - found, budget)
            if not num_new_tokens or not self._try_to_admit(request, match, num_new_tokens, external):
                break
            self.waiting.pop()
            row = self.allocator.row_of(request.request_id)
            is_new = request.request_id not in self._lost_tokens
            self._enter_running(request, row)
            self._note_admission(request, row, match, external)
            if self._remote is not None and is_new:
                self._remote.admitted(request, 0)
            admitted.append((row, found, num_new_tokens))
            budget -= num_new_tokens
        if not admitted:
            return rows, firsts, counts
        more = np.array(admitted, dtype=np.int64)
        return (
            np.concatenate([rows, more[:, 0]]),
            np.concatenate([firsts, more[:, 1]]),
            np.concatenate([counts, more[:, 2]]),
        )

    def _num_remote_tokens(self, request: Request, match: PrefixMatch) -> int:
        """What a new request waits for; one that was preempted computes anew what its engine does not find."""
        if self._remote is None or request.request_id in self._lost_tokens:
            return 0
        return self._remote.num_tokens_after(request, match.num_hit_tokens)

    def _begin_transfer(self, request: Request, match: PrefixMatch, num_tokens: int) -> None:
        row = self.allocator.row_of(request.request_id)
        self._note_admission(request, row, match, num_tokens)
        self._incoming.begin(IncomingTransfer(request, row, match.num_hit_tokens + num_tokens))
        if self._remote is not None:
            self._remote.admitted(request, num_tokens)

    def _first_chunk(self, wanted: int, budget: int) -> int:
        """Tokens of a new request in this step; 0 if it must wait for a step with more room."""
        if not self.config.enable_chunked_prefill:
            # With its outputs a preempted request may have outgrown a step: in one piece it would never return.
            in_pieces = wanted > self.config.max_num_batched_tokens
            return wanted if wanted <= budget else budget if in_pieces else 0
        limit = self.config.long_prefill_token_threshold
        return min(wanted, budget, limit) if limit else min(wanted, budget)

    def _try_to_admit(self, request: Request, match: PrefixMatch, num_new_tokens: int, external: int) -> bool:
        reserved = self._blocks_reserved()
        # An idle pool has nothing to keep a watermark for; with it, a request of nearly the pool's size would wait
        # for ever.
        use_watermark = self._num_running > 0
        comes_back = request.request_id in self._lost_tokens
        whole = self.config.reserve_full_sequence or comes_back
        if self.config.num_speculative_tokens and comes_back:
            # It will be protected until it has produced a token, which takes room for drafts as well.
            blocks = [-(-request.num_tokens // table.block_size) for table in self.allocator.state.tables]
            reserved += self._blocks_to_go_on(request.num_tokens) - sum(blocks)
        if whole and not self.allocator.can_admit(
            request, match, use_watermark=use_watermark, reserved_blocks=reserved
        ):
            return False
        taken = self.allocator.allocate(
            request,
            num_new_tokens,
            match,
            num_external_tokens=external,
            num_lookahead_tokens=self.config.num_speculative_tokens,
            reserved_blocks=reserved,
            use_watermark=use_watermark,
        )
        return taken is not None

    def _enter_running(self, request: Request, row: int) -> None:
        self._running[self._num_running] = row
        self._num_running += 1
        self._request_in[row] = request
        self._known[row] = request.num_tokens
        self._remaining[row] = request.max_tokens - request.num_output_tokens

    def _note_admission(self, request: Request, row: int, match: PrefixMatch, external: int) -> None:
        stats = self.stats
        lost = self._lost_tokens.pop(request.request_id, None)
        if lost is not None:
            self._protected.add(row)
            stats.readmission_queries_tokens += request.num_tokens
            stats.readmission_hits_tokens += match.num_hit_tokens
            stats.recomputed_tokens += max(lost - match.num_hit_tokens - external, 0)
            if self._external is None:
                stats.swapped_in_tokens += external
            if external and self._external is None:
                self._swapped_blocks += sum([-(-external // table.block_size) for table in self.allocator.state.tables])
            self._swap_space.drop(request.request_id)
            stats.readmission_shared_tokens += max(match.num_hit_tokens - lost, 0)
        else:
            request.num_cached_tokens = match.num_hit_tokens + external
            stats.external_hits_tokens += external
            stats.prefix_queries_tokens += request.num_tokens
            stats.prefix_hits_tokens += match.num_hit_tokens

    # -- bookkeeping -------------------------------------------------------------------------------------------------

    def _leave_running(self, rows: list[int]) -> None:
        running = self.running_rows
        leaving = np.zeros(len(self._known), dtype=np.bool_)
        leaving[rows] = True
        kept = running[~leaving[running]]
        self._num_running = len(kept)
        self._running[: len(kept)] = kept
        for row in rows:
            self._request_in[row] = None
            self._protected.discard(row)

    def _finish(self, row: int) -> Request:
        request = self.request_in(row)
        request.num_output_tokens = int(self._known[row]) - request.num_prompt_tokens
        if self._keeps_blocks_of is None or not self._keeps_blocks_of(request):
            self.allocator.free(request.request_id)
        del self._requests[request.request_id]
        self._forget(request.request_id)
        self.stats.num_finished += 1
        return request

    def _forget(self, request_id: str) -> None:
        self._swap_space.drop(request_id)
        self._lost_tokens.pop(request_id, None)

    def _describe(self, batch: TokenBatch) -> ScheduledStep:
        """The sums that a latency model needs. A token at position p attends to p + 1 tokens."""
        firsts, counts = batch.first_positions, batch.counts
        missing = self._known[batch.rows] - firsts
        if largest(missing) == 1 and not self.config.num_speculative_tokens:
            num_decode = len(missing)
            load = StepLoad(0, num_decode, 0, sum_of(firsts) + num_decode, num_decode, self._swapped_blocks)
            return ScheduledStep(batch, load)
        context = counts * firsts + counts * (counts + 1) // 2
        decoding = missing == 1
        drafts = np.maximum(counts - missing, 0)
        num_decode = sum_of(counts[decoding])
        all_context, decode_context = sum_of(context), sum_of(context[decoding])
        load = StepLoad(
            num_prefill_tokens=sum_of(counts) - num_decode,
            num_decode_tokens=num_decode,
            prefill_context_tokens=all_context - decode_context,
            decode_context_tokens=decode_context,
            num_sampled=int(np.count_nonzero(counts >= missing)),
            num_swapped_blocks=self._swapped_blocks,
        )
        return ScheduledStep(batch, load, num_draft_tokens=drafts if np.count_nonzero(drafts) else None)
