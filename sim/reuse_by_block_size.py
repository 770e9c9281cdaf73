"""Hit rate by block size: what a cache could serve at best if its blocks were larger or smaller, and what it misses.

A request shares with the requests before it the tokens up to the end of its last trace block that one of them had
too. A cache without end finds of these the full blocks of its own size, one token of the prompt always computed:
`min(shared, input_length - 1) // block_size * block_size` tokens. A request that shares tokens but not one whole
block is a near miss: its hit rate is 0, and not because nothing was shared (field report B02).
"""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ..core.errors import InputError
from .prompt_blocks import PromptBlocks

IntArray = npt.NDArray[np.int64]
BLOCK_SIZES = (1, 16, 32, 64, 128, 256, 512, 1024)


@attrs.frozen
class ReuseAtBlockSize:
    """What an infinite cache serves at one block size.

    Attributes:
        block_size: tokens of a block.
        hit_tokens: tokens of full blocks found; one token a prompt is always computed.
        lost_tokens: tokens that are shared, as far as the trace knows, and not found at this size.
        near_miss_requests: requests that share tokens and hit no block.
        unknown_tokens: tokens that may be shared beyond what the trace's own blocks tell, at most; below the trace's
            own block size a cache would find them.
    """

    block_size: int
    hit_tokens: int
    lost_tokens: int
    near_miss_requests: int
    unknown_tokens: int


@attrs.frozen(eq=False)
class SharedTokens:
    """How many tokens each request shares with those before it: int64 [num_requests] each.

    Attributes:
        shared: tokens shared, up to the end of the last trace block that an earlier request had too.
        unknown: further tokens that may be shared inside the trace block in which the prompts part.
        input_lengths: tokens of each prompt.
    """

    shared: IntArray
    unknown: IntArray
    input_lengths: IntArray

    @property
    def sharing_requests(self) -> int:
        """Requests that share any token."""
        return int(np.count_nonzero(self.shared))

    def at(self, block_size: int) -> ReuseAtBlockSize:
        """What is found at a block size. Raises `InputError` below 1 token."""
        if block_size < 1:
            raise InputError(f"a block size of {block_size} was asked for; it must be 1 token or more")
        hits = np.minimum(self.shared, self.input_lengths - 1) // block_size * block_size
        return ReuseAtBlockSize(
            block_size=block_size,
            hit_tokens=int(hits.sum()),
            lost_tokens=int((self.shared - hits).sum()),
            near_miss_requests=int(np.count_nonzero((self.shared > 0) & (hits == 0))),
            unknown_tokens=int(self.unknown.sum()),
        )

    def table(self, block_sizes: Sequence[int]) -> list[dict[str, Any]]:
        """One row a block size, for JSON; rates are shares of all prompt tokens."""
        num_tokens = int(self.input_lengths.sum())
        rows = [self.at(block_size) for block_size in block_sizes]
        return [{**attrs.asdict(row), "hit_rate": row.hit_tokens / num_tokens if num_tokens else 0.0} for row in rows]


def shared_tokens(prompts: PromptBlocks) -> SharedTokens:
    """Per request, out of prompts at the trace's own block size (`split` 1)."""
    block_size, lengths = prompts.block_size, prompts.input_lengths
    is_known = prompts.previous_request >= 0
    num_known = np.bincount(prompts.requests[is_known], minlength=prompts.num_requests)
    shared = np.minimum(num_known * block_size, lengths)
    unknown = np.minimum(block_size - 1, lengths - shared)
    unknown[:1] = 0  # there is nothing before the first request
    return SharedTokens(shared, unknown, lengths)
