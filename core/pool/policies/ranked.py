"""Eviction orders for studies: what they share, and those that rank blocks (fifo, lfu, length-aware).

What an order costs is stated with it: n is the number of queued blocks, k the number of blocks of a call.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from ...events import Key
from ..free_queue import FreeQueue


def deepest_first(blocks: Sequence[int], indices: Sequence[int]) -> list[int]:
    """The blocks by falling logical index; equally deep ones (of different requests) as given."""
    return [blocks[place] for place in sorted(range(len(blocks)), key=indices.__getitem__, reverse=True)]


class StudyOrder(ABC):
    """What the study orders share: unkeyed blocks go first, as vLLM's stack; a policy orders the keyed ones.

    A queued block that loses its key goes behind the other unkeyed ones. Of several that lose theirs together, the
    one that the policy would have evicted first comes first, so a reset leaves `order` as it was.

    An order strands a block if it evicts what precedes it in its request: the block stays cached, and no lookup finds
    it until what precedes it is cached again. Each order says whether it can; keys dropped by id strand under any.

    A policy sees every keyed block, referenced or queued, and may hand out queued ones only (`_is_queued`). What
    `_victims` says is a function of its state, and `_evict` moves that state on to where the last victim was found.
    The common part costs O(k) a call and 14 bytes a block.
    """

    name: str
    observes_keys = True

    def __init__(self, num_blocks: int) -> None:
        self._unkeyed = FreeQueue(num_blocks)
        self._is_keyed = bytearray(num_blocks)
        self._is_queued = bytearray(num_blocks)  # keyed blocks only
        self._num_queued = 0

    def __len__(self) -> int:
        return len(self._unkeyed) + self._num_queued

    def order(self) -> list[int]:
        """Every queued block, the next one to be taken first."""
        return self._unkeyed.order() + self._victims(self._num_queued)

    def peek(self, count: int) -> tuple[int, ...]:
        """The next `count <= len` blocks to be taken, in order; changes nothing that `order` shows."""
        num_unkeyed = min(count, len(self._unkeyed))
        head = self._unkeyed.peek(num_unkeyed)
        return head if num_unkeyed == count else (*head, *self._victims(count - num_unkeyed))

    def take(self, blocks: tuple[int, ...]) -> None:
        """These blocks were taken: the next ones in any order, or (several groups share them out) some of those."""
        keyed, unkeyed = self._by_key(blocks)
        if unkeyed:
            self._unkeyed.take(unkeyed)
        if keyed:
            self._evict(keyed)
            for block in keyed:
                self._is_keyed[block] = self._is_queued[block] = 0
            self._num_queued -= len(keyed)

    def remove(self, blocks: Sequence[int]) -> None:
        """These queued blocks are referenced again, their content intact."""
        keyed, unkeyed = self._by_key(blocks)
        if unkeyed:
            self._unkeyed.remove(unkeyed)
        for block in keyed:
            self._is_queued[block] = 0
        self._num_queued -= len(keyed)

    def append(self, blocks: Sequence[int]) -> None:
        """Keyed blocks lost their last reference, in this order."""
        for block in blocks:
            self._is_queued[block] = 1
        self._num_queued += len(blocks)
        self._release(blocks)

    def prepend(self, blocks: Sequence[int]) -> None:
        """Unkeyed blocks lost their last reference, in this order; the first one is to be taken next."""
        self._unkeyed.prepend(blocks)

    def on_cached(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Key]) -> None:
        """Blocks of a group became findable under `keys`; `indices` are their logical indices (their depth)."""
        for block in blocks:
            self._is_keyed[block] = 1
        self._admit(group, blocks, indices, keys)

    def on_adopted(self, blocks: Sequence[int]) -> None:
        """Blocks were found and adopted, or shared by a fork, which may give away unkeyed ones too."""
        keyed, _ = self._by_key(blocks)
        self._use(keyed)

    def on_uncached(self, blocks: Sequence[int]) -> None:
        """Blocks lost their key where they stand, queued or not. O(order) if several of them are queued."""
        keyed, _ = self._by_key(blocks)
        queued = [block for block in keyed if self._is_queued[block]]
        if len(queued) > 1:
            chosen = set(queued)
            queued = [block for block in self._victims(self._num_queued) if block in chosen]
        self._forget(keyed)
        for block in keyed:
            self._is_keyed[block] = self._is_queued[block] = 0
        self._num_queued -= len(queued)
        self._unkeyed.append(queued)

    def _by_key(self, blocks: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
        is_keyed = self._is_keyed
        keyed = [block for block in blocks if is_keyed[block]]
        unkeyed = () if len(keyed) == len(blocks) else tuple([block for block in blocks if not is_keyed[block]])
        return keyed, unkeyed

    # -- the policy --------------------------------------------------------------------------------------------------

    @abstractmethod
    def _victims(self, count: int) -> list[int]:
        """The next `count` keyed, queued blocks to be evicted, in order. Changes nothing that this shows."""

    @abstractmethod
    def _evict(self, blocks: list[int]) -> None:
        """These keyed, queued blocks are taken; usually `_victims(len(blocks))`, in any order."""

    @abstractmethod
    def _forget(self, blocks: list[int]) -> None:
        """These blocks are no longer keyed, for another reason than an eviction."""

    @abstractmethod
    def _admit(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Key]) -> None:
        """These referenced blocks are keyed from now on."""

    @abstractmethod
    def _use(self, blocks: list[int]) -> None:
        """These keyed blocks were found by a request, or shared by a fork."""

    @abstractmethod
    def _release(self, blocks: Sequence[int]) -> None:
        """These keyed blocks are queued from now on."""


class LeastWeightOrder(StudyOrder):
    """Lowest weight first; among equals the one released longest ago, which is vLLM's LRU and its tail first.

    A lazy heap of `(weight, release, block)`: an entry that is no longer its block's is dropped when it is met, and
    the heap is rebuilt when more than half of it is such. What `peek` took off the heap stays aside, in order, until
    something else is asked. A release costs O(log n) a block, `peek` and `take` together the same, amortized; reuse
    and uses are O(k); `order` is O(n log n). About 200 bytes a queued block.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._weight: list[float] = [0] * num_blocks
        self._entry_of: list[tuple[float, int, int] | None] = [None] * num_blocks
        self._heap: list[tuple[float, int, int]] = []
        self._peeked: list[tuple[float, int, int]] = []
        self._num_releases = 0

    def remove(self, blocks: Sequence[int]) -> None:
        """These queued blocks are referenced again, their content intact."""
        super().remove(blocks)
        for block in blocks:
            self._entry_of[block] = None

    def _victims(self, count: int) -> list[int]:
        entry_of, heap, peeked = self._entry_of, self._heap, self._peeked
        for entry in peeked:
            if entry is entry_of[entry[2]]:
                heappush(heap, entry)
        peeked.clear()
        if count == self._num_queued:
            live = sorted([entry for entry in heap if entry is entry_of[entry[2]]])
            heap[:] = live
            return [block for *_, block in live]
        while len(peeked) < count:
            entry = heappop(heap)
            if entry is entry_of[entry[2]]:
                peeked.append(entry)
        return [block for *_, block in peeked]

    def _evict(self, blocks: list[int]) -> None:
        self._forget(blocks)

    def _forget(self, blocks: list[int]) -> None:
        for block in blocks:
            self._entry_of[block] = None

    def _release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._enter(block, self._num_releases)
            self._num_releases += 1

    def _enter(self, block: int, release: int) -> None:
        entry = (self._weight[block], release, block)
        self._entry_of[block] = entry
        heappush(self._heap, entry)
        if len(self._heap) > 2 * self._num_queued + 64:
            self._heap = [live for live in self._entry_of if live is not None]
            self._peeked.clear()
            heapify(self._heap)


class FifoOrder(LeastWeightOrder):
    """Longest in the cache first, by the time at which a block became findable; hits do not refresh it.

    Of blocks cached by one event the deeper go first. Blocks of one request that were cached by different events
    (chunks of its prompt, output, or a prefix that it found) go in that order, shallower first: FIFO strands.

    Source: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2),
    1966. Costs: see `LeastWeightOrder`.
    """

    name = "fifo"

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._num_cached = 0

    def _admit(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Key]) -> None:
        for block in deepest_first(blocks, indices):
            self._weight[block] = self._num_cached
            self._num_cached += 1

    def _use(self, blocks: list[int]) -> None:
        """A hit changes nothing."""


class LfuOrder(LeastWeightOrder):
    """Used least often since it became findable first; ties by LRU.

    Becoming findable counts as the first use; each adoption by a request counts, a preempted request that finds its
    own blocks again among them, and so does a share in a fork. Uses before an eviction are forgotten. Whoever uses a
    block uses what precedes it too, so nothing is stranded.

    Source: in-cache LFU of L. Breslau et al., "Web caching and Zipf-like distributions", INFOCOM 1999. Costs: see
    `LeastWeightOrder`.
    """

    name = "lfu"

    def _admit(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Key]) -> None:
        for block in blocks:
            self._weight[block] = 1

    def _use(self, blocks: list[int]) -> None:
        for block in blocks:
            self._weight[block] += 1


class LengthAwareOrder(LeastWeightOrder):
    """Deepest in its request first, by logical index; ties by LRU. Nothing is stranded.

    Groups of different block sizes compare by index, not by tokens.

    Source: the LengthAwareCache of R. Qin et al., "Mooncake: a KVCache-centric disaggregated architecture for LLM
    serving", 2024, arXiv:2407.00079. Costs: see `LeastWeightOrder`.
    """

    name = "length-aware"

    def _admit(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Key]) -> None:
        for block, index in zip(blocks, indices, strict=True):
            self._weight[block] = -index

    def _use(self, blocks: list[int]) -> None:
        """A hit changes nothing."""
