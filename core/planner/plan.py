"""Bytes to blocks: how many blocks an engine's ranks share, and whether one request of the longest length fits.

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
from .ranks import RankPlan, blocks_per_request, plan_ranks_alone, share_pool
from .specs import MambaLikeSpec, ServingLimits
from .verdict import PlanCondition, PlanRefusedError, override_refusal, plan_warnings, request_refusal


@attrs.frozen(kw_only=True)
class KVCachePlan:
    """The planner's answer, also where it is no: then `refusal` says why, and the figures show what there is.

    Attributes:
        inputs: the question.
        groups: block-table groups over the whole engine.
        ranks: each rank's part.
        num_blocks: blocks of the pool, equal on all ranks, the null block included.
        max_model_len: longest request: as asked, or as auto-fitted.
        blocks_per_request: blocks of one request of `max_model_len` tokens, over all groups.
        scheduler_block_size: tokens that scheduled lengths align to (lcm of the groups' blocks).
        hash_block_size: tokens of one prefix-hash block.
        refusal: why it does not fit; None if it does.
        warnings: what the reader should know, a sentence each.
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
        """One request of `max_model_len` tokens fits on every rank."""
        return self.refusal is None

    def require_fits(self) -> "KVCachePlan":
        """The plan itself.

        Raises:
            PlanRefusedError: it does not fit.
        """
        if self.refusal is not None:
            raise self.refusal
        return self

    @property
    def limits(self) -> ServingLimits:
        """What bounds a request under this plan, at the length that came out."""
        return attrs.evolve(self.inputs.limits, max_model_len=self.max_model_len)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return max(self.num_blocks - 1, 0)

    @property
    def max_concurrency(self) -> float:
        """Requests of `max_model_len` that the blocks would hold, the null block counted in, as vLLM reports it."""
        return self.num_blocks / self.blocks_per_request

    @property
    def kv_cache_size_tokens(self) -> int:
        """`max_concurrency` in tokens, as vLLM reports it."""
        return int(self.max_concurrency * self.max_model_len)

    @property
    def needs_zeroing(self) -> bool:
        """Whether a taken block must be zeroed before use."""
        return needs_zeroing(self.groups)

    @property
    def bottleneck_ranks(self) -> tuple[int, ...]:
        """Ranks that decide `num_blocks`: the least memory per byte of block, not the least memory (A05)."""
        return tuple(rank.rank for rank in self.ranks if rank.is_bottleneck)

    def configs(self) -> tuple[KVCacheConfig, ...]:
        """Each rank's KV cache, laid out.

        Raises:
            PlanRefusedError: the plan does not fit.
        """
        self.require_fits()
        return tuple(lay_out(rank.groups, self.num_blocks, self.inputs.layout) for rank in self.ranks)

    def worst_case_need(self, max_num_seqs: int) -> "WorstCaseNeed":
        """What `max_num_seqs` requests of `max_model_len` tokens need at once (A08)."""
        num_blocks = max_num_seqs * self.blocks_per_request
        return WorstCaseNeed(
            num_blocks=num_blocks,
            num_bytes=tuple(num_blocks * rank.bytes_per_block for rank in self.ranks),
            reuse_only_blocks=max(self.num_usable_blocks - num_blocks, 0),
            capped_num_blocks=min(num_blocks + 1, self.num_blocks),
        )


@attrs.frozen(kw_only=True)
class WorstCaseNeed:
    """What a number of longest requests needs at once.

    Attributes:
        num_blocks: blocks of all of them.
        num_bytes: the same in bytes, rank by rank.
        reuse_only_blocks: further usable blocks of the pool, which can only serve prefix-cache reuse.
        capped_num_blocks: a pool of just these blocks and the null block.
    """

    num_blocks: int
    num_bytes: tuple[int, ...]
    reuse_only_blocks: int
    capped_num_blocks: int


def plan_kv_cache(inputs: PlanInputs) -> KVCachePlan:
    """Plan one engine's KV cache; the answer may be no (see `KVCachePlan.refusal`).

    Raises:
        InputError: the layers cannot share one pool, or a value that they depend on is missing.
    """
    groups = group_layers(inputs.layer_specs, inputs.layout, inputs.disable_hybrid_kv_cache_manager)
    ranks = plan_ranks_alone(inputs, groups)
    num_blocks = max(min(rank.num_blocks_alone for rank in ranks if rank.bytes_per_block), 0)
    refusal = _override_refusal(inputs, ranks)
    max_model_len = inputs.max_model_len
    if inputs.auto_fit_max_model_len:
        max_model_len = min(rank.largest_max_model_len for rank in ranks) or inputs.max_model_len
    request_blocks = blocks_per_request(groups, attrs.evolve(inputs.limits, max_model_len=max_model_len))
    refusal = refusal or _request_refusal(inputs, groups, ranks)
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
        refusal=refusal,
        warnings=plan_warnings(inputs, groups, shared_ranks, max_model_len),
    )


def _override_refusal(inputs: PlanInputs, ranks: Sequence[RankPlan]) -> PlanRefusedError | None:
    override = inputs.num_gpu_blocks_override
    if override is None or not inputs.validate_override:
        return None
    tightest = min(
        (rank for rank in ranks if rank.bytes_per_block), key=lambda rank: rank.available_bytes // rank.bytes_per_block
    )
    largest = tightest.available_bytes // tightest.bytes_per_block
    if override <= largest:
        return None
    return override_refusal(
        rank=tightest.rank,
        override=override,
        bytes_per_block=tightest.bytes_per_block,
        available_bytes=tightest.available_bytes,
        largest_override=largest,
    )


def _request_refusal(
    inputs: PlanInputs, groups: Sequence[KVCacheGroup], ranks: Sequence[RankPlan]
) -> PlanRefusedError | None:
    """The refusal of the longest request; with auto-fit of a single token, as any longer request may be given up."""
    max_model_len = 1 if inputs.auto_fit_max_model_len else inputs.max_model_len
    request_blocks = blocks_per_request(groups, attrs.evolve(inputs.limits, max_model_len=max_model_len))
    tightest = min((rank for rank in ranks if rank.bytes_per_block), key=lambda rank: rank.num_blocks_alone)
    if request_blocks <= tightest.num_blocks_alone - 1:
        return None
    pool_bytes = tightest.available_bytes
    if inputs.num_gpu_blocks_override is not None:
        pool_bytes = inputs.num_gpu_blocks_override * tightest.bytes_per_block
    if inputs.auto_fit_max_model_len:
        condition = PlanCondition.AUTO_FIT_ZERO
    elif pool_bytes <= tightest.bytes_per_block:
        # A byte past the null block is enough to be told how much more is needed (golden error.one-block-only).
        condition = PlanCondition.NO_AVAILABLE_MEMORY
    else:
        condition = PlanCondition.REQUEST_DOES_NOT_FIT
    return request_refusal(
        condition,
        rank=tightest.rank,
        max_model_len=max_model_len,
        needed_blocks=request_blocks,
        num_blocks=tightest.num_blocks_alone,
        bytes_per_block=tightest.bytes_per_block,
        available_bytes=pool_bytes,
        largest_max_model_len=min(rank.largest_max_model_len for rank in ranks),
        num_gpu_blocks_override=inputs.num_gpu_blocks_override,
    )


def resolve_block_sizes(inputs: PlanInputs, groups: Sequence[KVCacheGroup]) -> tuple[int, int]:
    """Tokens that scheduled lengths align to, and tokens of one prefix-hash block.

    One group: both are its block. Several: the least common multiple of their blocks, and their greatest common
    divisor; the latter stays coarse where nothing reads hashes (no prefix caching) or where states are not kept at
    aligned boundaries.
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
