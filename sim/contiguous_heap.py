"""A first-fit heap: contiguous regions of any size, in-place growth where the slots behind a region are free."""

from bisect import bisect_left

from ..core.errors import InputError, MisuseError


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
