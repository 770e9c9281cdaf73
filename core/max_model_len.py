"""How many blocks one request can need, and the longest request that a rank's memory serves."""

from collections.abc import Sequence

import attrs

from .kv_cache_config import KVCacheGroup
from .serving_limits import ServingLimits


def blocks_per_request(groups: Sequence[KVCacheGroup], limits: ServingLimits) -> int:
    """Most blocks that one request of `limits.max_model_len` tokens holds at once, over all groups.

    Every group draws its own blocks from the one pool, also on a rank that holds none of the group's layers.

    Raises:
        InputError: `limits` lacks a value that a group's kind depends on.
    """
    return sum(group.spec.max_blocks_per_request(limits) for group in groups)


def largest_max_model_len(groups: Sequence[KVCacheGroup], limits: ServingLimits, num_usable_blocks: int) -> int:
    """The longest request, up to `limits.max_model_len`, that `num_usable_blocks` serve; 0 if not even one token fits.

    Found by bisection, which is sound as the blocks of a request never shrink when it grows.
    """
    fits, too_long = 0, limits.max_model_len + 1
    while too_long - fits > 1:
        length = (fits + too_long) // 2
        if blocks_per_request(groups, attrs.evolve(limits, max_model_len=length)) <= num_usable_blocks:
            fits = length
        else:
            too_long = length
    return fits
