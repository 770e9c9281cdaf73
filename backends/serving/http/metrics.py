"""The metrics of a live server for Prometheus, under vLLM's names if they mean the same, else under `kvledger:`."""

import time
from collections import deque
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from ....core.scheduler.scheduler import StepOutcome
from ....core.types import ScheduledStep, StepResult
from ...sinks.metrics.boundaries import FIRST_TOKEN_MS, PREEMPTIONS, REQUEST_MS, STEP_TOKENS, TOKEN_MS, token_boundaries
from ...sinks.metrics.endpoint import Figure, FigureCollector
from ..engine.generation import Output
from ..engine.live_engine import LiveEngine
from ..engine.request import LiveRequest, seconds_between

# Number of recent request ends from which the wait for a free place is estimated, and its limit in whole seconds.
NUM_ENDS = 32
MAX_RETRY_AFTER_S = 60
_LABELS = ("engine", "model_name")
# Histograms of times: (name, text, boundaries).
_TIMES = (
    ("time_to_first_token", "From arrival to the first token.", FIRST_TOKEN_MS),
    ("inter_token_latency", "Gap between two tokens that a client was given.", TOKEN_MS),
    ("request_time_per_output_token", "From the first token to the last, a token.", TOKEN_MS),
    ("e2e_request_latency", "From arrival to the end.", REQUEST_MS),
    ("request_queue_time", "From arrival to the first step.", REQUEST_MS),
    ("request_prefill_time", "From the first step to the first token.", REQUEST_MS),
    ("request_decode_time", "From the first token to the last.", REQUEST_MS),
    ("request_inference_time", "From the first step to the last token.", REQUEST_MS),
)
_TOKENS_OF_REQUESTS = {
    "prompt_tokens": "Prompt tokens of a request.",
    "generation_tokens": "Output tokens of a request.",
    "params_max_tokens": "What a request may produce at most.",
    "prefill_kv_computed_tokens": "Prompt tokens that were not found in the cache.",
}


class ServingMetrics:
    """Counts steps, requests and answers, and reads the engine's gauges at each scrape.

    `ended` and `step` are the engine's callbacks (`on_request_ended`, `observers`); the server calls the others.
    """

    def __init__(self, model_name: str, max_model_len: int) -> None:
        """Start at 0; `max_model_len` bounds the buckets of lengths. Call `watch` once the engine exists."""
        self._engine: LiveEngine | None = None
        self._ends_s: deque[float] = deque(maxlen=NUM_ENDS)
        self._labels = {"engine": "0", "model_name": model_name}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(FigureCollector(self, self._labels))  # pyright: ignore[reportArgumentType]
        tokens = token_boundaries(max_model_len)
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens, cached ones too, of ended requests.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Output tokens produced.")
        self._success = Counter(
            "vllm:request_success", "Requests that ended, by reason.", (*_LABELS, "finished_reason"),
            registry=self._registry,
        )  # fmt: skip
        self._step_tokens = self._histogram(
            "vllm:iteration_tokens_total", "Tokens computed in an engine step.", STEP_TOKENS
        )
        self._seconds = {
            name: self._histogram(f"vllm:{name}_seconds", f"{text} Seconds.", [each / 1e3 for each in boundaries_ms])
            for name, text, boundaries_ms in _TIMES
        }
        self._of_requests = {
            name: self._histogram(f"vllm:request_{name}", text, tokens) for name, text in _TOKENS_OF_REQUESTS.items()
        }
        self._of_requests["num_preemptions"] = self._histogram(
            "vllm:request_num_preemptions", "How often an ended request had lost its blocks.", PREEMPTIONS
        )
        self._errors = Counter(
            "kvledger:http_errors", "Requests under /v1 that were answered with an error, by status.",
            (*_LABELS, "status"), registry=self._registry,
        )  # fmt: skip
        self._disconnects = self._counter("kvledger:client_disconnects", "Clients that left before their answer ended.")

    def watch(self, engine: LiveEngine) -> None:
        """Set the engine whose gauges are read."""
        self._engine = engine

    def step(self, step: ScheduledStep, result: StepResult, _outcome: StepOutcome) -> None:
        """Count a step that was computed."""
        outputs: list[Output] = result.outputs
        self._step_tokens.observe(step.batch.num_tokens)
        self._generation_tokens.inc(sum(1 + len(output.samples) for output in outputs))

    def ended(self, live: LiveRequest) -> None:
        """Count a request that has ended, for any reason."""
        stats = live.stats
        self._ends_s.append(time.monotonic())
        self._success.labels(**self._labels, finished_reason=stats.finish_reason or "error").inc()
        self._prompt_tokens.inc(stats.num_prompt_tokens)
        started, first, last = live.started_ns, live.first_token_ns, live.last_token_ns
        computed = None if stats.num_cached_tokens is None else stats.num_prompt_tokens - stats.num_cached_tokens
        measured = (
            (self._of_requests["prompt_tokens"], stats.num_prompt_tokens),
            (self._of_requests["generation_tokens"], stats.num_output_tokens),
            (self._of_requests["params_max_tokens"], live.settings.max_tokens),
            (self._of_requests["prefill_kv_computed_tokens"], computed),
            (self._of_requests["num_preemptions"], stats.num_preemptions),
            (self._seconds["time_to_first_token"], stats.ttft_s),
            (self._seconds["request_time_per_output_token"], stats.tpot_s),
            (self._seconds["e2e_request_latency"], stats.e2e_s),
            (self._seconds["request_queue_time"], stats.queue_time_s),
            (self._seconds["request_prefill_time"], seconds_between(started, first)),
            (self._seconds["request_decode_time"], seconds_between(first, last)),
            (self._seconds["request_inference_time"], seconds_between(started, last)),
        )
        for histogram, value in measured:
            if value is not None:
                histogram.observe(value)

    def gap(self, seconds: float) -> None:
        """Count the time between two tokens of a request (ITL)."""
        self._seconds["inter_token_latency"].observe(seconds)

    def answered(self, status: int) -> None:
        """Count the status of an answer, or of an error in a stream."""
        if status >= 400:
            self._errors.labels(**self._labels, status=str(status)).inc()

    def client_left(self) -> None:
        """Count a client that left before its answer ended."""
        self._disconnects.inc()

    def retry_after_s(self) -> int:
        """Estimate the whole seconds until a place in the queue is free: the mean time between recent request ends."""
        ends = list(self._ends_s)
        if len(ends) < 2:
            return 1
        between_s = (ends[-1] - ends[0]) / (len(ends) - 1)
        return min(max(1, round(between_s + 0.5)), MAX_RETRY_AFTER_S)

    def text(self) -> bytes:
        """Return one scrape in Prometheus' text format."""
        return generate_latest(self._registry)

    def figures(self) -> Iterator[Figure]:
        """Yield the engine's figures now."""
        engine = self._engine
        if engine is None:
            return
        stats, config = engine.stats, engine.allocator.config
        waiting = max(stats.num_unended - stats.num_running, 0)
        counts = stats.scheduler
        yield Figure("vllm:num_requests_running", "gauge", "Requests that hold blocks.", stats.num_running)
        yield Figure("vllm:num_requests_waiting", "gauge", "Requests that hold none, or none any more.", waiting)
        yield Figure("vllm:kv_cache_usage_perc", "gauge", "Held over usable blocks, 0 to 1.", stats.kv_cache_usage)
        queries = "Tokens looked up in the prefix cache at first admissions."
        yield Figure("vllm:prefix_cache_queries", "counter", queries, counts.prefix_queries_tokens)
        hits = "Tokens found in the prefix cache at first admissions."
        yield Figure("vllm:prefix_cache_hits", "counter", hits, counts.prefix_hits_tokens)
        yield Figure("vllm:num_preemptions", "counter", "Requests that lost their blocks.", counts.num_preemptions)
        recomputed = "Tokens computed again after a preemption."
        yield Figure("kvledger:recomputed_tokens", "counter", recomputed, counts.recomputed_tokens)
        info = {
            "block_size": str(config.scheduler_block_size),
            "enable_prefix_caching": str(config.enable_caching),
            "num_gpu_blocks": str(config.num_blocks),
        }
        yield Figure("vllm:cache_config_info", "gauge", "What the pool is.", 1, info)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, boundaries: Sequence[float]) -> Histogram:
        return Histogram(name, text, _LABELS, registry=self._registry, buckets=boundaries).labels(**self._labels)
