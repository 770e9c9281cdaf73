"""Which waiting requests are admitted into the next step: in order, until tokens, sequences or blocks run out."""

import attrs
import numpy as np

from ..allocator.allocator import KVCacheAllocator
from ..allocator.prefix_cache import PrefixMatch
from ..errors import InputError
from ..events import Key
from ..types import ExternalTokens, RemoteTokens, Request, TokenBatch, sum_of
from .config import SchedulerConfig
from .preemption import PreemptedRequests
from .queues import WaitingQueue
from .running import RunningRequests
from .stats import SchedulerStats
from .transfers import IncomingTransfer, IncomingTransfers

# A request that found too few blocks, and what has to happen before another look can end otherwise.


@attrs.frozen
class RefusedAdmission:
    """What was so when the blocks did not suffice for a request.

    What counts for a request is how many blocks are free and how many of the blocks of its hit others hold. While the
    key behind the hit is not found, the sum of the two grows only by references that are given back, and by keys that
    are dropped from free blocks where another block under the key is held: whoever adopts a block of the hit takes it
    from the free ones, and so does whoever takes it for other content, even if a block under its key comes again. A
    block that is copied on write is one that others go on holding. All this is so where the hit names no block twice,
    and while the request stays what it was.

    Attributes:
        request: who was refused.
        next_key: of the block behind its hit.
        num_missing_blocks: how many more would have had to be free.
        num_gains: `LedgerState.num_gains` at the time.
        reserved_blocks: free blocks that were promised to others.
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
        """Whether this request would be refused again, so that it need not look."""
        return (
            self.request is request
            and allocator.state.num_gains - self.num_gains < self.num_missing_blocks
            and self.reserved_blocks <= reserved_blocks
            and self.use_watermark <= use_watermark
            and allocator.pool.find(self.next_key) is None
        )


class WaitingAdmission:
    """Admits from the head of the queue. The first request that has to wait keeps back those behind it.

    Attributes:
        incoming: admitted requests that hold blocks and wait for their tokens from another engine.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: KVCacheAllocator,
        running: RunningRequests,
        waiting: WaitingQueue,
        preempted: PreemptedRequests,
        stats: SchedulerStats,
        external: ExternalTokens | None,
        remote: RemoteTokens | None,
    ) -> None:
        """`external` and `remote` are those of `Scheduler`.

        Raises:
            InputError: both of them, or `external` beside a swap space.
        """
        if external is not None and config.swap_space_blocks:
            raise InputError(
                f"swap_space_blocks {config.swap_space_blocks} and an external cache exclude each other: what a "
                "preempted request loses is kept there already"
            )
        if external is not None and remote is not None:
            raise InputError("tokens come from an external cache or from another engine, not from both")
        self._config = config
        self._allocator = allocator
        self._running = running
        self._waiting = waiting
        self._preempted = preempted
        self._stats = stats
        self._external = external
        self._remote = remote
        self.incoming = IncomingTransfers()
        self._refused: RefusedAdmission | None = None

    def forget_refusal(self, request: Request) -> None:
        """A request is submitted anew: it may need fewer blocks than when it was refused, or not all at once."""
        if self._refused is not None and self._refused.request is request:
            self._refused = None

    def take_in_received(self) -> None:
        """Requests whose tokens have come from another engine run, as far as there is a place for them."""
        while self.incoming.are_there and len(self._running) < self._config.max_num_seqs:
            transfer = self.incoming.next_there()
            self._running.enter(transfer.request, transfer.row, transfer.num_found_tokens)

    def admit(self, batch: TokenBatch) -> TokenBatch:
        """The batch with what admitted requests compute behind what running ones do."""
        budget = self._config.max_num_batched_tokens - sum_of(batch.counts)
        admitted: list[tuple[int, int, int]] = []
        waiting, running, free_rows = self._waiting, self._running, self._allocator.state.free_rows
        while budget > 0 and len(waiting) and len(running) < self._config.max_num_seqs and free_rows:
            request = waiting.head()
            if self._is_refused_still(request):
                break
            match = self._allocator.match_prefix(request)
            remote = self._num_remote_tokens(request, match)
            if remote:
                if not self._allocate(request, match, 0, remote):
                    break
                waiting.pop()
                self._begin_transfer(request, match, remote)
                continue
            external = self._num_external_tokens(request, match)
            found = match.num_hit_tokens + external
            num_new_tokens = self._first_chunk(request.num_tokens - found, budget)
            if not num_new_tokens or not self._allocate(request, match, num_new_tokens, external):
                break
            waiting.pop()
            row = self._allocator.row_of(request.request_id)
            running.enter(request, row, found)
            self._note(request, row, match, external)
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
        """What a new request waits for; one that was preempted computes anew what its engine does not find."""
        if self._remote is None or request in self._preempted:
            return 0
        return self._remote.num_tokens_after(request, match.num_hit_tokens)

    def _num_external_tokens(self, request: Request, match: PrefixMatch) -> int:
        """What is copied in behind a hit instead of being computed."""
        if self._external is not None:
            return self._external.num_tokens_after(request, match.num_hit_tokens)
        return max(self._preempted.num_swapped_tokens(request) - match.num_hit_tokens, 0)

    def _begin_transfer(self, request: Request, match: PrefixMatch, num_tokens: int) -> None:
        row = self._allocator.row_of(request.request_id)
        self.incoming.begin(IncomingTransfer(request, row, match.num_hit_tokens + num_tokens))
        self._note_first(request, match, num_tokens)
        if self._remote is not None:
            self._remote.admitted(request, num_tokens)

    def _first_chunk(self, wanted: int, budget: int) -> int:
        """Tokens of a new request in this step; 0 if it must wait for a step with more room."""
        if not self._config.enable_chunked_prefill:
            # With its outputs a preempted request may have outgrown a step: in one piece it would never return.
            in_pieces = wanted > self._config.max_num_batched_tokens
            return wanted if wanted <= budget else budget if in_pieces else 0
        limit = self._config.long_prefill_token_threshold
        return min(wanted, budget, limit) if limit else min(wanted, budget)

    def _allocate(self, request: Request, match: PrefixMatch, num_new_tokens: int, external: int) -> bool:
        """Take blocks for a request, if those that are free suffice."""
        reserved, use_watermark = self._reserved_for(request), self._uses_watermark()
        if self._config.reserve_full_sequence or request in self._preempted:
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
            num_lookahead_tokens=self._config.num_speculative_tokens,
            reserved_blocks=reserved,
            use_watermark=use_watermark,
        )
        return taken is not None

    def _remember_refusal(
        self, request: Request, match: PrefixMatch, missing: int, reserved: int, use_watermark: bool
    ) -> None:
        hit = match.blocks[0]
        # Tokens that come from elsewhere come and go unseen. And a block that stands several times in a hit, as one
        # whose key names content alone may, is several fewer to be taken as soon as anybody else holds it.
        if self._external is not None or self._remote is not None or len(set(hit)) < len(hit):
            return
        next_key = self._allocator.key_behind(request, match)
        if next_key is not None:
            gains = self._allocator.state.num_gains
            self._refused = RefusedAdmission(request, next_key, missing, gains, reserved, use_watermark)

    def _is_refused_still(self, request: Request) -> bool:
        return self._refused is not None and self._refused.still_holds(
            self._allocator, request, self._reserved_for(request), self._uses_watermark()
        )

    def _reserved_for(self, request: Request) -> int:
        """Free blocks that others are promised, and those that a preempted request needs beyond its known tokens."""
        return self._preempted.blocks_reserved() + self._preempted.blocks_to_protect(request)

    def _uses_watermark(self) -> bool:
        # An idle pool has nothing to keep a watermark for; with it, a request of nearly the pool's size would wait
        # for ever.
        return len(self._running) > 0

    def _note(self, request: Request, row: int, match: PrefixMatch, external: int) -> None:
        if request in self._preempted:
            self._preempted.come_back(request, row, match, external, 0 if self._external is not None else external)
            return
        self._note_first(request, match, external)
        if self._remote is not None:
            self._remote.admitted(request, 0)

    def _note_first(self, request: Request, match: PrefixMatch, external: int) -> None:
        """What a request found that had never been admitted before."""
        request.num_cached_tokens = match.num_hit_tokens + external
        self._stats.external_hits_tokens += external
        self._stats.prefix_queries_tokens += request.num_tokens
        self._stats.prefix_hits_tokens += match.num_hit_tokens
