"""FIFO: the block that has been cached longest goes first."""

from collections.abc import Hashable, Sequence
from itertools import filterfalse

from .policy import EvictionPolicy, eviction_policies


@eviction_policies.register("fifo")
class Fifo(EvictionPolicy):
    """Evicts the block that became findable first; hits do not refresh it.

    Of blocks cached by one event the deeper go first. Blocks of one request that were cached by different events
    (chunks of its prompt, output, or a prefix that it found) go in that order, shallower first: FIFO strands.

    Source: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2),
    1966. All calls are O(1) per block, amortized, and one step more for each older
    block that stays when a block goes.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._line: list[int] = []  # all cached blocks, held or free, from `_head` on
        self._head = 0

    def admit(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Hashable]) -> None:
        self._line += self.deepest_first(blocks, indices)

    def victims(self, count: int) -> list[int]:
        line, at = self._line, self._head
        found: list[int] = []
        while len(found) < count:
            seen = line[at : at + count - len(found)]
            found += self.free_among(seen)
            at += len(seen)
        return found

    def forget(self, blocks: Sequence[int]) -> None:
        num_gone = len(blocks)
        if self._line[self._head : self._head + num_gone] == [*blocks]:  # the usual case: the oldest, in order
            self._head += num_gone
            self._shorten()
            return
        gone = set(blocks)
        num_seen = len(blocks)
        while True:
            seen = self._line[self._head : self._head + num_seen]
            kept = list(filterfalse(gone.__contains__, seen))
            if len(kept) + len(gone) == len(seen):
                break
            num_seen *= 2
        end = self._head + len(seen)
        self._head = end - len(kept)
        self._line[self._head : end] = kept
        self._shorten()

    def _shorten(self) -> None:
        if 2 * self._head > len(self._line):
            del self._line[: self._head]
            self._head = 0
