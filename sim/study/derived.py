"""Figures of a study that no single part has: the trace's mean request on the pool, and whether the engine keeps up."""

from bisect import bisect_right
from typing import Any

from ...core.deployment.plan import DeploymentPlan
from ...core.planner.report import capacity_mix

SHARE_LEFT_WAITING = 0.01
LEAST_LEFT_WAITING = 10


def derived_figures(parts: dict[str, dict[str, Any]], plan: DeploymentPlan | None) -> dict[str, Any]:
    """What follows from the parts that are done.

    `pool_pinned_by`: the option that sizes the pool whatever else the memory says; None: the memory decides.
    `claims_reuse`: whether the trace says which prompts share blocks. `mean_request_tokens`: prompt and output of the
    mean request, rounded up; `users_of_mean_length`: how many of them the pool holds at once. `waiting_at_last_arrival`
    and `seconds_after_last_arrival`: how many requests waited when the last one came, and how long the rest took.
    `most_waiting`: the longest queue sampled. `falls_behind`: more than 1 % of all requests, and more than 10, were
    left waiting at the last arrival.
    """
    out: dict[str, Any] = {"pool_pinned_by": None if plan is None else _pinned_by(plan)}
    curve, replay = parts.get("curve"), parts.get("replay")
    if curve is not None:
        trace = curve["trace"]
        out["claims_reuse"] = trace["num_requests"] > trace["num_requests_without_hash_ids"]
        out["mean_request_tokens"] = -(-(trace["input_tokens"] + trace["output_tokens"]) // trace["num_requests"])
        if plan is not None and plan.fits:
            (row,) = capacity_mix(plan.pool, (out["mean_request_tokens"],)).rows
            out["users_of_mean_length"] = row.users
    if replay is not None:
        out.update(_queue(replay))
    return out


def _queue(replay: dict[str, Any]) -> dict[str, Any]:
    last_arrival_s, series = replay["last_arrival_s"], replay["series"]
    waiting = series["num_requests_waiting"]
    sample = bisect_right(series["time_s"], last_arrival_s) - 1
    left = waiting[sample] if sample >= 0 else 0
    return {
        "seconds_after_last_arrival": replay["simulated_seconds"] - last_arrival_s,
        "waiting_at_last_arrival": left,
        "most_waiting": max(waiting, default=0),
        "falls_behind": left > max(LEAST_LEFT_WAITING, SHARE_LEFT_WAITING * replay["requests"]["total"]),
    }


def _pinned_by(plan: DeploymentPlan) -> str | None:
    deployment = plan.deployment
    options = {
        "--num-gpu-blocks-override": deployment.num_gpu_blocks_override,
        "--kv-cache-memory-bytes": deployment.kv_cache_memory_bytes,
    }
    return next((option for option, value in options.items() if value is not None), None)
