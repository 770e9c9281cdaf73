"""The prompts of a trace as flat arrays of block numbers: what every capacity study reads, 4 bytes a number."""

from array import array
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ..core.errors import InputError
from .traces import Trace, TraceRequest

IntArray = npt.NDArray[np.int64]
NEVER = int(np.iinfo(np.int64).max)


@attrs.define(slots=False, eq=False)
class PromptBlocks:
    """Every prompt's blocks, in order of arrival, numbered from 0 in the order in which they first appear.

    `blocks` is int32; request r owns `blocks[starts[r]:starts[r + 1]]`; `input_lengths` is int64 [num_requests] in
    tokens, `arrivals_s` float64 [num_requests]. A prompt without hash ids gets blocks of its own, which nobody
    shares. Blocks form a trie (one parent each, which the trace readers check), so the new blocks of a prompt are its
    last ones.

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
    arrivals_s: npt.NDArray[np.float64]
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
    """Read a trace once, at the trace's own block size or another one (tokens; see `at_block_size`).

    Raises `InputError` where neither the trace nor the caller gives a size, or where the blocks of a prompt cannot
    form a trie with those before it.
    """
    own = trace.info.trace_block_size
    if block_size is not None and block_size < 1:
        raise InputError(f"--block-size is {block_size}; it must be 1 token or more")
    if own is None and block_size is None:
        raise InputError(
            f"{trace.info.name} carries no hash ids and so no block size; give the cache's with --block-size "
            "(vLLM's default is 16)"
        )
    size = own or block_size or 1
    numbering = _Numbering(size, trace.info.full_blocks_only)
    for request in trace:
        numbering.add(request)
    prompts = PromptBlocks(
        block_size=size,
        split=1,
        blocks=np.array(numbering.blocks, dtype=np.int32),
        starts=starts_of(np.array(numbering.counts, dtype=np.int64)),
        input_lengths=np.array(numbering.input_lengths, dtype=np.int64),
        arrivals_s=np.array(numbering.arrivals_s, dtype=np.float64),
        num_distinct=numbering.num_distinct,
        full_blocks_only=trace.info.full_blocks_only,
    )
    return prompts if block_size is None else at_block_size(prompts, block_size)


def at_block_size(prompts: PromptBlocks, block_size: int) -> PromptBlocks:
    """The same prompts in blocks of another size, out of the trace's own ones (`split` 1).

    Larger blocks that are a multiple group the trace's: n of them make one, named by the last of them, and what is
    shared below a whole group is lost. Smaller ones that divide it: a full trace block becomes `split` blocks. With
    any other size a block is named by the trace block in which it ends and by where in it. A partial last block, cut
    smaller, shares only with a partial block of the same id and length.
    """
    own = prompts.block_size
    if block_size == own:
        return prompts
    if own % block_size == 0:
        return attrs.evolve(
            prompts, block_size=block_size, split=own // block_size, **_renumbered(_with_tails(prompts))
        )
    names, starts = _ends_in(prompts, block_size)
    return attrs.evolve(prompts, block_size=block_size, starts=starts, **_renumbered(names))


def starts_of(counts: IntArray) -> IntArray:
    """Where each of so many pieces begins, and the end of the last: int64 [len(counts) + 1]."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))


def _ends_in(prompts: PromptBlocks, block_size: int) -> tuple[IntArray, IntArray]:
    """A name for every block of `block_size` tokens by where it ends, and where each prompt's begin."""
    own, lengths = prompts.block_size, prompts.input_lengths
    covered = prompts.counts * own if prompts.full_blocks_only else lengths
    counts = covered // block_size if prompts.full_blocks_only else -(-lengths // block_size)
    starts = starts_of(counts)
    request = np.repeat(np.arange(len(counts)), counts)
    position = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    last_token = np.minimum((position + 1) * block_size, covered[request]) - 1
    at = prompts.starts[request] + last_token // own
    if block_size % own == 0:
        return prompts.blocks[at].astype(np.int64), starts
    _, numbers = np.unique(_with_tails(prompts), return_inverse=True)
    return numbers[at] * own + last_token % own, starts


def _with_tails(prompts: PromptBlocks) -> IntArray:
    """The block numbers, those of partial last blocks told apart by their length too: int64 [len(blocks)]."""
    names = prompts.blocks.astype(np.int64) * prompts.block_size
    if not prompts.full_blocks_only:
        has_blocks = prompts.counts > 0
        names[prompts.starts[1:][has_blocks] - 1] += (prompts.input_lengths % prompts.block_size)[has_blocks]
    return names


def _renumbered(names: IntArray) -> dict[str, Any]:
    """Numbers for names in the order in which they first appear."""
    distinct, first, inverse = np.unique(names, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty(len(distinct), dtype=np.int32)
    number[order] = np.arange(len(distinct), dtype=np.int32)
    return {"blocks": number[inverse], "num_distinct": len(distinct)}


class _Numbering:
    """Numbers the blocks of one prompt after the other, in flat arrays."""

    def __init__(self, block_size: int, full_blocks_only: bool) -> None:
        self.blocks = array("i")
        self.counts = array("q")
        self.input_lengths = array("q")
        self.arrivals_s = array("d")
        self.num_distinct = 0
        self._num_ids = 0
        self._block_size = block_size
        self._rounds_up = not full_blocks_only
        self._number: dict[int, int] = {}

    def add(self, request: TraceRequest) -> None:
        """One prompt; its known blocks come first, then the new ones."""
        input_length, ids = request.input_length, request.hash_ids
        number = self._number
        if ids is None:
            count, tail = divmod(input_length, self._block_size)
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
                    f"request {request.place}: one of its block ids was seen before, but not after the same prefix; "
                    "one id must have one parent"
                )
            self._num_ids = len(number)
        self.blocks.extend(fresh)
        self.num_distinct += len(fresh)
        self.counts.append(count)
        self.input_lengths.append(input_length)
        self.arrivals_s.append(request.arrival_s)
