"""Bucket boundaries of the histograms that vLLM publishes for Prometheus: milliseconds, tokens, or counts."""

REQUEST_MS = (
    *(300, 500, 800, 1_000, 1_500, 2_000, 2_500, 5_000, 10_000, 15_000, 20_000, 30_000, 40_000, 50_000, 60_000),
    *(120_000, 240_000, 480_000, 960_000, 1_920_000, 7_680_000),
)
FIRST_TOKEN_MS = (
    *(1, 5, 10, 20, 40, 60, 80, 100, 250, 500, 750, 1_000, 2_500, 5_000, 7_500, 10_000, 20_000, 40_000, 80_000),
    *(160_000, 640_000, 2_560_000),
)
TOKEN_MS = (
    *(10, 25, 50, 75, 100, 150, 200, 300, 400, 500, 750, 1_000, 2_500, 5_000, 7_500, 10_000, 20_000, 40_000),
    80_000,
)
STEP_TOKENS = (1, *(1 << power for power in range(3, 15)))
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


def token_boundaries(max_model_len: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, 50, ... up to `max_model_len`."""
    boundaries: list[int] = []
    power = 1
    while power <= max_model_len:
        boundaries += [digit * power for digit in (1, 2, 5) if digit * power <= max_model_len]
        power *= 10
    return boundaries
