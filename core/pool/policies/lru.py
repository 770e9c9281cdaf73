"""LRU: the block released longest ago goes first."""

from collections.abc import Hashable, Sequence

from ..free_queue import FreeQueue
from .policy import EvictionPolicy, eviction_policies


@eviction_policies.register("lru")
class Lru(EvictionPolicy):
    """Evicts the block that was released longest ago. A request's deepest block goes first, so nothing is stranded.

    For the capacity curve; a ledger runs the free queue itself. All calls are O(1) per block, amortized.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._queue = FreeQueue(num_blocks)
        self._queue.take(self._queue.peek(num_blocks - 1))

    def admit(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Hashable]) -> None:
        """Nothing to do: a block is queued when it is released."""

    def hold(self, blocks: Sequence[int]) -> None:
        self._queue.remove(blocks)

    def release(self, blocks: Sequence[int]) -> None:
        self._queue.append(blocks)

    def victims(self, count: int) -> list[int]:
        return list(self._queue.peek(count))

    def evict(self, blocks: Sequence[int]) -> None:
        self._queue.take(tuple(blocks))

    def forget(self, blocks: Sequence[int]) -> None:
        self._queue.remove([*self.free_among(blocks)])
