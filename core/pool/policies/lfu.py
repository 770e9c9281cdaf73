"""LFU: the block that was used least often goes first."""

from collections.abc import Hashable, Sequence

from .least_weight import LeastWeight
from .policy import eviction_policies


@eviction_policies.register("lfu")
class Lfu(LeastWeight):
    """Evicts the block with the fewest uses since it became findable; ties by LRU.

    Becoming findable counts as the first use. Each adoption by a request counts (a preempted request that finds its
    own blocks again included), and so does a share in a fork. Uses before an eviction are forgotten. Whoever uses a
    block also uses what precedes it, so nothing is stranded.

    Source: in-cache LFU of L. Breslau et al., "Web caching and Zipf-like distributions", INFOCOM 1999.
    """

    def admit(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Hashable]) -> None:
        for block in blocks:
            self.weight[block] = 1

    def use(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.weight[block] += 1
