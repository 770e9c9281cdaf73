"""The prompts of a trace as flat arrays of block numbers: what every capacity study reads, 4 bytes a number."""

from array import array
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import attrs
import numpy as np
import numpy.typing as npt

from ..core.errors import InputError
from .traces import Trace

IntArray = npt.NDArray[np.int64]
NEVER = int(np.iinfo(np.int64).max)


@attrs.define(slots=False, eq=False)
class PromptBlocks:
    """Every prompt's blocks, in order of arrival, numbered from 0 in the order in which they first appear.

    `blocks` is int32; request r owns `blocks[starts[r]:starts[r + 1]]`; `input_lengths` is int64
    [num_requests] in tokens. A prompt without hash ids gets blocks of its own, which nobody shares. Blocks form a
    trie (one parent each, which the trace readers check), so the new blocks of a prompt are its last ones.

    `block_size` is the cache's, in tokens. Where it is smaller than the trace's, one number here stands for `split`
    blocks of the cache that always come together (the last number of a prompt for as many as its tokens fill).

    With `full_blocks_only` the trace names no partial block, so prompts consist of their full blocks, and the tokens
    behind the last one take no block and are shared with nobody.
    """

    block_size: int
    split: int
    blocks: npt.NDArray[np.int32]
    starts: IntArray
    input_lengths: IntArray
    num_distinct: int
    full_blocks_only: bool = False

    @property
    def num_requests(self) -> int:
        """Prompts in the window."""
        return len(self.input_lengths)

    @property
    def num_block_events(self) -> int:
        """Blocks of the cache over all prompts, each counted every time; a partial last block counts as one."""
        return int(self.counts_in_cache.sum())

    @property
    def num_distinct_blocks(self) -> int:
        """Blocks of the cache that are different from each other: an infinite cache ends up with these."""
        return int(self.events_in_cache[self.previous_request < 0].sum())

    @property
    def input_tokens(self) -> int:
        """Tokens over all prompts."""
        return int(self.input_lengths.sum())

    @cached_property
    def counts(self) -> IntArray:
        """Numbers of each prompt, int64 [num_requests]."""
        return np.diff(self.starts)

    @cached_property
    def counts_in_cache(self) -> IntArray:
        """Blocks of the cache that each prompt fills, int64 [num_requests]."""
        if self.full_blocks_only:
            return self.counts * self.split
        return -(-self.input_lengths // self.block_size)

    @cached_property
    def missing_tokens(self) -> IntArray:
        """Tokens by which each prompt leaves its last block unfilled, int64 [num_requests]."""
        return np.maximum(self.counts_in_cache * self.block_size - self.input_lengths, 0)

    @cached_property
    def events_in_cache(self) -> IntArray:
        """Blocks of the cache that each number stands for, int64 [len(blocks)]."""
        out = np.full(len(self.blocks), self.split, dtype=np.int64)
        has_blocks = self.counts > 0
        out[self.starts[1:][has_blocks] - 1] = (self.counts_in_cache - (self.counts - 1) * self.split)[has_blocks]
        return out

    @cached_property
    def positions(self) -> IntArray:
        """Index of each number within its prompt, int64 [len(blocks)]."""
        return np.arange(len(self.blocks)) - np.repeat(self.starts[:-1], self.counts)

    @cached_property
    def requests(self) -> IntArray:
        """Request of each number, int64 [len(blocks)]."""
        return np.repeat(np.arange(self.num_requests), self.counts)

    @cached_property
    def _order_by_block(self) -> IntArray:
        return np.argsort(self.blocks, kind="stable")

    @cached_property
    def previous_request(self) -> IntArray:
        """The last earlier request that holds the same block, -1 where there is none; int64 [len(blocks)]."""
        order = self._order_by_block
        same = self.blocks[order[1:]] == self.blocks[order[:-1]]
        out = np.full(len(self.blocks), -1, dtype=np.int64)
        out[order[1:][same]] = self.requests[order[:-1][same]]
        return out

    @cached_property
    def next_event(self) -> IntArray:
        """Index of the next block event of the same block, NEVER where there is none; int64 [len(blocks)]."""
        order = self._order_by_block
        same = self.blocks[order[1:]] == self.blocks[order[:-1]]
        out = np.full(len(self.blocks), NEVER, dtype=np.int64)
        out[order[:-1][same]] = order[1:][same]
        return out

    @cached_property
    def active_counts(self) -> IntArray:
        """How many numbers of each prompt, its first ones, occur in another prompt before or after it."""
        is_active = (self.previous_request >= 0) | (self.next_event != NEVER)
        return np.bincount(self.requests[is_active], minlength=self.num_requests)

    @cached_property
    def depths(self) -> IntArray:
        """Index of each block within every prompt that holds it, int64 [num_distinct]."""
        out = np.zeros(self.num_distinct, dtype=np.int64)
        out[self.blocks] = self.positions
        return out

    def __iter__(self) -> Iterator[list[int]]:
        """The blocks of one prompt after the other."""
        flat = self.blocks.tolist()
        starts = self.starts.tolist()
        for begin, end in pairwise(starts):
            yield flat[begin:end]


def read_prompt_blocks(trace: Trace, block_size: int | None = None) -> PromptBlocks:
    """Read a trace once, at the trace's own block size or another (tokens).

    Larger blocks group the trace's: n of them make one, and what is shared below a whole group is lost. Smaller ones
    divide it: a full trace block becomes `split` blocks, and a partial last block shares only with a partial block of
    the same id and length. Raises `InputError` where the sizes do not divide, where neither the trace nor the caller
    gives one, or where the blocks of a prompt cannot form a trie with those before it.
    """
    block_size, group, split = _block_sizes(trace, block_size)
    full_only = trace.info.full_blocks_only
    numbering = _Numbering(block_size * split, full_only)
    for request in trace:
        ids: Sequence[Hashable] | None = request.hash_ids
        if ids is not None:
            if group > 1:
                ids = (*ids[group - 1 :: group], *(ids[-1:] if len(ids) % group and not full_only else ()))
            elif split > 1 and not full_only and (num_tokens := request.input_length % (block_size * split)):
                ids = (*ids[:-1], (ids[-1], num_tokens))
        numbering.add(request.input_length, ids, request.place)
    starts = np.zeros(len(numbering.counts) + 1, dtype=np.int64)
    np.cumsum(np.array(numbering.counts, dtype=np.int64), out=starts[1:])
    return PromptBlocks(
        block_size=block_size,
        split=split,
        blocks=np.array(numbering.blocks, dtype=np.int32),
        starts=starts,
        input_lengths=np.array(numbering.input_lengths, dtype=np.int64),
        num_distinct=numbering.num_distinct,
        full_blocks_only=full_only,
    )


def _block_sizes(trace: Trace, block_size: int | None) -> tuple[int, int, int]:
    """The cache's block size, trace blocks in one block of the cache, and the other way round."""
    own = trace.info.trace_block_size
    if block_size is None:
        if own is None:
            raise InputError(
                f"{trace.info.name} carries no hash ids and so no block size; give the cache's with --block-size "
                "(vLLM's default is 16)"
            )
        return own, 1, 1
    if block_size < 1:
        raise InputError(f"--block-size is {block_size}; it must be 1 token or more")
    if own is None or own == block_size:
        return block_size, 1, 1
    if block_size % own == 0:
        return block_size, block_size // own, 1
    if own % block_size == 0:
        return block_size, 1, own // block_size
    raise InputError(
        f"--block-size {block_size} neither divides nor is a multiple of the {own} tokens that one hash id of "
        f"{trace.info.name} stands for, so its blocks cannot be made from the trace's"
    )


class _Numbering:
    """Numbers the blocks of one prompt after the other, in flat arrays."""

    def __init__(self, tokens_per_number: int, full_blocks_only: bool) -> None:
        self.blocks = array("i")
        self.counts = array("q")
        self.input_lengths = array("q")
        self.num_distinct = 0
        self._num_ids = 0
        self._tokens_per_number = tokens_per_number
        self._rounds_up = not full_blocks_only
        self._number: dict[Hashable, int] = {}

    def add(self, input_length: int, ids: Sequence[Hashable] | None, place: int) -> None:
        """One prompt; its known blocks come first, then the new ones."""
        number = self._number
        if ids is None:
            count, tail = divmod(input_length, self._tokens_per_number)
            count += self._rounds_up and tail > 0
        else:
            count = len(ids)
        num_known = 0
        if ids is not None:
            known = list(map(number.get, ids))
            num_known = known.index(None) if None in known else count
            self.blocks.extend(known[:num_known])  # pyright: ignore[reportArgumentType] - cut at the first None
        fresh = range(self.num_distinct, self.num_distinct + count - num_known)
        if ids is not None and num_known < count:
            number.update(zip(ids[num_known:], fresh, strict=True))
            if len(number) != self._num_ids + len(fresh):
                raise InputError(
                    f"request {place}: one of its block ids was seen before, but not after the same prefix; one id "
                    "must have one parent"
                )
            self._num_ids = len(number)
        self.blocks.extend(fresh)
        self.num_distinct += len(fresh)
        self.counts.append(count)
        self.input_lengths.append(input_length)
