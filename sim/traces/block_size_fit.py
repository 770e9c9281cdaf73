"""Which trace block sizes explain a number of ids: the inverse of `num_ids = ceil(input_length / trace_block_size)`."""

from collections.abc import Iterable
from itertools import islice

import attrs


@attrs.frozen
class BlockSizes:
    """A range of block sizes in tokens, both ends included; `largest` None means no upper end."""

    smallest: int
    largest: int | None

    @property
    def is_empty(self) -> bool:
        """Whether no size at all fits."""
        return self.largest is not None and self.largest < self.smallest

    def __str__(self) -> str:
        if self.is_empty:
            return "no trace block size at all"
        if self.largest is None:
            return f"trace block sizes of {self.smallest} or more"
        if self.largest == self.smallest:
            return f"only a trace block size of {self.smallest}"
        return f"trace block sizes {self.smallest} to {self.largest}"

    def __and__(self, other: "BlockSizes") -> "BlockSizes":
        ends = [each.largest for each in (self, other) if each.largest is not None]
        return BlockSizes(max(self.smallest, other.smallest), min(ends, default=None))

    @property
    def likeliest(self) -> int:
        """The largest power of two in the range (nearly every block size is one), else the smallest size."""
        if self.largest is None:
            return 1 << (self.smallest - 1).bit_length()
        power = 1 << (self.largest.bit_length() - 1)
        return power if power >= self.smallest else self.smallest


ANY_SIZE = BlockSizes(1, None)


def block_sizes_that_fit(input_length: int, num_ids: int) -> BlockSizes:
    """Sizes s with ceil(input_length / s) == num_ids; 20 tokens under 2 ids fit 10 to 19 (field report G01)."""
    if num_ids == 0:
        return BlockSizes(1, 0)
    smallest = -(-input_length // num_ids)
    largest = None if num_ids == 1 else -(-input_length // (num_ids - 1)) - 1
    return BlockSizes(smallest, largest)


def suggest_block_size(lengths: Iterable[tuple[int, int]], at_most: int) -> str:
    """A sentence for an error message from the first `at_most` pairs of (input_length, num_ids)."""
    fits, num_rows = ANY_SIZE, 0
    for input_length, num_ids in islice(lengths, at_most):
        fits &= block_sizes_that_fit(input_length, num_ids)
        num_rows += 1
    if fits.is_empty:
        return f"No one trace block size fits the first {num_rows:,} rows."
    rows = "one row fits" if num_rows == 1 else f"first {num_rows:,} rows fit"
    return f"The {rows} {fits}: try --trace-block-size {fits.likeliest}."
