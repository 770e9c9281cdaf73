"""What other eviction policies make of a prefix cache, by replaying the prompts at one capacity.

The rules are those of the LRU curve (sim/cache/lru_curve.py): sequential requests, hits are the longest cached prefix,
the blocks of the present prompt are never evicted, and among equals the last block of a prompt goes first. A prompt of
more blocks than the cache holds keeps its first ones. Only the choice of the victim differs:

    lru            least recently asked for
    fifo           longest in the cache
    lfu            asked for least often since it came in; ties by LRU
    s3fifo         S3-FIFO (SOSP'23): a small queue (10 %) filters one-time blocks, a ghost queue lets them back
    sieve          SIEVE (NSDI'24): FIFO with a hand that spares blocks asked for since it last passed
    length-aware   deepest in its prompt first; ties by LRU
    belady         asked for again latest (needs the future); every block of the present prompt comes in
    optimum        the same, but a block may stay out: no policy can serve more
"""

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

from ...core.errors import InputError
from .lru_curve import CachePoint
from .prompt_blocks import NEVER, PromptBlocks


class Policy(Protocol):
    """A cache of one capacity under one policy."""

    def serve(self, blocks: list[int]) -> int:
        """Take one prompt's blocks in, and return how many of them, from the first on, were there already."""
        ...


def replay_policy(prompts: PromptBlocks, policy: str, num_blocks: int) -> CachePoint:
    """Hits of one policy with `num_blocks` usable blocks. Raises `InputError` for an unknown policy or no blocks."""
    if policy not in POLICIES:
        raise InputError(f"--policy {policy!r} is not known; the policies are {', '.join(POLICIES)}")
    if num_blocks < 1:
        raise InputError(f"--capacities holds {num_blocks}; a cache has 1 block or more")
    if prompts.split > 1:
        raise InputError(
            f"--policy {policy} is replayed block by block, at the trace's own --block-size "
            f"({prompts.block_size * prompts.split}) or a multiple; at {prompts.block_size} only lru is to be had"
        )
    serve = POLICIES[policy](prompts, num_blocks).serve
    block_size = prompts.block_size
    hit_blocks = hit_tokens = full_block_hits = 0
    for blocks, input_length in zip(prompts, prompts.input_lengths.tolist(), strict=True):
        hits = serve(blocks)
        if hits:
            hit_blocks += hits
            hit_tokens += min(hits * block_size, input_length)
            full_block_hits += min(hits, (input_length - 1) // block_size)
    return CachePoint(num_blocks, hit_blocks, hit_tokens, full_block_hits * block_size)


class PinningCache(ABC):
    """What the policies without a view of the future share: residency, the prefix that hits, how many must go."""

    def __init__(self, prompts: PromptBlocks, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_resident = 0
        self.is_resident = bytearray(prompts.num_distinct)

    def serve(self, blocks: list[int]) -> int:
        """Take one prompt's blocks in, and return how many of them, from the first on, were there already."""
        is_resident = self.is_resident
        flags = bytes(map(is_resident.__getitem__, blocks))
        hits = flags.find(0)
        if hits < 0:
            self.record(blocks, [])
            return len(blocks)
        fresh = [block for block, flag in zip(blocks, flags, strict=True) if not flag]
        room = self.num_blocks - (len(blocks) - len(fresh))
        if len(fresh) > room:
            left_out = set(fresh[room:])
            fresh = fresh[:room]
            blocks = [block for block in blocks if block not in left_out]
        excess = self.num_resident + len(fresh) - self.num_blocks
        if excess > 0:
            self.evict(excess, set(blocks))
            self.num_resident -= excess
        self.record(blocks, fresh)
        for block in fresh:
            is_resident[block] = 1
        self.num_resident += len(fresh)
        return hits

    @abstractmethod
    def record(self, blocks: list[int], fresh: list[int]) -> None:
        """`blocks` were asked for, first block first; those in `fresh` come in."""

    @abstractmethod
    def evict(self, count: int, pinned: set[int]) -> None:
        """Clear `is_resident` of `count` blocks outside `pinned`; there are that many."""


class Lru(PinningCache):
    """Least recently asked for. The curve in one pass is the same policy at every capacity."""

    def __init__(self, prompts: PromptBlocks, num_blocks: int) -> None:
        super().__init__(prompts, num_blocks)
        self._queue: OrderedDict[int, None] = OrderedDict()

    def record(self, blocks: list[int], fresh: list[int]) -> None:
        """Every block to the recent end, the first one last."""
        queue = self._queue
        for block in reversed(blocks):
            queue[block] = None
            queue.move_to_end(block)

    def evict(self, count: int, pinned: set[int]) -> None:
        """From the old end; pinned blocks lose their place, which `record` is about to renew anyway."""
        queue, is_resident = self._queue, self.is_resident
        while count:
            block, _ = queue.popitem(last=False)
            if block not in pinned:
                is_resident[block] = 0
                count -= 1


class Fifo(PinningCache):
    """Longest in the cache, whatever was asked for since."""

    def __init__(self, prompts: PromptBlocks, num_blocks: int) -> None:
        super().__init__(prompts, num_blocks)
        self._queue: deque[int] = deque()

    def record(self, blocks: list[int], fresh: list[int]) -> None:
        """New blocks join, the last one first in line to leave."""
        self._queue.extend(reversed(fresh))

    def evict(self, count: int, pinned: set[int]) -> None:
        """From the old end; pinned blocks keep their place."""
        kept: list[int] = []
        while count:
            block = self._queue.popleft()
            if block in pinned:
                kept.append(block)
            else:
                self.is_resident[block] = 0
                count -= 1
        self._queue.extendleft(reversed(kept))


class LeastWeight(PinningCache):
    """Lowest weight first, ties by LRU: a heap of integers `weight * scale + stamp`, stale ones dropped when met.

    A stamp is given to a block each time it is asked for and grows with recency, so it also tells the block.
    """

    def __init__(self, prompts: PromptBlocks, num_blocks: int) -> None:
        super().__init__(prompts, num_blocks)
        self._scale = max(1, len(prompts.blocks))
        self._block_of_stamp: list[int] = []
        self._stamp: list[int] = [-1] * prompts.num_distinct
        self._heap: list[int] = []

    @abstractmethod
    def weight(self, block: int) -> int:
        """The present weight of a block that was just asked for."""

    def record(self, blocks: list[int], fresh: list[int]) -> None:
        """Every block gets a new stamp and its present weight."""
        stamp = len(self._block_of_stamp)
        self._block_of_stamp.extend(reversed(blocks))
        scale, heap = self._scale, self._heap
        for block in reversed(blocks):
            self._stamp[block] = stamp
            heappush(heap, self.weight(block) * scale + stamp)
            stamp += 1

    def evict(self, count: int, pinned: set[int]) -> None:
        """Lightest first; pinned blocks lose their entry, which `record` is about to renew anyway."""
        heap, scale = self._heap, self._scale
        while count:
            stamp = heappop(heap) % scale
            block = self._block_of_stamp[stamp]
            if self._stamp[block] == stamp and block not in pinned:
                self.is_resident[block] = 0
                self._stamp[block] = -1
                count -= 1


class Lfu(LeastWeight):
    """Asked for least often since it came in."""

    def __init__(self, prompts: PromptBlocks, num_blocks: int) -> None:
        super().__init__(prompts, num_blocks)
        self._frequency = [0] * prompts.num_distinct

    def record(self, blocks: list[int], fresh: list[int]) -> None:
        """Count every block once more; new ones start at 1."""
        for block in fresh:
            self._frequency[block] = 0
        for block in blocks:
            self._frequency[block] += 1
        super().record(blocks, fresh)

    def weight(self, block: int) -> int:
        """Times asked for."""
        return self._frequency[block]


class LengthAware(LeastWeight):
    """Deepest in its prompt first."""

    def __init__(self, prompts: PromptBlocks, num_blocks: int) -> None:
        super().__init__(prompts, num_blocks)
        depth = prompts.depths
        self._height = (depth.max(initial=0) - depth).tolist()

    def weight(self, block: int) -> int:
        """Distance from the deepest block of the trace."""
        return self._height[block]


class Sieve(PinningCache):
    """A FIFO queue and a hand that walks from old to new, sparing blocks asked for since it last passed."""

    def __init__(self, prompts: PromptBlocks, num_blocks: int) -> None:
        super().__init__(prompts, num_blocks)
        end = prompts.num_distinct  # one more node closes the ring: its `newer` is the oldest block
        self._end = end
        self._newer = list(range(end + 1))
        self._older = list(range(end + 1))
        self._visited = bytearray(end + 1)
        self._hand = end

    def record(self, blocks: list[int], fresh: list[int]) -> None:
        """Mark what was there; new blocks join at the new end, the last one older than the first."""
        for block in blocks:
            self._visited[block] = 1
        newer, older, end = self._newer, self._older, self._end
        for block in reversed(fresh):
            self._visited[block] = 0
            newest = older[end]
            newer[newest], older[block], newer[block], older[end] = block, newest, end, block

    def evict(self, count: int, pinned: set[int]) -> None:
        """Walk the ring; a spared block must be asked for again before the hand returns."""
        newer, older, visited = self._newer, self._older, self._visited
        hand = self._hand
        while count:
            block = newer[self._end] if hand == self._end else hand
            hand = newer[block]
            if block in pinned:
                continue
            if visited[block]:
                visited[block] = 0
                continue
            newer[older[block]], older[hand] = hand, older[block]
            self.is_resident[block] = 0
            count -= 1
        self._hand = hand


class S3Fifo(PinningCache):
    """Three FIFO queues: new blocks pass a small one; those asked for twice more move to the main one.

    A block that leaves the small queue is remembered, without content, in the ghost queue; if it is asked for while
    remembered it goes to the main queue at once.
    """

    SMALL_SHARE = 0.1
    MAX_FREQUENCY = 3

    def __init__(self, prompts: PromptBlocks, num_blocks: int) -> None:
        super().__init__(prompts, num_blocks)
        self._small_target = max(1, int(num_blocks * self.SMALL_SHARE))
        self._num_ghosts = num_blocks - self._small_target
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._frequency = bytearray(prompts.num_distinct)

    def record(self, blocks: list[int], fresh: list[int]) -> None:
        """Count what was there; new blocks join the small queue, remembered ones the main queue."""
        frequency = self._frequency
        for block in blocks:
            if frequency[block] < self.MAX_FREQUENCY:
                frequency[block] += 1
        for block in reversed(fresh):
            frequency[block] = 0
            if block in self._ghosts:
                del self._ghosts[block]
                self._main.append(block)
            else:
                self._small.append(block)

    def evict(self, count: int, pinned: set[int]) -> None:
        """From the small queue while it is over its share, else from the main queue; pinned blocks keep their place."""
        pinned_small: list[int] = []
        pinned_main: list[int] = []
        small, main, frequency = self._small, self._main, self._frequency
        while count:
            if small and (len(small) + len(pinned_small) > self._small_target or not main):
                block = small.popleft()
                if block in pinned:
                    pinned_small.append(block)
                elif frequency[block] > 1:
                    main.append(block)
                else:
                    self._remember(block)
                    self.is_resident[block] = 0
                    count -= 1
            else:
                block = main.popleft()
                if block in pinned:
                    pinned_main.append(block)
                elif frequency[block]:
                    frequency[block] -= 1
                    main.append(block)
                else:
                    self.is_resident[block] = 0
                    count -= 1
        small.extendleft(reversed(pinned_small))
        main.extendleft(reversed(pinned_main))

    def _remember(self, block: int) -> None:
        self._ghosts[block] = None
        if len(self._ghosts) > self._num_ghosts:
            self._ghosts.popitem(last=False)


class Belady:
    """The block asked for again latest goes first; every block of the present prompt comes in.

    A block is known by the index of its next block event: later events, and deeper blocks of one request, are larger.
    Blocks never asked for again only take room, so they are counted, not listed; only the first blocks of a prompt,
    its `active` ones, were there before or are asked for again.
    """

    def __init__(self, prompts: PromptBlocks, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_live = 0
        self.is_live = bytearray(prompts.num_distinct)
        self.block_of_event = prompts.blocks.tolist()
        self.next_event = prompts.next_event.tolist()
        self.active_counts = iter(prompts.active_counts.tolist())
        self.begin = 0
        self.heap: list[int] = []
        self._num_dead = 0

    def serve(self, blocks: list[int]) -> int:
        """Take one prompt's blocks in, and return how many of them, from the first on, were there already."""
        begin, end = self.begin, self.begin + len(blocks)
        active = blocks[: next(self.active_counts)]
        flags = bytes(map(self.is_live.__getitem__, active))
        num_own = sum(flags)
        num_fresh = min(len(blocks), self.num_blocks) - num_own
        excess = self.num_live + self._num_dead + num_fresh - self.num_blocks
        num_dead_evicted = min(self._num_dead, max(excess, 0))
        self._num_dead -= num_dead_evicted
        self.evict(excess - num_dead_evicted, end)
        for event, block, flag in zip(range(begin, end), active, flags, strict=False):
            if flag:
                self.num_live -= 1
            elif num_fresh:
                num_fresh -= 1
            else:
                break
            self._num_dead += not self.take(event, block)
        self._num_dead += num_fresh
        self.begin = end
        hits = flags.find(0)
        return len(active) if hits < 0 else hits

    def take(self, event: int, block: int) -> bool:
        """List the block if it is asked for again, and say whether it is."""
        upcoming = self.next_event[event]
        if upcoming == NEVER:
            self.is_live[block] = 0
            return False
        self.is_live[block] = 1
        self.num_live += 1
        heappush(self.heap, -upcoming)
        return True

    def evict(self, count: int, end: int) -> None:
        """`count` blocks that are asked for again; entries before `end` are past, or of the present prompt."""
        while count > 0:
            event = -heappop(self.heap)
            if event >= end:
                self.is_live[self.block_of_event[event]] = 0
                self.num_live -= 1
                count -= 1


class Optimum(Belady):
    """Belady where a block may also stay out: one never asked for again never takes room."""

    def serve(self, blocks: list[int]) -> int:
        """Keep, of what is there and what this prompt brings, the blocks asked for again soonest."""
        begin, end = self.begin, self.begin + len(blocks)
        active = blocks[: next(self.active_counts)]
        flags = bytes(map(self.is_live.__getitem__, active))
        self.num_live -= sum(flags)
        for event, block in zip(range(begin, end), active, strict=False):
            self.take(event, block)
        self.evict(self.num_live - self.num_blocks, end)
        self.begin = end
        hits = flags.find(0)
        return len(active) if hits < 0 else hits


POLICIES: dict[str, Callable[[PromptBlocks, int], Policy]] = {
    "lru": Lru,
    "fifo": Fifo,
    "lfu": Lfu,
    "s3fifo": S3Fifo,
    "sieve": Sieve,
    "length-aware": LengthAware,
    "belady": Belady,
    "optimum": Optimum,
}
