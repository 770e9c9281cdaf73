"""Cache kinds: what one group of layers must keep. Each kind is a small class behind the `CacheKind` protocol.

The allocator coordinates groups through these few questions and never asks which kind a group has. Rules 11 to 13, 16,
17 and 21 of the recorded op traces (golden/ops) fix the answers; where a rule is vLLM's it is named.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from .errors import InputError, positive

# The placeholder in block tables for content that a group skips; never handed out, never counted.
NULL_BLOCK = 0


class CacheKind(Protocol):
    """How one group finds a hit, what it skips, what it releases and what it registers. Immutable."""

    # Whether a hit is an unbroken run from the start, so that losing a block makes all blocks behind it unreachable.
    needs_whole_prefix: ClassVar[bool]
    # Whether a block holds one entry per token, which decode context parallelism spreads over ranks. If not, it holds
    # one state, written where a step ends: the blocks that a step runs past stay null (vLLM's "align" mode).
    holds_tokens: ClassVar[bool]

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    def find_hit(
        self, keys: Sequence[Hashable], indexes: Sequence[Mapping[Hashable, int]], alignment: int, drop_last: bool
    ) -> list[list[int]]:
        """Find the longest hit that all indexes share. Returns for each index the blocks by logical index, 0 = skipped.

        Args:
            keys: block hashes of the candidate blocks 0, 1, 2, ... (complete blocks only).
            indexes: key -> block, one for each group of this kind; a block counts when all of them have its key.
            alignment: the hit's length in tokens must be a multiple of this.
            drop_last: EAGLE needs the last block's hidden states, so a non-empty hit gives its last block back.
        """
        ...

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Count the tokens at the start that no later token attends to, once `num_computed_tokens` are computed."""
        ...

    def computed_tokens_that_skip(self, num_blocks: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return the fewest computed tokens at which the first `num_blocks` blocks are skipped; None: never.

        This is the inverse of `num_skipped_tokens` for a whole batch: int64 `[num_reqs]` in and out.
        """
        ...

    def admission_cap_blocks(self, max_in_flight_tokens: int, max_model_len: int) -> int | None:
        """Return the most blocks that a request of any length holds, or None where that grows with its length."""
        ...

    def retained(self, start: int, stop: int, boundaries: Iterable[int], drop_last: bool) -> Iterable[int]:
        """Choose which complete blocks `start <= index < stop` get a key if hits end at `boundaries` (in tokens)."""
        ...

    def retained_between(self, start: int, stop: int, interval: int, drop_last: bool) -> Iterable[int]:
        """Choose which complete blocks get a key if hits also end at every multiple of `interval` tokens (rule 21)."""
        ...


def _leading_run(keys: Sequence[Hashable], index: Mapping[Hashable, int]) -> list[int]:
    if not keys or keys[0] not in index:  # most lookups that miss do so at the first key
        return []
    found: list[Any] = list(map(index.get, keys))
    return found if all(found) else found[: found.index(None)]  # the null block is never indexed


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
    block_size: int = attrs.field(validator=positive)

    def find_hit(
        self, keys: Sequence[Hashable], indexes: Sequence[Mapping[Hashable, int]], alignment: int, drop_last: bool
    ) -> list[list[int]]:
        """Find an unbroken run from the start, without its last block under EAGLE, rounded down to the alignment."""
        if alignment == self.block_size and len(indexes) == 1 and not drop_last:
            return [_leading_run(keys, indexes[0])]
        found = [_leading_run(keys, index) for index in indexes]
        length = min([len(run) for run in found])
        if drop_last and length:
            length -= 1
        return _cut_to_alignment(_cut(found, length), self.block_size, alignment)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Skip none: later tokens read every token again."""
        return 0

    def computed_tokens_that_skip(self, num_blocks: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return None: no block is ever skipped."""
        return None

    def admission_cap_blocks(self, max_in_flight_tokens: int, max_model_len: int) -> int | None:
        """Return None: the blocks grow with the request."""
        return None

    def retained(self, start: int, stop: int, boundaries: Iterable[int], drop_last: bool) -> Iterable[int]:
        """Choose all: each block is part of every longer hit."""
        return range(start, stop)

    def retained_between(self, start: int, stop: int, interval: int, drop_last: bool) -> Iterable[int]:
        """Choose all."""
        return range(start, stop)


@attrs.frozen
class CompressedState(FullAttention):
    """One stored state covers `tokens_per_state` tokens; blocks live and hit as under full attention.

    `block_size` counts tokens, so a block stores `block_size / tokens_per_state` states (DeepSeek V4's compressed
    layers: ratios 4 and 128).
    """

    tokens_per_state: int = attrs.field(validator=positive)

    def __attrs_post_init__(self) -> None:
        if self.block_size % self.tokens_per_state:
            raise InputError(
                f"block_size {self.block_size} does not hold whole states of {self.tokens_per_state} tokens; "
                f"use a multiple of {self.tokens_per_state}"
            )


@attrs.frozen
class SlidingWindow:
    """A token attends to itself and the `window - 1` before it; blocks that fall out of the window are freed."""

    needs_whole_prefix: ClassVar[bool] = False
    holds_tokens: ClassVar[bool] = True
    block_size: int = attrs.field(validator=positive)
    window: int = attrs.field(validator=positive)

    def _blocks_of_a_window(self, drop_last: bool) -> int:
        return -(-(self.window - 1) // self.block_size) + drop_last

    def find_hit(
        self, keys: Sequence[Hashable], indexes: Sequence[Mapping[Hashable, int]], alignment: int, drop_last: bool
    ) -> list[list[int]]:
        """Find the rightmost run that fills a window and skip all before it; else the leading run (rule 12)."""
        need = self._blocks_of_a_window(drop_last)
        found = [[NULL_BLOCK] * len(keys) for _ in indexes]
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
        # vLLM 0.32 aligns both before and after EAGLE's block is dropped.
        (aligned, *_) = _cut_to_alignment(_cut(found, run), self.block_size, alignment)
        return _cut_to_alignment(_cut(found, max(len(aligned) - drop_last, 0)), self.block_size, alignment)

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Skip all but the `window - 1` tokens that the next one attends to (rule 17)."""
        return max(0, num_computed_tokens - self.window + 1)

    def computed_tokens_that_skip(self, num_blocks: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Blocks are skipped once the window starts behind them."""
        return num_blocks * self.block_size + self.window - 1

    def admission_cap_blocks(self, max_in_flight_tokens: int, max_model_len: int) -> int | None:
        """Count a window, the tokens in flight, and one more block: a window may start inside a block (rule 16)."""
        return -(-min(self.window - 1 + max_in_flight_tokens, max_model_len) // self.block_size) + 1

    def retained(self, start: int, stop: int, boundaries: Iterable[int], drop_last: bool) -> Iterable[int]:
        """Choose the window of blocks before each boundary (rule 21), and under EAGLE the block behind it."""
        need = self._blocks_of_a_window(drop_last)
        ends = [end // self.block_size + drop_last for end in boundaries]
        return sorted({i for end in ends for i in range(max(end - need, start), min(end, stop))})

    def retained_between(self, start: int, stop: int, interval: int, drop_last: bool) -> Iterable[int]:
        """Choose the same blocks of every multiple of the interval but the first, which is 0."""
        need, period = self._blocks_of_a_window(drop_last), interval // self.block_size
        if need >= period:
            return range(start, stop)
        return [i for i in range(max(start, drop_last), stop) if (i - drop_last) % period >= period - need]


@attrs.frozen
class ChunkedLocal:
    """A token attends to the tokens of its own chunk; earlier chunks are freed (Llama 4's local layers)."""

    needs_whole_prefix: ClassVar[bool] = False
    holds_tokens: ClassVar[bool] = True
    block_size: int = attrs.field(validator=positive)
    chunk_size: int = attrs.field(validator=positive)

    def find_hit(
        self, keys: Sequence[Hashable], indexes: Sequence[Mapping[Hashable, int]], alignment: int, drop_last: bool
    ) -> list[list[int]]:
        """Count the whole chunks before the last as found, then find an unbroken run from there (rule 13).

        If a hit would end inside a chunk whose start was not found, it is cut to the last length that is usable.
        """
        max_tokens = len(keys) * self.block_size
        start = max_tokens // self.chunk_size * self.chunk_size // self.block_size
        runs = [_leading_run(keys[start:], index) for index in indexes]
        length = min([len(run) for run in runs])
        found = [[NULL_BLOCK] * start + run[:length] for run in runs]
        length += start
        if drop_last and length:
            length -= 1
        while length * self.block_size % alignment or not self._holds_its_chunk(length, start):
            length -= 1
        return _cut(found, length)

    def _holds_its_chunk(self, length: int, start: int) -> bool:
        """Whether a hit of `length` blocks, null before `start`, has every block that its next token attends to.

        Dropping or cutting blocks can end it in a chunk before the one that was looked up.
        """
        first_attended = self.num_skipped_tokens(length * self.block_size) // self.block_size
        return first_attended == length or first_attended >= start

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Skip every chunk before the one that the next token belongs to (rule 17)."""
        return num_computed_tokens // self.chunk_size * self.chunk_size

    def computed_tokens_that_skip(self, num_blocks: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Blocks are skipped once the chunk that holds their last token is complete."""
        return -(-num_blocks * self.block_size // self.chunk_size) * self.chunk_size

    def admission_cap_blocks(self, max_in_flight_tokens: int, max_model_len: int) -> int | None:
        """Count a chunk and the tokens in flight (rule 16), plus one block where chunks may start inside a block."""
        straddles = self.chunk_size % self.block_size > 0
        return -(-min(self.chunk_size + max_in_flight_tokens, max_model_len) // self.block_size) + straddles

    def retained(self, start: int, stop: int, boundaries: Iterable[int], drop_last: bool) -> Iterable[int]:
        """Choose all: a hit may end anywhere inside a chunk."""
        return range(start, stop)

    def retained_between(self, start: int, stop: int, interval: int, drop_last: bool) -> Iterable[int]:
        """Choose all."""
        return range(start, stop)


@attrs.frozen
class SequenceState:
    """One state of fixed size per sequence (linear attention); each block holds the state at its last token.

    A step leaves one state, where it ends: the blocks that it runs past are null, and no lookup finds them. Only the
    latest state is needed to continue, so earlier blocks are freed, and a hit needs only the block at its end. Draft
    models have no states, so no block is dropped for EAGLE. (vLLM's Mamba cache in "align" mode.)
    """

    needs_whole_prefix: ClassVar[bool] = False
    holds_tokens: ClassVar[bool] = False
    block_size: int = attrs.field(validator=positive)

    def find_hit(
        self, keys: Sequence[Hashable], indexes: Sequence[Mapping[Hashable, int]], alignment: int, drop_last: bool
    ) -> list[list[int]]:
        """Find the rightmost aligned boundary whose state is cached."""
        for i in range(len(keys) - 1, -1, -1):
            if (i + 1) * self.block_size % alignment:
                continue
            blocks = _found_by_all(keys[i], indexes)
            if blocks is not None:
                return [[NULL_BLOCK] * i + [block] for block in blocks]
        return [[] for _ in indexes]

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Skip all but the last token: the request continues from its state."""
        return max(0, num_computed_tokens - 1)

    def computed_tokens_that_skip(self, num_blocks: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Blocks are skipped once a later block holds the state to continue from."""
        return num_blocks * self.block_size + 1

    def admission_cap_blocks(self, max_in_flight_tokens: int, max_model_len: int) -> int | None:
        """Count two: the state that a step starts from and the one that it leaves."""
        return 2

    def retained(self, start: int, stop: int, boundaries: Iterable[int], drop_last: bool) -> Iterable[int]:
        """Choose the state at each boundary."""
        wanted = {end // self.block_size - 1 for end in boundaries}
        return sorted(i for i in wanted if start <= i < stop)

    def retained_between(self, start: int, stop: int, interval: int, drop_last: bool) -> Iterable[int]:
        """Choose the state at each multiple of the interval."""
        period = max(interval // self.block_size, 1)
        return range(start + (-start - 1) % period, stop, period)
