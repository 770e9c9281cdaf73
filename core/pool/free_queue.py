"""The free queue: unreferenced blocks in the order in which they will be taken, with O(1) removal from the middle.

Blocks with a key join a line at its back; blocks without one go onto a stack in front of the line. A prefix hit removes
a block from the middle by counting one more of its entries in the line as outdated. The line holds a block's entries in
the order in which it was queued, so the outdated ones are the oldest, and they are skipped when they reach the head.
When the line has grown to twice the pool, its outdated entries are dropped; at least a pool of insertions lies between
two such clean-ups, so they cost a few nanoseconds per insertion. Whole batches enter and leave as slices of a list. A
linked list of objects, the usual structure, costs 100 bytes a block and follows a pointer per step.
"""

from collections.abc import Hashable, Sequence

from ..errors import MisuseError


class FreeQueue:
    """Unreferenced blocks, head first, in the LRU order of vLLM's pool (`BlockPool.release` says who goes where).

    Blocks are ids `1 .. num_blocks - 1` (0 is the null block and never queued). The pool guarantees that each is
    queued at most once. The queue takes 16 bytes a block and 32 for its id, and up to 8 for each outdated entry.
    """

    name = "lru"
    observes_keys = False

    def __init__(self, num_blocks: int) -> None:
        self._line = list(range(1, num_blocks))
        self._head = 0  # index into the line: entries before it have been taken
        self._capacity = 2 * num_blocks + 64
        # How many entries of each block in the line are outdated.
        self._num_outdated = [0] * num_blocks
        self._front: list[int] = []  # the last one will be taken next
        self._num_queued = num_blocks - 1
        # The blocks at the head that the last `peek` returned; None: the queue has changed since.
        self._peeked: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return self._num_queued

    def order(self) -> list[int]:
        """Return every queued block, head first. O(length)."""
        return self._front[::-1] + self._settle(self._num_queued - len(self._front))

    def peek(self, count: int) -> tuple[int, ...]:
        """Return the `count` blocks that will be taken next, in order. The order stays as it is.

        Raises:
            MisuseError: fewer blocks are queued.
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
        """Remove blocks that were taken from the head: those of `peek`, or in a replay those of the event."""
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
        """Remove blocks from any place in the line (a prefix hit adopts them)."""
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
        """Queue blocks at the front; the first one given becomes the head."""
        self._front += blocks[::-1]
        self._num_queued += len(blocks)
        self._peeked = None

    def on_cached(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Hashable]) -> None:
        """Not called: LRU depends on when blocks are released, not on their content."""

    def on_adopted(self, blocks: Sequence[int]) -> None:
        """Not called, see `on_cached`."""

    def on_uncached(self, blocks: Sequence[int]) -> None:
        """Not called, see `on_cached`."""

    def _settle(self, count: int) -> list[int]:
        """Return the next `count` live entries of the line, and drop the outdated ones between them."""
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
        """Take one group's share of the head, which other groups' blocks separate, out of the front stack.

        Returns the blocks of the share that are in the line instead.
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
