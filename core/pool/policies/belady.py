"""Belady's MIN: the block that is used again latest is evicted first. It needs to know the requests to come."""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import islice

from ..eviction_order import BELADY, PolicyOrder
from .policy import EvictionPolicy


class Belady(EvictionPolicy):
    """Evicts the block that is used again latest, or never; ties by LRU. See `BeladyOrder`.

    Blocks never used again wait in an LRU queue, at O(1) per block. The others wait in a lazy heap of
    `(-next use, release, block)`: an entry that is no longer its block's is dropped when it is met, and what `victims`
    took off the heap stays aside until the next call. A release costs O(log n) per block, `victims` and `evict`
    together the same, amortized; the order of all n free blocks O(n log n). About 250 bytes per free block, and 200
    per cached one.
    """

    def __init__(self, num_blocks: int, next_use: Callable[[Hashable], float]) -> None:
        super().__init__(num_blocks)
        self._ask = next_use
        self._next_use = [math.inf] * num_blocks
        self._key_of: list[Hashable] = [None] * num_blocks
        self._block_of: dict[Hashable, int] = {}
        self._copies: dict[Hashable, list[int]] = {}  # all blocks of each key that several have
        self._never: OrderedDict[int, None] = OrderedDict()
        self._entry_of: list[tuple[float, int, int] | None] = [None] * num_blocks
        self._heap: list[tuple[float, int, int]] = []
        self._aside: list[tuple[float, int, int]] = []
        self._num_releases = 0

    def admit(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Hashable]) -> None:
        block_of, key_of, next_uses, ask = self._block_of, self._key_of, self._next_use, self._ask
        for block, key in zip(blocks, keys, strict=True):
            key_of[block] = key
            first = block_of.setdefault(key, block)
            if first == block:
                next_uses[block] = ask(key)
            else:
                self._learn(key)
                next_uses[block] = next_uses[first]
                self._copies.setdefault(key, [first]).append(block)

    def use(self, blocks: Sequence[int]) -> None:
        if self._copies:
            for block in blocks:
                self._learn(self._key_of[block])
            return
        next_uses, key_of, ask = self._next_use, self._key_of, self._ask
        for block in blocks:
            next_uses[block] = ask(key_of[block])

    def _learn(self, key: Hashable) -> None:
        next_use = self._ask(key)
        for block in self._copies.get(key) or (self._block_of[key],):
            if self.is_held[block]:
                self._next_use[block] = next_use
            else:
                self.hold((block,))
                self._next_use[block] = next_use
                self.release((block,))

    def hold(self, blocks: Sequence[int]) -> None:
        entry_of = self._entry_of
        for block in blocks:
            if entry_of[block] is None:
                del self._never[block]
            else:
                entry_of[block] = None

    def release(self, blocks: Sequence[int]) -> None:
        next_uses, num_releases = self._next_use, self._num_releases
        for block in blocks:
            next_use = next_uses[block]
            if next_use == math.inf:
                self._never[block] = None
            else:
                entry = self._entry_of[block] = (-next_use, num_releases, block)
                heappush(self._heap, entry)
                num_releases += 1
        self._num_releases = num_releases
        if len(self._heap) > 2 * len(self._entry_of) + 64:
            self._heap = sorted([entry for entry in self._entry_of if entry is not None])
            self._aside.clear()

    def victims(self, count: int) -> list[int]:
        entry_of, heap, aside = self._entry_of, self._heap, self._aside
        for entry in aside:
            if entry is entry_of[entry[2]]:
                heappush(heap, entry)
        aside.clear()
        never = list(islice(self._never, count))
        while len(never) + len(aside) < count:
            entry = heappop(heap)
            if entry is entry_of[entry[2]]:
                aside.append(entry)
        return never + [block for *_, block in aside]

    def forget(self, blocks: Sequence[int]) -> None:
        self.hold([*self.free_among(blocks)])
        for block in blocks:
            key = self._key_of[block]
            others = self._copies.get(key)
            if others is None:
                del self._block_of[key]
                continue
            others.remove(block)
            self._block_of[key] = others[0]
            if len(others) == 1:
                del self._copies[key]


class BeladyOrder(PolicyOrder):
    """Evicts the block whose next use is farthest away, or never comes; among equals the least recently used one.

    An upper bound for studies: no server knows which requests will come.

        future = FutureUses(keys_of_requests)
        allocator = KVCacheAllocator(config, sinks=[log], eviction=BeladyOrder(config.num_blocks, future))
        log.replay(eviction=BeladyOrder(config.num_blocks, FutureUses(keys_of_requests)))

    `next_use(key)` says when the key is used next *after the present use*: any number that grows with time, `math.inf`
    for never, not NaN. The order asks once for each block that becomes findable, and once for each keyed block that is
    adopted or shared by a fork, in the order of the events. Other blocks of the same key learn the answer too; one that
    is free counts as released at that moment. `next_use` must not raise.

    The future is an input and not in the log, so equality means: two folds of one log have equal `order` if their
    futures answer these questions alike. A function of the key alone does; one that keeps a clock must start from the
    beginning for the replay and be at the same moment at the same event. `FutureUses` draws its clock from the
    questions.

    Every new block comes in, so this is not the optimum of a cache that may refuse one. A predicted use that does not
    come keeps its block until the key is used again. If uses come as predicted, whoever uses a block also uses what
    precedes it, so nothing is stranded.

    Source: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2),
    1966. Costs: see `Belady`.
    """

    name = BELADY

    def __init__(self, num_blocks: int, next_use: Callable[[Hashable], float]) -> None:
        super().__init__(BELADY, Belady(num_blocks, next_use))


class FutureUses:
    """When each key is used next, for requests that are served whole, one after another, in a known order.

    A callable for `BeladyOrder`, good for one run. Time is the position of a use among the keys of all requests put
    one after another, so of two blocks that one request will use the deeper one is used later. Each call stands for
    the first use of its key at or after the use of the last call, so it does no harm if a request is not served, or in
    part. Requests that overlap in time need a callable that knows their clock, and so do several groups, which ask
    once each. A key that does not occur again is never used again. O(1) per call, amortized.
    """

    def __init__(self, keys_of_requests: Iterable[Sequence[Hashable]]) -> None:
        """Args: keys_of_requests: the block keys of each request, first block first, in the order of service."""
        self._now = -1
        self._uses_of: dict[Hashable, list[int]] = {}
        for time, key in enumerate(key for keys in keys_of_requests for key in keys):
            self._uses_of.setdefault(key, []).append(time)
        for uses in self._uses_of.values():
            uses.reverse()

    def __call__(self, key: Hashable) -> float:
        """The time of the key's use after the present one, or infinity."""
        uses = self._uses_of.get(key, [])
        while uses and uses[-1] < self._now:
            uses.pop()
        if uses:
            self._now = uses.pop()
        return uses[-1] if uses else math.inf
