"""A plan told: as JSON-ready rows, and as the formulas behind its figures with the numbers substituted."""

from collections import Counter
from typing import Any

from .kv_cache_config import KVCacheGroup
from .planning import KVCachePlan
from .rank_plan import RankPlan


def plan_as_dict(plan: KVCachePlan) -> dict[str, Any]:
    """The planning keys of `plan --json`: plain numbers, strings and lists.

    `page_size_bytes` is the largest page of a layer, `bytes_per_block` that of the rank that decides the pool.
    """
    tightest = tightest_rank(plan)
    return {
        "page_size_bytes": max(spec.page_size_bytes for group in plan.groups for spec in group.layer_specs),
        "bytes_per_block": tightest.bytes_per_block,
        "num_gpu_blocks": plan.num_blocks,
        "num_usable_blocks": plan.num_usable_blocks,
        "kv_cache_tokens": plan.kv_cache_size_tokens,
        "max_concurrency": plan.max_concurrency,
        "max_model_len": plan.max_model_len,
        "blocks_per_request": plan.blocks_per_request,
        "scheduler_block_size": plan.scheduler_block_size,
        "hash_block_size": plan.hash_block_size,
        "needs_zeroing": plan.needs_zeroing,
        "groups": [_group_as_dict(group) for group in plan.groups],
        "ranks": [_rank_as_dict(rank) for rank in plan.ranks],
        "warnings": list(plan.warnings),
        "fits": plan.fits,
        "refusal": None if plan.refusal is None else str(plan.refusal),
    }


def tightest_rank(plan: KVCachePlan) -> RankPlan:
    """The first of the ranks that hold the fewest blocks alone."""
    return min((rank for rank in plan.ranks if rank.bytes_per_block), key=lambda rank: rank.num_blocks_alone)


def _group_as_dict(group: KVCacheGroup) -> dict[str, Any]:
    return {
        "kind": group.kind,
        "block_size": group.block_size,
        "page_size_bytes": group.page_size_bytes,
        "bytes_per_block": group.bytes_per_block,
        "layers": list(group.layer_names),
        "page_terms": [
            {"name": term.name, "bytes": term.num_bytes, "formula": term.formula} for term in group.spec.page_terms
        ],
    }


def _rank_as_dict(rank: RankPlan) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "num_layers": rank.num_layers,
        "available_bytes": rank.available_bytes,
        "bytes_per_block": rank.bytes_per_block,
        "num_blocks_alone": rank.num_blocks_alone,
        "num_blocks": rank.num_blocks,
        "bytes_used": rank.bytes_used,
        "idle_bytes": rank.idle_bytes,
        "remainder_bytes": rank.remainder_bytes,
        "request_bytes": rank.request_bytes,
        "bottleneck": rank.is_bottleneck,
    }


def explain_plan(plan: KVCachePlan) -> tuple[str, ...]:
    """The formulas behind a plan, a line each: pages, bytes per block, blocks, blocks of one request, concurrency."""
    lines: list[str] = []
    for index, group in enumerate(plan.groups):
        for spec in dict.fromkeys(group.layer_specs):
            lines.extend(f"group {index} ({spec.kind}) {line}" for line in spec.formula().splitlines())
    for rank in plan.ranks:
        lines.extend(_explain_rank(plan, rank))
    request = " + ".join(f"({group.spec.max_blocks_formula(plan.limits)})" for group in plan.groups)
    lines.append(f"blocks of one request of {plan.max_model_len:,} tokens: {request} = {plan.blocks_per_request:,}")
    lines.append(
        f"maximum concurrency: {plan.num_blocks:,} blocks / {plan.blocks_per_request:,} = {plan.max_concurrency:.2f}x; "
        f"{plan.num_usable_blocks:,} blocks are usable, as block 0 is reserved"
    )
    return tuple(lines)


def _explain_rank(plan: KVCachePlan, rank: RankPlan) -> list[str]:
    if not rank.bytes_per_block:
        return [f"rank {rank.rank} holds no layer that stores a KV cache"]
    widest = max(rank.groups, key=lambda group: group.bytes_per_block)
    pages = Counter(spec.page_size_bytes for spec in widest.layer_specs)
    layers = " + ".join(f"{count} layers x {page:,} B" for page, count in pages.items())
    which = " of the widest group" if len(rank.groups) > 1 else ""
    blocks = f"floor({rank.available_bytes:,} B / {rank.bytes_per_block:,} B)"
    if plan.inputs.num_gpu_blocks_override is not None:
        blocks = "num_gpu_blocks_override"
    return [
        f"rank {rank.rank} bytes per block: {layers}{which} = {rank.bytes_per_block:,} B",
        f"rank {rank.rank} blocks: {blocks} = {rank.num_blocks_alone:,}, of which the pool uses {rank.num_blocks:,}: "
        f"{rank.bytes_used:,} B used, {rank.idle_bytes:,} B idle, {rank.remainder_bytes:,} B left over",
    ]
