"""2Q as an eviction policy of one's own: `kvledger --plugin examples/two_queues.py curve --policy lru,2q,optimum`.

T. Johnson and D. Shasha, "2Q: a low overhead high performance buffer management replacement algorithm", VLDB 1994.
"""

from collections import OrderedDict
from itertools import chain, islice

from kvledger.core import EvictionPolicy, eviction_policies


@eviction_policies.register("2q")
class TwoQueues(EvictionPolicy):
    """New blocks pass through a FIFO of a quarter of the pool; a key that soon comes back goes to an LRU queue."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.max_new, self.max_remembered = num_blocks // 4, num_blocks // 2
        self.new = OrderedDict()  # block -> its key, the oldest first
        self.hot = OrderedDict()  # the same, the one released longest ago first
        self.remembered = OrderedDict()  # keys that left `new`, the oldest first

    def admit(self, group, blocks, indices, keys):
        for block, key in self.deepest_first(list(zip(blocks, keys, strict=True)), indices):
            is_back = self.remembered.pop(key, None) is not None
            (self.hot if is_back else self.new)[block] = key

    def release(self, blocks):
        for block in filter(self.hot.__contains__, blocks):
            self.hot.move_to_end(block)

    def victims(self, count):
        new, hot = self.free_among(self.new), self.free_among(self.hot)
        too_many = islice(new, max(0, len(self.new) - self.max_new))
        return list(islice(chain(too_many, hot, new), count))

    def evict(self, blocks):
        self.remembered.update((self.new[block], True) for block in blocks if block in self.new)
        while len(self.remembered) > self.max_remembered:
            self.remembered.popitem(last=False)
        self.forget(blocks)

    def forget(self, blocks):
        for block in blocks:
            (self.new if block in self.new else self.hot).pop(block)
