"""What `kvledger plan` prints with --json, and the formulas of --explain."""

from collections.abc import Sequence
from typing import Any

from ...core.deployment.diagnosis import Diagnosis
from ...core.deployment.plan import DeploymentPlan, StagePlan
from ...core.deployment.remedies import FittingValues, fitting_values
from ...core.deployment.startup_log import log_lines
from ...core.errors import DoesNotFitError
from ...core.memory.budget import MemoryShortfallError
from ...core.memory.ledger import LedgerRow, RowRole
from ...core.planner.report import CapacityRow, explain_plan, plan_as_dict
from ...core.planner.verdict import PlanRefusedError
from ..scenario.plan_question import PlanQuestion


def plan_payload(
    question: PlanQuestion,
    plan: DeploymentPlan,
    capacity: Sequence[CapacityRow],
    diagnoses: Sequence[Diagnosis],
    warnings: Sequence[str],
) -> dict[str, Any]:
    """The JSON document: the ledger of the stage that decides the pool, the pool, and everything beside them."""
    deployment = plan.deployment
    pool = plan_as_dict(plan.pool)
    low, high = plan.blocks_range
    return {
        "model": deployment.geometry.name,
        "architecture": deployment.geometry.architecture,
        "device": {
            "name": question.device_name,
            "total_bytes": deployment.total_bytes,
            "free_bytes": deployment.free_bytes,
            "requested_bytes": plan.bottleneck_stage.ledger.budget.requested_bytes,
            "utilization": deployment.utilization,
            "semantics": str(deployment.semantics),
        },
        "ledger": [row_as_dict(row, deployment.total_bytes) for row in plan.rows(plan.bottleneck_stage)],
        "available_bytes": plan.bottleneck_stage.ledger.available_bytes,
        **pool,
        "num_gpu_blocks": plan.num_blocks,
        "kv_cache_tokens": max(pool["kv_cache_tokens"], 0),
        "max_concurrency": max(pool["max_concurrency"], 0),
        "num_gpu_blocks_range": [low, high],
        "stages": [_stage_as_dict(plan, stage) for stage in plan.stages],
        "totals": totals(plan),
        "capacity": [_capacity_as_dict(plan, row) for row in capacity],
        "suggestions": suggestions_as_dict(fitting_values(plan)),
        "log_lines": list(log_lines(plan)),
        "diagnoses": [diagnosis_as_dict(diagnosis) for diagnosis in diagnoses],
        "assumptions": list(question.assumptions),
        "warnings": list(warnings),
        "fits": plan.fits,
        "refusal": None if plan.refusal is None else refusal_as_dict(plan.refusal),
    }


def row_as_dict(row: LedgerRow, total_bytes: int) -> dict[str, Any]:
    """One row of the ledger."""
    return {
        "name": row.name,
        "bytes": row.num_bytes,
        "source": str(row.source),
        "share": row.num_bytes / total_bytes,
        "role": str(row.role),
        "low_bytes": row.low_bytes,
        "high_bytes": row.high_bytes,
        "formula": row.formula,
    }


def _stage_as_dict(plan: DeploymentPlan, stage: StagePlan) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "layers": [stage.layers.start, stage.layers.stop - 1],
        "ranks": list(stage.ranks),
        "available_bytes": stage.ledger.available_bytes,
        "ledger": [row_as_dict(row, plan.deployment.total_bytes) for row in plan.rows(stage)],
    }


def totals(plan: DeploymentPlan) -> dict[str, Any]:
    """What all GPUs hold together: bytes multiply with every kind of parallelism, tokens with data parallelism only."""
    deployment = plan.deployment
    engine_bytes = sum(max(rank.bytes_used, 0) for rank in plan.pool.ranks)
    tokens = max(plan.pool.kv_cache_size_tokens, 0)
    return {
        "gpus": deployment.num_gpus,
        "kv_cache_bytes": engine_bytes * deployment.data_parallel_size,
        "kv_cache_tokens": tokens * deployment.data_parallel_size,
        "max_concurrency": max(plan.pool.max_concurrency, 0) * deployment.data_parallel_size,
        "engines": deployment.data_parallel_size,
    }


def _capacity_as_dict(plan: DeploymentPlan, row: CapacityRow) -> dict[str, Any]:
    """Users of one length, over all data-parallel engines; blocks and bytes are of one user on the tightest rank."""
    engines = plan.deployment.data_parallel_size
    return {
        "context_tokens": row.context_tokens,
        "blocks_per_user": row.peak_blocks,
        "bytes_per_user": row.peak_blocks * plan.bytes_per_block,
        "floor_bytes_per_user": row.floor_bytes,
        "users": max(row.users, 0) * engines,
        "decode_users": max(row.decode_users, 0) * engines,
        "floor_users": max(row.floor_users, 0) * engines,
        "exceeds_max_model_len": row.exceeds_max_model_len,
    }


def suggestions_as_dict(values: FittingValues) -> dict[str, Any]:
    """Values to paste, and vLLM's own beside them."""
    return {
        "kv_cache_memory_bytes_for_this_pool": values.same_pool.num_bytes,
        "largest_fitting": {
            "to_requested_limit_bytes": values.to_requested_limit.num_bytes,
            "to_requested_limit_blocks": values.to_requested_limit.num_blocks,
            "to_gpu_limit_bytes": values.to_gpu_limit.num_bytes,
            "to_gpu_limit_blocks": values.to_gpu_limit.num_blocks,
            "max_model_len": values.max_model_len,
            "gpu_memory_utilization": values.gpu_memory_utilization,
        },
        "suggested_vllm": {
            "to_requested_limit_bytes": values.suggested_vllm.to_requested_limit_bytes,
            "to_gpu_limit_bytes": values.suggested_vllm.to_gpu_limit_bytes,
        },
    }


def diagnosis_as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """A diagnosis with its remedies."""
    return {
        "complaint": diagnosis.complaint,
        "row": diagnosis.row,
        "bytes": diagnosis.row_bytes,
        "findings": list(diagnosis.findings),
        "remedies": [
            {"option": remedy.option, "value": remedy.value, "num_blocks": remedy.num_blocks, "cost": remedy.cost}
            for remedy in diagnosis.remedies
        ],
    }


def refusal_as_dict(refusal: DoesNotFitError) -> dict[str, Any]:
    """Why not, with the numbers."""
    out: dict[str, Any] = {"message": str(refusal)}
    if isinstance(refusal, MemoryShortfallError | PlanRefusedError):
        out |= {
            "condition": str(refusal.condition),
            "needed_bytes": refusal.needed_bytes,
            "available_bytes": refusal.available_bytes,
            "shortfall_bytes": refusal.shortfall_bytes,
            "largest": refusal.largest,
        }
    return out


def explanation(plan: DeploymentPlan) -> tuple[str, ...]:
    """Every formula with its numbers: what layers store, the ledger row by row, the pool, one request."""
    deployment = plan.deployment
    stage = plan.bottleneck_stage
    budget = stage.ledger.budget
    lines = ["what one token stores, over the whole model:"]
    lines += [f"  {line}" for line in deployment.geometry.bytes_per_token_formula(deployment.cache_dtype)]
    lines.append(f"the ledger of rank {stage.ranks.start} (stage {stage.stage}):")
    for row in plan.rows(stage):
        span = "" if row.low_bytes == row.high_bytes else f"; within {row.low_bytes:,} to {row.high_bytes:,} B"
        lines.append(f"  {row.name} = {row.num_bytes:,} B ({row.source}): {row.formula}{span}")
        if row.role is RowRole.GRAPHS and not deployment.reserve_graph_memory:
            lines.append("    not set aside when the pool is sized")
    if stage.unreserved_graphs is not None:
        graphs = stage.unreserved_graphs
        lines.append(f"  {graphs.name} = {graphs.num_bytes:,} B ({graphs.source}), not set aside: {graphs.formula}")
    if deployment.kv_cache_memory_bytes is not None:
        lines.append(f"  available = {deployment.kv_cache_memory_bytes:,} B, pinned")
    else:
        lines.append(f"  available = {budget.formula(stage.ledger.non_kv_rows)} = {stage.ledger.available_bytes:,} B")
    lines.append("the pool:")
    lines += [f"  {line}" for line in explain_plan(plan.pool)]
    return tuple(lines)
