"""The figures of a fleet: those of a single replay over all engines, and each engine's own."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from ...core.scheduler.scheduler import Scheduler
from ...core.scheduler.stats import SchedulerStats
from ..engine.distributions import QuantileSketch
from ..engine.engine import NANOSECONDS
from ..engine.metrics import Recorder
from ..engine.replay import MAX_REJECTIONS_SHOWN, ReplayReport, replay_report
from ..engine.vllm_metrics import (
    preemption_figures,
    prefix_cache_figures,
    request_figures,
    share,
    take_snapshot,
    throughput_figures,
    timing_figures,
)
from .tiers import TierStore

MAX_SERIES_POINTS = 1024


@attrs.frozen(eq=False)
class ReplicaRun:
    """One engine after its run."""

    replica: int
    data_parallel_rank: int
    scheduler: Scheduler
    recorder: Recorder
    rejections: list[str]
    tiers: TierStore | None = None
    pool: str = ""


def fleet_report(
    runs: Sequence[ReplicaRun],
    assumptions: dict[str, Any],
    simulated_seconds: float,
    wall_seconds: float,
    stats: SchedulerStats | None = None,
) -> ReplayReport:
    """Sums, merged distributions and means over engines; `replicas` holds the figures of each.

    Occupancy is the mean over engines and time, and the maximum of any engine; running and waiting requests over time
    are summed. `stats` are the counters to report where they are not the engines' sum (requests that two had).
    """
    first = replay_report(
        runs[0].scheduler, runs[0].recorder, runs[0].rejections, assumptions, simulated_seconds, wall_seconds
    )
    stats = stats or summed_stats([run.scheduler.stats for run in runs])
    usable_blocks = runs[0].scheduler.allocator.config.num_blocks - 1
    num_steps = sum(run.recorder.num_steps for run in runs)
    span = simulated_seconds or 1.0
    held_block_ns = sum(run.recorder.held_block_ns for run in runs)
    return attrs.evolve(
        first,
        requests=request_figures(stats),
        prefix_cache={**prefix_cache_figures(stats), **_with_tiers(runs, stats)},
        preemptions=preemption_figures(stats),
        kv_cache_usage={
            "mean": held_block_ns / (span * NANOSECONDS * usable_blocks * len(runs)),
            "max": max(run.recorder.max_held_blocks for run in runs) / usable_blocks,
        },
        latencies={
            "ttft_s": _merged(runs, lambda recorder: recorder.ttft_ns),
            "tpot_s": _merged(runs, lambda recorder: recorder.tpot_ns),
            "itl_s": _merged(runs, lambda recorder: recorder.itl_ns),
            "e2e_s": _merged(runs, lambda recorder: recorder.e2e_ns),
        },
        throughput=throughput_figures(stats, sum(run.recorder.num_output_tokens for run in runs), span),
        steps=num_steps,
        rejections=[reason for run in runs for reason in run.rejections][:MAX_REJECTIONS_SHOWN],
        series=_series(runs),
        snapshot=None,
        engine_snapshots=[
            take_snapshot(run.scheduler, run.recorder) for run in runs if run.recorder.histograms is not None
        ],
        replicas=[_replica(run, simulated_seconds) for run in runs],
        timing=timing_figures(wall_seconds, num_steps),
    )


def _replica(run: ReplicaRun, simulated_seconds: float) -> dict[str, Any]:
    """The figures of one engine that differ between engines."""
    stats, recorder = run.scheduler.stats, run.recorder
    usable_blocks = run.scheduler.allocator.config.num_blocks - 1
    span_ns = (simulated_seconds or 1.0) * NANOSECONDS
    return {
        **({"pool": run.pool} if run.pool else {}),
        "replica": run.replica,
        "data_parallel_rank": run.data_parallel_rank,
        "requests": request_figures(stats),
        "prefix_cache_hit_rate": share(stats.prefix_hits_tokens, stats.prefix_queries_tokens),
        "queries_tokens": stats.prefix_queries_tokens,
        "hits_tokens": stats.prefix_hits_tokens,
        "preemptions": stats.num_preemptions,
        "kv_cache_usage": {
            "mean": recorder.held_block_ns / (span_ns * usable_blocks),
            "max": recorder.max_held_blocks / usable_blocks,
        },
        "busy_share": recorder.busy_ns / span_ns,
        "output_tokens": recorder.num_output_tokens,
        "steps": recorder.num_steps,
        "ttft_s": recorder.ttft_ns.summary(NANOSECONDS),
        "tpot_s": recorder.tpot_ns.summary(NANOSECONDS),
        **({} if run.tiers is None else {"tiers": run.tiers.figures()}),
    }


def _with_tiers(runs: Sequence[ReplicaRun], stats: SchedulerStats) -> dict[str, Any]:
    """What the tiers behind the pools add to the hits, where there are any."""
    if all(run.tiers is None for run in runs):
        return {}
    found = stats.prefix_hits_tokens + stats.external_hits_tokens
    return {
        "external_hits_tokens": stats.external_hits_tokens,
        "hit_rate_with_tiers": share(found, stats.prefix_queries_tokens),
    }


def summed_stats(parts: Sequence[SchedulerStats]) -> SchedulerStats:
    """Counters over all engines; the most preemptions of one request are a maximum."""
    total = {field.name: sum(getattr(stats, field.name) for stats in parts) for field in attrs.fields(SchedulerStats)}
    total["max_preemptions_per_request"] = max(stats.max_preemptions_per_request for stats in parts)
    return SchedulerStats(**total)


def _merged(runs: Sequence[ReplicaRun], sketch_of: Callable[[Recorder], QuantileSketch]) -> dict[str, Any]:
    merged = QuantileSketch()
    for run in runs:
        merged.merge(sketch_of(run.recorder))
    return merged.summary(NANOSECONDS)


def _series(runs: Sequence[ReplicaRun]) -> dict[str, list[float]]:
    """Mean usage, and sums of running and waiting requests, at up to 1,024 of the times that engines sampled."""
    columns = [run.recorder.series.columns() for run in runs]
    names = [name for name in columns[0] if name != "time_s"]
    times = sorted({time for engine in columns for time in engine["time_s"]})
    stride = -(-len(times) // MAX_SERIES_POINTS) or 1
    times = times[::stride]
    out: dict[str, list[float]] = {"time_s": times}
    for name in names:
        sums = [sum(_at(engine["time_s"], engine[name], time) for engine in columns) for time in times]
        out[name] = [value / len(runs) for value in sums] if name == "kv_cache_usage" else sums
    return out


def _at(times: Sequence[float], values: Sequence[float], time: float) -> float:
    """The value of a step function at a time; 0 before its first sample."""
    place = bisect_right(times, time)
    return values[place - 1] if place else 0.0
