"""Reports of a plan: JSON-ready rows, the formulas behind its figures, and how many users fit."""

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import attrs

from ..errors import InputError
from .layout import KVCacheGroup
from .plan import KVCachePlan
from .ranks import RankPlan, blocks_per_request, tightest_rank
from .specs import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    LatentSpec,
    ServingLimits,
    required_encoder_tokens,
)


def plan_as_dict(plan: KVCachePlan) -> dict[str, Any]:
    """Build the planning keys of the plan command's JSON: plain numbers, strings and lists.

    `page_size_bytes` is the largest page of a layer, `bytes_per_block` that of the rank that decides the pool.
    """
    return {
        "page_size_bytes": max(spec.page_size_bytes for group in plan.groups for spec in group.layer_specs),
        "bytes_per_block": tightest_rank(plan.ranks).bytes_per_block,
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
    """List the formulas behind a plan, one line each: pages, bytes per block, blocks, one request, concurrency."""
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


DEFAULT_CONTEXT_TOKENS = (2_048, 8_192, 32_768, 131_072)
"""Context lengths of the capacity table: 2k, 8k, 32k and 128k."""


@attrs.frozen(kw_only=True)
class CapacityRow:
    """How many users fit if the contexts of all are `context_tokens` long.

    Attributes:
        context_tokens: prompt and output of one user.
        floor_bytes: fewest bytes of one user on the tightest rank: whole tokens, only those within windows.
        floor_users: users by bytes alone, `usable bytes // floor_bytes`; no allocator serves more.
        decode_blocks: blocks of one user who decodes: windows honoured, one token in flight, rounded to blocks.
        decode_users: users who fit while all of them decode.
        peak_blocks: most blocks of one user, with a whole batch of prefill in flight; admission counts with this.
        users: users who fit while all of them are at their peak; the safe figure.
        exceeds_max_model_len: whether the engine refuses requests of this length, so that no user is served.
    """

    context_tokens: int
    floor_bytes: int
    floor_users: int
    decode_blocks: int
    decode_users: int
    peak_blocks: int
    users: int
    exceeds_max_model_len: bool


@attrs.frozen(kw_only=True)
class CapacityMix:
    """The capacity table of a plan, and the users of a mix.

    Attributes:
        rows: one for each context length.
        users_in_mix: users who fit when their lengths occur in the given shares, all at their peak; None: no shares.
    """

    rows: tuple[CapacityRow, ...]
    users_in_mix: int | None


def capacity_mix(
    plan: KVCachePlan,
    context_tokens: Sequence[int] = DEFAULT_CONTEXT_TOKENS,
    shares: Mapping[int, float] | None = None,
) -> CapacityMix:
    """Count the users that a plan's pool serves at each context length.

    Args:
        plan: a plan; one that refuses its longest request may still serve shorter ones.
        context_tokens: lengths of the table.
        shares: length -> share of the users with this length; the shares add up to 1.

    Raises:
        InputError: a length below 1 token, or shares that do not add up to 1.
    """
    rows = tuple(_capacity_row(plan, tokens) for tokens in context_tokens)
    return CapacityMix(
        rows=rows,
        users_in_mix=None if shares is None else _users_in_mix(plan, shares),
    )


def _capacity_row(plan: KVCachePlan, context_tokens: int) -> CapacityRow:
    limits = attrs.evolve(plan.limits, max_model_len=context_tokens)
    exceeds = context_tokens > plan.max_model_len
    usable = 0 if exceeds else plan.num_usable_blocks
    peak_blocks = blocks_per_request(plan.groups, limits)
    decode_blocks = blocks_per_request(plan.groups, attrs.evolve(limits, max_in_flight_tokens=1))
    floor_users, floor_bytes = _users_by_bytes_alone(plan, limits)
    return CapacityRow(
        context_tokens=context_tokens,
        floor_bytes=floor_bytes,
        floor_users=0 if exceeds else floor_users,
        decode_blocks=decode_blocks,
        decode_users=usable // decode_blocks,
        peak_blocks=peak_blocks,
        users=usable // peak_blocks,
        exceeds_max_model_len=exceeds,
    )


def _users_by_bytes_alone(plan: KVCachePlan, limits: ServingLimits) -> tuple[int, int]:
    """Users, and fewest bytes of one user, on the rank on which the fewest users fit."""
    by_rank: list[tuple[int, int]] = []
    for rank in plan.ranks:
        specs = [plan.inputs.layer_specs[name] for name in plan.inputs.layers_of_rank(rank.rank)]
        floor_bytes = sum(_request_floor_bytes(spec, limits) for spec in specs)
        if floor_bytes:
            by_rank.append((plan.num_usable_blocks * rank.bytes_per_block // floor_bytes, floor_bytes))
    return min(by_rank)


def _request_floor_bytes(spec: KVCacheSpec, limits: ServingLimits) -> int:
    """Fewest bytes that one request of `limits.max_model_len` tokens occupies in one layer of one rank."""
    if isinstance(spec, CrossAttentionSpec):
        return spec.floor_bytes(required_encoder_tokens(limits))
    shards = limits.decode_context_parallel_size if isinstance(spec, FullAttentionSpec | LatentSpec) else 1
    return spec.floor_bytes(-(-limits.max_model_len // shards))


def _users_in_mix(plan: KVCachePlan, shares: Mapping[int, float]) -> int:
    fractions = {tokens: Fraction(str(share)) for tokens, share in shares.items()}
    if sum(fractions.values()) != 1 or any(share < 0 for share in fractions.values()):
        raise InputError(f"shares of context lengths are {dict(shares)}; they must be 0 or more and add up to 1")
    mean_blocks = sum(
        share * blocks_per_request(plan.groups, attrs.evolve(plan.limits, max_model_len=tokens))
        for tokens, share in fractions.items()
    )
    if any(share and tokens > plan.max_model_len for tokens, share in fractions.items()):
        return 0
    return int(plan.num_usable_blocks // mean_blocks)
