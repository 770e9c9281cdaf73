"""S3-FIFO: a small queue that new blocks must survive, a main queue, and a memory of what the small one let go."""

from collections import OrderedDict, deque
from collections.abc import Sequence

import attrs

from ...events import Key
from .ranked import StudyOrder, deepest_first

_SMALL_SHARE = 10  # percent of the usable blocks
_MAX_USES = 3


@attrs.frozen
class _Walk:
    """What happens until enough victims are found: the state behind it, as changes to the state before."""

    victims: list[int]
    demoted: list[int]  # those victims that leave the small queue, and so become ghosts
    moved: deque[int]  # the blocks that end up at the back of the main queue, in order
    uses: dict[int, int]  # of the blocks in `moved`, among others


class S3FifoOrder(StudyOrder):
    """New blocks join the small queue; what is used twice there moves to the main queue, the rest is evicted.

    A victim is looked for in the small queue while that holds at least 10 % of the usable blocks, and else in the
    main queue; where one has nothing unreferenced to give, in the other. The oldest block of the small queue moves to
    the back of the main queue, its uses forgotten, if it was used more than once; else it is evicted and its key
    becomes a ghost. The oldest block of the main queue goes back to its end with one use less if it has any, and else
    is evicted. Uses count from 0 when a block becomes findable, adoptions and forks alike, up to 3. A key that
    becomes findable while it is a ghost joins the main queue. There are as many ghosts as blocks in 90 % of the pool;
    evictions by id leave none, and a reset keeps them. Referenced blocks are passed over and keep their place.

    Of blocks cached by one event the deeper stand as the older. Older blocks can go before newer ones of the same
    request, and those in one queue before those in the other: S3-FIFO strands. Blocks taken out of turn (several
    groups share one head) leave without moving others.

    Source: J. Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023; the paper goes on in the
    small queue until one block is evicted, here its size is looked at before each step. Caching and uses are O(1) a
    block, eviction and `peek` O(k), amortized, and one step more for each referenced block passed over; `order` is
    O(keyed blocks). About 200 bytes a keyed block and 250 a ghost.
    """

    name = "s3fifo"

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        num_usable = num_blocks - 1
        self._small_target = max(1, num_usable * _SMALL_SHARE // 100)
        self._max_ghosts = num_usable - self._small_target
        self._small: OrderedDict[int, None] = OrderedDict()
        self._main: OrderedDict[int, None] = OrderedDict()
        self._ghosts: OrderedDict[tuple[int, Key] | None, None] = OrderedDict()
        self._uses = bytearray(num_blocks)
        self._name_of: list[tuple[int, Key] | None] = [None] * num_blocks  # group and key

    def _victims(self, count: int) -> list[int]:
        return self._walk(count).victims

    def _walk(self, count: int) -> _Walk:
        is_queued = self._is_queued
        small = (block for block in self._small if is_queued[block])
        main = (block for block in self._main if is_queued[block])
        walk = _Walk([], [], deque(), {})
        num_small = len(self._small)
        while len(walk.victims) < count:
            block = next(small, None) if num_small >= self._small_target else None
            is_small = block is not None
            if block is None:
                block = next(main, None)
            if block is None and walk.moved:
                block = walk.moved.popleft()
            if block is None:
                block, is_small = next(small), True
            num_small -= is_small
            uses = walk.uses.get(block, self._uses[block])
            if uses >= (2 if is_small else 1):
                walk.uses[block] = 0 if is_small else uses - 1
                walk.moved.append(block)
            else:
                walk.victims.append(block)
                if is_small:
                    walk.demoted.append(block)
        return walk

    def _evict(self, blocks: list[int]) -> None:
        walk = self._walk(len(blocks))
        if set(walk.victims) == set(blocks):
            for block in walk.moved:
                self._leave(block)
                self._main[block] = None
                self._uses[block] = walk.uses[block]
            demoted = walk.demoted
        else:
            demoted = [block for block in blocks if block in self._small]
        for block in demoted:
            self._remember(self._name_of[block])
        self._forget(blocks)

    def _forget(self, blocks: list[int]) -> None:
        for block in blocks:
            self._leave(block)
            self._name_of[block] = None

    def _leave(self, block: int) -> None:
        del (self._small if block in self._small else self._main)[block]

    def _remember(self, name: tuple[int, Key] | None) -> None:
        self._ghosts[name] = None
        self._ghosts.move_to_end(name)
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)

    def _admit(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Key]) -> None:
        for block, key in zip(blocks, keys, strict=True):
            self._name_of[block] = (group, key)
            self._uses[block] = 0
        for block in deepest_first(blocks, indices):
            name = self._name_of[block]
            if name in self._ghosts:
                del self._ghosts[name]
                self._main[block] = None
            else:
                self._small[block] = None

    def _use(self, blocks: list[int]) -> None:
        for block in blocks:
            if self._uses[block] < _MAX_USES:
                self._uses[block] += 1

    def _release(self, blocks: Sequence[int]) -> None:
        """Where a block stands does not depend on when it was released."""
