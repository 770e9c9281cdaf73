"""The free queue: unreferenced blocks in the order in which they will be taken, with O(1) removal from the middle.

Keyed blocks join a line at its back, unkeyed ones a stack in front of it. A prefix hit removes a block from the middle
by counting one more of its entries in the line as outdated. A block's entries are in the order in which it was queued,
so the oldest ones are the outdated ones; they are skipped when they reach the head. When the line has grown to
twice the pool its outdated entries are dropped, which happens after at least a pool of insertions and so costs a few
nanoseconds each. Whole batches come and go as slices of a list. A linked list of objects, the usual structure, costs
100 bytes a block and a pointer chase per step.
"""

from collections.abc import Hashable, Sequence

from ..errors import MisuseError


class FreeQueue:
    """Unreferenced blocks, head first: the LRU order of vLLM's pool. `BlockPool.release` picks the end that a block joins.

    Blocks are ids `1 .. num_blocks - 1` (0 is the null block and never queued); each is queued at most once, which
    the pool guarantees. 16 bytes a block and the 32 of its id; up to 8 more for each outdated entry.
    """

    name = "lru"
    observes_keys = False

    def __init__(self, num_blocks: int) -> None:
        self._line = list(range(1, num_blocks))
        self._head = 0  # of the line: entries before it have been taken
        self._capacity = 2 * num_blocks + 64
        # How many entries of a block in the line are out of date.
        self._num_outdated = [0] * num_blocks
        self._front: list[int] = []  # the next one to be taken is the last
        self._num_queued = num_blocks - 1
        # The blocks that the last `peek` returned; None if the queue has changed since.
        self._peeked: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return self._num_queued

    def order(self) -> list[int]:
        """Every queued block, head first. O(length)."""
        return self._front[::-1] + self._settle(self._num_queued - len(self._front))

    def peek(self, count: int) -> tuple[int, ...]:
        """The `count` blocks that will be taken next, in order; the order stays as it is.

        Raises:
            MisuseError: fewer are queued.
        """
        if count > self._num_queued:
            raise MisuseError(f"{count} blocks are asked for, but {self._num_queued} are queued")
        front = self._front
        if not front:
            blocks = tuple(self._settle(count))
        elif count <= len(front):
            blocks = tuple(front[: -count - 1 : -1])
        else:
            blocks = (*front[::-1], *self._settle(count - len(front)))
        self._peeked = blocks
        return blocks

    def take(self, blocks: tuple[int, ...]) -> None:
        """Remove blocks that a decision took from the head (`peek` named them; a replay reads them from the event)."""
        if blocks is not self._peeked and blocks != self.peek(len(blocks)):
            self.remove(self._taken_behind_front(blocks))
            return
        num_in_line = len(blocks)
        if self._front:
            start = max(len(self._front) - num_in_line, 0)
            num_in_line -= len(self._front) - start
            del self._front[start:]
        self._head += num_in_line
        self._num_queued -= len(blocks)
        self._peeked = None

    def remove(self, blocks: Sequence[int]) -> None:
        """Remove blocks from anywhere in the line (a prefix hit adopts them)."""
        num_outdated = self._num_outdated
        for block in blocks:
            num_outdated[block] += 1
        self._num_queued -= len(blocks)
        self._peeked = None

    def append(self, blocks: Sequence[int]) -> None:
        """Queue blocks at the back, in the order given."""
        if len(self._line) + len(blocks) > self._capacity:
            self._drop_outdated()
        self._line += blocks
        self._num_queued += len(blocks)
        self._peeked = None

    def prepend(self, blocks: Sequence[int]) -> None:
        """Queue blocks at the front, the first one given becoming the head."""
        self._front += blocks[::-1]
        self._num_queued += len(blocks)
        self._peeked = None

    def on_cached(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Hashable]) -> None:
        """Not called: LRU needs to know when blocks are released, not what they hold."""

    def on_adopted(self, blocks: Sequence[int]) -> None:
        """Not called, see `on_cached`."""

    def on_uncached(self, blocks: Sequence[int]) -> None:
        """Not called, see `on_cached`."""

    def _settle(self, count: int) -> list[int]:
        """Return the next `count` live entries of the line, and drop the outdated ones between them from its head."""
        line, num_outdated = self._line, self._num_outdated
        at = self._head
        chunk = line[at : at + count]
        for block in chunk:
            if num_outdated[block]:
                break
        else:
            return chunk
        settled: list[int] = []
        while chunk:
            at += len(chunk)
            for block in chunk:
                if num_outdated[block]:
                    num_outdated[block] -= 1
                else:
                    settled.append(block)
            chunk = line[at : at + count - len(settled)]
        if at - self._head > count:
            self._head = at - count
            line[self._head : at] = settled
        return settled

    def _taken_behind_front(self, blocks: Sequence[int]) -> list[int]:
        """Take those of the blocks that are in the front stack, and return the others, which are in the line.

        The blocks are one group's share of the head, so blocks of other groups can be between them.
        """
        missing = set(blocks)
        front = self._front
        place = len(front)
        kept: list[int] = []
        while place and missing:
            place -= 1
            if front[place] in missing:
                missing.discard(front[place])
            else:
                kept.append(front[place])
        front[place:] = kept[::-1]
        self._num_queued -= len(blocks) - len(missing)
        return list(missing)

    def _drop_outdated(self) -> None:
        self._line = self._settle(self._num_queued - len(self._front))
        self._head = 0
        self._num_outdated = [0] * len(self._num_outdated)
