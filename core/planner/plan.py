"""Bytes to blocks: how many blocks an engine's ranks share, and whether one request of the longest length fits.

    >>> from kvledger.core.planner.specs import FullAttentionSpec
    >>> spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bf16")
    >>> inputs = PlanInputs(
    ...     layer_specs={"layer 0": spec}, available_bytes=(1 << 30,), max_model_len=8192, enable_prefix_caching=True
    ... )
    >>> plan = plan_kv_cache(inputs).require_fits()
    >>> plan.num_blocks
    16384

Every rank of an engine holds the same block ids, so the pool is the minimum over the ranks. The null block (block 0)
is part of `num_blocks`, `kv_cache_size_tokens` and `max_concurrency`, as vLLM reports them; whether a request fits is
checked against the usable blocks. Rules: golden/planning.jsonl; field reports A01, A03, A05, A08, A09.
"""

import math
from collections.abc import Sequence

import attrs

from .groups import group_layers
from .inputs import PlanInputs
from .layout import KVCacheConfig, KVCacheGroup, lay_out, needs_zeroing
from .ranks import RankPlan, blocks_per_request, plan_ranks_alone, share_pool, tightest_rank
from .specs import MambaLikeSpec, ServingLimits
from .verdict import PlanRefusedError, override_refusal, plan_warnings, request_refusal


@attrs.frozen(kw_only=True)
class KVCachePlan:
    """The planner's answer. If nothing fits, `refusal` says why, and the figures show what there is.

    Attributes:
        inputs: the question.
        groups: block-table groups over the whole engine.
        ranks: each rank's part; those that decide `num_blocks` have `is_bottleneck` (A05).
        num_blocks: blocks of the pool, equal on all ranks, the null block included.
        max_model_len: longest request: as asked, or as auto-fitted.
        blocks_per_request: blocks of one request of `max_model_len` tokens, over all groups.
        scheduler_block_size: tokens that scheduled lengths align to (lcm of the groups' blocks).
        hash_block_size: tokens of one prefix-hash block.
        refusal: why it does not fit; None if it does.
        warnings: what the reader should know, one sentence each.
    """

    inputs: PlanInputs
    groups: tuple[KVCacheGroup, ...]
    ranks: tuple[RankPlan, ...]
    num_blocks: int
    max_model_len: int
    blocks_per_request: int
    scheduler_block_size: int
    hash_block_size: int
    refusal: PlanRefusedError | None
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether one request of `max_model_len` tokens fits on every rank."""
        return self.refusal is None

    def require_fits(self) -> "KVCachePlan":
        """Return the plan itself.

        Raises:
            PlanRefusedError: it does not fit.
        """
        if self.refusal is not None:
            raise self.refusal
        return self

    @property
    def limits(self) -> ServingLimits:
        """The limits of a request under this plan, at its `max_model_len`."""
        return attrs.evolve(self.inputs.limits, max_model_len=self.max_model_len)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return max(self.num_blocks - 1, 0)

    @property
    def max_concurrency(self) -> float:
        """Requests of `max_model_len` that the blocks would hold, the null block included, as vLLM reports it."""
        return self.num_blocks / self.blocks_per_request

    @property
    def kv_cache_size_tokens(self) -> int:
        """`max_concurrency` in tokens, as vLLM reports it."""
        return int(self.max_concurrency * self.max_model_len)

    @property
    def needs_zeroing(self) -> bool:
        """Whether a taken block must be zeroed before use."""
        return needs_zeroing(self.groups)

    def configs(self) -> tuple[KVCacheConfig, ...]:
        """Lay out the KV cache of each rank.

        Raises:
            PlanRefusedError: the plan does not fit.
        """
        self.require_fits()
        return tuple(lay_out(rank.groups, self.num_blocks, self.inputs.layout) for rank in self.ranks)


def plan_kv_cache(inputs: PlanInputs) -> KVCachePlan:
    """Plan one engine's KV cache; where it does not fit, `KVCachePlan.refusal` says why.

    Raises:
        InputError: the layers cannot share one pool, or a value that they depend on is missing.
    """
    groups = group_layers(inputs.layer_specs, inputs.layout, inputs.disable_hybrid_kv_cache_manager)
    ranks = plan_ranks_alone(inputs, groups)
    num_blocks = max(tightest_rank(ranks).num_blocks_alone, 0)
    max_model_len = inputs.max_model_len
    if inputs.auto_fit_max_model_len:
        max_model_len = min(rank.largest_max_model_len for rank in ranks) or inputs.max_model_len
    request_blocks = blocks_per_request(groups, attrs.evolve(inputs.limits, max_model_len=max_model_len))
    if inputs.cap_to_max_num_seqs is not None:
        num_blocks = min(num_blocks, inputs.cap_to_max_num_seqs * request_blocks + 1)
    scheduler_block_size, hash_block_size = resolve_block_sizes(inputs, groups)
    shared_ranks = tuple(share_pool(rank, inputs, ranks, num_blocks) for rank in ranks)
    return KVCachePlan(
        inputs=inputs,
        groups=groups,
        ranks=shared_ranks,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        blocks_per_request=request_blocks,
        scheduler_block_size=scheduler_block_size,
        hash_block_size=hash_block_size,
        refusal=override_refusal(inputs, ranks) or request_refusal(inputs, groups, ranks),
        warnings=plan_warnings(inputs, groups, shared_ranks, max_model_len),
    )


def resolve_block_sizes(inputs: PlanInputs, groups: Sequence[KVCacheGroup]) -> tuple[int, int]:
    """Tokens that scheduled lengths align to, and tokens of one prefix-hash block.

    One group: both are its block. Several groups: the least common multiple and the greatest common divisor of their
    blocks. The hash block stays at the multiple if nothing reads hashes (no prefix caching) or if states are not kept
    at aligned boundaries.
    """
    shards = inputs.decode_context_parallel_size
    if len(groups) == 1:
        block_tokens = (inputs.block_size or groups[0].block_size) * shards
        return block_tokens, block_tokens
    sizes = [group.tokens_per_block(shards) for group in groups]
    scheduler_block_size = math.lcm(*sizes)
    unaligned_states = inputs.state_cache_mode != "align" and any(
        isinstance(group.spec, MambaLikeSpec) for group in groups
    )
    if not inputs.enable_prefix_caching or unaligned_states:
        return scheduler_block_size, scheduler_block_size
    return scheduler_block_size, math.gcd(*sizes)
