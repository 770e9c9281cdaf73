"""Replay a trace on a simulated engine: allocator, scheduler and latency model under a simulated clock."""

from collections.abc import Callable, Iterable
from typing import Any

import attrs
import simpy

from ...backends.sim_backend import SimBackend
from ...core.allocator.allocator import KVCacheAllocator
from ...core.allocator.config import AllocatorConfig
from ...core.errors import InputError
from ...core.scheduler.config import SchedulerConfig, SchedulerStats
from ...core.scheduler.scheduler import Scheduler
from ...core.types import Backend, DraftModel, EventSink, LatencyModel
from ..figures import Document
from ..traces.trace import TraceRequest
from .arrivals import TraceArrivals
from .distributions import RELATIVE_ERROR, RunHistograms
from .engine import MAX_REJECTIONS_KEPT, NANOSECONDS, AsyncSchedulingEngine, RunListener, SimulatedEngine
from .metrics import Recorder, RequestRecord
from .vllm_metrics import Snapshot, take_snapshot


@attrs.define(kw_only=True)
class ReplayReport:
    """The figures of one replay; `to_json` returns them under the names of the command line's `--json`."""

    requests: dict[str, int]
    prefix_cache: dict[str, float]
    preemptions: dict[str, float]
    kv_cache_usage: dict[str, float]
    latencies: dict[str, dict[str, Any]]
    throughput: dict[str, float]
    simulated_seconds: float
    steps: int
    assumptions: dict[str, object]
    rejections: list[str]
    series: dict[str, list[float]]
    kv_transfer: dict[str, object] | None = None
    """In a disaggregated fleet: how much was copied between engines, and how long that took."""
    replicas: list[dict[str, Any]] = attrs.field(factory=list)  # In a fleet: the figures of each engine
    timing: dict[str, float]
    snapshot: Snapshot | None = None
    """The final state under the names of vLLM's metrics, if histograms were counted; not part of `to_json`."""
    engine_snapshots: list[Snapshot] = attrs.field(factory=list)  # In a fleet: the snapshot of each engine

    def to_json(self) -> Document:
        """Plain values; everything except `timing` is the same in every run."""
        out: Document = {}
        for name, value in attrs.asdict(self, recurse=False).items():
            if name == "latencies":
                out.update(value)
            elif name not in ("snapshot", "engine_snapshots") and (value or name not in ("kv_transfer", "replicas")):
                out[name] = value
        return out


def replay(
    trace: Iterable[TraceRequest],
    *,
    allocator: AllocatorConfig,
    scheduler: SchedulerConfig,
    latency: LatencyModel | None = None,
    backend: Backend | None = None,
    trace_block_size: int | None,
    sinks: Iterable[EventSink] = (),
    listeners: Iterable[RunListener] = (),
    on_finished: Callable[[RequestRecord], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
    macro_steps: bool = True,
    drafts: DraftModel | None = None,
    async_scheduling: bool = False,
    http_s: float = 0.0,
    closed_loop: bool | None = None,
) -> ReplayReport:
    """Run every request of a trace through allocator, scheduler and latency model, until each has ended.

    Args:
        trace: rows in order of arrival; read once and not kept.
        allocator: pool, groups and limits; block hashes are taken at `hash_block_size`.
        scheduler: batch limits and policies.
        latency: how long a step takes in simulated memory.
        backend: computes and times the steps in place of simulated memory; give it or a latency model.
        trace_block_size: tokens that an id of the trace represents; None if it has no ids (nothing is shared then).
        sinks: further sinks of every commit (a log, metrics).
        listeners: called for requests, commits and steps during the run (a time series, a trace of the engine).
        on_finished: called with the record of each finished request; no record is kept.
        on_progress: called with the number of requests submitted so far.
        drafts: how many drafts are accepted; needed with `num_speculative_tokens`.
        closed_loop: as for `TraceArrivals.run`.
        async_scheduling: whether each step is decided while the step before it runs.
        http_s: time from a client to the engine and back, part of TTFT and E2E.
        macro_steps: whether identical decode steps are taken at once; the figures are the same either way.

    Raises:
        InputError: limits that contradict each other, a closed loop asked of a trace that links no turns, or not
            exactly one of a latency model and a backend.
    """
    if (latency is None) == (backend is None):
        raise InputError(
            "give replay a latency model for simulated memory, or a backend that times its steps, and not both"
        )
    if backend is not None and drafts is not None:
        raise InputError("a backend verifies its own drafts; a draft model works with a latency model only")
    env = simpy.Environment()
    histograms = RunHistograms(allocator.max_model_len)
    http_ns = round(http_s * NANOSECONDS)
    recorder = Recorder(lambda: int(env.now), allocator.max_num_reqs, histograms, on_finished, listeners, http_ns)
    if backend is None:
        backend = SimBackend(latency, drafts)
    ledger = KVCacheAllocator(allocator, sinks=[backend, recorder, *sinks])
    batcher = Scheduler(scheduler, ledger)
    engine_class = AsyncSchedulingEngine if async_scheduling else SimulatedEngine
    engine = engine_class(env, batcher, backend, recorder, macro_steps)
    arrivals = TraceArrivals(
        env,
        lambda request, _: engine.submit(request),
        allocator.hash_block_size,
        trace_block_size,
        looks_ahead=allocator.num_lookahead_tokens > 0,
        http_ns=http_ns,
    )
    engine.on_ended = arrivals.ended
    wall_seconds = arrivals.run(trace, closed_loop, on_progress)
    assumptions = {
        "async_scheduling": async_scheduling,
        "http_ms": http_s * 1e3,
        **arrivals.assumptions(),
        **(latency.assumptions() if latency is not None else {"backend": type(backend).__name__}),
        **(drafts.assumptions() if drafts is not None else {}),
    }
    seconds = arrivals.last_ended_ns / NANOSECONDS
    return replay_report(batcher, recorder, engine.rejections, assumptions, seconds, wall_seconds)


def replay_report(
    scheduler: Scheduler,
    recorder: Recorder,
    rejections: list[str],
    assumptions: dict[str, object],
    simulated_seconds: float,
    wall_seconds: float,
) -> ReplayReport:
    """The figures of one engine after its run."""
    stats, config = scheduler.stats, scheduler.allocator.config
    return ReplayReport(
        **counted_figures(stats, recorder.num_output_tokens, simulated_seconds or 1.0),
        kv_cache_usage={
            "mean": recorder.mean_held_blocks() / (config.num_blocks - 1),
            "max": recorder.max_held_blocks / (config.num_blocks - 1),
        },
        latencies=recorder.latencies.summaries(),
        simulated_seconds=simulated_seconds,
        steps=recorder.num_steps,
        assumptions={
            "num_blocks": config.num_blocks,
            "usable_blocks": config.num_blocks - 1,
            "groups": [str(kind) for kind in config.groups],
            "max_model_len": config.max_model_len,
            "enable_prefix_caching": config.enable_caching,
            "eviction": config.eviction,
            **attrs.asdict(scheduler.config),
            **assumptions,
            "percentiles": f"nearest rank, from a sketch with {RELATIVE_ERROR * 100:g} % relative error",
            "ttft": "from the client's send to its first token: http_ms, queueing and the steps",
        },
        rejections=rejections[:MAX_REJECTIONS_KEPT],
        series=recorder.series.columns(),
        snapshot=take_snapshot(scheduler, recorder) if recorder.histograms is not None else None,
        timing=timing_figures(wall_seconds, recorder.num_steps),
    )


def counted_figures(stats: SchedulerStats, num_output_tokens: int, seconds: float) -> Document:
    """The fields of a report that come from the counters of one engine, or from their sums over a fleet."""
    return {
        "requests": request_figures(stats),
        # First admissions; readmissions are counted separately (field report D04).
        "prefix_cache": {
            "queries_tokens": stats.prefix_queries_tokens,
            "hits_tokens": stats.prefix_hits_tokens,
            "hit_rate": share(stats.prefix_hits_tokens, stats.prefix_queries_tokens),
            # What EAGLE or MTP costs: cached tokens that are computed again for their hidden states.
            "dropped_for_drafts_tokens": stats.dropped_hits_tokens,
            "readmission_queries_tokens": stats.readmission_queries_tokens,
            "readmission_hits_tokens": stats.readmission_hits_tokens,
            "readmission_shared_tokens": stats.readmission_shared_tokens,
        },
        # How often requests were preempted, and what that cost (field report D03).
        "preemptions": {
            "total": stats.num_preemptions,
            "max_per_request": stats.max_preemptions_per_request,
            "recompute_tax": share(stats.recomputed_tokens, stats.computed_tokens),
            "recomputed_tokens": stats.recomputed_tokens,
            "swapped_out_tokens": stats.swapped_out_tokens,
            "swapped_in_tokens": stats.swapped_in_tokens,
        },
        "throughput": {
            "requests_per_s": stats.num_finished / seconds,
            "output_tokens_per_s": num_output_tokens / seconds,
            "computed_tokens_per_s": stats.computed_tokens / seconds,
        },
    }


def request_figures(stats: SchedulerStats) -> dict[str, int]:
    """Requests by how they ended."""
    return {
        "total": stats.num_submitted + stats.num_rejected,
        "finished": stats.num_finished,
        "rejected": stats.num_rejected,
        "aborted": stats.num_aborted,
    }


def timing_figures(wall_seconds: float, num_steps: int) -> dict[str, float]:
    """Figures that depend on this machine's clock."""
    return {"wall_seconds": wall_seconds, "us_per_step": share(wall_seconds * 1e6, num_steps)}


def share(part: float, whole: float) -> float:
    """`part / whole`; 0 if `whole` is 0."""
    return part / whole if whole else 0.0
