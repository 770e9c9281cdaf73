"""Workloads of single requests: lengths and arrivals only. Their prompts are shared with nobody, as far as is known."""

from collections.abc import Iterator

import attrs

from ..random_draws import Draws
from .stream import SessionRequest


@attrs.frozen
class ShareGPTParameters:
    """ShareGPT conversations as the PagedAttention paper (SOSP'23) samples them: mean 161.31 tokens in, 337.99 out."""

    requests_per_s: float = 2.0
    """The rate of the paper's Fig. 13; arrivals are Poisson."""
    prompt_tokens: tuple[float, float] = (101.0, 1.0)
    """Lognormal (median, sigma)."""
    max_input_length: int = 1_024
    output_shape: float = 1.32
    output_mean_tokens: float = 338.3
    """Gamma."""
    max_total_tokens: int = 2_048


def sharegpt_requests(parameters: ShareGPTParameters, seed: int) -> Iterator[SessionRequest]:
    """Requests for ever, in order of arrival from 0 s on."""
    p, draws, now = parameters, Draws(seed), 0.0
    while True:
        num_input = min(max(1, round(draws.lognormal(*p.prompt_tokens))), p.max_input_length)
        num_output = max(1, round(draws.gamma(p.output_shape, p.output_mean_tokens)))
        yield now, num_input, min(num_output, p.max_total_tokens - num_input), None
        now += draws.exponential(1 / p.requests_per_s)


@attrs.frozen
class CodeParameters:
    """Code completion in an editor, fitted by hand to the public Azure 2023 code trace: long prompts, short answers.

    Arrivals come in bursts with silence between them.
    """

    burst_s: float = 5.0
    pause_s: float = 13.6
    """Means of two exponentials."""
    burst_requests_per_s: float = 9.6
    burst_shape: float = 2.0
    """The rate of a burst is gamma with this mean and shape; within a burst arrivals are Poisson."""
    prompt_shape: float = 0.92
    prompt_mean_tokens: float = 2_120.0
    """Gamma, cut at the longest prompt."""
    min_input_length: int = 3
    max_input_length: int = 7_437
    min_output_length: int = 6
    output_tokens: tuple[float, float] = (7.8, 1.45)
    """Beyond the shortest: lognormal (median, sigma)."""
    max_output_length: int = 1_900


def code_requests(parameters: CodeParameters, seed: int) -> Iterator[SessionRequest]:
    """Requests for ever, in order of arrival from 0 s on."""
    p, draws = parameters, Draws(seed)
    for now in _bursts(p, draws):
        num_input = round(draws.gamma(p.prompt_shape, p.prompt_mean_tokens))
        num_output = p.min_output_length + int(draws.lognormal(*p.output_tokens))
        yield (
            now,
            min(max(num_input, p.min_input_length), p.max_input_length),
            min(num_output, p.max_output_length),
            None,
        )


def _bursts(p: CodeParameters, draws: Draws) -> Iterator[float]:
    begin = 0.0
    while True:
        end = begin + draws.exponential(p.burst_s)
        mean_gap = 1 / draws.gamma(p.burst_shape, p.burst_requests_per_s)
        now = begin
        while now < end:
            yield now
            now += draws.exponential(mean_gap)
        begin = end + draws.exponential(p.pause_s)
