"""Limits and policies of the scheduler, under the names that vLLM gives them, and its counters."""

import attrs

from ..errors import InputError

_MINIMA = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "long_prefill_token_threshold": 0,
    "swap_space_blocks": 0,
    "num_speculative_tokens": 0,
}
_CHOICES = {
    "policy": ("fcfs", "priority"),
    "preemption_victim": ("last-admitted", "least-computed"),
    "preemption_mode": ("recompute", "swap"),
}


@attrs.frozen
class SchedulerConfig:
    """Limits of an engine step, and which request gives way when blocks run out.

    Attributes:
        max_num_seqs: most requests that run at the same time.
        max_num_batched_tokens: most tokens that one step computes.
        enable_chunked_prefill: whether a prompt may be computed over several steps.
        long_prefill_token_threshold: most prompt tokens of one request in a step; 0: no such limit.
        policy: "fcfs", or "priority" (the lowest value first, then the earliest arrival).
        preemption_victim: which request loses its blocks under "fcfs" when blocks run out: "last-admitted" (vLLM) or
            "least-computed" (the one that loses the least work; field report D03).
        preemption_mode: what a preempted request does when it comes back: "recompute" (vLLM V1) computes its tokens
            again; "swap" copies its blocks to host memory and back, as long as `swap_space_blocks` has room for them,
            and recomputes otherwise.
        swap_space_blocks: blocks of host memory for swapped requests; needed for "swap".
        num_speculative_tokens: draft tokens verified per request and decode step; 0: no speculative decoding.
        num_lookahead_tokens: slots that a step reserves for the next step's drafts; below 0: `num_speculative_tokens`.
            0 where drafts need no keys and values before they are verified (n-grams).
        protect_preempted: whether a preempted request that comes back is left alone until it has produced a token, so
            that none is preempted twice without progress in between (field report D02). vLLM protects none.
        drop_unwritten_keys: under "priority" a request may be preempted in the step that served it, when its newest
            blocks have keys and will never be written. Whether these keys are dropped, as an engine that computes must
            do; vLLM keeps them.
        reserve_full_sequence: whether a request is admitted only when all its known tokens fit (vLLM's
            scheduler_reserve_full_isl), not just its first chunk.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    preemption_victim: str = "last-admitted"
    preemption_mode: str = "recompute"
    swap_space_blocks: int = 0
    num_speculative_tokens: int = 0
    num_lookahead_tokens: int = -1
    protect_preempted: bool = False
    drop_unwritten_keys: bool = False
    reserve_full_sequence: bool = True

    def __attrs_post_init__(self) -> None:
        if self.num_lookahead_tokens < 0:
            object.__setattr__(self, "num_lookahead_tokens", self.num_speculative_tokens)
        for name, minimum in _MINIMA.items():
            if getattr(self, name) < minimum:
                raise InputError(f"{name} must be at least {minimum}, not {getattr(self, name)}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise InputError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}, so "
                "not every running request could continue in each step; raise the first or lower the second"
            )
        if (self.preemption_mode == "swap") != (self.swap_space_blocks > 0):
            raise InputError(
                f"preemption_mode {self.preemption_mode!r} and swap_space_blocks {self.swap_space_blocks} contradict "
                "each other: swapping needs blocks of host memory, recomputing has no use for them"
            )

    def for_content(self) -> "SchedulerConfig":
        """Return the config for an engine that computes: a key of what was never written would give wrong tokens."""
        return attrs.evolve(self, drop_unwritten_keys=True)


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
