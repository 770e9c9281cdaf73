"""What is known of one request when it has finished: a row of `--requests-out`."""

import attrs


@attrs.frozen
class RequestRecord:
    """One finished request of a simulated run; times as field report D07 defines them.

    Attributes:
        request_id: the place of its row in the trace.
        arrival_s: when it was sent, seconds from the start of the run.
        queue_time_s: from arrival to the first admission; what a preemption costs later is part of `e2e_s`.
        ttft_s: from arrival to the first output token, queueing included.
        tpot_s: (e2e_s - ttft_s) / (num_output_tokens - 1); None for a single token.
        e2e_s: from arrival to the last output token.
        num_prompt_tokens: of the prompt, cached ones included.
        num_output_tokens: produced.
        num_cached_tokens: of the prompt, found in the prefix cache at the first admission.
        num_preemptions: how often it lost its blocks.
    """

    request_id: str
    arrival_s: float
    queue_time_s: float
    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
