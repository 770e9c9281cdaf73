"""The five placements of a sequence's KV memory that `kvledger compare` compares, and the heaps that they use."""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

import attrs

from ...core.errors import InputError, MisuseError

GROWTH_FACTOR = 2


class ContiguousHeap:
    """A first-fit heap of `num_slots` token slots: regions of any size that grow in place if the slots behind are free.

    Holes are kept by address; neighbours are merged when freed. Raises InputError for a heap or a region below one
    slot.
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
        """Slots of the largest hole; 0 if nothing is free."""
        return max(self._sizes, default=0)

    @property
    def fragmentation(self) -> float:
        """1 - largest hole / free slots: the share of the free memory that one large region cannot use."""
        return 1 - self.largest_hole / self.num_free if self.num_free else 0.0

    def allocate(self, num_slots: int) -> int | None:
        """The address of a region in the first hole that is large enough, or None if there is none."""
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
        """Grow a region in place to `num_slots`; return False without a change if the slots behind it are not free."""
        size = self._size_of(address)
        at = bisect_left(self._holes, address)
        missing = num_slots - size
        if at == len(self._holes) or self._holes[at] != address + size or self._sizes[at] < missing:
            return False
        self._take_from_hole(at, missing)
        self._live[address] = num_slots
        return True

    def release(self, address: int) -> None:
        """Free a region. Raises MisuseError if no region begins at `address`."""
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


@attrs.frozen
class Chunk:
    """`size` slots from `address` on; the address is a multiple of the size, and the size a power of two."""

    address: int
    size: int


class BuddyAllocator:
    """A buddy allocator of `num_slots` token slots: chunks of power-of-two sizes, split on demand, merged when freed.

    A pool whose size is not a power of two starts as one chunk per binary digit, the largest first: 15,700 slots are
    8,192 + 4,096 + 2,048 + 1,024 + 256 + 64 + 16 + 4. Of the chunks that fit, the smallest is used, and of those the
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
        """The size of the largest chunk of an empty pool."""
        return 1 << (self.num_slots.bit_length() - 1)

    def allocate(self, num_slots: int) -> Chunk | None:
        """The smallest chunk of at least `num_slots`, or None if there is none. Raises InputError below 1 slot."""
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
        """Free a chunk; merge it with its buddy as long as that is free too. Raises MisuseError if it is not live."""
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
        """Remove a chunk from the free chunks; return False if it is not free."""
        free = self._free[order]
        at = bisect_left(free, address)
        if at == len(free) or free[at] != address:
            return False
        del free[at]
        return True


@attrs.define(eq=False)
class Sequence:
    """A running request. `start_tokens` are computed when it is admitted; each iteration then adds one token."""

    start_tokens: int
    output_tokens: int
    preemptions: int = 0  # how often it was preempted
    order: int = 0  # its number among all admissions
    started: int = 0  # its first iteration
    capacity: int = 0  # slots requested, before an allocator rounds them
    place: Any = None  # belongs to the placement

    @property
    def total_tokens(self) -> int:
        """Tokens in its last iteration."""
        return self.start_tokens + self.output_tokens

    def tokens_at(self, iteration: int) -> int:
        """Tokens in an iteration; in the first one, the tokens it started with and one more."""
        return self.start_tokens + iteration - self.started + 1


# A placement allocates memory for sequences. `admit` places a sequence and its first new token, and `grow` makes room
# for `num_tokens` in total; both set its `capacity`, and return False without a change if it does not fit now.


class ReservedPlacement:
    """Reserves one contiguous chunk of a buddy allocator per sequence, with `slots_to_reserve` slots, until it ends."""

    def __init__(self, name: str, num_slots: int, slots_to_reserve: Callable[[Sequence], int]) -> None:
        self.name = name
        self._buddy = BuddyAllocator(num_slots)
        self._slots_to_reserve = slots_to_reserve

    def can_ever_hold(self, sequence: Sequence) -> bool:
        return self._slots_to_reserve(sequence) <= self._buddy.largest_possible

    def admit(self, sequence: Sequence, is_alone: bool) -> bool:
        sequence.capacity = self._slots_to_reserve(sequence)
        sequence.place = self._buddy.allocate(sequence.capacity)
        return sequence.place is not None

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Nothing to do: the reservation covers the last token."""
        return num_tokens <= sequence.capacity

    def release(self, sequence: Sequence) -> None:
        self._buddy.release(sequence.place)


def reserved_placements(num_slots: int, max_model_len: int) -> list[ReservedPlacement]:
    """The paper's three reservations for a sequence.

    * static ("Orca (Max)"): the maximum length.
    * pow2 ("Orca (Pow2)"): the prompt plus the output rounded up to a power of two, at most the maximum length.
    * oracle ("Orca (Oracle)"): exactly what it will need, as if its length were known beforehand.
    """

    def pow2(sequence: Sequence) -> int:
        rounded = 1 << (sequence.output_tokens - 1).bit_length()
        return min(sequence.start_tokens + rounded, max_model_len)

    return [
        ReservedPlacement("static", num_slots, lambda _: max_model_len),
        ReservedPlacement("pow2", num_slots, pow2),
        ReservedPlacement("oracle", num_slots, lambda sequence: sequence.total_tokens),
    ]


class GrowingPlacement:
    """Uses a contiguous region that doubles when it is full: in place if the slots behind it are free, else by copying.

    During a copy, a sequence holds the old and the new region. `num_copies` and `copied_tokens` count the copies.
    """

    name = "growing"

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        self.heap = ContiguousHeap(num_slots)
        self.num_copies = 0
        self.copied_tokens = 0
        self._largest_capacity = min(max_model_len, num_slots)

    def can_ever_hold(self, sequence: Sequence) -> bool:
        return sequence.total_tokens <= self.heap.num_slots

    def admit(self, sequence: Sequence, is_alone: bool) -> bool:
        """Allocate twice the present tokens; a region for the next token alone would be full immediately."""
        sequence.capacity = self._doubled(sequence.start_tokens)
        sequence.place = self.heap.allocate(sequence.capacity)
        return sequence.place is not None

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Double the region, at most to the maximum length."""
        capacity = self._doubled(sequence.capacity)
        if not self.heap.extend(sequence.place, capacity):
            address = self.heap.allocate(capacity)
            if address is None:
                return False
            self.heap.release(sequence.place)
            sequence.place = address
            self.num_copies += 1
            self.copied_tokens += sequence.capacity
        sequence.capacity = capacity
        return True

    def release(self, sequence: Sequence) -> None:
        self.heap.release(sequence.place)

    def _doubled(self, num_slots: int) -> int:
        return max(num_slots + 1, min(GROWTH_FACTOR * num_slots, self._largest_capacity))


class PagedPlacement:
    """Uses blocks of `block_size`, one at a time, anywhere. Blocks are only counted: waste does not depend on ids.

    One block is the null block, as in the real pool. A sequence is admitted only if the share `watermark` of the blocks
    stays free, unless nothing else runs.
    """

    name = "paged"

    def __init__(self, num_slots: int, block_size: int, watermark: float) -> None:
        self._block_size = block_size
        self._num_usable = max(num_slots // block_size - 1, 0)
        self._num_free = self._num_usable
        self._watermark_blocks = int(watermark * self._num_usable)

    def can_ever_hold(self, sequence: Sequence) -> bool:
        """Whether the blocks of the whole sequence fit into the usable ones."""
        return self._num_blocks(sequence.total_tokens) <= self._num_usable

    def admit(self, sequence: Sequence, is_alone: bool) -> bool:
        num_blocks = self._num_blocks(sequence.start_tokens + 1)
        kept_free = 0 if is_alone else self._watermark_blocks
        if num_blocks + kept_free > self._num_free:
            return False
        self._num_free -= num_blocks
        sequence.capacity = num_blocks * self._block_size
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        if not self._num_free:
            return False
        self._num_free -= 1
        sequence.capacity += self._block_size
        return True

    def release(self, sequence: Sequence) -> None:
        self._num_free += sequence.capacity // self._block_size

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


Placement = ReservedPlacement | GrowingPlacement | PagedPlacement
