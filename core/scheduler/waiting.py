"""Admission: which waiting requests enter the next step, in order, until tokens, sequences or blocks run out."""

import attrs
import numpy as np

from ..allocator.allocator import KVCacheAllocator
from ..allocator.prefix_cache import PrefixMatch
from ..errors import InputError
from ..events import Key
from ..types import ExternalTokens, RemoteTokens, Request, TokenBatch, sum_of
from .chunks import StateChunks
from .config import SchedulerConfig, SchedulerStats
from .preemption import PreemptedRequests
from .queues import IncomingTransfer, Transfers, WaitingQueue
from .running import RunningRequests


@attrs.frozen
class RefusedAdmission:
    """A request that found too few blocks, and the state at that time: it tells when another lookup is worthwhile.

    What counts for a request is how many blocks are free plus how many blocks of its hit other requests hold. While no
    block is cached under the key behind the hit, this sum grows only when references are given back, or when a key is
    dropped from a free block while another block under the same key is held. A request that touches a block of the
    hit takes it from the free queue, and so does one that takes the block for other content, even if a block under
    its key appears again later. A block that is copied on write stays held by others. All this requires that the hit
    names no block twice and that the request does not change.

    Attributes:
        request: the request that was refused.
        next_key: key of the block behind its hit.
        num_missing_blocks: how many more blocks would have had to be free.
        num_gains: `LedgerState.num_gains` at that time.
        reserved_blocks: free blocks that were reserved for others.
        use_watermark: whether the watermark had to stay free.
    """

    request: Request
    next_key: Key
    num_missing_blocks: int
    num_gains: int
    reserved_blocks: int
    use_watermark: bool

    def still_holds(
        self, allocator: KVCacheAllocator, request: Request, reserved_blocks: int, use_watermark: bool
    ) -> bool:
        """Whether this request would be refused again, so that it needs no lookup."""
        return (
            self.request is request
            and allocator.state.num_gains - self.num_gains < self.num_missing_blocks
            and self.reserved_blocks <= reserved_blocks
            and self.use_watermark <= use_watermark
            and allocator.pool.find(self.next_key) is None
        )


class WaitingAdmission:
    """Admits requests from the head of the queue. The first one that has to wait holds back those behind it.

    Attributes:
        transfers: copies from and to other engines, with the requests that wait for theirs.
        num_steps: the steps that the scheduler has decided so far.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: KVCacheAllocator,
        running: RunningRequests,
        waiting: WaitingQueue,
        preempted: PreemptedRequests,
        stats: SchedulerStats,
        chunks: StateChunks,
        external: ExternalTokens | None,
        remote: RemoteTokens | None,
    ) -> None:
        """Take over `external` and `remote` as `Scheduler` documents them.

        Raises:
            InputError: both of them, or `external` beside a swap space.
        """
        if external is not None and config.swap_space_blocks:
            raise InputError(
                f"swap_space_blocks {config.swap_space_blocks} and an external cache exclude each other: the external "
                "cache already keeps what a preempted request loses"
            )
        if external is not None and remote is not None:
            raise InputError("give either an external cache or another engine as the source of tokens, not both")
        self._config = config
        self._allocator = allocator
        self._running = running
        self._waiting = waiting
        self._preempted = preempted
        self._stats = stats
        self._chunks = chunks
        self._external = external
        self._remote = remote
        self.transfers = Transfers()
        self.num_steps = 0
        self._refused: RefusedAdmission | None = None

    def forget_refusal(self, request: Request) -> None:
        """Forget the refusal of a request that is submitted again: it may now need fewer blocks, or not all at once."""
        if self._refused is not None and self._refused.request is request:
            self._refused = None

    def start_received(self) -> None:
        """Start requests whose content has arrived from another engine, while fewer than `max_num_seqs` run."""
        ready = self.transfers.ready
        while ready and len(self._running) < self._config.max_num_seqs:
            transfer = ready.popleft()
            self._running.enter(transfer.request, transfer.row, transfer.num_found_tokens)

    def admit(self, batch: TokenBatch) -> TokenBatch:
        """Admit requests and return the batch with their tokens appended."""
        waiting, running, free_rows = self._waiting, self._running, self._allocator.state.free_rows
        budget = self._config.max_num_batched_tokens - sum_of(batch.counts)
        admitted: list[tuple[int, int, int]] = []
        pads = running.pads_admissions(batch)
        while budget > 0 and len(waiting) and len(running) < self._config.max_num_seqs and free_rows:
            request = waiting.head()
            if self._would_be_refused_again(request):
                break
            request.cache_boundary = 0  # what an earlier lookup reported is outdated, in vLLM too
            match = self._allocator.match_prefix(request)
            remote = self._num_remote_tokens(request, match)
            if remote:
                if not self._allocate(request, match, 0, remote):
                    break
                waiting.pop_head()
                self._begin_transfer(request, match, remote)
                continue
            external = self._num_external_tokens(request, match)
            found = match.num_hit_tokens + external
            dropped = self._allocator.num_dropped_tokens(request, match)
            num_new_tokens = self._first_chunk(request, found, budget, batch, pads)
            if not num_new_tokens or self._waits_for_state(match, batch, admitted):
                break
            if not self._allocate(request, match, num_new_tokens, external):
                break
            waiting.pop_head()
            row = self._allocator.row_of(request.request_id)
            running.enter(request, row, found)
            self._note(request, row, match, external, dropped)
            admitted.append((row, found, num_new_tokens))
            budget -= num_new_tokens
        if not admitted:
            return batch
        rows, firsts, counts = np.array(admitted, dtype=np.int64).T
        return TokenBatch(
            np.concatenate([batch.rows, rows]),
            np.concatenate([batch.first_positions, firsts]),
            np.concatenate([batch.counts, counts]),
        )

    def _num_remote_tokens(self, request: Request, match: PrefixMatch) -> int:
        """Tokens that a new request waits for; a preempted one computes again what its own engine does not find."""
        if self._remote is None or request in self._preempted:
            return 0
        return self._remote.num_tokens_after(request, match.num_hit_tokens)

    def _num_external_tokens(self, request: Request, match: PrefixMatch) -> int:
        """Tokens that are copied in behind a hit instead of being computed."""
        if self._external is not None:
            return self._external.num_tokens_after(request, match.num_hit_tokens)
        return max(self._preempted.num_swapped_tokens(request) - match.num_hit_tokens, 0)

    def _begin_transfer(self, request: Request, match: PrefixMatch, num_tokens: int) -> None:
        row = self._allocator.row_of(request.request_id)
        self.transfers.begin(IncomingTransfer(request, row, match.num_hit_tokens + num_tokens), self.num_steps)
        self._note_first(request, match, num_tokens)
        if self._remote is not None:
            self._remote.admitted(request, num_tokens)

    def _first_chunk(self, request: Request, found: int, budget: int, batch: TokenBatch, pads: bool) -> int:
        """Tokens that an admitted request computes in this step; 0 if it must wait for a step with more room.

        Where it `pads`, a request that lacks a single token enters with as many tokens as those that decode with
        drafts: the graphs of a step are made for equal numbers. The drafts behind its token are never right.
        """
        wanted = request.num_tokens - found
        padded = 1 + self._config.num_speculative_tokens
        pads = pads and wanted == 1 and found + padded < self._allocator.config.max_model_len
        if pads and (found or len(batch.rows)):
            count = self._aligned(request, found, padded) if padded <= budget else 0
            return count if count in (0, padded) else 1
        if not self._config.enable_chunked_prefill:
            # With its outputs a preempted request may exceed a whole step, and undivided it would never return.
            in_pieces = wanted > self._config.max_num_batched_tokens
            count = wanted if wanted <= budget else budget if in_pieces else 0
        else:
            limit = self._running.prefill_limit
            count = min(wanted, budget, limit) if limit else min(wanted, budget)
        return self._aligned(request, found, count)

    def _waits_for_state(self, match: PrefixMatch, batch: TokenBatch, admitted: list[tuple[int, int, int]]) -> bool:
        """Whether a hit ends in a state that no request can continue from in this step.

        That is one which this step writes, and in vLLM also the last state of a prompt whose own request continues from
        it in this step and stays within the block behind it.
        """
        size, hit = self._chunks.block_size, match.num_hit_tokens
        if not size or not hit:
            return False
        if self._allocator.hits_state_of_this_step(match):
            return True
        places = (batch.first_positions == hit).nonzero()[0].tolist()
        batched = [(batch.rows.item(place), hit, batch.counts.item(place)) for place in places]
        for row, first, count in [*batched, *admitted]:
            if first != hit or min(first + count, self._running.known.item(row)) >= hit + size:
                continue
            prompt = self._running.request_in(row).num_prompt_tokens
            if self._chunks.last_boundary(prompt) == hit and self._allocator.holds_state_of(row, match):
                return True
        return False

    def _aligned(self, request: Request, found: int, count: int) -> int:
        """As many of `count` tokens behind those found as end where a state is kept."""
        if not self._chunks.block_size or not count:
            return count
        return self._chunks.count(found, count, request.num_prompt_tokens, request.num_tokens, request.cache_boundary)

    def _allocate(self, request: Request, match: PrefixMatch, num_new_tokens: int, external: int) -> bool:
        """Take blocks for a request; False if too few are free."""
        reserved, use_watermark = self._reserved_for(request), self._uses_watermark()
        if self._config.reserve_full_sequence or self._preempted.must_fit_whole(request):
            missing = self._allocator.num_missing_blocks(
                request, match, use_watermark=use_watermark, reserved_blocks=reserved
            )
            if missing > 0:
                self._remember_refusal(request, match, missing, reserved, use_watermark)
                return False
        taken = self._allocator.allocate(
            request,
            num_new_tokens,
            match,
            num_external_tokens=external,
            num_lookahead_tokens=self._config.num_lookahead_tokens,
            reserved_blocks=reserved,
            use_watermark=use_watermark,
        )
        return taken is not None

    def _remember_refusal(
        self, request: Request, match: PrefixMatch, missing: int, reserved: int, use_watermark: bool
    ) -> None:
        hit = match.blocks[0]
        # The ledger does not show when outside tokens appear or vanish. And a block that occurs several times in a hit
        # (possible where keys name content alone) saves several blocks at once as soon as another request holds it.
        if self._external is not None or self._remote is not None or len(set(hit)) < len(hit):
            return
        next_key = self._allocator.key_behind(request, match)
        if next_key is not None:
            gains = self._allocator.state.num_gains
            self._refused = RefusedAdmission(request, next_key, missing, gains, reserved, use_watermark)

    def _would_be_refused_again(self, request: Request) -> bool:
        return self._refused is not None and self._refused.still_holds(
            self._allocator, request, self._reserved_for(request), self._uses_watermark()
        )

    def _reserved_for(self, request: Request) -> int:
        """Free blocks reserved for others, and those that a preempted request needs beyond its known tokens."""
        return self._preempted.blocks_reserved() + self._preempted.blocks_to_protect(request)

    def _uses_watermark(self) -> bool:
        # With no running request there is nothing to keep a watermark for, and it would make a request of nearly the
        # pool's size wait forever.
        return len(self._running) > 0

    def _note(self, request: Request, row: int, match: PrefixMatch, external: int, dropped: int) -> None:
        if request in self._preempted:
            self._preempted.come_back(request, row, match, external, 0 if self._external is not None else external)
            return
        self._note_first(request, match, external)
        self._stats.dropped_hits_tokens += dropped
        if self._remote is not None:
            self._remote.admitted(request, 0)

    def _note_first(self, request: Request, match: PrefixMatch, external: int) -> None:
        """Count what a request found at its first admission."""
        request.num_cached_tokens = match.num_hit_tokens + external
        self._stats.external_hits_tokens += external
        self._stats.prefix_queries_tokens += request.num_tokens
        self._stats.prefix_hits_tokens += match.num_hit_tokens
