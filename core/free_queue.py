"""The free queue: unreferenced blocks in the order in which they will be taken, with O(1) removal from the middle.

The queue is an array with holes. `position_of[block]` says where a block stands, so a prefix hit removes it by
leaving a hole; taking from the head skips holes; when an end of the array is reached the live entries are moved to
its middle, which happens after at least half a pool of insertions and so costs a few nanoseconds each. Whole batches
move by slices. A linked list of objects, the usual structure, costs 100 bytes a block and a pointer chase per step.
"""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .errors import MisuseError
from .events import Key

# Below this many blocks a Python loop over array.array beats NumPy's fixed cost per call.
_NUMPY_PAYS_FROM = 48


class FreeQueue:
    """Unreferenced blocks, head first. The LRU order of vLLM's pool: see `BlockPool.release` for who goes where.

    Blocks are ids `1 .. num_blocks - 1` (0 is the null block and never queued); each is queued at most once, which
    the pool guarantees. 12 bytes a block.
    """

    name = "lru"
    observes_keys = False

    def __init__(self, num_blocks: int) -> None:
        usable = num_blocks - 1
        self._capacity = 2 * usable + 64
        self._ring = array("i", bytes(4 * self._capacity))
        self._position_of = array("i", bytes(4 * num_blocks))
        self._ring_view = np.frombuffer(self._ring, dtype=np.int32)
        self._position_view = np.frombuffer(self._position_of, dtype=np.int32)
        self._num_queued = 0
        self._head = self._tail = 0
        self._place_in_the_middle(np.arange(1, num_blocks, dtype=np.int32))
        self._peeked: tuple[int, ...] = ()
        self._peeked_end = -1

    def __len__(self) -> int:
        return self._num_queued

    def order(self) -> list[int]:
        """Every queued block, head first. O(length)."""
        live = self._ring_view[self._head : self._tail]
        return live[live != 0].tolist()

    def peek(self, count: int) -> tuple[int, ...]:
        """The `count` blocks that will be taken next, in order; nothing changes.

        Raises:
            MisuseError: fewer are queued.
        """
        if count > self._num_queued:
            raise MisuseError(f"{count} blocks are asked for, but {self._num_queued} are queued")
        head = self._head
        holes = self._tail - head - self._num_queued
        stop = head + count
        found = self._ring[head:stop].tolist()
        if holes and 0 in found:
            found = [block for block in found if block]
            while len(found) < count:
                more = self._ring[stop : stop + count].tolist()
                wanted = count - len(found)
                live = [block for block in more if block]
                if len(live) >= wanted:
                    live = live[:wanted]
                    stop = self._position_of[live[-1]] + 1
                else:
                    stop += len(more)
                found += live
        self._peeked, self._peeked_end = tuple(found), stop
        return self._peeked

    def take(self, blocks: tuple[int, ...]) -> None:
        """Remove blocks that a decision took from the head (`peek` said which; a replay reads them from the event)."""
        if self._peeked_end < 0 or len(self._peeked) != len(blocks):
            self.peek(len(blocks))
        if blocks == self._peeked:
            # Holes between the old and the new head are dropped with it.
            self._head = self._peeked_end
            self._num_queued -= len(blocks)
            self._peeked_end = -1
        else:  # several groups take interleaved shares of one head
            self.remove(blocks)

    def remove(self, blocks: Sequence[int]) -> None:
        """Remove queued blocks from wherever they stand (a prefix hit adopts them)."""
        if len(blocks) < _NUMPY_PAYS_FROM:
            ring, position_of = self._ring, self._position_of
            for block in blocks:
                ring[position_of[block]] = 0
        else:
            self._ring_view[self._position_view[np.array(blocks, dtype=np.int32)]] = 0
        self._num_queued -= len(blocks)
        self._peeked_end = -1

    def append(self, blocks: Sequence[int]) -> None:
        """Queue blocks at the back, in the order given."""
        if self._tail + len(blocks) > self._capacity:
            self._compact()
        self._write(self._tail, blocks)
        self._tail += len(blocks)

    def prepend(self, blocks: Sequence[int]) -> None:
        """Queue blocks at the front, the first one given becoming the head."""
        if self._head < len(blocks):
            self._compact()
        self._head -= len(blocks)
        self._write(self._head, blocks)

    def on_cached(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Key]) -> None:
        """Not called: LRU needs to know when blocks are released, not what they hold."""

    def on_adopted(self, blocks: Sequence[int]) -> None:
        """Not called, see `on_cached`."""

    def on_uncached(self, blocks: Sequence[int]) -> None:
        """Not called, see `on_cached`."""

    def _write(self, start: int, blocks: Sequence[int]) -> None:
        count = len(blocks)
        self._num_queued += count
        self._peeked_end = -1
        if count < _NUMPY_PAYS_FROM:
            ring, position_of = self._ring, self._position_of
            if count == 1:
                ring[start] = blocks[0]
            elif count:  # nothing in place of nothing would count as a change of length
                ring[start : start + count] = array("i", blocks)
            for block in blocks:
                position_of[block] = start
                start += 1
        else:
            ids = np.array(blocks, dtype=np.int32)
            self._ring_view[start : start + count] = ids
            self._position_view[ids] = np.arange(start, start + count, dtype=np.int32)

    def _compact(self) -> None:
        live = self._ring_view[self._head : self._tail]
        self._place_in_the_middle(live[live != 0])

    def _place_in_the_middle(self, live: NDArray[np.int32]) -> None:
        self._head = (self._capacity - len(live)) // 2
        self._tail = self._head + len(live)
        self._ring_view[self._head : self._tail] = live
        self._position_view[live] = np.arange(self._head, self._tail, dtype=np.int32)
        self._num_queued = len(live)
        self._peeked_end = -1
