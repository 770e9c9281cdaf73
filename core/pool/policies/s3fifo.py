"""S3-FIFO: a small queue that new blocks must survive, a main queue, and a memory of what the small one let go."""

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from itertools import islice

import attrs

from .policy import EvictionPolicy, eviction_policies

_SMALL_SHARE = 10  # percent of the usable blocks
_MAX_USES = 3


@attrs.frozen
class _Walk:
    """A search for victims: what the state will be after it, as changes to the state before."""

    victims: list[int]
    demoted: list[int]  # victims that leave the small queue, and so become ghosts
    moved: deque[int]  # blocks that end up at the back of the main queue, in order
    uses: dict[int, int]  # of the blocks in `moved`, among others


@eviction_policies.register("s3fifo")
class S3Fifo(EvictionPolicy):
    """New blocks join the small queue; what is used twice there moves to the main queue, the rest is evicted.

    The search for a victim starts in the small queue while that holds at least 10 % of the usable blocks, and in the
    main queue otherwise; where one has no free block, it goes on in the other. The oldest block of the small queue
    moves to the back of the main queue if it was used more than once, and its uses are forgotten; otherwise it is
    evicted and its key becomes a ghost. The oldest block of the main queue goes to the back with one use less if it
    has any; otherwise it is evicted. Uses count from 0 when a block becomes findable, adoptions and forks alike, up to
    3. A key that becomes findable while it is a ghost joins the main queue. There are as many ghosts as blocks in 90 %
    of the pool; evictions by id leave none, and a reset keeps them. Held blocks are passed over and keep their place.

    Of blocks cached by one event the deeper count as the older. Older blocks can go before newer ones of the same
    request, and those in one queue before those in the other: S3-FIFO strands. Blocks taken out of turn (several
    groups share one head) leave without moving others.

    Source: J. Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. The paper goes on in the
    small queue until one block is evicted; here its size is compared before each step. Admissions and uses are O(1)
    per block, evictions and `victims` O(count), amortized, and one step more for each held block passed over. About
    200 bytes per cached block and 250 per ghost.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        num_usable = num_blocks - 1
        self._small_target = max(1, num_usable * _SMALL_SHARE // 100)
        self._max_ghosts = num_usable - self._small_target
        # Blocks from the oldest to the newest, each with its name: its key and cache group.
        self._small: OrderedDict[int, Hashable] = OrderedDict()
        self._main: OrderedDict[int, Hashable] = OrderedDict()
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()  # names
        self._uses = bytearray(num_blocks)
        self._walked = _Walk([], [], deque(), {})  # the latest search

    def admit(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Hashable]) -> None:
        ghosts, small, main, uses = self._ghosts, self._small, self._main, self._uses
        for block in blocks:
            uses[block] = 0
        names = keys if group == 0 else [(group, key) for key in keys]  # groups share keys, but no ghosts
        blocks, names = self.deepest_first(blocks, indices), self.deepest_first(names, indices)
        if ghosts.keys().isdisjoint(names):
            small.update(zip(blocks, names, strict=True))
            return
        for block, name in zip(blocks, names, strict=True):
            if name in ghosts:
                del ghosts[name]
                main[block] = name
            else:
                small[block] = name

    def use(self, blocks: Sequence[int]) -> None:
        uses = self._uses
        for block in blocks:
            if uses[block] < _MAX_USES:
                uses[block] += 1

    def victims(self, count: int) -> list[int]:
        self._walked = self._walk(count)
        return self._walked.victims

    def evict(self, blocks: Sequence[int]) -> None:
        walk = self._walked if blocks is self._walked.victims else self._walk(len(blocks))
        small, main, ghosts = self._small, self._main, self._ghosts
        demoted: Sequence[int] = walk.demoted
        if blocks is walk.victims or set(blocks) == set(walk.victims):
            for block in walk.moved:
                main[block] = small.pop(block) if block in small else main.pop(block)
                self._uses[block] = walk.uses[block]
        else:
            demoted = [block for block in blocks if block in small]
        if len(demoted) == len(blocks):  # the usual case: all of them leave the small queue
            names = list(map(small.pop, demoted))
        else:
            names = [small[block] for block in demoted]
            self.forget(blocks)  # a victim that moved on the way is still in the queue that it came from
        new_ghosts = dict.fromkeys(names)
        if len(new_ghosts) == len(names) and ghosts.keys().isdisjoint(new_ghosts):
            ghosts.update(new_ghosts)
        else:
            for name in names:
                ghosts[name] = None
                ghosts.move_to_end(name)
        for _ in range(len(ghosts) - self._max_ghosts):
            ghosts.popitem(last=False)

    def forget(self, blocks: Sequence[int]) -> None:
        small, main = self._small, self._main
        for block in blocks:
            del (small if block in small else main)[block]

    def _walk(self, count: int) -> _Walk:
        uses, target, num_small = self._uses, self._small_target, len(self._small)
        if num_small - count >= target:
            oldest = list(islice(self.free_among(self._small), count))
            if len(oldest) == count and max(map(uses.__getitem__, oldest), default=0) < 2:
                return _Walk(oldest, oldest, deque(), {})  # the usual case
        small, main = self.free_among(self._small), self.free_among(self._main)
        walk = _Walk([], [], deque(), {})
        victims, demoted, moved, new_uses = walk.victims, walk.demoted, walk.moved, walk.uses
        while len(victims) < count:
            block = next(small, 0) if num_small >= target else 0  # 0: no free block is left
            is_small = block > 0
            if not block:
                block = next(main, 0) or (moved.popleft() if moved else 0)
            if not block:
                block, is_small = next(small), True
            if is_small:
                num_small -= 1
                if uses[block] > 1:
                    new_uses[block] = 0
                    moved.append(block)
                else:
                    victims.append(block)
                    demoted.append(block)
            elif num_uses := new_uses.get(block, uses[block]):
                new_uses[block] = num_uses - 1
                moved.append(block)
            else:
                victims.append(block)
        return walk
