"""A buddy allocator: contiguous chunks of power-of-two sizes, split on demand and merged with their buddy when free.

This is what the allocators that reserve contiguous memory are measured with (PagedAttention, SOSP'23, section 6.1).
"""

from bisect import bisect_left, insort

import attrs

from ..core.errors import InputError, MisuseError


@attrs.frozen
class Chunk:
    """`size` slots from `address` on; the address is a multiple of the size, and the size a power of two."""

    address: int
    size: int


class BuddyAllocator:
    """Contiguous chunks out of `num_slots` token slots.

    A pool whose size is not a power of two starts as one chunk per binary digit, the largest first: 15,700 slots are
    8,192 + 4,096 + 2,048 + 1,024 + 256 + 64 + 16 + 4. Of the chunks that fit, the smallest is taken, and of those the
    one with the lowest address. Raises InputError for a pool below one slot.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise InputError(f"a buddy allocator over {num_slots} slots: at least 1 is needed")
        self.num_slots = num_slots
        self.num_free = num_slots
        self._free: list[list[int]] = [[] for _ in range(num_slots.bit_length())]  # by order: addresses, ascending
        self._order_of_live: dict[int, int] = {}
        address = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._free[order].append(address)
                address += 1 << order

    @property
    def largest_possible(self) -> int:
        """The size of the largest chunk that an empty pool can give."""
        return 1 << (self.num_slots.bit_length() - 1)

    def allocate(self, num_slots: int) -> Chunk | None:
        """The smallest chunk of at least `num_slots`, or None where there is none. Raises InputError below 1 slot."""
        if num_slots < 1:
            raise InputError(f"a chunk of {num_slots} slots was asked for: at least 1 is needed")
        wanted = (num_slots - 1).bit_length()
        order = next((order for order in range(wanted, len(self._free)) if self._free[order]), None)
        if order is None:
            return None
        address = self._free[order].pop(0)
        while order > wanted:  # keep the lower half, free the upper one
            order -= 1
            insort(self._free[order], address + (1 << order))
        self._order_of_live[address] = order
        self.num_free -= 1 << order
        return Chunk(address, 1 << order)

    def release(self, chunk: Chunk) -> None:
        """Free a chunk and merge it with its buddy while that is free too. Raises MisuseError if it is not live."""
        order = self._order_of_live.get(chunk.address)
        if order is None or chunk.size != 1 << order:
            raise MisuseError(f"{chunk} is not allocated")
        del self._order_of_live[chunk.address]
        self.num_free += chunk.size
        address = chunk.address
        while self._take_free(order, address ^ (1 << order)):
            address &= ~(1 << order)
            order += 1
        insort(self._free[order], address)

    def free_chunks(self) -> list[Chunk]:
        """The free chunks by address."""
        chunks = [Chunk(address, 1 << order) for order, free in enumerate(self._free) for address in free]
        return sorted(chunks, key=lambda chunk: chunk.address)

    def _take_free(self, order: int, address: int) -> bool:
        """Remove a chunk from the free ones; False where it is not free."""
        free = self._free[order]
        at = bisect_left(free, address)
        if at == len(free) or free[at] != address:
            return False
        del free[at]
        return True
