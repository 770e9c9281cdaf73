"""A lower bound on latency: each request alone on an idle engine that has every earlier prompt cached.

Queueing, other requests in a step, evictions and routing only add to these times. If they miss an SLO, every fleet of
this engine misses it, and no replay is needed.
"""

from collections.abc import Iterator

import attrs

from ...core.scheduler.config import SchedulerConfig
from ...core.types import LatencyModel, StepLoad
from ..cache.prompt_blocks import read_prompt_blocks
from ..cache.reuse import shared_tokens
from ..engine.metrics import RequestRecord
from ..fleet.fleet import EngineParts
from ..latency.linear import LinearLatency, SwapLatency
from ..latency.roofline import RooflineLatency
from ..traces import Trace
from .slo import Slo, SloTally, Verdict


@attrs.frozen(kw_only=True)
class IdleBound:
    """The best that any fleet of an engine can do: its verdict, and the share of requests within the limits."""

    verdict: Verdict
    share_in_time: float


def idle_bound(trace: Trace, parts: EngineParts, slo: Slo) -> IdleBound | None:
    """Compute the bound; None if this engine has none.

    Measured step times need not grow with the work of a step, and under the priority policy a request may hit blocks
    of a request that arrived after it.
    """
    if not _grows_with_load(parts.latency) or parts.scheduler.policy != "fcfs":
        return None
    ttft_s = slo.ttft_s if slo.ttft_p99_s is None else slo.ttft_p99_s
    tpot_s = slo.tpot_s if slo.tpot_p99_s is None else slo.tpot_p99_s
    e2e_s = slo.e2e_s if slo.e2e_p99_s is None else slo.e2e_p99_s
    tally, each = SloTally(slo), SloTally(Slo(goodput_share=1.0, ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s))
    num_requests = 0
    for record in idle_records(trace, parts):
        tally.finished(record)
        each.finished(record)
        num_requests += 1
    share = each.verdict(num_requests).figures["goodput_share"]["value"]
    return IdleBound(verdict=tally.verdict(num_requests), share_in_time=share)


def idle_records(trace: Trace, parts: EngineParts) -> Iterator[RequestRecord]:
    """Yield the record of each request run alone, with the smallest possible TTFT, TPOT and E2E.

    The longest prefix in whole blocks that the trace's ids share with an earlier request counts as cached, but at least
    one token is computed. The rest takes as few steps as possible. Each later token takes at least one step over the
    prompt alone; with speculative decoding a step may give several tokens, so TPOT counts as 0.
    """
    latency, scheduler = parts.latency, parts.scheduler
    block_size = min(kind.block_size for kind in parts.allocator.groups)
    has_ids = trace.info.trace_block_size is not None
    cached = _cached_tokens(trace, block_size) if has_ids and parts.allocator.enable_caching else {}
    for index, row in enumerate(trace):
        first = cached.get(index, 0)
        ttft_s = parts.http_s + _prompt_seconds(latency, scheduler, row.input_length, first)
        num_tokens = max(row.output_length, 1)
        tpot_s = None
        if num_tokens > 1:
            alone = StepLoad(0, 1, 0, row.input_length + 1, 1)
            tpot_s = 0.0 if scheduler.num_speculative_tokens else latency.step_seconds(alone)
        yield RequestRecord(
            request_id=str(row.place),
            arrival_s=row.arrival_s,
            queue_time_s=0.0,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            e2e_s=ttft_s + (tpot_s or 0.0) * (num_tokens - 1),
            num_prompt_tokens=row.input_length,
            num_output_tokens=num_tokens,
            num_cached_tokens=first,
            num_preemptions=0,
        )


def _cached_tokens(trace: Trace, block_size: int) -> dict[int, int]:
    """Index of a request -> its cached tokens, if not 0."""
    shared = shared_tokens(read_prompt_blocks(trace))
    cached = shared.shared.clip(max=shared.input_lengths - 1) // block_size * block_size
    return {int(index): int(cached[index]) for index in cached.nonzero()[0]}


def _prompt_seconds(latency: LatencyModel, scheduler: SchedulerConfig, num_prompt_tokens: int, first: int) -> float:
    """Seconds of the steps that compute the prompt from token `first` on, each as large as the limits allow.

    `long_prefill_token_threshold` does not limit a request that is alone.
    """
    largest = scheduler.max_num_batched_tokens if scheduler.enable_chunked_prefill else num_prompt_tokens
    seconds = 0.0
    for start in range(first, num_prompt_tokens, largest):
        end = min(start + largest, num_prompt_tokens)
        # A token at position p attends to p + 1 tokens.
        pairs = (end * (end + 1) - start * (start + 1)) // 2
        num_sampled = int(end == num_prompt_tokens)
        if end - start == 1:  # the scheduler counts a single last token as decode
            seconds += latency.step_seconds(StepLoad(0, 1, 0, pairs, num_sampled))
        else:
            seconds += latency.step_seconds(StepLoad(end - start, 0, pairs, 0, num_sampled))
    return seconds


def _grows_with_load(latency: LatencyModel) -> bool:
    inner = latency.inner if isinstance(latency, SwapLatency) else latency
    return isinstance(inner, LinearLatency | RooflineLatency)
