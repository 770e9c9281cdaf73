"""Continuous batching as vLLM V1 does it: which requests compute how many tokens in the next step. Knows no clock."""

from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..allocator.allocator import KVCacheAllocator
from ..errors import DoesNotFitError, InputError, MisuseError
from ..events import named_tuple
from ..types import ExternalTokens, RemoteTokens, Request, ScheduledStep, StepLoad, TokenBatch, smallest, sum_of
from .chunks import StateChunks
from .config import SchedulerConfig, SchedulerStats
from .preemption import PreemptedRequests
from .queues import FcfsQueue, Lease, PriorityQueue, WaitingQueue
from .running import RunningRequests
from .waiting import WaitingAdmission


class StepOutcome(NamedTuple):
    """The rows that a completed step changed: int64 arrays.

    Attributes:
        sampled: rows that produced output, in batch order.
        produced: output tokens of each sampled row (several in a macro-step, or with accepted drafts).
        finished: sampled rows that produced their last token; the rows are released already.
        finished_requests: the requests of the finished rows.
        preempted: the sampled rows that were preempted while the step was in flight, with their requests.
    """

    sampled: NDArray[np.int64]
    produced: NDArray[np.int64]
    finished: NDArray[np.int64]
    finished_requests: tuple[Request, ...]
    preempted: tuple[tuple[int, Request], ...] = ()


class _Overlap(NamedTuple):
    """The step in flight while the next one was decided: what it samples, and which rows end with it."""

    step: ScheduledStep
    rows: NDArray[np.int64]
    sampled: NDArray[np.int64]
    ending: list[int]


class Scheduler:
    """Schedules running requests first, in order of admission, then waiting ones, within a token budget.

    The loop around it is `core/scheduler/engine.py`. A step's blocks are allocated when it is scheduled; `complete`
    accounts for its tokens. Requests that can never fit are refused at `submit` (D01), so the head of the queue is
    always served in the end. With `protect_preempted`, a request that comes back after a preemption keeps its blocks
    until it has produced a token, so no request is preempted twice without progress in between (D02).
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
            allocator: the allocator; no other scheduler may use it.
            external: source of tokens behind a hit, besides the swap space.
            remote: another engine whose tokens a request waits for before its first step. Meanwhile the request holds
                its blocks and its row and cannot be preempted; `received` ends the wait.
            keeps_blocks_of: called with each request that finishes: whether its blocks stay until they are `sent`.

        Raises:
            InputError: limits that contradict each other.
        """
        if config.max_num_seqs > allocator.config.max_num_reqs:
            raise InputError(
                f"max_num_seqs {config.max_num_seqs} exceeds the allocator's {allocator.config.max_num_reqs} rows "
                "(max_num_reqs)"
            )
        self.config = config
        self.allocator = allocator
        self.stats = SchedulerStats()
        self.waiting: WaitingQueue = PriorityQueue() if config.policy == "priority" else FcfsQueue()
        self._keeps_blocks_of = keeps_blocks_of
        self._requests: dict[str, Request] = {}
        self._preempted = PreemptedRequests(config, allocator, self.stats)
        chunks = StateChunks(config, allocator.config)
        self._running = RunningRequests(config, allocator, self.waiting, self._preempted, chunks)
        self._admission = WaitingAdmission(
            config, allocator, self._running, self.waiting, self._preempted, self.stats, chunks, external, remote
        )
        self._transfers = self._admission.transfers
        # The step that was scheduled last and is not completed, and the one before it if that is not completed either.
        self._in_flight: ScheduledStep | None = None
        self._overlap: _Overlap | None = None
        # Rows of requests that were aborted during the step in flight.
        self._aborted_rows: set[int] = set()
        # About the step in flight: whether it holds every running request, and the fewest outputs that any of them
        # still has to produce (0: not computed).
        self._is_whole = False
        self._fewest_remaining = 0

    @property
    def num_running(self) -> int:
        """Number of requests that hold blocks and compute."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that hold no blocks, yet or any more."""
        return len(self.waiting)

    @property
    def has_unfinished(self) -> bool:
        """Whether any submitted request has not ended, or a copy holds blocks (see `leases`)."""
        transfers = self._transfers
        return bool(len(self._running) or len(self.waiting) or transfers.held or transfers.ready)

    @property
    def head_is_blocked(self) -> bool:
        """Whether arrivals cannot change the next steps: under "fcfs" they queue behind a request that has to wait."""
        return self.config.policy == "fcfs" and len(self.waiting) > 0

    @property
    def running_rows(self) -> NDArray[np.int64]:
        """Rows of the running requests in order of admission: int64 `[num_running]`, valid until this changes."""
        return self._running.rows

    def request_in(self, row: int) -> Request:
        """Return the running request in a row, or the one that was preempted while its step was in flight."""
        preempted = self._running.preempted.get(row) if self._overlap is not None else None
        return self._running.request_in(row) if preempted is None else preempted

    def check_fits(self, request: Request) -> None:
        """Raise `DoesNotFitError` with the numbers if the request can never be served (D01)."""
        # The last output token is never computed, so it needs no slot.
        longest = request.num_prompt_tokens + request.max_tokens - 1
        draft_slots = self.config.num_speculative_tokens + self.config.num_lookahead_tokens
        with_drafts = min(longest + draft_slots, self.allocator.config.max_model_len)
        self.allocator.check_fits(max(longest, with_drafts), f"request {request.request_id!r}")
        if not self.config.enable_chunked_prefill and request.num_prompt_tokens > self.config.max_num_batched_tokens:
            raise DoesNotFitError(
                f"request {request.request_id!r} has {request.num_prompt_tokens:,} prompt tokens, more than "
                f"max_num_batched_tokens {self.config.max_num_batched_tokens:,}, and chunked prefill is off"
            )

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            DoesNotFitError: its prompt and `max_tokens` can never fit; it is counted as rejected (D01).
            MisuseError: a request with this id is still being served.
        """
        self._accept(request)
        self.waiting.add(request)

    def fork(self, parent_id: str, child: Request, has_ended: bool = False) -> None:
        """Add another output of a running request's prompt, right after the step that computed the prompt's end.

        The child shares the parent's blocks and runs from the next step on. If the parent ended with that step, or no
        further request may run, the child waits for blocks of its own, ahead of requests that never started.

        Args:
            parent_id: the request that has the same prompt.
            child: the new request with its first output token, which the same step gave (`num_output_tokens` is 1).
            has_ended: whether that token was its last one, so that the child is only counted.

        Raises:
            DoesNotFitError: its prompt and `max_tokens` can never fit; it is counted as rejected (D01).
            MisuseError: a request with this id is still being served, the child has not exactly one output token, or
                the parent has computed other tokens than the prompt.
        """
        if child.num_output_tokens != 1:
            raise MisuseError(
                f"{child.request_id!r} forks from {parent_id!r} with {child.num_output_tokens} output tokens; it must "
                "have one, which the step that computed the prompt's end gave"
            )
        num_computed = child.num_tokens - 1
        holds_prompt = self.allocator.holds(parent_id)
        if holds_prompt and self._running.computed.item(self.allocator.row_of(parent_id)) != num_computed:
            raise MisuseError(
                f"{child.request_id!r} cannot fork from {parent_id!r}, which has computed other tokens than the "
                f"{num_computed} of the prompt; fork right after the step that computed its end"
            )
        self._accept(child)
        child.num_cached_tokens = child.num_prompt_tokens
        if has_ended:
            del self._requests[child.request_id]
            self.stats.num_finished += 1
        elif holds_prompt and len(self._running) < self.config.max_num_seqs and self.allocator.state.free_rows:
            self.allocator.fork(parent_id, child)
            row, num_drafts = self.allocator.row_of(child.request_id), self.config.num_speculative_tokens
            self._running.enter(child, row, num_computed, num_drafts)
        else:
            self.waiting.add_preempted(child)

    def _accept(self, request: Request) -> None:
        if request.request_id in self._requests or request.request_id in self._transfers:
            raise MisuseError(f"a request {request.request_id!r} is still being served")
        try:
            self.check_fits(request)
        except DoesNotFitError:
            self.stats.num_rejected += 1
            raise
        self.stats.num_submitted += 1
        request.num_cached_tokens, request.num_preemptions = None, 0
        self._admission.forget_refusal(request)
        self._requests[request.request_id] = request

    def abort(self, request_id: str) -> bool:
        """End a request in any state; returns False for one that has ended already, which changes nothing (C06)."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        if self.allocator.holds(request_id):
            row = self.allocator.row_of(request_id)
            if self._in_flight is not None:
                self._aborted_rows.add(row)
            self._leave([row])
            if not self._transfers.abort(request_id, self._admission.num_steps):
                self.allocator.abort(request_id)
        else:
            self.waiting.remove(request)
        self._preempted.forget(request_id)
        self.stats.num_aborted += 1
        return True

    def received(self, request_id: str) -> None:
        """Note that the copy which `RemoteTokens.admitted` began has ended: the request runs once there is a place.

        Raises:
            MisuseError: no copy of this request is under way (C07).
        """
        if not self._transfers.end(request_id, "received"):
            self.allocator.abort(request_id)

    def sent(self, request_id: str) -> None:
        """Free the blocks that a finished request kept: another engine has read them.

        Raises:
            MisuseError: no copy of this request is under way (C07).
        """
        self._transfers.end(request_id, "sent")
        self.allocator.free(request_id)

    def leases(self) -> tuple[Lease, ...]:
        """List the requests whose blocks stay held for a copy, those that were aborted included, oldest first."""
        return tuple(
            Lease(request_id, state, step, tuple([tuple(blocks) for blocks in self.allocator.block_ids(request_id)]))
            for request_id, (state, step) in self._transfers.held.items()
        )

    def end_lease(self, request_id: str) -> None:
        """Free the blocks of a copy whose end nobody will tell, because the other engine is gone (C08).

        The caller answers for it that nothing writes into these blocks any more.

        Raises:
            MisuseError: no copy of this request is under way, or the request still waits for it.
        """
        state = self._transfers.held.get(request_id, ("", 0))[0]
        if state == "receiving":
            raise MisuseError(f"request {request_id!r} waits for its copy: abort it first, or tell `received`")
        self._transfers.end(request_id, "sent" if state == "sending" else "received")
        self.allocator.abort(request_id)

    def end_leases(self, older_than_steps: int) -> tuple[str, ...]:
        """Do `end_lease` for every copy that nobody waits for and that is this many steps old; return their names."""
        latest = self._admission.num_steps - older_than_steps
        due = [lease.request_id for lease in self.leases() if lease.state != "receiving" and lease.since_step <= latest]
        for request_id in due:
            self.end_lease(request_id)
        return tuple(due)

    def reset_prefix_cache(self, *, while_running: bool = False) -> None:
        """Drop every key, and the copies of preempted requests in host memory, which are as old.

        Raises:
            MisuseError: as `KVCacheAllocator.reset_prefix_cache`.
        """
        self.allocator.reset_prefix_cache(while_running=while_running)
        self._preempted.drop_copies()

    def schedule(self) -> ScheduledStep | None:
        """Decide the next step and allocate its blocks; None if nothing can be computed now.

        Called before the last step is completed, it decides as vLLM's asynchronous scheduling does: without the outputs
        of that step, and without what it gives back. It has to be completed next.

        Raises:
            MisuseError: two steps are in flight, or one with drafts.
        """
        if self._in_flight is not None:
            self._begin_overlap(self._in_flight)
        self._preempted.num_swapped_blocks = 0
        self._fewest_remaining = 0
        self.allocator.begin_step()
        self._admission.num_steps += 1
        self._admission.start_received()
        if self.config.long_prefill_token_threshold:
            self._running.prefill_limit = self._prefill_limit()
        batch = self._running.decide()
        num_continued = len(batch.rows)
        if len(self.waiting) and not self._running.preempted:
            batch = self._admission.admit(batch)
        if not len(batch.rows):
            # A request that preempted itself leaves a step without tokens; those behind it are served by the next one.
            # With a step in flight its end comes first: it may be what the preempted requests wait for.
            return self.schedule() if self._running.preempted and self._overlap is None else None
        self._is_whole = len(batch.rows) == len(self._running)
        self._running.computed[batch.rows] = batch.first_positions + batch.counts
        self._in_flight = self._with_load(batch, num_continued)
        return self._in_flight

    def _begin_overlap(self, step: ScheduledStep) -> None:
        """Count the outputs of the step in flight as known, for the decision that is made without them."""
        if self._overlap is not None or self.config.num_speculative_tokens:
            raise MisuseError(
                "complete the step in flight before the next one is scheduled: "
                + ("its drafts decide what comes next" if self._overlap is None else "two of them are in flight")
            )
        running, rows = self._running, step.batch.rows
        sampled = rows[self._sampled_places(step)]
        counts = step.batch.counts
        if self._aborted_rows:
            gone = list(self._aborted_rows)
            counts, sampled = counts[~np.isin(rows, gone)], sampled[~np.isin(sampled, gone)]
            rows = rows[~np.isin(rows, gone)]
            self._aborted_rows.clear()
        running.overlaps = True
        running.known[sampled] += step.num_steps
        running.remaining[sampled] -= step.num_steps
        running.promised[sampled] = 1
        running.in_flight[rows] = counts
        ending = sampled[running.remaining[sampled] == 0].tolist()
        running.all_decode = (running.all_decode or (self._is_whole and len(sampled) == len(rows))) and not ending
        self._overlap = _Overlap(step, rows, sampled, ending)
        self._in_flight = None

    def _end_overlap(self, overlap: _Overlap) -> StepOutcome:
        """Do `complete` for a step during which the next one was decided."""
        step, rows, sampled, ending = overlap
        running = self._running
        running.promised[sampled] = 0
        running.in_flight[rows] = 0
        self._overlap = None
        self.stats.computed_tokens += step.load.num_tokens * step.num_steps
        if self._preempted.protected:
            self._preempted.unprotect(sampled.tolist())
        preempted = tuple([(row, running.preempted[row]) for row in sampled.tolist() if row in running.preempted])
        held = sampled
        if preempted:
            held = sampled[~np.isin(sampled, list(running.preempted))]
        self.allocator.register(held, running.known[held] - 1)
        gone = dict(preempted)
        requests = tuple([self._finish_waiting(gone[row]) if row in gone else self._finish(row) for row in ending])
        if ending:
            self._leave([row for row in ending if row not in gone])
        produced = np.empty(len(sampled), dtype=np.int64)
        produced.fill(step.num_steps)
        return StepOutcome(sampled, produced, np.array(ending, dtype=np.int64), requests, preempted)

    def _finish_waiting(self, request: Request) -> Request:
        """End a request whose last token arrives after its preemption."""
        self.waiting.remove(request)
        del self._requests[request.request_id]
        self._preempted.forget(request.request_id)
        self.stats.num_finished += 1
        return request

    def _prefill_limit(self) -> int:
        """Most tokens of one prompt in this step: a request that is alone takes them from no other."""
        limit = self.config.long_prefill_token_threshold
        is_alone = len(self._running) + len(self.waiting) + self._transfers.num_expected < 2
        return 0 if is_alone else limit

    def _with_load(self, batch: TokenBatch, num_continued: int) -> ScheduledStep:
        num_swapped_blocks = self._preempted.num_swapped_blocks
        has_drafts = self.config.num_speculative_tokens > 0
        if self._running.all_decode and not has_drafts:
            return ScheduledStep(batch, _decode_load(batch, num_swapped_blocks))
        missing = self._running.known[batch.rows] - batch.first_positions
        if not has_drafts:
            return ScheduledStep(batch, _mixed_load(batch, missing, num_swapped_blocks))
        drafts = np.maximum(batch.counts - missing, 0)
        load = _load_with_drafts(batch, missing, num_swapped_blocks)
        if not np.count_nonzero(drafts):
            return ScheduledStep(batch, load)
        proposed = drafts.copy()
        proposed[num_continued:] = 0
        return ScheduledStep(batch, load, num_draft_tokens=drafts, num_proposed_tokens=proposed)

    def max_repeats(self, step: ScheduledStep) -> int:
        """Most further steps like this decode-only one that can follow before any scheduling decision is due.

        0 unless every running request decodes, none was preempted and none ends in this step; further bounded by the
        free blocks. Requests that wait now stay blocked while no block is freed. The caller must account for requests
        that arrive later.
        """
        rows = step.batch.rows
        if (
            step.load.num_prefill_tokens
            or self.config.num_speculative_tokens
            or self._running.preempted
            or len(rows) != len(self._running)
            or not self.allocator.can_append_several_steps
        ):
            return 0
        self._fewest_remaining = smallest(self._running.remaining[rows])
        limit = self._fewest_remaining - 1
        while limit > 0 and not self.allocator.could_append(rows, limit):
            limit //= 2
        return limit

    def repeat(self, step: ScheduledStep, times: int) -> ScheduledStep:
        """Allocate `times <= max_repeats(step)` further steps of the same requests; return the macro-step."""
        batch = step.batch
        taken_at = self.allocator.append_steps(batch.rows, times, int(self._running.overlaps))
        counts = batch.counts + times
        self._running.computed[batch.rows] = batch.first_positions + counts
        tokens = TokenBatch(batch.rows, batch.first_positions, counts)
        self._in_flight = ScheduledStep(tokens, step.load, 1 + times, blocks_taken_at=taken_at)
        return self._in_flight

    def complete(
        self,
        step: ScheduledStep,
        stopped: Collection[int] = (),
        num_accepted_tokens: NDArray[np.int64] | None = None,
    ) -> StepOutcome:
        """Account for a computed step: count the produced tokens, free the requests that finish.

        Args:
            step: the step that was scheduled last, or the one before it if the last was scheduled meanwhile.
            stopped: rows whose request ends with this step's token (a stop token; live serving).
            num_accepted_tokens: int64 `[num_reqs]`, accepted drafts of each request in the batch; None: no drafts.

        Raises:
            MisuseError: a stopped row produced no token in this step, or more drafts were accepted than there were; or
                a row stopped although the next step is decided.
        """
        if self._overlap is not None:
            if stopped:
                raise MisuseError(f"rows {sorted(stopped)} cannot stop: the next step already computes for them")
            return self._end_overlap(self._overlap)
        self._in_flight = None
        self._aborted_rows.clear()
        self._running.overlaps = False
        running, rows = self._running, step.batch.rows
        places = self._sampled_places(step)
        sampled = rows[places]
        if stopped:
            strangers = set(stopped).difference(sampled.tolist())
            if strangers:
                raise MisuseError(
                    f"rows {sorted(strangers)} cannot stop with a step in which they produced no token; the rows that "
                    f"did are {sampled.tolist()}"
                )
        remaining = running.remaining[sampled]
        produced = np.empty(len(sampled), dtype=np.int64)
        produced.fill(step.num_steps)
        if step.num_draft_tokens is not None:
            produced += self._accepted(step.num_draft_tokens, num_accepted_tokens)[places]
            produced = np.minimum(produced, remaining)
            # This takes rejected drafts back: all known tokens but the newest are computed.
            running.computed[sampled] = running.known[sampled] + produced - 1
        if self.config.num_speculative_tokens:
            running.drafts[sampled] = self.config.num_speculative_tokens
        self.stats.computed_tokens += step.load.num_tokens * step.num_steps
        running.known[sampled] += produced
        running.remaining[sampled] = remaining - produced
        if self._is_whole and len(sampled) == len(rows):
            running.all_decode = True
        if self._preempted.protected:
            self._preempted.unprotect(sampled.tolist())
        if stopped:
            running.remaining[list(stopped)] = 0
        elif self._fewest_remaining > step.num_steps:
            return StepOutcome(sampled, produced, sampled[:0], ())
        ended = sampled[running.remaining[sampled] == 0].tolist()
        # A request that was aborted while the step ran is no longer in its row.
        finished = [row for row in ended if running.holds(row)]
        requests = tuple([self._finish(row) for row in finished])
        if finished:
            self._leave(finished)
        return StepOutcome(sampled, produced, np.array(finished, dtype=np.int64), requests)

    def _sampled_places(self, step: ScheduledStep) -> slice | NDArray[np.bool_]:
        """Batch places of the requests that produce output; a prompt chunk that is not the last one produces none."""
        batch = step.batch
        if step.load.num_sampled == len(batch.rows):
            return slice(None)
        return batch.first_positions + batch.counts >= self._running.known[batch.rows]

    def _accepted(self, drafts: NDArray[np.int64], accepted: NDArray[np.int64] | None) -> NDArray[np.int64]:
        if accepted is None:
            accepted = np.zeros_like(drafts)
        if (accepted < 0).any() or (accepted > drafts).any():
            raise MisuseError(
                f"accepted drafts {accepted.tolist()} of {drafts.tolist()}: at most all of them, at least 0"
            )
        self.stats.num_draft_tokens += int(drafts.sum())
        self.stats.num_accepted_tokens += int(accepted.sum())
        return accepted

    def _finish(self, row: int) -> Request:
        request = self._running.note_outputs(row)
        if self._keeps_blocks_of is not None and self._keeps_blocks_of(request):
            self._transfers.keep(request.request_id, self._admission.num_steps)
        else:
            self.allocator.free(request.request_id)
        del self._requests[request.request_id]
        self._preempted.forget(request.request_id)
        self.stats.num_finished += 1
        return request

    def _leave(self, rows: list[int]) -> None:
        self._running.leave(rows)
        self._preempted.unprotect(rows)


def _decode_load(batch: TokenBatch, num_swapped_blocks: int) -> StepLoad:
    """The load of a batch in which every request computes its newest token. A token at position p attends to p + 1."""
    num_reqs = len(batch.rows)
    context = sum_of(batch.first_positions) + num_reqs
    return named_tuple(StepLoad, (0, num_reqs, 0, context, num_reqs, num_swapped_blocks))


def _mixed_load(batch: TokenBatch, num_missing: NDArray[np.int64], num_swapped_blocks: int) -> StepLoad:
    """The load of a batch without drafts in which some requests compute prompt tokens.

    `num_missing`, int64 `[num_reqs]`, is how many known tokens of each request were not computed before the step: 1
    for a request that decodes.
    """
    num_sampled = num_decode_tokens = len(batch.rows)
    decode_context_tokens = sum_of(batch.first_positions) + num_decode_tokens
    num_prefill_tokens = prefill_context_tokens = 0
    for place in (num_missing != 1).nonzero()[0].tolist():
        first, count = batch.first_positions.item(place), batch.counts.item(place)
        num_prefill_tokens += count
        prefill_context_tokens += count * first + count * (count + 1) // 2
        num_decode_tokens -= 1
        decode_context_tokens -= first + 1
        if count < num_missing.item(place):
            num_sampled -= 1
    sums = (
        num_prefill_tokens,
        num_decode_tokens,
        prefill_context_tokens,
        decode_context_tokens,
        num_sampled,
        num_swapped_blocks,
    )
    return named_tuple(StepLoad, sums)


def _load_with_drafts(batch: TokenBatch, num_missing: NDArray[np.int64], num_swapped_blocks: int) -> StepLoad:
    """As `_mixed_load`, where requests that decode may verify drafts."""
    firsts, counts = batch.first_positions, batch.counts
    context = counts * firsts + counts * (counts + 1) // 2
    decoding = num_missing == 1
    num_decode_tokens, decode_context_tokens = sum_of(counts[decoding]), sum_of(context[decoding])
    return StepLoad(
        sum_of(counts) - num_decode_tokens,
        num_decode_tokens,
        sum_of(context) - decode_context_tokens,
        decode_context_tokens,
        int(np.count_nonzero(counts >= num_missing)),
        num_swapped_blocks,
    )
