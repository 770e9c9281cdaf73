"""The standard benchmark question, without a trace: what `vllm bench serve` sends with its dataset of random tokens."""

import math
from collections.abc import Iterator
from itertools import accumulate

import attrs

from ...core.errors import InputError, non_negative, positive
from ..random_draws import Draws
from ..traces.rows import RowTrace
from .stream import BlockIds, SessionRequest, WorkloadModel, open_stream

# Unless given: vLLM's number of prompts, or ten for each user where that is more, as InferenceX sends them.
NUM_PROMPTS = 1_000
PROMPTS_PER_USER = 10
# Tokens of a block id. Prompts share the whole blocks of their prefix.
BLOCK_SIZE = 16


@attrs.frozen(kw_only=True)
class BenchmarkParameters:
    """Lengths in tokens, and the load. Every field means what it means to `vllm bench serve` 0.32.

    Attributes:
        input_len, output_len: lengths are whole numbers, drawn uniformly from `floor(len * (1 - range_ratio))` to
            `ceil(len * (1 + range_ratio))`. An output has at least one token.
        prefix_len: tokens that every prompt begins with, on top of `input_len`. Prompts share nothing else.
        request_rate: requests per second, a Poisson process scaled so that the last one comes after
            `num_prompts / request_rate` seconds; inf: all at once.
        max_concurrency: most requests under way. Where it is reached, a request is sent when another one ends.
        num_prompts: requests in total.

    Raises InputError: a value out of range.
    """

    input_len: int = attrs.field(validator=non_negative)
    output_len: int = attrs.field(validator=positive)
    range_ratio: float = 0.0
    prefix_len: int = attrs.field(default=0, validator=non_negative)
    request_rate: float = math.inf
    max_concurrency: int | None = attrs.field(default=None, validator=attrs.validators.optional(positive))
    num_prompts: int = attrs.field(
        default=attrs.Factory(lambda p: max(NUM_PROMPTS, PROMPTS_PER_USER * (p.max_concurrency or 0)), takes_self=True),
        validator=positive,
    )

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.range_ratio < 1:
            raise InputError(f"range_ratio is {self.range_ratio}; it must be 0 or more, and below 1")
        if not self.request_rate > 0:
            raise InputError(f"request_rate is {self.request_rate}; it must be above 0 (inf: all requests at once)")
        if self.prefix_len + self._lengths(self.input_len, 0)[0] < 1:
            raise InputError(f"input_len {self.input_len} allows a prompt without a token; give a longer one")

    def draw_lengths(self, draws: Draws) -> tuple[int, int]:
        """Tokens of a prompt, prefix included, and of its output."""
        inputs, outputs = self._lengths(self.input_len, 0), self._lengths(self.output_len, 1)
        num_input, num_output = (lengths[int(draws.uniform() * len(lengths))] for lengths in (inputs, outputs))
        return self.prefix_len + num_input, num_output

    def _lengths(self, mean: int, least: int) -> range:
        low, high = math.floor(mean * (1 - self.range_ratio)), math.ceil(mean * (1 + self.range_ratio))
        return range(max(low, least), max(high, least) + 1)

    def arrivals(self, draws: Draws) -> list[float]:
        """When each request comes, in seconds."""
        if self.request_rate == math.inf:
            return [0.0] * self.num_prompts
        times = list(accumulate(draws.exponential(1.0) for _ in range(self.num_prompts)))
        return [time / times[-1] * self.num_prompts / self.request_rate for time in times]


def benchmark_requests(parameters: BenchmarkParameters, seed: int) -> Iterator[SessionRequest]:
    """The requests in order of arrival; the first comes at 0 s."""
    draws, ids = Draws(seed), BlockIds()
    arrivals = parameters.arrivals(draws)
    prefix = ids.new(parameters.prefix_len // BLOCK_SIZE)
    for arrival_s in arrivals:
        num_input, num_output = parameters.draw_lengths(draws)
        prompt = tuple(ids.grown(prefix, parameters.prefix_len, num_input, BLOCK_SIZE)) if prefix else None
        yield arrival_s - arrivals[0], num_input, num_output, prompt


def open_benchmark(
    parameters: BenchmarkParameters,
    *,
    seed: int = 0,
    skip_first: int = 0,
    limit: int | None = None,
    rate_scale: float = 1.0,
) -> RowTrace:
    """A `Trace` of these requests; two with one seed are identical. Raises InputError for an option out of range."""
    p = parameters
    if rate_scale != 1 and p.request_rate == math.inf:
        raise InputError(f"rate_scale {rate_scale:g} has no effect without a request_rate; leave it out")
    rate = "all at once" if p.request_rate == math.inf else f"{p.request_rate:g} requests/s (Poisson)"
    cap = "" if p.max_concurrency is None else f", at most {p.max_concurrency:,} under way"
    model = WorkloadModel(
        name=f"{p.prefix_len + p.input_len:,} tokens in and {p.output_len:,} out",
        resembles="vllm bench serve with random prompts",
        parameters=p,
        requests=benchmark_requests,
        duration_s=math.inf,
        trace_block_size=BLOCK_SIZE if p.prefix_len >= BLOCK_SIZE else None,
        # JSON has no infinity.
        stated={name: "inf" if value == math.inf else value for name, value in attrs.asdict(p).items()},
        about=f"{p.num_prompts:,} requests: {rate}{cap}",
        timestamp_unit="ns",
        format="benchmark",
        max_concurrency=p.max_concurrency,
    )
    return open_stream(model, seed=seed, skip_first=skip_first, limit=limit, rate_scale=rate_scale)
