"""How many users fit at each context length, and in a mix of lengths, not only at the maximum length."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

import attrs

from .errors import InputError
from .kv_cache_spec import CrossAttentionSpec, FullAttentionSpec, KVCacheSpec
from .latent_and_state_spec import LatentSpec
from .max_model_len import blocks_per_request
from .planning import KVCachePlan
from .serving_limits import ServingLimits

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
