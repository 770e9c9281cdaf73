"""One rank's part of an engine's pool, and how many blocks a request takes of it."""

from collections.abc import Sequence

import attrs

from .inputs import PlanInputs
from .layout import KVCacheGroup, pool_bytes_per_block, require_expressible
from .specs import ServingLimits


def blocks_per_request(groups: Sequence[KVCacheGroup], limits: ServingLimits) -> int:
    """Most blocks that one request of `limits.max_model_len` tokens holds at once, over all groups.

    Every group draws its own blocks from the one pool, also on a rank that holds none of the group's layers.

    Raises:
        InputError: `limits` lacks a value that a group's kind depends on.
    """
    return sum(group.spec.max_blocks_per_request(limits) for group in groups)


def largest_max_model_len(groups: Sequence[KVCacheGroup], limits: ServingLimits, num_usable_blocks: int) -> int:
    """The longest request, up to `limits.max_model_len`, that `num_usable_blocks` serve; 0 if not even one token fits.

    Bisection finds it, because a longer request never needs fewer blocks.
    """
    fits, too_long = 0, limits.max_model_len + 1
    while too_long - fits > 1:
        length = (fits + too_long) // 2
        if blocks_per_request(groups, attrs.evolve(limits, max_model_len=length)) <= num_usable_blocks:
            fits = length
        else:
            too_long = length
    return fits


@attrs.frozen(kw_only=True)
class RankPlan:
    """One rank's part of the pool. `available = used + idle + remainder`, all in bytes.

    Attributes:
        rank: its place in `available_bytes`.
        groups: the engine's groups with the layers that this rank holds.
        available_bytes: memory for its KV cache, as given.
        bytes_per_block: bytes of one block on this rank; 0 if it holds no layer.
        num_blocks_alone: blocks that it would hold alone (or those of the override).
        num_blocks: blocks that it holds: those of the tightest rank.
        request_bytes: bytes of one request of the requested length, in whole blocks.
        largest_max_model_len: longest request that this rank alone serves, up to the requested length.
        is_bottleneck: whether this rank decides `num_blocks`.
    """

    rank: int
    groups: tuple[KVCacheGroup, ...]
    available_bytes: int
    bytes_per_block: int
    num_blocks_alone: int
    num_blocks: int
    request_bytes: int
    largest_max_model_len: int
    is_bottleneck: bool

    @property
    def num_layers(self) -> int:
        """Layers that the rank holds."""
        return sum(len(group.layer_names) for group in self.groups)

    @property
    def bytes_used(self) -> int:
        """Bytes of the rank's buffer."""
        return self.num_blocks * self.bytes_per_block

    @property
    def idle_bytes(self) -> int:
        """Bytes of whole blocks that fit into the memory but that another rank, an override or a cap leaves unused."""
        if self.bytes_per_block == 0:
            return 0
        return max(self.available_bytes // self.bytes_per_block - self.num_blocks, 0) * self.bytes_per_block

    @property
    def remainder_bytes(self) -> int:
        """Bytes left after whole blocks; negative if an override takes more than is available."""
        return self.available_bytes - self.bytes_used - self.idle_bytes


def plan_ranks_alone(inputs: PlanInputs, groups: tuple[KVCacheGroup, ...]) -> tuple[RankPlan, ...]:
    """Plan each rank as if it were alone.

    Raises:
        InputError: the layout cannot express the pages, or a value that the layers depend on is missing.
    """
    request_blocks = blocks_per_request(groups, inputs.limits)
    ranks: list[RankPlan] = []
    for rank, available_bytes in enumerate(inputs.available_bytes):
        rank_groups = tuple(group.on_rank(frozenset(inputs.layers_of_rank(rank))) for group in groups)
        require_expressible(rank_groups, inputs.layout)
        block_bytes = pool_bytes_per_block(rank_groups)
        num_blocks_alone = available_bytes // block_bytes if block_bytes else 0
        if inputs.num_gpu_blocks_override is not None:
            num_blocks_alone = inputs.num_gpu_blocks_override
        ranks.append(
            RankPlan(
                rank=rank,
                groups=rank_groups,
                available_bytes=available_bytes,
                bytes_per_block=block_bytes,
                num_blocks_alone=num_blocks_alone,
                num_blocks=num_blocks_alone,
                request_bytes=request_blocks * block_bytes,
                largest_max_model_len=largest_max_model_len(groups, inputs.limits, num_blocks_alone - 1)
                if block_bytes
                else inputs.max_model_len,
                is_bottleneck=False,
            )
        )
    return tuple(ranks)


def tightest_rank(ranks: Sequence[RankPlan]) -> RankPlan:
    """The first of the ranks that hold the fewest blocks alone; ranks without layers do not count."""
    return min((rank for rank in ranks if rank.bytes_per_block), key=lambda rank: rank.num_blocks_alone)


def share_pool(rank: RankPlan, inputs: PlanInputs, ranks: Sequence[RankPlan], num_blocks: int) -> RankPlan:
    """Give the rank the blocks of the tightest one; under an override no rank is a bottleneck."""
    decides = rank.bytes_per_block > 0 and rank.num_blocks_alone == tightest_rank(ranks).num_blocks_alone
    return attrs.evolve(rank, num_blocks=num_blocks, is_bottleneck=decides and inputs.num_gpu_blocks_override is None)
