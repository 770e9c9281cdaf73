"""Values to paste: the largest of each option that works, and what vLLM would suggest, side by side (A14).

Each comes back: fed in again, it gives the plan it was taken from, and a step more is refused.
"""

import attrs

from .deployment_plan import DeploymentPlan
from .max_model_len import largest_max_model_len
from .memory_budget import largest_utilization
from .memory_ledger import RowRole, sum_bytes
from .memory_sizing import KVBytesSuggestion, SizedMemory, WholeBlocks, largest_fitting, suggested_vllm


@attrs.frozen(kw_only=True)
class FittingValues:
    """Largest values that work.

    Attributes:
        same_pool: `--kv-cache-memory-bytes` that gives the plan's own pool again.
        to_requested_limit: the largest within what utilization requests.
        to_gpu_limit: the largest within all that is free on the device; a block more is refused at start-up.
        max_model_len: longest request of this pool; None where windows bound what any request holds.
        gpu_memory_utilization: largest that passes the check at start-up.
        suggested_vllm: what vLLM suggests: the graph memory twice and 150 MiB off.
    """

    same_pool: WholeBlocks
    to_requested_limit: WholeBlocks
    to_gpu_limit: WholeBlocks
    max_model_len: int | None
    gpu_memory_utilization: float
    suggested_vllm: KVBytesSuggestion


def fitting_values(plan: DeploymentPlan) -> FittingValues:
    """The values for one plan. Pools are in whole blocks of the stage with the largest block, so that all stages
    agree.
    """
    deployment = plan.deployment
    per_block = max(rank.bytes_per_block for rank in plan.pool.ranks)
    requested = min(stage.ledger.budget.requested_bytes for stage in plan.stages)
    reserved = deployment.frontend_reservation_bytes

    def largest(limit_bytes: int) -> WholeBlocks:
        spare = min(limit_bytes - _non_kv_bytes(plan, index) for index in range(len(plan.stages)))
        return largest_fitting(spare, 0, per_block)

    pool = WholeBlocks(num_blocks=plan.num_blocks, bytes_per_block=per_block)
    return FittingValues(
        same_pool=pool,
        to_requested_limit=largest(requested - reserved),
        to_gpu_limit=largest(deployment.free_bytes - reserved),
        max_model_len=longest_request(plan),
        gpu_memory_utilization=largest_utilization(
            deployment.total_bytes, deployment.free_bytes + deployment.externally_held_bytes
        ),
        suggested_vllm=_suggested_vllm(plan),
    )


def _non_kv_bytes(plan: DeploymentPlan, stage_index: int) -> int:
    """Everything beside the pool on a GPU of the stage, graphs counted once whether they are reserved or not."""
    stage = plan.stages[stage_index]
    return stage.ledger.non_kv_bytes + (stage.unreserved_graphs.num_bytes if stage.unreserved_graphs else 0)


def longest_request(plan: DeploymentPlan) -> int | None:
    """The longest request that the usable blocks serve, whatever length was asked for; None if there is no bound."""
    pool = plan.pool
    shards = plan.deployment.decode_context_parallel_size
    most = max(group.tokens_per_block(shards) for group in pool.groups) * max(pool.num_usable_blocks, 1) + 1
    longest = largest_max_model_len(
        pool.groups, attrs.evolve(pool.limits, max_model_len=most), max(pool.num_usable_blocks, 0)
    )
    return None if longest == most else longest


def _suggested_vllm(plan: DeploymentPlan) -> KVBytesSuggestion:
    stage = plan.bottleneck_stage
    rows = stage.ledger.non_kv_rows
    graphs = sum_bytes(rows, RowRole.GRAPHS) + (stage.unreserved_graphs.num_bytes if stage.unreserved_graphs else 0)
    sized = SizedMemory(
        requested_bytes=stage.ledger.budget.requested_bytes,
        total_consumed_bytes=sum_bytes(rows, RowRole.RESIDENT),
        peak_activation_bytes=sum_bytes(rows, RowRole.TRANSIENT) + sum_bytes(rows, RowRole.GRAPHS),
        profiled_available_bytes=stage.ledger.available_bytes,
        available_bytes=stage.ledger.available_bytes,
        free_before_bytes=plan.deployment.free_bytes,
        is_pinned=False,
    )
    return suggested_vllm(sized, graphs)
