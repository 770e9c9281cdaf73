"""Where a prompt's chunks must end so that the states which later requests continue from are written."""

from ..allocator.config import AllocatorConfig
from .config import SchedulerConfig


class StateChunks:
    """Ends chunks where a group of states keeps one (vLLM: `mamba_cache_mode` "align").

    A step leaves its state where it ends, so a chunk that runs past a boundary leaves nothing there to be found.

    Attributes:
        block_size: tokens between the boundaries; 0 where no group keeps states that can be found.
    """

    def __init__(self, config: SchedulerConfig, allocator: AllocatorConfig) -> None:
        sizes = [kind.block_size for kind in allocator.groups if not kind.holds_tokens]
        self.block_size = max(sizes, default=0) if allocator.enable_caching else 0
        self._drops_block = allocator.use_eagle
        # The tokens behind the last boundary: one to compute, or those that its key looks ahead to.
        self._left = 0 if allocator.use_eagle else max(allocator.num_lookahead_tokens, 1)
        self._longest = config.max_num_batched_tokens
        if config.long_prefill_token_threshold:
            self._longest = min(self._longest, config.long_prefill_token_threshold)

    def count(self, start: int, wanted: int, num_prompt_tokens: int, num_tokens: int, junction: int) -> int:
        """Return how many of the `wanted` tokens behind position `start` the next chunk has; perhaps none.

        Args:
            start: tokens that need not be computed any more.
            wanted: tokens to compute, within the budget of the step.
            num_prompt_tokens: the length of the prompt.
            num_tokens: tokens known, outputs included.
            junction: where this prompt parts from a cached one (`Request.cache_boundary`); 0: nowhere known.
        """
        size, end = self.block_size, start + wanted
        prefill_end = max(num_prompt_tokens, num_tokens - 1)
        if not size or start >= prefill_end:
            return wanted
        if end < prefill_end:
            aligned = end // size * size
            # A block that is larger than any chunk is filled by several.
            if aligned > start or size <= self._longest:
                end = aligned
        # The last boundary that the same prompt can continue from; under EAGLE it gives a block back.
        last = self.last_boundary(num_tokens)
        stops = [last, start + (junction - start) // size * size]
        if start % size:
            stops.append((start // size + 1) * size)
        return max(min([stop for stop in stops if start < stop < end], default=end) - start, 0)

    def last_boundary(self, num_tokens: int) -> int:
        """The last boundary from which the same tokens can be continued; 0 or less: none."""
        size = self.block_size
        return (num_tokens - self._left) // size * size - (size if self._drops_block else 0)
