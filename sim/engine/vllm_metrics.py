"""The figures of a simulated run under the names of vLLM's Prometheus metrics, at any time during it.

Series that a simulation has no figure for are left out (corrupted requests, multimodal caches, LoRA, the process).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs

from ...core.allocator.config import AllocatorConfig
from ...core.errors import MisuseError
from ...core.scheduler.scheduler import Scheduler
from .distributions import NANOSECONDS, Histogram, RunHistograms
from .metrics import Recorder

FINISHED_REASON = "finished_reason"
CACHE_CONFIG_INFO = "vllm:cache_config_info"
MODEL_NAME_WITHOUT_MODEL = "simulated"
_ENGINE: Mapping[str, str] = {"engine": "0"}


@attrs.frozen
class HistogramCounts:
    """A histogram at one time: cumulative counts by boundary (infinity last), and the sum of the samples."""

    buckets: tuple[tuple[float, int], ...]
    total: float


@attrs.frozen
class Metric:
    """One metric."""

    name: str  # vLLM's name; counters without the "_total" that the text format adds
    kind: Literal["gauge", "counter", "histogram"]  # metric type in the text format
    text: str  # what it counts, and how that differs from a server
    read: Callable[[Scheduler, Recorder], Any]  # returns its value now; for `request_success` a dict by reason


Snapshot = dict[str, Any]


def series_labels(facts: Mapping[str, Any], engine: Mapping[str, str] = _ENGINE) -> dict[str, str]:
    """The labels that dashboards select by. `facts` describe the pool; without a model the name is "simulated"."""
    return {**engine, "model_name": str(facts.get("model", MODEL_NAME_WITHOUT_MODEL))}


def cache_config_labels(
    config: AllocatorConfig, facts: Mapping[str, Any], engine: Mapping[str, str] = _ENGINE
) -> dict[str, str]:
    """The labels of `vllm:cache_config_info` that a simulation knows, with vLLM's spelling.

    With groups of several block sizes, `block_size` is the one that prefix hits are multiples of.
    """
    labels = {
        **engine,
        "block_size": str(config.scheduler_block_size),
        "enable_prefix_caching": str(config.enable_caching),
        "num_gpu_blocks": str(config.num_blocks),
    }
    if "model" in facts:
        labels["cache_dtype"] = str(facts["kv_cache_dtype"])
        labels["gpu_memory_utilization"] = str(facts["gpu_memory_utilization"])
    return labels


def take_snapshot(scheduler: Scheduler, recorder: Recorder) -> Snapshot:
    """The current value of every metric in `METRICS`, by name: a number, a dict by reason, or `HistogramCounts`."""
    return {metric.name: metric.read(scheduler, recorder) for metric in METRICS}


def _histograms(recorder: Recorder) -> RunHistograms:
    if recorder.histograms is None:
        raise MisuseError("this run was recorded without histograms; give its Recorder a RunHistograms")
    return recorder.histograms


def _counts(histogram: Histogram, unit: int) -> HistogramCounts:
    buckets: list[tuple[float, int]] = []
    number = 0
    for boundary, count in zip(histogram.boundaries, histogram.counts, strict=False):
        number += count
        buckets.append((boundary / unit, number))
    buckets.append((math.inf, number + histogram.counts[-1]))
    return HistogramCounts(tuple(buckets), histogram.total / unit)


def _gauge(name: str, text: str, read: Callable[[Scheduler], float]) -> Metric:
    return Metric(name, "gauge", text, lambda scheduler, _recorder: read(scheduler))


def _counter(name: str, text: str, read: Callable[[Scheduler, Recorder], float]) -> Metric:
    return Metric(name, "counter", text, read)


def _seconds(name: str, text: str, read: Callable[[RunHistograms], Histogram]) -> Metric:
    return Metric(name, "histogram", text, lambda _, recorder: _counts(read(_histograms(recorder)), NANOSECONDS))


def _numbers(name: str, text: str, read: Callable[[RunHistograms], Histogram]) -> Metric:
    return Metric(name, "histogram", text, lambda _, recorder: _counts(read(_histograms(recorder)), 1))


def _success(scheduler: Scheduler, _recorder: Recorder) -> dict[str, int]:
    stats = scheduler.stats
    return {"stop": 0, "length": stats.num_finished, "abort": stats.num_aborted}


METRICS: tuple[Metric, ...] = (
    _gauge("vllm:num_requests_running", "Requests that hold blocks.", lambda s: s.num_running),
    _gauge("vllm:num_requests_waiting", "Requests that wait for blocks or a place.", lambda s: s.num_waiting),
    _gauge(
        "vllm:kv_cache_usage_perc",
        "Referenced blocks as a share of the usable ones, 0 to 1.",
        lambda s: s.allocator.pool.usage,
    ),
    _counter(
        "vllm:prefix_cache_queries",
        "Tokens looked up in the prefix cache at first admissions; readmissions are not counted.",
        lambda s, _: s.stats.prefix_queries_tokens,
    ),
    _counter(
        "vllm:prefix_cache_hits",
        "Tokens found in the prefix cache at first admissions.",
        lambda s, _: s.stats.prefix_hits_tokens,
    ),
    _counter("vllm:num_preemptions", "Times that a request lost its blocks.", lambda s, _: s.stats.num_preemptions),
    _counter(
        "vllm:prompt_tokens",
        "Prompt tokens, cached ones included, of finished requests (a server counts them at the first token).",
        lambda _, r: _histograms(r).prompt_tokens.total,
    ),
    _counter("vllm:generation_tokens", "Output tokens produced.", lambda _, r: r.num_output_tokens),
    _counter("vllm:spec_decode_num_draft_tokens", "Drafts verified.", lambda s, _: s.stats.num_draft_tokens),
    _counter(
        "vllm:spec_decode_num_accepted_tokens",
        "Drafts that became output.",
        lambda s, _: s.stats.num_accepted_tokens,
    ),
    Metric(
        "vllm:request_success",
        "counter",
        "Requests that ended, by reason; a simulated one ends at its recorded length.",
        _success,
    ),
    _numbers(
        "vllm:iteration_tokens_total", "Tokens computed in an engine step; exact counts.", lambda h: h.step_tokens
    ),
    _seconds(
        "vllm:time_to_first_token_seconds",
        "From arrival to the first token, queueing included; model time only; exact counts.",
        lambda h: h.ttft_ns,
    ),
    _seconds(
        "vllm:inter_token_latency_seconds",
        "Gap between successive tokens of a request; exact counts.",
        lambda h: h.itl_ns,
    ),
    _seconds(
        "vllm:request_time_per_output_token_seconds",
        "(E2E - TTFT) / (tokens - 1) of a finished request of two tokens or more; exact counts.",
        lambda h: h.tpot_ns,
    ),
    _seconds(
        "vllm:e2e_request_latency_seconds",
        "From arrival to the last token; exact counts.",
        lambda h: h.e2e_ns,
    ),
    _seconds(
        "vllm:request_queue_time_seconds",
        "From arrival to the first admission; exact counts.",
        lambda h: h.queue_ns,
    ),
    _seconds(
        "vllm:request_prefill_time_seconds",
        "From the first admission to the first token; exact counts.",
        lambda h: h.prefill_ns,
    ),
    _seconds(
        "vllm:request_decode_time_seconds",
        "From the first token to the last; exact counts.",
        lambda h: h.decode_ns,
    ),
    _seconds(
        "vllm:request_inference_time_seconds",
        "From the first admission to the last token; exact counts.",
        lambda h: h.inference_ns,
    ),
    _numbers("vllm:request_prompt_tokens", "Prompt tokens of a request; exact counts.", lambda h: h.prompt_tokens),
    _numbers("vllm:request_generation_tokens", "Output tokens of a request; exact counts.", lambda h: h.output_tokens),
    _numbers(
        "vllm:request_max_num_generation_tokens",
        "The most output tokens of a request's sequences, of which it has one; exact counts.",
        lambda h: h.output_tokens,
    ),
    _numbers(
        "vllm:request_params_max_tokens",
        "What a request may produce at most: its recorded length; exact counts.",
        lambda h: h.output_tokens,
    ),
    _numbers(
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens of a request that its first admission did not find in the cache; exact counts.",
        lambda h: h.prefill_computed_tokens,
    ),
    _numbers(
        "vllm:request_num_preemptions", "Preemptions of a finished request; exact counts.", lambda h: h.preemptions
    ),
)
