"""SIEVE: a FIFO queue and a hand that spares the blocks that were used since it last passed them."""

from array import array
from collections.abc import Sequence

from ...events import Key
from .ranked import StudyOrder, deepest_first

# The null block is never queued, so it closes the ring: `newer` of it is the oldest block, `older` the newest.
_END = 0


class SieveOrder(StudyOrder):
    """Blocks stand in the order in which they became findable; the hand walks from the oldest to the newest and round.

    Met by the hand, a block that was used since it became findable, or since the hand last cleared it, loses that
    mark and stays; one that was not is evicted, and the hand waits behind it. Referenced blocks are passed over, their
    mark intact. Of blocks cached by one event the deeper stand as the older. Blocks taken out of turn leave without
    moving the hand; the last group's share of a common head moves it past all of them.

    Older blocks can go before newer ones of the same request, when the hand has cleared both: SIEVE strands.

    Source: Y. Zhang et al., "SIEVE is simpler than LRU: an efficient turn-key eviction algorithm for web caches",
    NSDI 2024. Caching, uses and eviction are O(1) a block and `peek` O(k), all amortized, and one step more for each
    referenced block that the hand passes over; `order` is O(keyed blocks). 9 bytes a block and those of `StudyOrder`.
    """

    name = "sieve"

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._newer = array("i", range(num_blocks))
        self._older = array("i", range(num_blocks))
        self._is_used = bytearray(num_blocks)
        self._hand = _END

    def _victims(self, count: int) -> list[int]:
        victims, _ = self._walk(count)
        return victims

    def _walk(self, count: int) -> tuple[list[int], list[int]]:
        """The victims that the hand finds, and the blocks whose mark it clears on the way."""
        newer, is_used, is_queued = self._newer, self._is_used, self._is_queued
        victims: list[int] = []
        spared: list[int] = []
        start = block = newer[_END] if self._hand == _END else self._hand
        while len(victims) < count:
            if is_queued[block]:
                (spared if is_used[block] else victims).append(block)
            block = newer[block]
            if block == start:  # the second time round nothing that may go is marked
                victims += spared[: count - len(victims)]
                break
        return victims, spared

    def _evict(self, blocks: list[int]) -> None:
        victims, spared = self._walk(len(blocks))
        if set(victims) != set(blocks):
            self._forget(blocks)
            return
        for block in spared:
            self._is_used[block] = 0
        self._forget(victims)
        self._hand = self._newer[victims[-1]]

    def _forget(self, blocks: list[int]) -> None:
        newer, older = self._newer, self._older
        for block in blocks:
            if self._hand == block:
                self._hand = newer[block]
            newer[older[block]], older[newer[block]] = newer[block], older[block]

    def _admit(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Key]) -> None:
        newer, older = self._newer, self._older
        for block in deepest_first(blocks, indices):
            newest = older[_END]
            newer[newest] = older[_END] = block
            newer[block], older[block] = _END, newest
            self._is_used[block] = 0

    def _use(self, blocks: list[int]) -> None:
        for block in blocks:
            self._is_used[block] = 1

    def _release(self, blocks: Sequence[int]) -> None:
        """Where a block stands does not depend on when it was released."""
