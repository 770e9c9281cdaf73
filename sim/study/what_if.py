"""What would change the answer: the same deployment with one option changed, planned again."""

from typing import Any

import attrs

from ...core.deployment.deployment import Deployment
from ...core.deployment.plan import DeploymentPlan
from ...core.deployment.remedies import try_plan
from ...core.models.weights import quantization_schemes
from ...core.planner.report import capacity_mix
from ..cache.capacity_curve import CapacityCurve

HIGHER_UTILIZATION = 0.95


def what_if(plan: DeploymentPlan, curve: CapacityCurve, mean_request_tokens: int) -> list[dict[str, Any]]:
    """One row an option: what it makes of the pool, of the requests at once, and of the LRU hit rate.

    Each row is a deployment that was planned; those that do not go together with the model are left out. The first one
    is the deployment as it is.
    """
    rows = [_row("as it is", plan, curve, mean_request_tokens)]
    for option, deployment in _changes(plan.deployment):
        changed = try_plan(deployment)
        if changed is not None:
            rows.append(_row(option, changed, curve, mean_request_tokens))
    return rows


def _changes(deployment: Deployment) -> list[tuple[str, Deployment]]:
    """Options worth trying on this deployment."""
    sizes_itself = deployment.kv_cache_memory_bytes is not None or deployment.num_gpu_blocks_override is not None
    out: list[tuple[str, Deployment]] = []
    if sizes_itself:
        return out
    if deployment.utilization < HIGHER_UTILIZATION:
        changed = attrs.evolve(deployment, utilization=HIGHER_UTILIZATION)
        out.append((f"--gpu-memory-utilization {HIGHER_UTILIZATION}", changed))
    if deployment.kv_cache_dtype == "auto":
        out.append(("--kv-cache-dtype fp8", attrs.evolve(deployment, kv_cache_dtype="fp8")))
    if deployment.scheme is None and deployment.given.weights_bytes is None and deployment.measured is None:
        changed = attrs.evolve(deployment, quantization=quantization_schemes()["fp8"])
        out.append(("--quantization fp8", changed))
    ranks = 2 * deployment.tensor_parallel_size
    if deployment.measured is None and deployment.given.weights_bytes is None:
        out.append((f"--tensor-parallel-size {ranks}", attrs.evolve(deployment, tensor_parallel_size=ranks)))
    return out


def _row(option: str, plan: DeploymentPlan, curve: CapacityCurve, mean_request_tokens: int) -> dict[str, Any]:
    pool = plan.pool
    tokens = max(pool.kv_cache_size_tokens, 0) if plan.fits else 0
    point = curve.lru.at(tokens // curve.block_size)
    (users,) = capacity_mix(pool, (mean_request_tokens,)).rows
    return {
        "option": option,
        "gpus": plan.deployment.num_gpus,
        "fits": plan.fits,
        "num_gpu_blocks": plan.num_blocks if plan.fits else 0,
        "kv_cache_tokens": tokens,
        "users_of_mean_length": users.users if plan.fits else 0,
        "lru_token_hit_rate": curve.token_hit_rate(point) if curve.info.claims_reuse else None,
    }
