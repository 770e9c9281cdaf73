"""Holds the prompts of a trace as flat arrays of block numbers, 4 bytes each: the input of every capacity study."""

from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ...core.errors import InputError
from ..traces import Trace, TraceRequest

IntArray = npt.NDArray[np.int64]
NEVER = int(np.iinfo(np.int64).max)
# How many ids are moved into flat arrays at a time.
IDS_AT_ONCE = 4_096
# Names below this multiple of their number are looked up in a table, larger ones by sorting.
SPARSE = 8


@attrs.define(slots=False, eq=False)
class PromptBlocks:
    """Every prompt's blocks, in order of arrival, numbered from 0 in the order in which they first appear.

    `blocks` is int32; request r owns `blocks[starts[r]:starts[r + 1]]`; `input_lengths` is int64 [num_requests] in
    tokens, `arrivals_s` float64 [num_requests]. A prompt without hash ids gets blocks of its own, which no other
    prompt shares. Blocks form a trie (one parent each, which the trace readers check), so the new blocks
    of a prompt are its last ones.

    `block_size` is the cache's, in tokens. Where it is smaller than the trace's, one number here stands for `split`
    blocks of the cache that always come together (the last number of a prompt for as many as its tokens fill).

    With `full_blocks_only` the trace names no partial block, so prompts consist of their full blocks, and the tokens
    behind the last one take no block and are not shared.
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
    prompts = _in_arrays(trace, own or block_size or 1)
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


def sums_before(values: npt.NDArray[Any]) -> IntArray:
    """The sum of the values before each one, and of all of them: int64 [len(values) + 1]."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(values)))


def _ends_in(prompts: PromptBlocks, block_size: int) -> tuple[IntArray, IntArray]:
    """A name for every block of `block_size` tokens by where it ends, and where each prompt's begin."""
    own, lengths = prompts.block_size, prompts.input_lengths
    covered = prompts.counts * own if prompts.full_blocks_only else lengths
    counts = covered // block_size if prompts.full_blocks_only else -(-lengths // block_size)
    starts = sums_before(counts)
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
    return _numbered(_first_places(names))


def _numbered(first_places: IntArray) -> dict[str, Any]:
    """`blocks`, int32 numbers in the order of first places, and `num_distinct`, how many different ones there are."""
    is_new = first_places == np.arange(len(first_places))
    numbers = np.cumsum(is_new, dtype=np.int32) - np.int32(1)
    return {"blocks": numbers[first_places], "num_distinct": int(np.count_nonzero(is_new))}


def _first_places(names: npt.NDArray[Any]) -> IntArray:
    """Where each name (int64, or object for ints of any size) occurs for the first time: int64 [len(names)]."""
    if names.dtype == np.int64 and len(names) and names.min() >= 0 and names.max() < SPARSE * len(names):
        first = np.empty(int(names.max()) + 1, dtype=np.int64)
        first[names[::-1]] = np.arange(len(names) - 1, -1, -1)  # of one name's places the last assigned remains
        return first[names]
    _, first, inverse = np.unique(names, return_index=True, return_inverse=True)
    return first[inverse]


def _in_arrays(trace: Trace, block_size: int) -> PromptBlocks:
    """The prompts of a trace, read once, at its own block size."""
    read = _ReadPrompts(block_size, trace.info.full_blocks_only)
    for request in trace:
        read.add(request)
    counts = np.array(read.counts, dtype=np.int64)
    first_places = read.first_places(counts)
    starts = sums_before(counts)
    _refuse_unless_trie(first_places, starts, read.places)
    return PromptBlocks(
        block_size=block_size,
        split=1,
        starts=starts,
        input_lengths=np.array(read.input_lengths, dtype=np.int64),
        arrivals_s=np.array(read.arrivals_s, dtype=np.float64),
        full_blocks_only=trace.info.full_blocks_only,
        **_numbered(first_places),
    )


def _refuse_unless_trie(first_places: IntArray, starts: IntArray, places: Sequence[int]) -> None:
    """Raise `InputError` unless what is new in a prompt comes after what is known in it."""
    is_new = first_places == np.arange(len(first_places))
    begins = np.zeros(len(first_places) + 1, dtype=bool)
    begins[starts] = True
    wrong = np.flatnonzero(is_new[:-1] & ~is_new[1:] & ~begins[1:-1])
    if len(wrong):
        place = places[int(np.searchsorted(starts, wrong[0], side="right")) - 1]
        raise InputError(
            f"request {place}: one of its block ids was seen before, but not after the same prefix; "
            "one id must have one parent"
        )


class _ReadPrompts:
    """Collects a trace's requests while it is read: flat arrays, 8 bytes per id."""

    def __init__(self, block_size: int, full_blocks_only: bool) -> None:
        self.counts = array("q")
        self.input_lengths = array("q")
        self.arrivals_s = array("d")
        self.places = array("q")
        self._has_ids = array("b")
        self._ids: array[int] | list[int] = array("q")
        self._latest_ids: list[int] = []
        self._block_size = block_size
        self._rounds_up = not full_blocks_only

    def add(self, request: TraceRequest) -> None:
        """Take in the next request."""
        ids = request.hash_ids
        if ids is None:
            count, tail = divmod(request.input_length, self._block_size)
            self.counts.append(count + (self._rounds_up and tail > 0))
        else:
            self.counts.append(len(ids))
            self._latest_ids += ids
            if len(self._latest_ids) >= IDS_AT_ONCE:
                self._keep_latest_ids()
        self._has_ids.append(ids is not None)
        self.input_lengths.append(request.input_length)
        self.arrivals_s.append(request.arrival_s)
        self.places.append(request.place)

    def first_places(self, counts: IntArray) -> IntArray:
        """Where each block occurs for the first time; one of a prompt without ids occurs nowhere else."""
        self._keep_latest_ids()
        first = _first_places(np.array(self._ids, dtype=np.int64 if isinstance(self._ids, array) else object))
        has_ids = np.array(self._has_ids, dtype=bool)
        if has_ids.all():
            return first
        with_ids = np.flatnonzero(np.repeat(has_ids, counts))
        out = np.arange(counts.sum())
        out[with_ids] = with_ids[first]
        return out

    def _keep_latest_ids(self) -> None:
        latest: Sequence[int] = self._latest_ids
        if isinstance(self._ids, array):
            try:
                latest = array("q", latest)
            except OverflowError:  # re-blocked ids may be of any size
                self._ids = self._ids.tolist()
        self._ids.extend(latest)
        self._latest_ids.clear()
