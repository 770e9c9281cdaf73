"""A scheduler's counters as the figures of a report: of one engine, or summed over a fleet."""

from typing import Any

from ..core.scheduler_stats import SchedulerStats


def request_figures(stats: SchedulerStats) -> dict[str, int]:
    """How the requests ended."""
    return {
        "total": stats.num_submitted + stats.num_rejected,
        "finished": stats.num_finished,
        "rejected": stats.num_rejected,
        "aborted": stats.num_aborted,
    }


def prefix_cache_figures(stats: SchedulerStats) -> dict[str, Any]:
    """First admissions make the hit rate; readmissions stand apart (field report D04)."""
    return {
        "queries_tokens": stats.prefix_queries_tokens,
        "hits_tokens": stats.prefix_hits_tokens,
        "hit_rate": share(stats.prefix_hits_tokens, stats.prefix_queries_tokens),
        "readmission_queries_tokens": stats.readmission_queries_tokens,
        "readmission_hits_tokens": stats.readmission_hits_tokens,
        "readmission_shared_tokens": stats.readmission_shared_tokens,
    }


def preemption_figures(stats: SchedulerStats) -> dict[str, Any]:
    """How often requests lost their blocks, and what it cost (field report D03)."""
    return {
        "total": stats.num_preemptions,
        "max_per_request": stats.max_preemptions_per_request,
        "recompute_tax": share(stats.recomputed_tokens, stats.computed_tokens),
        "recomputed_tokens": stats.recomputed_tokens,
        "swapped_out_tokens": stats.swapped_out_tokens,
        "swapped_in_tokens": stats.swapped_in_tokens,
    }


def throughput_figures(stats: SchedulerStats, num_output_tokens: int, seconds: float) -> dict[str, float]:
    """Rates over the simulated time."""
    return {
        "requests_per_s": stats.num_finished / seconds,
        "output_tokens_per_s": num_output_tokens / seconds,
        "computed_tokens_per_s": stats.computed_tokens / seconds,
    }


def timing_figures(wall_seconds: float, num_steps: int) -> dict[str, float]:
    """What depends on this machine's clock, and so stands apart."""
    return {"wall_seconds": wall_seconds, "us_per_step": share(wall_seconds * 1e6, num_steps)}


def share(part: float, whole: float) -> float:
    """`part / whole`, 0 where there is no whole."""
    return part / whole if whole else 0.0
