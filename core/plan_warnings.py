"""What the reader of a plan should know beside the figures, a sentence each."""

from collections.abc import Sequence

from .hybrid_waste import hybrid_waste
from .kv_cache_config import KVCacheGroup
from .plan_inputs import PlanInputs
from .quantities import format_bytes
from .rank_plan import RankPlan


def plan_warnings(
    inputs: PlanInputs, groups: Sequence[KVCacheGroup], ranks: Sequence[RankPlan], max_model_len: int
) -> tuple[str, ...]:
    """All sentences that apply to a plan."""
    return (
        *_override_warnings(inputs, ranks),
        *_idle_warnings(ranks),
        *_full_sizing_warnings(inputs, max_model_len),
        *_unequal_group_warnings(groups),
        *_padding_warnings(groups),
    )


def _override_warnings(inputs: PlanInputs, ranks: Sequence[RankPlan]) -> list[str]:
    override = inputs.num_gpu_blocks_override
    if override is None:
        return []
    would_fit = min(rank.available_bytes // rank.bytes_per_block for rank in ranks if rank.bytes_per_block)
    return [
        f"num_gpu_blocks_override {override:,} replaces the {max(would_fit, 0):,} blocks that fit; every figure uses it"
    ]


def _idle_warnings(ranks: Sequence[RankPlan]) -> list[str]:
    bottlenecks = [rank.rank for rank in ranks if rank.is_bottleneck]
    return [
        f"rank {rank.rank} leaves {format_bytes(rank.idle_bytes)} idle: the pool is held to {rank.num_blocks:,} blocks "
        f"by rank {', '.join(map(str, bottlenecks))}, while it alone would hold {rank.num_blocks_alone:,}"
        for rank in ranks
        if bottlenecks and not rank.is_bottleneck and rank.idle_bytes
    ]


def _full_sizing_warnings(inputs: PlanInputs, max_model_len: int) -> list[str]:
    if not inputs.disable_hybrid_kv_cache_manager:
        return []
    waste = hybrid_waste(inputs.layer_specs, max_model_len)
    if waste.floor_bytes == waste.full_bytes:
        return []
    return [
        "hybrid allocation is off, so windowed layers are sized like full attention: "
        f"{waste.wasted_share:.2%} of a request of {max_model_len:,} tokens is never read again"
    ]


def _unequal_group_warnings(groups: Sequence[KVCacheGroup]) -> list[str]:
    widest = max(group.bytes_per_block for group in groups)
    narrow = [index for index, group in enumerate(groups) if group.bytes_per_block < widest]
    if not narrow:
        return []
    unused = 1 - sum(group.bytes_per_block for group in groups) / (widest * len(groups))
    return [
        f"groups {', '.join(map(str, narrow))} fill less of a block than the widest group, and every block is as wide: "
        f"{unused:.2%} of a block is unused on average over the groups"
    ]


def _padding_warnings(groups: Sequence[KVCacheGroup]) -> list[str]:
    warnings: list[str] = []
    for index, group in enumerate(groups):
        padding_bytes = group.spec.page_size_bytes - group.spec.unpadded_page_size_bytes
        if padding_bytes:
            warnings.append(
                f"pages of group {index} ({group.spec.kind}) are padded by {padding_bytes:,} of "
                f"{group.spec.page_size_bytes:,} bytes, so that all pages are equal"
            )
    return warnings
