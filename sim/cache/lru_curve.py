"""Computes the hits of an LRU prefix cache at every capacity, exactly, in one pass over the trace.

What is counted: requests come one after the other, each finished before the next arrives. A prompt hits the longest
prefix of its blocks that is in the cache; all its blocks are then the most recent ones, the first block the most recent
of all, so that the last block of a prompt is evicted first. The blocks of the present prompt are never evicted.
Capacities are usable blocks (an engine's null block comes on top). Outputs take no blocks.

Why one pass is enough: under LRU a cache of C blocks holds the C most recent ones, so a block hits exactly where its
depth in the recency stack is at most C. Blocks form a trie, so depth grows along a prompt, and neighbours that were
last asked for by the same request lie next to each other in the stack: one look-up serves the whole run. The depth of a
run follows from how many blocks each earlier request was the last to ask for, and that from the runs before: a sum for
each run over those before it, taken for all of them at once in O(runs log runs).
"""

import attrs
import numpy as np
import numpy.typing as npt

from ...core.errors import InputError
from .prompt_blocks import PromptBlocks, sums_before

IntArray = npt.NDArray[np.int64]


@attrs.frozen
class CachePoint:
    """Hits of a cache of `num_blocks` blocks; None means an unlimited one.

    `hit_tokens` counts a partial last block by its own length. `full_block_hit_tokens` follows vLLM: only full blocks
    can hit, and at least one token of every prompt is computed.
    """

    num_blocks: int | None
    hit_blocks: int
    hit_tokens: int
    full_block_hit_tokens: int


@attrs.frozen(eq=False)
class LruCurve:
    """Hits at every capacity: three int64 arrays [largest depth + 1], indexed by the number of blocks."""

    hit_blocks: IntArray
    hit_tokens: IntArray
    full_block_hit_tokens: IntArray

    def at(self, num_blocks: int) -> CachePoint:
        """The point at one capacity, in usable blocks."""
        if num_blocks < 0:
            raise InputError(f"a cache of {num_blocks} blocks does not exist; the least is 0")
        depth = min(num_blocks, len(self.hit_blocks) - 1)
        return CachePoint(
            num_blocks,
            int(self.hit_blocks[depth]),
            int(self.hit_tokens[depth]),
            int(self.full_block_hit_tokens[depth]),
        )

    @property
    def infinite(self) -> CachePoint:
        """An unlimited cache: the ceiling."""
        return attrs.evolve(self.at(len(self.hit_blocks) - 1), num_blocks=None)

    def smallest_for(self, share: float) -> int:
        """Return the fewest blocks that serve `share` (0 to 1) of the blocks that an unlimited cache would."""
        return int(np.searchsorted(self.hit_blocks, np.ceil(share * self.hit_blocks[-1])))


def lru_curve(prompts: PromptBlocks) -> LruCurve:
    """Compute the hits of an LRU prefix cache of every size in one pass."""
    runs = _Runs.of(prompts)
    depth = _depths(prompts, runs)
    block_size = prompts.block_size
    counts = prompts.counts_in_cache

    holds_last = runs.position + runs.length == counts[runs.request]
    missing_tokens = np.where(holds_last, prompts.missing_tokens[runs.request], 0)
    num_full = (prompts.input_lengths - 1) // block_size  # at least one token is computed
    full_length = np.clip(num_full[runs.request] - runs.position, 0, runs.length)

    num_depths = int((depth + runs.length).max(initial=1)) + 1
    hit_blocks = _hits_by_capacity(depth, runs.length, num_depths)
    short = np.zeros(num_depths, dtype=np.int64)
    np.add.at(short, depth + runs.length - 1, missing_tokens)
    return LruCurve(
        hit_blocks=hit_blocks,
        hit_tokens=hit_blocks * block_size - np.cumsum(short),
        full_block_hit_tokens=_hits_by_capacity(depth, full_length, num_depths) * block_size,
    )


@attrs.frozen
class _Runs:
    """Runs of neighbouring blocks of a prompt that the same earlier request used last; int64 [num_runs] each.

    Positions and lengths are in blocks of the cache.
    """

    request: IntArray
    position: IntArray
    length: IntArray
    previous_request: IntArray

    @classmethod
    def of(cls, prompts: PromptBlocks) -> "_Runs":
        previous, request = prompts.previous_request, prompts.requests
        begins = np.ones(len(previous), dtype=bool)
        begins[1:] = (previous[1:] != previous[:-1]) | (request[1:] != request[:-1])
        at = np.flatnonzero(begins)
        length = np.diff(at, append=len(previous))
        seen = previous[at] >= 0
        at, length = at[seen], length[seen]
        position = prompts.positions[at] * prompts.split
        length = np.minimum(length * prompts.split, prompts.counts_in_cache[request[at]] - position)
        return cls(request[at], position, length, previous[at])


def _depths(prompts: PromptBlocks, runs: _Runs) -> IntArray:
    """Depth in the recency stack (1 = most recent) of the first block of every run, when its request arrives.

    The blocks above a run are all distinct blocks so far less those that requests up to `previous_request` were last to
    touch: all of theirs but what runs before this one have touched again.
    """
    distinct = np.cumsum(np.where(prompts.previous_request < 0, prompts.events_in_cache, 0))
    begin = prompts.starts[runs.request]
    num_distinct = np.where(begin > 0, distinct[begin - 1], 0)
    last_touched = np.cumsum(prompts.counts_in_cache)[runs.previous_request]
    touched_again = _sums_of_earlier(runs.previous_request, runs.length)
    return num_distinct + 1 - (last_touched - touched_again)


def _sums_of_earlier(keys: IntArray, weights: IntArray) -> IntArray:
    """For every entry, the sum of the weights of those before it whose key is not larger; int64 [len(keys)].

    The entries are sorted by key, then split by one bit of their index after the other, the highest first, as in a
    wavelet tree: an entry that precedes another one shares the bits above some bit with it, and has 0 in that bit
    where the other has 1.
    """
    sums = np.zeros(len(keys), dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    places = np.arange(len(keys))
    for bit in reversed(range(len(keys).bit_length())):
        half = 1 << bit
        is_low = order & half == 0
        group = order & -2 * half  # where the entries that share the bits above this one begin: they are all there
        low_weights = sums_before(np.where(is_low, weights[order], 0))
        num_low = sums_before(is_low)
        sums[order] += np.where(is_low, 0, low_weights[:-1] - low_weights[group])
        num_low_in_group = num_low[:-1] - num_low[group]
        split = np.empty_like(order)
        split[np.where(is_low, group + num_low_in_group, half + places - num_low_in_group)] = order
        order = split
    return sums


def _hits_by_capacity(depth: IntArray, length: IntArray, num_depths: int) -> IntArray:
    """Blocks of depth at most c, for every c; run k covers the `length[k]` depths from `depth[k]` on."""
    begins = np.bincount(depth, minlength=num_depths)
    ends = np.bincount(depth + length, minlength=num_depths)
    return np.cumsum(np.cumsum(begins - ends)).astype(np.int64)
