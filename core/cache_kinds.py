"""Cache kinds: what one group of layers needs to keep. One small class each, all behind the `CacheKind` protocol.

The allocator coordinates groups through these few questions and never asks which kind it has. Rules 11 to 13, 16, 17
and 21 of the recorded op traces (golden/ops) fix the answers; where a rule is vLLM's it is named.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import ClassVar, Protocol, cast

import attrs
import numpy as np
from numpy.typing import NDArray

from .errors import InputError

NULL = 0


class CacheKind(Protocol):
    """How one group finds a hit, what it skips, what it releases and what it registers. Immutable."""

    # Whether a hit is an unbroken run from the start, so that losing a block strands all behind it.
    needs_whole_prefix: ClassVar[bool]
    # Whether a block holds one entry a token, which decode context parallelism spreads over ranks; a state is whole.
    holds_tokens: ClassVar[bool]

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        ...

    def find_hit(
        self, keys: Sequence[Hashable], indexes: Sequence[Mapping[Hashable, int]], alignment: int, drop_last: bool
    ) -> list[list[int]]:
        """The longest hit that every index agrees on: for each index, blocks by logical index, 0 where skipped.

        Args:
            keys: keys of the candidate blocks 0, 1, 2, ... (complete blocks only).
            indexes: key -> block, one of each group of this kind; a block counts when all of them have it.
            alignment: the hit's length in tokens must be a multiple of this.
            drop_last: EAGLE needs the last block's hidden states, so a non-empty hit gives its last block back.
        """
        ...

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """How many tokens at the start no later token attends to, once `num_computed_tokens` are computed."""
        ...

    def computed_tokens_that_skip(self, num_blocks: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """The fewest computed tokens at which the first `num_blocks` blocks are skipped; None where none ever is.

        The inverse of `num_skipped_tokens`, for a whole batch: int64 `[num_reqs]` in and out.
        """
        ...

    def admission_cap_blocks(self, max_in_flight_tokens: int, max_model_len: int) -> int | None:
        """The most blocks that a request of any length holds, or None where that grows with its length."""
        ...

    def retained(self, start: int, stop: int, boundaries: Iterable[int], drop_last: bool) -> Iterable[int]:
        """Of the complete blocks `start <= index < stop`, those worth a key if hits end at `boundaries`, in tokens."""
        ...


def _positive(_: object, attribute: "attrs.Attribute[int]", value: int) -> None:
    if value < 1:
        raise InputError(f"{attribute.name} must be at least 1, not {value}")


def _leading_run(keys: Sequence[Hashable], index: Mapping[Hashable, int]) -> list[int]:
    if not keys or keys[0] not in index:  # most lookups that miss do so at once
        return []
    found = list(map(index.get, keys))
    run = found if all(found) else found[: found.index(None)]  # the null block is never indexed
    return cast("list[int]", run)


def _found_by_all(key: Hashable, indexes: Sequence[Mapping[Hashable, int]]) -> list[int] | None:
    found: list[int] = []
    for index in indexes:
        block = index.get(key)
        if block is None:
            return None
        found.append(block)
    return found


def _cut(found: list[list[int]], length: int) -> list[list[int]]:
    return [blocks[:length] for blocks in found]


def _cut_to_alignment(found: list[list[int]], block_size: int, alignment: int) -> list[list[int]]:
    length = len(found[0])
    while length * block_size % alignment:
        length -= 1
    return _cut(found, length)


@attrs.frozen
class FullAttention:
    """Every token attends to all before it: nothing is skipped, a hit is an unbroken run from the start (rule 11)."""

    needs_whole_prefix: ClassVar[bool] = True
    holds_tokens: ClassVar[bool] = True
    block_size: int = attrs.field(validator=_positive)

    def find_hit(
        self, keys: Sequence[Hashable], indexes: Sequence[Mapping[Hashable, int]], alignment: int, drop_last: bool
    ) -> list[list[int]]:
        """An unbroken run from the start, without its last block under EAGLE, rounded down to the alignment."""
        if alignment == self.block_size and len(indexes) == 1 and not drop_last:
            return [_leading_run(keys, indexes[0])]
        found = [_leading_run(keys, index) for index in indexes]
        length = min([len(run) for run in found])
        if drop_last and length:
            length -= 1
        return _cut_to_alignment(_cut(found, length), self.block_size, alignment)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """None: every token may be read again."""
        return 0

    def computed_tokens_that_skip(self, num_blocks: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Never."""
        return None

    def admission_cap_blocks(self, max_in_flight_tokens: int, max_model_len: int) -> int | None:
        """No cap: the blocks grow with the request."""
        return None

    def retained(self, start: int, stop: int, boundaries: Iterable[int], drop_last: bool) -> Iterable[int]:
        """All of them: each is part of every longer hit."""
        return range(start, stop)


@attrs.frozen
class CompressedState(FullAttention):
    """One stored state covers `tokens_per_state` tokens; lifetimes and hits are those of full attention.

    `block_size` counts tokens, so a block stores `block_size / tokens_per_state` states (DeepSeek V4's compressed
    layers: ratios 4 and 128).
    """

    tokens_per_state: int = attrs.field(validator=_positive)

    def __attrs_post_init__(self) -> None:
        if self.block_size % self.tokens_per_state:
            raise InputError(
                f"block_size {self.block_size} does not hold whole states of {self.tokens_per_state} tokens; "
                f"use a multiple of {self.tokens_per_state}"
            )


@attrs.frozen
class SlidingWindow:
    """A token attends to itself and the `window - 1` before it; what fell out of the window is given back."""

    needs_whole_prefix: ClassVar[bool] = False
    holds_tokens: ClassVar[bool] = True
    block_size: int = attrs.field(validator=_positive)
    window: int = attrs.field(validator=_positive)

    def _blocks_of_a_window(self, drop_last: bool) -> int:
        return -(-(self.window - 1) // self.block_size) + drop_last

    def find_hit(
        self, keys: Sequence[Hashable], indexes: Sequence[Mapping[Hashable, int]], alignment: int, drop_last: bool
    ) -> list[list[int]]:
        """The rightmost run that fills a window, everything before it skipped; else the leading run (rule 12)."""
        need = self._blocks_of_a_window(drop_last)
        found = [[NULL] * len(keys) for _ in indexes]
        run = 0
        for i in range(len(keys) - 1, -1, -1):
            blocks = _found_by_all(keys[i], indexes)
            if blocks is None:
                run = 0
                continue
            if run == 0 and (i + 1 - drop_last) * self.block_size % alignment:
                continue
            for group_found, block in zip(found, blocks, strict=True):
                group_found[i] = block
            run += 1
            if run >= need:
                return _cut(found, i + run - drop_last)
        return _cut_to_alignment(_cut(found, max(run - drop_last, 0)), self.block_size, alignment)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All but the `window - 1` tokens that the next one attends to (rule 17)."""
        return max(0, num_computed_tokens - self.window + 1)

    def computed_tokens_that_skip(self, num_blocks: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Once the window lies wholly behind them."""
        return num_blocks * self.block_size + self.window - 1

    def admission_cap_blocks(self, max_in_flight_tokens: int, max_model_len: int) -> int | None:
        """A window and what is in flight, plus one block: a window need not start at a block's edge (rule 16)."""
        return -(-min(self.window - 1 + max_in_flight_tokens, max_model_len) // self.block_size) + 1

    def retained(self, start: int, stop: int, boundaries: Iterable[int], drop_last: bool) -> Iterable[int]:
        """The window of blocks before each boundary (rule 21)."""
        need = self._blocks_of_a_window(drop_last)
        wanted = {i for end in boundaries for i in range(end // self.block_size - need, end // self.block_size)}
        return sorted(i for i in wanted if start <= i < stop)


@attrs.frozen
class ChunkedLocal:
    """A token attends to the tokens of its own chunk; chunks before it are given back (Llama 4's local layers)."""

    needs_whole_prefix: ClassVar[bool] = False
    holds_tokens: ClassVar[bool] = True
    block_size: int = attrs.field(validator=_positive)
    chunk_size: int = attrs.field(validator=_positive)

    def find_hit(
        self, keys: Sequence[Hashable], indexes: Sequence[Mapping[Hashable, int]], alignment: int, drop_last: bool
    ) -> list[list[int]]:
        """Whole chunks before the last count as found, then an unbroken run from there (rule 13).

        A hit that would end inside a chunk whose start is not among the blocks found is cut to where it is of use.
        """
        max_tokens = len(keys) * self.block_size
        start = max_tokens // self.chunk_size * self.chunk_size // self.block_size
        runs = [_leading_run(keys[start:], index) for index in indexes]
        length = min([len(run) for run in runs])
        found = [[NULL] * start + run[:length] for run in runs]
        length += start
        if drop_last and length:
            length -= 1
        while length * self.block_size % alignment or not self._holds_its_chunk(length, start):
            length -= 1
        return _cut(found, length)

    def _holds_its_chunk(self, length: int, start: int) -> bool:
        """Whether a hit of `length` blocks, null before `start`, has all that its next token attends to.

        Dropping or cutting blocks can end it in a chunk before the one that was looked up.
        """
        first_attended = self.num_skipped_tokens(length * self.block_size) // self.block_size
        return first_attended == length or first_attended >= start

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Every chunk before the one that the next token belongs to (rule 17)."""
        return num_computed_tokens // self.chunk_size * self.chunk_size

    def computed_tokens_that_skip(self, num_blocks: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Once the chunk that holds their last token is complete."""
        return -(-num_blocks * self.block_size // self.chunk_size) * self.chunk_size

    def admission_cap_blocks(self, max_in_flight_tokens: int, max_model_len: int) -> int | None:
        """A chunk and what is in flight (rule 16), plus one block where chunks do not start at a block's edge."""
        straddles = self.chunk_size % self.block_size > 0
        return -(-min(self.chunk_size + max_in_flight_tokens, max_model_len) // self.block_size) + straddles

    def retained(self, start: int, stop: int, boundaries: Iterable[int], drop_last: bool) -> Iterable[int]:
        """All of them: a hit may end anywhere inside a chunk."""
        return range(start, stop)


@attrs.frozen
class SequenceState:
    """A fixed state a sequence (linear attention): the block at a boundary holds the state after all tokens up to it.

    Only the latest state is needed to go on, so blocks before it are given back, and a hit needs the one block at
    its end.
    """

    needs_whole_prefix: ClassVar[bool] = False
    holds_tokens: ClassVar[bool] = False
    block_size: int = attrs.field(validator=_positive)

    def find_hit(
        self, keys: Sequence[Hashable], indexes: Sequence[Mapping[Hashable, int]], alignment: int, drop_last: bool
    ) -> list[list[int]]:
        """The rightmost aligned boundary whose state is cached."""
        for i in range(len(keys) - 1 - drop_last, -1, -1):
            if (i + 1) * self.block_size % alignment:
                continue
            blocks = _found_by_all(keys[i], indexes)
            if blocks is not None:
                return [[NULL] * i + [block] for block in blocks]
        return [[] for _ in indexes]

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All but the last token, whose state is the one to continue from."""
        return max(0, num_computed_tokens - 1)

    def computed_tokens_that_skip(self, num_blocks: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Once a later block holds the state to continue from."""
        return num_blocks * self.block_size + 1

    def admission_cap_blocks(self, max_in_flight_tokens: int, max_model_len: int) -> int | None:
        """The state to continue from and the blocks that the tokens in flight pass through."""
        return -(-min(max_in_flight_tokens, max_model_len) // self.block_size) + 1

    def retained(self, start: int, stop: int, boundaries: Iterable[int], drop_last: bool) -> Iterable[int]:
        """The state at each boundary."""
        wanted = {end // self.block_size - 1 for end in boundaries}
        return sorted(i for i in wanted if start <= i < stop)
