"""How many users a pool serves at once: at each context length, not only at the longest.

A user of n tokens holds the blocks that one request of n tokens needs in every group. One block is reserved, so
users are counted in usable blocks. Field reports A17 and D05; TGI#832 counts the same way.
"""

from collections.abc import Sequence

import attrs

from .errors import InputError
from .max_model_len import blocks_per_request
from .planning import KVCachePlan

DEFAULT_LENGTHS = (2048, 8192, 32768, 131072)


@attrs.frozen(kw_only=True)
class CapacityRow:
    """Users of one context length.

    Attributes:
        context_tokens: prompt and output of one user.
        blocks_per_user: over all groups.
        users: that fit at once if all are of this length; None where the model cannot serve the length.
        bytes_per_user: on the rank that decides the pool.
        reason: why no figure is given.
    """

    context_tokens: int
    blocks_per_user: int
    users: int | None
    bytes_per_user: int
    reason: str = ""


def capacity_by_length(
    plan: KVCachePlan, bytes_per_block: int, lengths: Sequence[int] = DEFAULT_LENGTHS
) -> tuple[CapacityRow, ...]:
    """One row a length, shortest first; lengths beyond the model's longest request say so.

    Raises:
        InputError: a length below 1.
    """
    rows: list[CapacityRow] = []
    for length in sorted(set(lengths)):
        if length < 1:
            raise InputError(f"a context of {length} tokens; give at least 1")
        blocks = blocks_per_request(plan.groups, attrs.evolve(plan.limits, max_model_len=length))
        too_long = length > plan.max_model_len
        rows.append(
            CapacityRow(
                context_tokens=length,
                blocks_per_user=blocks,
                users=None if too_long else max(plan.num_usable_blocks, 0) // blocks,
                bytes_per_user=blocks * bytes_per_block,
                reason=f"longer than max_model_len {plan.max_model_len:,}" if too_long else "",
            )
        )
    return tuple(rows)


def users_of_mix(plan: KVCachePlan, shares: Sequence[tuple[int, float]]) -> int:
    """Users that fit at once if they are of several lengths, in the given shares.

    Args:
        plan: the pool.
        shares: (context_tokens, share of the users) pairs; the shares add up to 1.

    Raises:
        InputError: shares that do not add up to 1, or a length that the plan cannot serve.
    """
    total = sum(share for _, share in shares)
    if abs(total - 1) > 1e-6 or any(share < 0 for _, share in shares):
        raise InputError(f"the shares of a mix add up to {total:g}; they must be parts of 1")
    too_long = [length for length, _ in shares if length > plan.max_model_len]
    if too_long:
        raise InputError(f"a context of {max(too_long):,} tokens is longer than max_model_len {plan.max_model_len:,}")
    mean_blocks = sum(
        share * blocks_per_request(plan.groups, attrs.evolve(plan.limits, max_model_len=length))
        for length, share in shares
    )
    return int(max(plan.num_usable_blocks, 0) / mean_blocks)
