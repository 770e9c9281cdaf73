"""A plan told: as JSON-ready rows, and as the formulas behind its figures with the numbers substituted."""

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import attrs

from ..errors import InputError
from .layout import KVCacheGroup
from .plan import KVCachePlan
from .ranks import RankPlan, blocks_per_request
from .specs import CrossAttentionSpec, FullAttentionSpec, KVCacheSpec, LatentSpec, ServingLimits


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


# Figures of a whole node beside those of one rank: what multiplies with parallelism and what does not.


@attrs.frozen(kw_only=True)
class NodeTotals:
    """All engines of a deployment together.

    Attributes:
        num_engines: data-parallel ranks; each is an engine of its own, with blocks and block tables of its own.
        num_ranks: devices of all engines.
        kv_cache_bytes: bytes of all buffers.
        kv_cache_tokens: tokens that all engines hold.
        max_concurrency: requests of the longest length over all engines.
        notes: what multiplies and what does not.
    """

    num_engines: int
    num_ranks: int
    kv_cache_bytes: int
    kv_cache_tokens: int
    max_concurrency: float
    notes: tuple[str, ...]


def node_totals(engines: Sequence[KVCachePlan]) -> NodeTotals:
    """Totals over the engines of a deployment.

    Raises:
        InputError: no engine was given.
    """
    if not engines:
        raise InputError("node totals need the plan of at least one engine")
    return NodeTotals(
        num_engines=len(engines),
        num_ranks=sum(len(engine.ranks) for engine in engines),
        kv_cache_bytes=sum(rank.bytes_used for engine in engines for rank in engine.ranks),
        kv_cache_tokens=sum(engine.kv_cache_size_tokens for engine in engines),
        max_concurrency=sum(engine.max_concurrency for engine in engines),
        notes=(
            "tensor and pipeline parallelism multiply bytes but not tokens: all ranks of an engine hold parts of the "
            "same tokens",
            "data parallelism multiplies both bytes and tokens: every engine holds tokens of its own, and a prefix "
            "cached by one is not seen by another",
        ),
    )


# How many users fit at each context length, and in a mix of lengths, not only at the maximum length.

DEFAULT_CONTEXT_TOKENS = (2_048, 8_192, 32_768, 131_072)
"""Context lengths of the capacity table: 2k, 8k, 32k and 128k."""

_ONE_TOKEN_IN_FLIGHT = 1


@attrs.frozen(kw_only=True)
class CapacityRow:
    """Users whose contexts are all `context_tokens` long.

    Attributes:
        context_tokens: prompt and output of one user.
        floor_bytes: bytes that one user occupies at least, on the tightest rank: whole tokens, windows honoured.
        floor_users: users by bytes alone, `usable bytes // floor_bytes`; no allocator serves more.
        decode_blocks: blocks of one user who is decoding: windows honoured, one token in flight, rounded to blocks.
        decode_users: users who fit while all of them decode.
        peak_blocks: most blocks of one user, with a whole batch of prefill in flight; admission counts with this.
        users: users who fit at their peak all at once; the safe figure.
        exceeds_max_model_len: the engine refuses requests of this length, so nobody is served.
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
        num_usable_blocks: blocks that users share; the null block is not among them.
        users_in_mix: users who fit when their lengths occur in the given shares, all at their peak; None: no shares.
    """

    rows: tuple[CapacityRow, ...]
    num_usable_blocks: int
    users_in_mix: int | None


def capacity_mix(
    plan: KVCachePlan,
    context_tokens: Sequence[int] = DEFAULT_CONTEXT_TOKENS,
    shares: Mapping[int, float] | None = None,
) -> CapacityMix:
    """Users that a plan's pool serves at each context length.

    Args:
        plan: a plan; one that refuses its longest request may still serve shorter ones.
        context_tokens: lengths of the table.
        shares: length -> share of the users who have it; the shares add up to 1.

    Raises:
        InputError: a length below 1 token, or shares that do not add up to 1.
    """
    rows = tuple(_capacity_row(plan, tokens) for tokens in context_tokens)
    return CapacityMix(
        rows=rows,
        num_usable_blocks=plan.num_usable_blocks,
        users_in_mix=None if shares is None else _users_in_mix(plan, shares),
    )


def _capacity_row(plan: KVCachePlan, context_tokens: int) -> CapacityRow:
    limits = _limits_at(plan, context_tokens)
    exceeds = context_tokens > plan.max_model_len
    usable = 0 if exceeds else plan.num_usable_blocks
    peak_blocks = blocks_per_request(plan.groups, limits)
    decode_blocks = blocks_per_request(plan.groups, attrs.evolve(limits, max_in_flight_tokens=_ONE_TOKEN_IN_FLIGHT))
    floor_bytes, floor_users = _by_bytes_alone(plan, limits)
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


def _limits_at(plan: KVCachePlan, context_tokens: int) -> ServingLimits:
    return attrs.evolve(plan.limits, max_model_len=context_tokens)


def _by_bytes_alone(plan: KVCachePlan, limits: ServingLimits) -> tuple[int, int]:
    """Floor bytes and users of the rank on which the fewest users fit."""
    by_rank: list[tuple[int, int]] = []
    for rank in plan.ranks:
        specs = [plan.inputs.layer_specs[name] for name in plan.inputs.layers_of_rank(rank.rank)]
        floor_bytes = sum(request_floor_bytes(spec, limits) for spec in specs)
        if floor_bytes:
            by_rank.append((plan.num_usable_blocks * rank.bytes_per_block // floor_bytes, floor_bytes))
    users, floor_bytes = min(by_rank)
    return floor_bytes, users


def request_floor_bytes(spec: KVCacheSpec, limits: ServingLimits) -> int:
    """Bytes that one request of `limits.max_model_len` tokens occupies at least in one layer of one rank.

    Raises:
        InputError: a cross-attention layer without `max_encoder_tokens`.
    """
    if isinstance(spec, CrossAttentionSpec):
        if limits.max_encoder_tokens is None:
            raise InputError("cross-attention layers need max_encoder_tokens, the longest encoder input in tokens")
        return spec.floor_bytes(limits.max_encoder_tokens)
    shards = limits.decode_context_parallel_size if isinstance(spec, FullAttentionSpec | LatentSpec) else 1
    return spec.floor_bytes(-(-limits.max_model_len // shards))


def _users_in_mix(plan: KVCachePlan, shares: Mapping[int, float]) -> int:
    fractions = {tokens: Fraction(str(share)) for tokens, share in shares.items()}
    if sum(fractions.values()) != 1 or any(share < 0 for share in fractions.values()):
        raise InputError(f"shares of context lengths are {dict(shares)}; they must be 0 or more and add up to 1")
    mean_blocks = sum(
        share * blocks_per_request(plan.groups, _limits_at(plan, tokens)) for tokens, share in fractions.items()
    )
    if any(share and tokens > plan.max_model_len for tokens, share in fractions.items()):
        return 0
    return int(plan.num_usable_blocks // mean_blocks)
