"""A first-fit heap: contiguous regions of any size, in-place growth where the slots behind a region are free."""

from bisect import bisect_left, insort

import attrs

from ...core.errors import InputError, MisuseError


class ContiguousHeap:
    """Regions out of `num_slots` token slots. Holes are kept by address; neighbours are merged when freed.

    Raises InputError for a heap or a region below one slot.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise InputError(f"a heap of {num_slots} slots: at least 1 is needed")
        self.num_slots = num_slots
        self.num_free = num_slots
        self._holes = [0]  # addresses, ascending
        self._sizes = [num_slots]  # sizes of the same holes
        self._live: dict[int, int] = {}  # address -> size

    @property
    def largest_hole(self) -> int:
        """Slots of the largest hole, 0 where nothing is free."""
        return max(self._sizes, default=0)

    @property
    def fragmentation(self) -> float:
        """1 - largest hole / free slots: the share of the free memory that one large region cannot use."""
        return 1 - self.largest_hole / self.num_free if self.num_free else 0.0

    def allocate(self, num_slots: int) -> int | None:
        """The address of a region in the first hole that is large enough, or None where there is none."""
        if num_slots < 1:
            raise InputError(f"a region of {num_slots} slots was asked for: at least 1 is needed")
        for at, size in enumerate(self._sizes):
            if size >= num_slots:
                address = self._holes[at]
                self._take_from_hole(at, num_slots)
                self._live[address] = num_slots
                return address
        return None

    def extend(self, address: int, num_slots: int) -> bool:
        """Grow a region in place to `num_slots`; False, and no change, where the slots behind it are not free."""
        size = self._size_of(address)
        at = bisect_left(self._holes, address)
        missing = num_slots - size
        if at == len(self._holes) or self._holes[at] != address + size or self._sizes[at] < missing:
            return False
        self._take_from_hole(at, missing)
        self._live[address] = num_slots
        return True

    def release(self, address: int) -> None:
        """Free a region. Raises MisuseError where no region begins at `address`."""
        size = self._size_of(address)
        del self._live[address]
        self.num_free += size
        at = bisect_left(self._holes, address)
        if at < len(self._holes) and self._holes[at] == address + size:
            size += self._sizes[at]
            del self._holes[at], self._sizes[at]
        if at and self._holes[at - 1] + self._sizes[at - 1] == address:
            self._sizes[at - 1] += size
        else:
            self._holes.insert(at, address)
            self._sizes.insert(at, size)

    def holes(self) -> list[tuple[int, int]]:
        """(address, size) of every hole, by address."""
        return list(zip(self._holes, self._sizes, strict=True))

    def _size_of(self, address: int) -> int:
        if address not in self._live:
            raise MisuseError(f"no region begins at slot {address}")
        return self._live[address]

    def _take_from_hole(self, at: int, num_slots: int) -> None:
        self.num_free -= num_slots
        if self._sizes[at] == num_slots:
            del self._holes[at], self._sizes[at]
        else:
            self._holes[at] += num_slots
            self._sizes[at] -= num_slots


# A buddy allocator: contiguous chunks of power-of-two sizes, split on demand and merged with their buddy when free.


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
