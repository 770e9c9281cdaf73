"""The free queue: unreferenced blocks in the order in which they will be taken, with O(1) removal from the middle.

Keyed blocks join a line at its back, unkeyed ones a stack in front of it. A prefix hit takes a block out of the middle
by noting that one more of its entries in the line is out of date; a block's entries stand in the order in which it
was queued, so it is the oldest ones that are, and whoever meets one at the head skips it. When the line has grown to
twice the pool its outdated entries are dropped, which happens after at least a pool of insertions and so costs a few
nanoseconds each. Whole batches come and go as slices of a list. A linked list of objects, the usual structure, costs
100 bytes a block and a pointer chase per step.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from .errors import MisuseError
from .events import Key

# Below this many blocks a Python loop beats NumPy's fixed cost per call.
_NUMPY_PAYS_FROM = 64


class FreeQueue:
    """Unreferenced blocks, head first. The LRU order of vLLM's pool: see `BlockPool.release` for who goes where.

    Blocks are ids `1 .. num_blocks - 1` (0 is the null block and never queued); each is queued at most once, which
    the pool guarantees. 13 bytes a block and the 32 of its id; up to 8 more for each outdated entry.
    """

    name = "lru"
    observes_keys = False

    def __init__(self, num_blocks: int) -> None:
        self._line = list(range(1, num_blocks))
        self._head = 0  # of the line: what stands before it has been taken
        self._capacity = 2 * num_blocks + 64
        # How many entries of a block in the line are out of date.
        self._num_outdated = array("i", bytes(4 * num_blocks))
        self._front: list[int] = []  # the next one to be taken stands last
        self._is_in_front = bytearray(num_blocks)
        self._num_queued = num_blocks - 1
        # What the last `peek` saw: the blocks, how many of them are in front, where the line goes on (-1: something has
        # changed since) and how many outdated entries of which block lie before that.
        self._peeked: tuple[int, ...] = ()
        self._peeked_front = 0
        self._peeked_end = -1
        self._peeked_outdated: dict[int, int] | None = None

    def __len__(self) -> int:
        return self._num_queued

    def order(self) -> list[int]:
        """Every queued block, head first. O(length)."""
        return self._front[::-1] + self._walk(self._num_queued - len(self._front))[0]

    def peek(self, count: int) -> tuple[int, ...]:
        """The `count` blocks that will be taken next, in order; nothing changes.

        Raises:
            MisuseError: fewer are queued.
        """
        if count > self._num_queued:
            raise MisuseError(f"{count} blocks are asked for, but {self._num_queued} are queued")
        front = self._front
        if not front:
            found, self._peeked_end, self._peeked_outdated = self._walk(count)
            self._peeked_front = 0
        elif count <= len(front):
            found = front[: -count - 1 : -1]
            self._peeked_front, self._peeked_end, self._peeked_outdated = count, self._head, None
        else:
            behind, self._peeked_end, self._peeked_outdated = self._walk(count - len(front))
            found = front[::-1] + behind
            self._peeked_front = len(front)
        self._peeked = tuple(found)
        return self._peeked

    def take(self, blocks: tuple[int, ...]) -> None:
        """Remove blocks that a decision took from the head (`peek` said which; a replay reads them from the event)."""
        if self._peeked_end < 0 or len(self._peeked) != len(blocks):
            self.peek(len(blocks))
        if blocks is not self._peeked and blocks != self._peeked:  # several groups take interleaved shares of one head
            self.remove(blocks)
            return
        if self._peeked_front:
            for block in self._front[-self._peeked_front :]:
                self._is_in_front[block] = 0
            del self._front[-self._peeked_front :]
        if self._peeked_outdated:
            for block, count in self._peeked_outdated.items():
                self._num_outdated[block] -= count
        self._head = self._peeked_end
        self._num_queued -= len(blocks)
        self._peeked_end = -1

    def remove(self, blocks: Sequence[int]) -> None:
        """Remove queued blocks from wherever they stand (a prefix hit adopts them)."""
        num_outdated, is_in_front = self._num_outdated, self._is_in_front
        ids = np.array(blocks, dtype=np.intp) if len(blocks) >= _NUMPY_PAYS_FROM else None
        if ids is not None and not np.count_nonzero(np.frombuffer(is_in_front, dtype=np.bool_)[ids]):
            np.frombuffer(num_outdated, dtype=np.int32)[ids] += 1
        else:
            for block in blocks:
                if is_in_front[block]:
                    self._remove_from_front(block)
                else:
                    num_outdated[block] += 1
        self._num_queued -= len(blocks)
        self._peeked_end = -1

    def append(self, blocks: Sequence[int]) -> None:
        """Queue blocks at the back, in the order given."""
        if len(self._line) + len(blocks) > self._capacity:
            self._drop_outdated()
        self._line += blocks
        self._num_queued += len(blocks)
        self._peeked_end = -1

    def prepend(self, blocks: Sequence[int]) -> None:
        """Queue blocks at the front, the first one given becoming the head."""
        self._front += blocks[::-1]
        for block in blocks:
            self._is_in_front[block] = 1
        self._num_queued += len(blocks)
        self._peeked_end = -1

    def on_cached(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Key]) -> None:
        """Not called: LRU needs to know when blocks are released, not what they hold."""

    def on_adopted(self, blocks: Sequence[int]) -> None:
        """Not called, see `on_cached`."""

    def on_uncached(self, blocks: Sequence[int]) -> None:
        """Not called, see `on_cached`."""

    def _walk(self, count: int) -> tuple[list[int], int, dict[int, int] | None]:
        """The next `count` live entries of the line, where the one behind them is, and what was skipped on the way:
        how many entries of which block, or None.
        """
        num_outdated = self._num_outdated
        at = self._head
        found = self._line[at : at + count]
        for block in found:
            if num_outdated[block]:
                break
        else:
            return found, at + count, None
        found.clear()
        skipped: dict[int, int] = {}
        while len(found) < count and at < len(self._line):
            chunk = self._line[at : at + count - len(found)]
            at += len(chunk)
            for block in chunk:
                outdated = num_outdated[block]
                if outdated and skipped.get(block, 0) < outdated:
                    skipped[block] = skipped.get(block, 0) + 1
                else:
                    found.append(block)
        return found, at, skipped

    def _remove_from_front(self, block: int) -> None:
        """It is not far from the end: only the shares of several groups are taken from the middle."""
        place = len(self._front) - 1
        while self._front[place] != block:
            place -= 1
        del self._front[place]
        self._is_in_front[block] = 0

    def _drop_outdated(self) -> None:
        self._line = self._walk(self._num_queued - len(self._front))[0]
        self._head = 0
        self._num_outdated = array("i", bytes(4 * len(self._num_outdated)))
