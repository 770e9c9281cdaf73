"""The histograms of a simulated run, with the boundaries of vLLM's metrics of the same meaning."""

from collections.abc import Sequence
from typing import NamedTuple

from ..backends.sinks.vllm_boundaries import (
    FIRST_TOKEN_MS,
    PREEMPTIONS,
    REQUEST_MS,
    STEP_TOKENS,
    TOKEN_MS,
    token_boundaries,
)
from .histogram import Histogram

NANOSECONDS = 1_000_000_000


def _of_ms(boundaries_ms: tuple[int, ...]) -> Histogram:
    return Histogram([boundary * 1_000_000 for boundary in boundaries_ms])


class FinishedRequest(NamedTuple):
    """What is counted of a finished request.

    Attributes:
        arrival_ns: when it was sent, from the start of the run.
        admitted_ns: when it was first admitted.
        first_ns: when it got its first token.
        last_ns: when it got its last token.
        tpot_ns: nanoseconds per output token after the first; None for a single token.
        num_prompt_tokens: of the prompt, cached ones included.
        num_output_tokens: produced.
        num_cached_tokens: of the prompt, found at the first admission.
        num_preemptions: how often it lost its blocks.
    """

    arrival_ns: int
    admitted_ns: int
    first_ns: int
    last_ns: int
    tpot_ns: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int


class RunHistograms:
    """Times in nanoseconds, sizes in tokens; each is counted once a request, but `itl_ns` once a gap between tokens
    and `step_tokens` once an engine step.
    """

    def __init__(self, max_model_len: int) -> None:
        """Empty histograms for requests of up to `max_model_len` tokens."""
        self.ttft_ns = _of_ms(FIRST_TOKEN_MS)
        self.itl_ns = _of_ms(TOKEN_MS)
        self.tpot_ns = _of_ms(TOKEN_MS)
        self.e2e_ns = _of_ms(REQUEST_MS)
        self.queue_ns = _of_ms(REQUEST_MS)
        self.prefill_ns = _of_ms(REQUEST_MS)
        self.decode_ns = _of_ms(REQUEST_MS)
        self.inference_ns = _of_ms(REQUEST_MS)
        tokens = token_boundaries(max_model_len)
        self.prompt_tokens = Histogram(tokens)
        self.output_tokens = Histogram(tokens)
        self.prefill_computed_tokens = Histogram(tokens)
        self.preemptions = Histogram(PREEMPTIONS)
        self.step_tokens = Histogram(STEP_TOKENS)

    def count_finished(self, finished: Sequence[FinishedRequest]) -> None:
        """Count requests that ended."""
        self.e2e_ns.add_all([one.last_ns - one.arrival_ns for one in finished])
        self.queue_ns.add_all([one.admitted_ns - one.arrival_ns for one in finished])
        self.prefill_ns.add_all([one.first_ns - one.admitted_ns for one in finished])
        self.decode_ns.add_all([one.last_ns - one.first_ns for one in finished])
        self.inference_ns.add_all([one.last_ns - one.admitted_ns for one in finished])
        self.tpot_ns.add_all([one.tpot_ns for one in finished if one.tpot_ns is not None])
        self.prompt_tokens.add_all([one.num_prompt_tokens for one in finished])
        self.output_tokens.add_all([one.num_output_tokens for one in finished])
        self.prefill_computed_tokens.add_all([one.num_prompt_tokens - one.num_cached_tokens for one in finished])
        self.preemptions.add_all([one.num_preemptions for one in finished])
