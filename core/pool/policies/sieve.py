"""SIEVE: a FIFO queue and a hand that spares the blocks that were used since it last passed them."""

from collections.abc import Hashable, Sequence

from .policy import EvictionPolicy, eviction_policies

# The null block is always held, so it closes the ring: `newer` of it is the oldest block, `older` the newest.
_END = 0


@eviction_policies.register("sieve")
class Sieve(EvictionPolicy):
    """Blocks queue in the order in which they became findable; the hand walks from the oldest to the newest and round.

    A block that was used since it became findable, or since the hand last cleared its mark, loses the mark and stays;
    an unmarked one is evicted, and the hand waits behind it. The hand passes over held blocks and leaves their mark.
    Of blocks cached by one event the deeper count as the older. Blocks taken out of turn leave without moving the
    hand; the last group's share of a common head moves it past all of them.

    Older blocks can go before newer ones of the same request, when the hand has cleared both: SIEVE strands.

    Source: Y. Zhang et al., "SIEVE is simpler than LRU: an efficient turn-key eviction algorithm for web caches",
    NSDI 2024. All calls are O(1) per block, amortized, and `victims` one step more for each held block that the hand
    passes over. 17 bytes per block.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._newer = list(range(num_blocks))
        self._older = self._newer.copy()
        self._is_used = bytearray(num_blocks)
        self._hand = _END
        self._walked: tuple[list[int], list[int]] = ([], [])  # the latest search

    def admit(self, group: int, blocks: Sequence[int], indices: Sequence[int], keys: Sequence[Hashable]) -> None:
        newer, older, is_used = self._newer, self._older, self._is_used
        newest = older[_END]
        for block in self.deepest_first(blocks, indices):
            newer[newest] = block
            older[block] = newest
            is_used[block] = 0
            newest = block
        newer[newest] = _END
        older[_END] = newest

    def use(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._is_used[block] = 1

    def victims(self, count: int) -> list[int]:
        self._walked = self._walk(count)
        return self._walked[0]

    def evict(self, blocks: Sequence[int]) -> None:
        victims, spared = self._walked if blocks is self._walked[0] else self._walk(len(blocks))
        if victims is not blocks and set(victims) != set(blocks):
            self.forget(blocks)
            return
        for block in spared:
            self._is_used[block] = 0
        self.forget(victims)
        self._hand = self._newer[victims[-1]]

    def forget(self, blocks: Sequence[int]) -> None:
        newer, older = self._newer, self._older
        for block in blocks:
            if self._hand == block:
                self._hand = newer[block]
            newer[older[block]] = newer[block]
            older[newer[block]] = older[block]

    def _walk(self, count: int) -> tuple[list[int], list[int]]:
        """Return the victims that the hand finds, and the blocks whose mark it clears on the way."""
        newer, is_used, is_held = self._newer, self._is_used, self.is_held
        victims: list[int] = []
        spared: list[int] = []
        start = block = newer[_END] if self._hand == _END else self._hand
        while len(victims) < count:
            if not is_held[block]:
                (spared if is_used[block] else victims).append(block)
            block = newer[block]
            if block == start:  # in the second round nothing free is marked any more
                victims += spared[: count - len(victims)]
                break
        return victims, spared
