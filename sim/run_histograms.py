"""The histograms of a simulated run, with the boundaries of vLLM's metrics of the same meaning."""

from ..core.types import Request
from .histogram import Histogram

NANOSECONDS = 1_000_000_000

# Boundaries as vLLM publishes them for its Prometheus metrics: milliseconds, or tokens.
_REQUEST_MS = (
    *(300, 500, 800, 1_000, 1_500, 2_000, 2_500, 5_000, 10_000, 15_000, 20_000, 30_000, 40_000, 50_000, 60_000),
    *(120_000, 240_000, 480_000, 960_000, 1_920_000, 7_680_000),
)
_FIRST_TOKEN_MS = (
    *(1, 5, 10, 20, 40, 60, 80, 100, 250, 500, 750, 1_000, 2_500, 5_000, 7_500, 10_000, 20_000, 40_000, 80_000),
    *(160_000, 640_000, 2_560_000),
)
_TOKEN_MS = (
    *(10, 25, 50, 75, 100, 150, 200, 300, 400, 500, 750, 1_000, 2_500, 5_000, 7_500, 10_000, 20_000, 40_000),
    80_000,
)
_STEP_TOKENS = (1, *(1 << power for power in range(3, 15)))
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


def _of_ms(boundaries_ms: tuple[int, ...]) -> Histogram:
    return Histogram([boundary * 1_000_000 for boundary in boundaries_ms])


def token_boundaries(max_model_len: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to `max_model_len`."""
    boundaries: list[int] = []
    power = 1
    while power <= max_model_len:
        boundaries += [digit * power for digit in (1, 2, 5) if digit * power <= max_model_len]
        power *= 10
    return boundaries


class RunHistograms:
    """Times in nanoseconds, sizes in tokens; each is counted once a request, but `itl_ns` once a gap between tokens
    and `step_tokens` once an engine step.
    """

    def __init__(self, max_model_len: int) -> None:
        """Empty histograms for requests of up to `max_model_len` tokens."""
        self.ttft_ns = _of_ms(_FIRST_TOKEN_MS)
        self.itl_ns = _of_ms(_TOKEN_MS)
        self.tpot_ns = _of_ms(_TOKEN_MS)
        self.e2e_ns = _of_ms(_REQUEST_MS)
        self.queue_ns = _of_ms(_REQUEST_MS)
        self.prefill_ns = _of_ms(_REQUEST_MS)
        self.decode_ns = _of_ms(_REQUEST_MS)
        self.inference_ns = _of_ms(_REQUEST_MS)
        tokens = token_boundaries(max_model_len)
        self.prompt_tokens = Histogram(tokens)
        self.output_tokens = Histogram(tokens)
        self.prefill_computed_tokens = Histogram(tokens)
        self.preemptions = Histogram(_PREEMPTIONS)
        self.step_tokens = Histogram(_STEP_TOKENS)

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
