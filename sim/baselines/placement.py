"""Where a sequence's KV memory goes: the five placements that `kvledger compare` measures against each other."""

from collections.abc import Callable
from typing import Any, Protocol

import attrs

from .heaps import BuddyAllocator, ContiguousHeap

GROWTH_FACTOR = 2


@attrs.define(eq=False)
class Sequence:
    """A running request. `start_tokens` are computed when it is admitted; each iteration then adds one token.

    `preemptions` counts how often it was preempted, `order` is its number among all admissions, `started` its first
    iteration, `capacity` the slots asked for (before an allocator rounds them), `place` the placement's own note.
    """

    start_tokens: int
    output_tokens: int
    preemptions: int = 0
    order: int = 0
    started: int = 0
    capacity: int = 0
    place: Any = None

    @property
    def total_tokens(self) -> int:
        """Tokens that it holds in its last iteration."""
        return self.start_tokens + self.output_tokens

    def tokens_at(self, iteration: int) -> int:
        """Tokens that it holds in an iteration; in the first one, what it started with and one more."""
        return self.start_tokens + iteration - self.started + 1


class Placement(Protocol):
    """Gives a sequence its memory. `capacity` of a sequence is set by `admit` and `grow`."""

    name: str

    def can_ever_hold(self, sequence: Sequence) -> bool:
        """Whether the sequence fits into an empty memory, up to its last token."""
        ...

    def admit(self, sequence: Sequence, is_alone: bool) -> bool:
        """Place a sequence and its first new token; False, and no change, where it does not fit now."""
        ...

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for `num_tokens` in all; False, and no change, where that does not fit now."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Take the sequence's memory back."""
        ...


class ReservedPlacement:
    """One contiguous chunk of a buddy allocator per sequence, as large as `slots_to_reserve` says, until it ends."""

    def __init__(self, name: str, num_slots: int, slots_to_reserve: Callable[[Sequence], int]) -> None:
        self.name = name
        self._buddy = BuddyAllocator(num_slots)
        self._slots_to_reserve = slots_to_reserve

    def can_ever_hold(self, sequence: Sequence) -> bool:
        """Whether the reservation fits into the largest chunk of the pool."""
        return self._slots_to_reserve(sequence) <= self._buddy.largest_possible

    def admit(self, sequence: Sequence, is_alone: bool) -> bool:
        """Reserve a chunk."""
        sequence.capacity = self._slots_to_reserve(sequence)
        sequence.place = self._buddy.allocate(sequence.capacity)
        return sequence.place is not None

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Nothing to do: the reservation covers the last token."""
        return num_tokens <= sequence.capacity

    def release(self, sequence: Sequence) -> None:
        """Return the chunk."""
        self._buddy.release(sequence.place)


def static_placement(num_slots: int, max_model_len: int) -> ReservedPlacement:
    """Every sequence reserves the maximum length ("Orca (Max)")."""
    return ReservedPlacement("static", num_slots, lambda _: max_model_len)


def pow2_placement(num_slots: int, max_model_len: int) -> ReservedPlacement:
    """The prompt, and the output rounded up to a power of two, within the maximum length ("Orca (Pow2)")."""

    def slots_to_reserve(sequence: Sequence) -> int:
        rounded = 1 << (sequence.output_tokens - 1).bit_length()
        return min(sequence.start_tokens + rounded, max_model_len)

    return ReservedPlacement("pow2", num_slots, slots_to_reserve)


def oracle_placement(num_slots: int) -> ReservedPlacement:
    """Exactly what the sequence will need, as if its length were known beforehand ("Orca (Oracle)")."""
    return ReservedPlacement("oracle", num_slots, lambda sequence: sequence.total_tokens)


class GrowingPlacement:
    """A contiguous region that doubles when it is full: in place where the slots behind it are free, else by copying.

    While it copies, a sequence holds the old and the new region. `num_copies` and `copied_tokens` count the moves.
    """

    name = "growing"

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        self.heap = ContiguousHeap(num_slots)
        self.num_copies = 0
        self.copied_tokens = 0
        self._largest_capacity = min(max_model_len, num_slots)

    def can_ever_hold(self, sequence: Sequence) -> bool:
        """Whether the whole sequence fits into the heap."""
        return sequence.total_tokens <= self.heap.num_slots

    def admit(self, sequence: Sequence, is_alone: bool) -> bool:
        """A region of twice what is there; one for the next token alone would outgrow itself at once."""
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
        """Return the region."""
        self.heap.release(sequence.place)

    def _doubled(self, num_slots: int) -> int:
        return max(num_slots + 1, min(GROWTH_FACTOR * num_slots, self._largest_capacity))


class PagedPlacement:
    """Blocks of `block_size`, one at a time, anywhere. Blocks are counted, not named: waste does not depend on ids.

    One block is the null block, as in the real pool. A sequence is admitted only if `watermark` of the blocks stays
    free, unless nothing else runs.
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
        """Blocks for what is there and one token more."""
        num_blocks = self._num_blocks(sequence.start_tokens + 1)
        kept_free = 0 if is_alone else self._watermark_blocks
        if num_blocks + kept_free > self._num_free:
            return False
        self._num_free -= num_blocks
        sequence.capacity = num_blocks * self._block_size
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """One more block."""
        if not self._num_free:
            return False
        self._num_free -= 1
        sequence.capacity += self._block_size
        return True

    def release(self, sequence: Sequence) -> None:
        """Return the blocks."""
        self._num_free += sequence.capacity // self._block_size

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
