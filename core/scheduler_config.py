"""Limits and policies of the scheduler, under the names that vLLM gives them."""

import attrs

from .errors import InputError

POLICIES = ("fcfs", "priority")
VICTIMS = ("last-admitted", "least-computed")


@attrs.frozen
class SchedulerConfig:
    """What bounds a step and who gives way.

    Attributes:
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: tokens that one step computes at most.
        enable_chunked_prefill: whether a prompt may be computed over several steps.
        long_prefill_token_threshold: the most prompt tokens of one request a step; 0: no such limit.
        policy: "fcfs", or "priority" (the lowest value first, then the earliest arrival).
        preemption_victim: under "fcfs", who loses its blocks when they run out: "last-admitted" (vLLM) or
            "least-computed" (the one that loses the least work; field report D03).
        reserve_full_sequence: whether a request is admitted only when all its known tokens fit (vLLM's
            scheduler_reserve_full_isl), not just its first chunk.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    preemption_victim: str = "last-admitted"
    reserve_full_sequence: bool = True

    def __attrs_post_init__(self) -> None:
        for name, minimum in (("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("long_prefill_token_threshold", 0)):
            if getattr(self, name) < minimum:
                raise InputError(f"{name} must be at least {minimum}, not {getattr(self, name)}")
        for name, choices in (("policy", POLICIES), ("preemption_victim", VICTIMS)):
            if getattr(self, name) not in choices:
                raise InputError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: not "
                "every running request could produce a token in a step; raise the one or lower the other"
            )
