"""What is remembered of preempted requests: what they lost, where a copy of it is, and who may not lose it again."""

from ..allocator.allocator import KVCacheAllocator
from ..allocator.prefix_cache import PrefixMatch
from ..types import Request
from .config import SchedulerConfig
from .stats import SchedulerStats

# Host memory for the blocks of preempted requests: a count of blocks, no content.


class SwapSpace:
    """Which preempted requests have a copy in host memory, and how many of their tokens it holds."""

    def __init__(self, num_blocks: int) -> None:
        self._num_free_blocks = num_blocks
        self._kept: dict[str, tuple[int, int]] = {}

    def keep(self, request_id: str, num_tokens: int, num_blocks: int) -> bool:
        """Take a copy of a request's blocks; False if there is no room, or nothing to keep."""
        if not num_tokens or num_blocks > self._num_free_blocks:
            return False
        self._kept[request_id] = num_tokens, num_blocks
        self._num_free_blocks -= num_blocks
        return True

    def num_tokens_of(self, request_id: str) -> int:
        """Tokens, from the first one on, that the copy of a request holds; 0 without a copy."""
        return self._kept.get(request_id, (0, 0))[0]

    def drop(self, request_id: str) -> None:
        """Forget a request's copy, if there is one."""
        _, num_blocks = self._kept.pop(request_id, (0, 0))
        self._num_free_blocks += num_blocks


class PreemptedRequests:
    """From a request's preemption to the token that it produces after it has come back.

    Until then it is protected: no request is preempted twice without progress in between (field report D02). The blocks
    that it takes to produce that token were free when it came back and are kept for it.

    Attributes:
        protected: by row, the requests that came back and have not produced a token since.
        num_swapped_blocks: blocks copied between device and host memory since the step began, in both directions.
    """

    def __init__(self, config: SchedulerConfig, allocator: KVCacheAllocator, stats: SchedulerStats) -> None:
        self._num_speculative_tokens = config.num_speculative_tokens
        self._allocator = allocator
        self._stats = stats
        self._swap_space = SwapSpace(config.swap_space_blocks)
        # Tokens that requests had computed when they were preempted, until they come back.
        self._lost_tokens: dict[str, int] = {}
        self.protected: dict[int, Request] = {}
        self.num_swapped_blocks = 0

    def __contains__(self, request: Request) -> bool:
        """Whether the request was preempted and has not come back."""
        return request.request_id in self._lost_tokens

    def num_swapped_tokens(self, request: Request) -> int:
        """Tokens, from the first one on, of which host memory holds a copy."""
        return self._swap_space.num_tokens_of(request.request_id)

    def add(self, request: Request, row: int, num_computed_tokens: int) -> None:
        """A request is about to lose the blocks of its row. They are copied if there is room in the swap space."""
        self._lost_tokens[request.request_id] = num_computed_tokens
        num_blocks = sum([table.count(row) for table in self._allocator.state.tables])
        if self._swap_space.keep(request.request_id, num_computed_tokens, num_blocks):
            self.num_swapped_blocks += num_blocks
            self._stats.swapped_out_tokens += num_computed_tokens
        request.num_preemptions += 1
        self._stats.num_preemptions += 1
        self._stats.max_preemptions_per_request = max(self._stats.max_preemptions_per_request, request.num_preemptions)

    def come_back(self, request: Request, row: int, match: PrefixMatch, external: int, swapped_in: int) -> None:
        """A request holds blocks again.

        Args:
            request: which.
            row: of the block tables.
            match: what it found in the pool.
            external: tokens behind the hit that are copied in.
            swapped_in: how many of them come from the swap space.
        """
        stats = self._stats
        lost = self._lost_tokens.pop(request.request_id)
        self.protected[row] = request
        stats.readmission_queries_tokens += request.num_tokens
        stats.readmission_hits_tokens += match.num_hit_tokens
        stats.readmission_shared_tokens += max(match.num_hit_tokens - lost, 0)
        stats.recomputed_tokens += max(lost - match.num_hit_tokens - external, 0)
        stats.swapped_in_tokens += swapped_in
        if swapped_in:
            self.num_swapped_blocks += sum([-(-swapped_in // t.block_size) for t in self._allocator.state.tables])
        self._swap_space.drop(request.request_id)

    def produced(self, rows: list[int]) -> None:
        """These have produced a token, or left: nothing protects them any more."""
        for row in rows:
            self.protected.pop(row, None)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._swap_space.drop(request_id)
        self._lost_tokens.pop(request_id, None)

    def blocks_reserved(self) -> int:
        """Free blocks that protected requests still need to produce their next token."""
        if not self.protected:
            return 0
        return sum([self._blocks_to_go_on(request.num_tokens, row) for row, request in self.protected.items()])

    def blocks_to_protect(self, request: Request) -> int:
        """Further blocks that must be free when a request comes back: the drafts of its first decode step."""
        if not self._num_speculative_tokens or request not in self:
            return 0
        blocks = [-(-request.num_tokens // table.block_size) for table in self._allocator.state.tables]
        return self._blocks_to_go_on(request.num_tokens) - sum(blocks)

    def _blocks_to_go_on(self, num_tokens: int, row: int | None = None) -> int:
        """Blocks for `num_tokens` tokens with the drafts and lookahead of a decode step, less those of the row."""
        with_drafts = num_tokens + 2 * self._num_speculative_tokens
        num_slots = max(num_tokens, min(with_drafts, self._allocator.config.max_model_len))
        tables = self._allocator.state.tables
        held = [0 if row is None else table.count(row) for table in tables]
        return sum([max(-(-num_slots // t.block_size) - count, 0) for t, count in zip(tables, held, strict=True)])
