"""The histograms of a simulated run, with the boundaries of vLLM's metrics of the same meaning."""

from ..backends.sinks.vllm_boundaries import (
    FIRST_TOKEN_MS,
    PREEMPTIONS,
    REQUEST_MS,
    STEP_TOKENS,
    TOKEN_MS,
    token_boundaries,
)
from ..core.types import Request
from .histogram import Histogram

NANOSECONDS = 1_000_000_000


def _of_ms(boundaries_ms: tuple[int, ...]) -> Histogram:
    return Histogram([boundary * 1_000_000 for boundary in boundaries_ms])


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

    def finished(
        self, request: Request, arrival_ns: int, admitted_ns: int, first_ns: int, last_ns: int, tpot_ns: float | None
    ) -> None:
        """Count a finished request: sent, first admitted, and given its first and its last token at these times."""
        self.e2e_ns.add(last_ns - arrival_ns)
        self.queue_ns.add(admitted_ns - arrival_ns)
        self.prefill_ns.add(first_ns - admitted_ns)
        self.decode_ns.add(last_ns - first_ns)
        self.inference_ns.add(last_ns - admitted_ns)
        if tpot_ns is not None:
            self.tpot_ns.add(tpot_ns)
        self.prompt_tokens.add(request.num_prompt_tokens)
        self.output_tokens.add(request.num_output_tokens)
        self.prefill_computed_tokens.add(request.num_prompt_tokens - (request.num_cached_tokens or 0))
        self.preemptions.add(request.num_preemptions)
