"""Length-aware eviction: the block deepest in its request goes first."""

from collections.abc import Hashable, Sequence

from .least_weight import LeastWeight
from .policy import eviction_policies


@eviction_policies.register("length-aware")
class LengthAware(LeastWeight):
    """Evicts the block with the largest logical index in its request; ties by LRU. Nothing is stranded.

    Groups of different block sizes compare by index, not by tokens.

    Source: the LengthAwareCache of R. Qin et al., "Mooncake: a KVCache-centric disaggregated architecture for LLM
    serving", 2024, arXiv:2407.00079.
    """

    def admit(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Hashable]) -> None:
        for block, index in zip(blocks, indices, strict=True):
            self.weight[block] = -index
