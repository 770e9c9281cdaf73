"""What a scheduler counts over its whole life."""

import attrs
import numpy as np
from numpy.typing import NDArray

from ..events import named_tuple
from ..types import StepLoad, TokenBatch, sum_of


@attrs.define
class SchedulerStats:
    """Counters over the whole life of a scheduler, in the field's words.

    Attributes:
        num_submitted: requests accepted at submit.
        num_rejected: requests refused at submit because they can never fit.
        num_finished: requests that produced their last token.
        num_aborted: requests aborted before their end.
        num_preemptions: times a running request lost its blocks.
        max_preemptions_per_request: the most of them that one request suffered.
        prefix_queries_tokens: tokens looked up at first admissions.
        prefix_hits_tokens: tokens found at first admissions (the headline hit rate's numerator).
        external_hits_tokens: tokens copied in behind those at first admissions (host memory, disk, another engine).
        readmission_queries_tokens: tokens looked up when preempted requests came back.
        readmission_hits_tokens: tokens found then, mostly a request's own; never part of the hit rate (D04).
        readmission_shared_tokens: the part of them that the request had never computed itself.
        num_draft_tokens: drafts that were verified.
        num_accepted_tokens: those of them that became output.
        swapped_out_tokens: tokens of preempted requests that were copied to host memory.
        swapped_in_tokens: tokens that were copied back instead of being computed again.
        computed_tokens: tokens computed, recomputed ones included.
        recomputed_tokens: tokens computed again because a preemption had thrown them away (D03's recompute tax).
    """

    num_submitted: int = 0
    num_rejected: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_preemptions: int = 0
    max_preemptions_per_request: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    external_hits_tokens: int = 0
    readmission_queries_tokens: int = 0
    readmission_hits_tokens: int = 0
    readmission_shared_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    swapped_out_tokens: int = 0
    swapped_in_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0


# The sums over one step that a latency model needs. A token at position p attends to p + 1 tokens.


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
