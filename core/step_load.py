"""The sums over one step that a latency model needs. A token at position p attends to p + 1 tokens."""

import numpy as np
from numpy.typing import NDArray

from .named_tuples import named_tuple
from .reductions import sum_of
from .types import StepLoad, TokenBatch


def decode_load(batch: TokenBatch, num_swapped_blocks: int) -> StepLoad:
    """The load of a batch in which every request computes its newest token."""
    num_reqs = len(batch.rows)
    context = sum_of(batch.first_positions) + num_reqs
    return named_tuple(StepLoad, (0, num_reqs, 0, context, num_reqs, num_swapped_blocks))


def mixed_load(batch: TokenBatch, num_missing: NDArray[np.int64], num_swapped_blocks: int) -> StepLoad:
    """The load of a batch in which some compute prompts, without drafts.

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


def load_with_drafts(batch: TokenBatch, num_missing: NDArray[np.int64], num_swapped_blocks: int) -> StepLoad:
    """As `mixed_load`, where requests that decode may verify drafts."""
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
