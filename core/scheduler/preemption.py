"""What the scheduler remembers of preempted requests: what they lost, where a copy is, which are protected."""

from ..allocator.allocator import KVCacheAllocator
from ..allocator.prefix_cache import PrefixMatch
from ..types import Request
from .config import SchedulerConfig, SchedulerStats


class PreemptedRequests:
    """Follows a request from its preemption to the first token that it produces after it has come back.

    With `protect_preempted` the request is protected until then: no request is preempted twice without progress in
    between (field report D02). The blocks that it needs for that token were free when it came back and are kept for it.

    The swap space is host memory for the blocks of preempted requests: a count of blocks, no content.

    Attributes:
        protected: by row, the requests that came back and have not produced a token since; without
            `protect_preempted` none.
        num_swapped_blocks: blocks copied between device and host memory since the step began, in both directions.
    """

    def __init__(self, config: SchedulerConfig, allocator: KVCacheAllocator, stats: SchedulerStats) -> None:
        self._protects = config.protect_preempted
        self._num_draft_slots = config.num_speculative_tokens + config.num_lookahead_tokens
        self._allocator = allocator
        self._stats = stats
        self._num_free_swap_blocks = config.swap_space_blocks
        # By request id, what host memory holds of it: tokens, from the first one on, and blocks.
        self._copies: dict[str, tuple[int, int]] = {}
        # By request id, the tokens that it had computed when it was preempted, until it comes back.
        self._lost_tokens: dict[str, int] = {}
        self.protected: dict[int, Request] = {}
        self.num_swapped_blocks = 0

    def __contains__(self, request: Request) -> bool:
        """Whether the request was preempted and has not come back."""
        return request.request_id in self._lost_tokens

    def num_swapped_tokens(self, request: Request) -> int:
        """Tokens, from the first one on, of which host memory holds a copy; 0 without a copy."""
        return self._copies.get(request.request_id, (0, 0))[0]

    def add(self, request: Request, row: int, num_computed_tokens: int) -> None:
        """Note that a request is about to lose the blocks of its row; copy them if the swap space has room."""
        stats, request_id = self._stats, request.request_id
        self._lost_tokens[request_id] = num_computed_tokens
        num_blocks = sum([table.count(row) for table in self._allocator.state.tables])
        if num_computed_tokens and num_blocks <= self._num_free_swap_blocks:
            self._copies[request_id] = num_computed_tokens, num_blocks
            self._num_free_swap_blocks -= num_blocks
            self.num_swapped_blocks += num_blocks
            stats.swapped_out_tokens += num_computed_tokens
        request.num_preemptions += 1
        stats.num_preemptions += 1
        stats.max_preemptions_per_request = max(stats.max_preemptions_per_request, request.num_preemptions)

    def come_back(self, request: Request, row: int, match: PrefixMatch, external: int, swapped_in: int) -> None:
        """Note that a request holds blocks again.

        Args:
            request: the request.
            row: its row of the block tables.
            match: what it found in the pool.
            external: tokens behind the hit that are copied in.
            swapped_in: how many of these come from the swap space.
        """
        stats = self._stats
        lost = self._lost_tokens.pop(request.request_id)
        if self._protects:
            self.protected[row] = request
        stats.readmission_queries_tokens += request.num_tokens
        stats.readmission_hits_tokens += match.num_hit_tokens
        stats.readmission_shared_tokens += max(match.num_hit_tokens - lost, 0)
        stats.recomputed_tokens += max(lost - match.num_hit_tokens - external, 0)
        stats.swapped_in_tokens += swapped_in
        if swapped_in:
            self.num_swapped_blocks += sum([-(-swapped_in // t.block_size) for t in self._allocator.state.tables])
        self._drop_copy(request.request_id)

    def unprotect(self, rows: list[int]) -> None:
        """End the protection of requests that have produced a token, or left."""
        for row in rows:
            self.protected.pop(row, None)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._drop_copy(request_id)
        self._lost_tokens.pop(request_id, None)

    def drop_copies(self) -> None:
        """Forget every copy in host memory; the requests compute their tokens again."""
        for request_id in tuple(self._copies):
            self._drop_copy(request_id)

    def must_fit_whole(self, request: Request) -> bool:
        """Whether all known tokens of a request must fit when it comes back: it is protected from then on."""
        return self._protects and request in self

    def blocks_reserved(self) -> int:
        """Free blocks that protected requests still need to produce their next token."""
        if not self.protected:
            return 0
        return sum([self._blocks_to_continue(request.num_tokens, row) for row, request in self.protected.items()])

    def blocks_to_protect(self, request: Request) -> int:
        """Further blocks that must be free when a request comes back: the drafts of its first decode step."""
        if not self._num_draft_slots or not self.must_fit_whole(request):
            return 0
        tables = self._allocator.state.tables
        num_tokens = request.num_tokens
        blocks = [-(-num_tokens // table.block_size) - table.first_taken(num_tokens) for table in tables]
        return self._blocks_to_continue(request.num_tokens) - sum(blocks)

    def _blocks_to_continue(self, num_tokens: int, row: int | None = None) -> int:
        """Blocks for `num_tokens` tokens with the drafts and lookahead of a decode step, less those of the row."""
        with_drafts = num_tokens + self._num_draft_slots
        num_slots = max(num_tokens, min(with_drafts, self._allocator.config.max_model_len))
        tables = self._allocator.state.tables
        held = [0 if row is None else table.count(row) for table in tables]
        return sum(
            [
                max(-(-num_slots // table.block_size) - max(count, table.first_taken(num_tokens)), 0)
                for table, count in zip(tables, held, strict=True)
            ]
        )

    def _drop_copy(self, request_id: str) -> None:
        self._num_free_swap_blocks += self._copies.pop(request_id, (0, 0))[1]
