"""What LFU and length-aware eviction share: the lightest block goes first, ties by LRU."""

from bisect import insort
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from .policy import EvictionPolicy


class LeastWeight(EvictionPolicy):
    """Evicts the block of least `weight`; among equals the one released longest ago, which is vLLM's LRU.

    Free blocks are queued by weight, one queue for each weight there is; a search drops the empty queues that it meets.
    All calls are O(1) per block, amortized, and O(weights) where the first block of a weight comes. A subclass changes
    the weight of held blocks only.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.weight = [0] * num_blocks
        self._queues: dict[int, OrderedDict[int, None]] = {}
        self._weights: list[int] = []  # of the queues, sorted

    def hold(self, blocks: Sequence[int]) -> None:
        weight, queues = self.weight, self._queues
        for block in blocks:
            del queues[weight[block]][block]

    def release(self, blocks: Sequence[int]) -> None:
        weight, queues = self.weight, self._queues
        for block in blocks:
            queue = queues.get(weight[block])
            if queue is None:
                queue = queues[weight[block]] = OrderedDict()
                insort(self._weights, weight[block])
            queue[block] = None

    def victims(self, count: int) -> list[int]:
        found: list[int] = []
        empty: list[int] = []
        for weight in self._weights:
            queue = self._queues[weight]
            if not queue:
                empty.append(weight)
                continue
            found += islice(queue, count - len(found))
            if len(found) == count:
                break
        for weight in empty:
            del self._queues[weight]
        if empty:
            self._weights = [weight for weight in self._weights if weight in self._queues]
        return found

    def forget(self, blocks: Sequence[int]) -> None:
        self.hold([*self.free_among(blocks)])
