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


# Name, kind, and text of each metric, and how to read it from (scheduler, recorder).
_COUNTS: tuple[tuple[str, Literal["gauge", "counter"], str, Callable[[Scheduler, Recorder], Any]], ...] = (
    ("num_requests_running", "gauge", "Requests that hold blocks.", lambda s, _: s.num_running),
    ("num_requests_waiting", "gauge", "Requests that wait for blocks or a place.", lambda s, _: s.num_waiting),
    (
        "kv_cache_usage_perc",
        "gauge",
        "Referenced blocks as a share of the usable ones, 0 to 1.",
        lambda s, _: s.allocator.pool.usage,
    ),
    (
        "prefix_cache_queries",
        "counter",
        "Tokens looked up in the prefix cache at first admissions; readmissions are not counted.",
        lambda s, _: s.stats.prefix_queries_tokens,
    ),
    (
        "prefix_cache_hits",
        "counter",
        "Tokens found in the prefix cache at first admissions.",
        lambda s, _: s.stats.prefix_hits_tokens,
    ),
    ("num_preemptions", "counter", "Times that a request lost its blocks.", lambda s, _: s.stats.num_preemptions),
    (
        "prompt_tokens",
        "counter",
        "Prompt tokens, cached ones included, of finished requests (a server counts them at the first token).",
        lambda _, r: _histograms(r).prompt_tokens.total,
    ),
    ("generation_tokens", "counter", "Output tokens produced.", lambda _, r: r.num_output_tokens),
    ("spec_decode_num_draft_tokens", "counter", "Drafts verified.", lambda s, _: s.stats.num_draft_tokens),
    (
        "spec_decode_num_accepted_tokens",
        "counter",
        "Drafts that became output.",
        lambda s, _: s.stats.num_accepted_tokens,
    ),
    (
        "request_success",
        "counter",
        "Requests that ended, by reason; a simulated one ends at its recorded length.",
        lambda s, _: {"stop": 0, "length": s.stats.num_finished, "abort": s.stats.num_aborted},
    ),
)

# Name and text of each histogram, and the field of `RunHistograms` that counts it; nanoseconds become seconds.
_HISTOGRAMS = (
    ("iteration_tokens_total", "step_tokens", "Tokens computed in an engine step"),
    (
        "time_to_first_token_seconds",
        "ttft_ns",
        "From the client's send to the first token",
    ),
    ("inter_token_latency_seconds", "itl_ns", "Gap between successive tokens of a request"),
    (
        "request_time_per_output_token_seconds",
        "tpot_ns",
        "(E2E - TTFT) / (tokens - 1) of a finished request of two tokens or more",
    ),
    ("e2e_request_latency_seconds", "e2e_ns", "From arrival to the last token"),
    ("request_queue_time_seconds", "queue_ns", "In the engine's queue up to the first admission"),
    ("request_prefill_time_seconds", "prefill_ns", "From the first admission to the first token"),
    ("request_decode_time_seconds", "decode_ns", "From the first token to the last"),
    ("request_inference_time_seconds", "inference_ns", "From the first admission to the last token"),
    ("request_prompt_tokens", "prompt_tokens", "Prompt tokens of a request"),
    ("request_generation_tokens", "output_tokens", "Output tokens of a request"),
    (
        "request_max_num_generation_tokens",
        "output_tokens",
        "The most output tokens of a request's sequences, of which it has one",
    ),
    ("request_params_max_tokens", "output_tokens", "What a request may produce at most: its recorded length"),
    (
        "request_prefill_kv_computed_tokens",
        "prefill_computed_tokens",
        "Prompt tokens of a request that its first admission did not find in the cache",
    ),
    ("request_num_preemptions", "preemptions", "Preemptions of a finished request"),
)


def _histogram(name: str, field: str, text: str) -> Metric:
    unit = NANOSECONDS if field.endswith("_ns") else 1

    def read(_: Scheduler, recorder: Recorder) -> HistogramCounts:
        return _counts(getattr(_histograms(recorder), field), unit)

    return Metric(f"vllm:{name}", "histogram", f"{text}; exact counts.", read)


METRICS = (
    *(Metric(f"vllm:{name}", kind, text, read) for name, kind, text, read in _COUNTS),
    *(_histogram(*row) for row in _HISTOGRAMS),
)
