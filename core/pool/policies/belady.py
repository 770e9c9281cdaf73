"""Belady's MIN: the block whose content is used again latest goes first. It needs the future."""

import math
from collections.abc import Callable, Iterable, Sequence

from ...events import Key
from .ranked import LeastWeightOrder


class BeladyOrder(LeastWeightOrder):
    """Next used latest, or never, first; ties by LRU. An upper bound for studies: no server knows the future.

        future = FutureUses(keys_of_requests)
        allocator = KVCacheAllocator(config, sinks=[log], eviction=BeladyOrder(config.num_blocks, future))
        log.replay(eviction=BeladyOrder(config.num_blocks, FutureUses(keys_of_requests)))

    `next_use(key)` says when the key is used next *after the use that is going on*: any number that grows with time,
    `math.inf` for never, not NaN. It is asked once for each block that becomes findable, and once for each keyed
    block that is adopted or shared by a fork, in the order of the events; a block of the same key learns the answer
    too. It must not raise.

    The future is an input and not in the log, so equality means: two folds of one log have equal `order` if their
    futures answer these questions alike. A function of the key alone does; one that keeps a clock must start anew for
    the replay and be at the same moment at the same event. `FutureUses` draws its clock from the questions.

    Every new block comes in, so this is not the optimum of a cache that may refuse one. A use that was foretold and
    does not come keeps its block until the key is used again. If uses come as foretold, whoever uses a block uses
    what precedes it too, so nothing is stranded.

    Source: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2),
    1966. Costs: see `LeastWeightOrder`, O(log n) for each queued block of a key at each of its uses, and about 200
    bytes more a keyed block.
    """

    name = "belady"

    def __init__(self, num_blocks: int, next_use: Callable[[Key], float]) -> None:
        super().__init__(num_blocks)
        self._next_use = next_use
        self._key_of: list[Key | None] = [None] * num_blocks
        self._blocks_of: dict[Key, list[int]] = {}

    def _admit(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Key]) -> None:
        for block, key in zip(blocks, keys, strict=True):
            self._key_of[block] = key
            self._blocks_of.setdefault(key, []).append(block)
            self._ask(key)

    def _use(self, blocks: list[int]) -> None:
        for block in blocks:
            self._ask(self._key_of[block])

    def _ask(self, key: Key) -> None:
        weight = -self._next_use(key)
        for block in self._blocks_of[key]:
            self._weight[block] = weight
            entry = self._entry_of[block]
            if entry is not None:
                self._enter(block, entry[1])

    def _forget(self, blocks: list[int]) -> None:
        super()._forget(blocks)
        for block in blocks:
            key = self._key_of[block]
            self._key_of[block] = None
            self._blocks_of[key].remove(block)
            if not self._blocks_of[key]:
                del self._blocks_of[key]


class FutureUses:
    """When each key is used next, for requests that are served whole, one after another, in a known order.

    A callable for `BeladyOrder`, good for one run. Time is the place of a use among the keys of all requests strung
    together, so of two blocks that one request will use the deeper one is used later. Each call is taken for the
    first use of its key that is not before the use of the last call, so requests that are not served, or in part, do
    no harm; requests that overlap in time do, and so do several groups, which ask once each: they need a callable
    that knows their clock. A key that is not foretold (again) is never used again. O(1) a call, amortized.
    """

    def __init__(self, keys_of_requests: Iterable[Sequence[Key]]) -> None:
        """Args: keys_of_requests: the block keys of each request, first block first, in the order of service."""
        self._now = -1
        self._uses_of: dict[Key, list[int]] = {}
        for time, key in enumerate(key for keys in keys_of_requests for key in keys):
            self._uses_of.setdefault(key, []).append(time)
        for uses in self._uses_of.values():
            uses.reverse()

    def __call__(self, key: Key) -> float:
        """The time of the key's use after the one that is going on, or infinity."""
        uses = self._uses_of.get(key, [])
        while uses and uses[-1] < self._now:
            uses.pop()
        if uses:
            self._now = uses.pop()
        return uses[-1] if uses else math.inf
