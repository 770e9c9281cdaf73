"""Counters of a scheduler."""

import attrs


@attrs.define
class SchedulerStats:
    """Counters over the whole life of a scheduler, in the field's words.

    Attributes:
        num_submitted: requests accepted at submit.
        num_rejected: requests refused at submit because they can never fit.
        num_finished: requests that produced their last token.
        num_aborted: requests aborted before their end.
        num_preemptions: times a running request lost its blocks.
        max_preemptions_per_request: most preemptions of a single request.
        prefix_queries_tokens: tokens looked up at first admissions.
        prefix_hits_tokens: tokens found at first admissions (the headline hit rate's numerator).
        dropped_hits_tokens: tokens that would have been found without the block that EAGLE or MTP gives back.
        external_hits_tokens: tokens copied in behind those at first admissions (host memory, disk, another engine).
        readmission_queries_tokens: tokens looked up when preempted requests came back.
        readmission_hits_tokens: tokens found then, mostly a request's own; never part of the hit rate (D04).
        readmission_shared_tokens: the part of them that the request had never computed itself.
        num_draft_tokens: draft tokens that were verified.
        num_accepted_tokens: draft tokens that became output.
        swapped_out_tokens: tokens of preempted requests that were copied to host memory.
        swapped_in_tokens: tokens that were copied back instead of being computed again.
        computed_tokens: tokens computed, recomputed ones included.
        recomputed_tokens: tokens computed again because a preemption had discarded them (D03's recompute tax).
    """

    num_submitted: int = 0
    num_rejected: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_preemptions: int = 0
    max_preemptions_per_request: int = 0
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    dropped_hits_tokens: int = 0
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
