"""Measures when and how far apart blocks are reused, and how many are in use: the shape behind a capacity curve.

* reuse distance: the number of distinct blocks that an LRU cache must hold so that a block is still there when it is
  used again (the depth in the recency stack). Its distribution is the LRU curve over its ceiling.
* reuse time: seconds from one request for a block to the next one, on the trace's clock.
* working set (Denning 1968): the distinct blocks used within a window of seconds.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from ...core.errors import InputError
from .lru_curve import LruCurve
from .prompt_blocks import NEVER, PromptBlocks, sums_before

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
WINDOWS_S = (10.0, 60.0, 300.0, 900.0, 1_800.0, 3_600.0)


@attrs.frozen
class WorkingSet:
    """Blocks used within the last `window_s` seconds: the mean over time, and the maximum."""

    window_s: float
    mean_blocks: float
    max_blocks: int


def reuse_distances(curve: LruCurve, shares: Sequence[float] = SHARES) -> dict[str, int]:
    """Compute percentiles of the reuse distance in blocks: `p50`, ... Empty if nothing is reused."""
    if not curve.infinite.hit_blocks:
        return {}
    return {f"p{share * 100:g}": curve.smallest_for(share) for share in shares}


def reuse_times(prompts: PromptBlocks, shares: Sequence[float] = SHARES) -> dict[str, float]:
    """Compute percentiles (nearest rank) of the reuse time in seconds: `p50`, ... Empty if nothing is reused."""
    previous = prompts.previous_request
    is_reuse = previous >= 0
    if not is_reuse.any():
        return {}
    seconds = prompts.arrivals_s[prompts.requests[is_reuse]] - prompts.arrivals_s[previous[is_reuse]]
    order = np.argsort(seconds, kind="stable")
    weights = np.cumsum(prompts.events_in_cache[is_reuse][order])
    ranks = np.searchsorted(weights, np.ceil(np.array(shares) * weights[-1]))
    return {f"p{share * 100:g}": float(seconds[order[rank]]) for share, rank in zip(shares, ranks, strict=True)}


def working_sets(prompts: PromptBlocks, windows_s: Sequence[float] = WINDOWS_S) -> list[WorkingSet]:
    """Compute the working set for each window within the trace's duration, in one sweep over its block events.

    A block is in the set from a request for it until `window_s` later, or until it is asked for again. The mean is
    over the time from the first arrival to the last.
    """
    arrivals = prompts.arrivals_s
    duration_s = float(arrivals[-1] - arrivals[0]) if len(arrivals) else 0.0
    if duration_s <= 0:
        return []
    uses = _Uses.of(prompts)
    return [_working_set(window_s, uses, arrivals) for window_s in windows_s if window_s <= duration_s]


@attrs.frozen(eq=False)
class _Uses:
    """Runs of neighbouring blocks that one request uses, and that the same later request uses next.

    Attributes:
        begin_s: when they are used, float64 [num_uses], in order.
        until_next_s: how long until they are used again, infinite for never; float64 [num_uses].
        num_blocks: how many of the cache's blocks they are, int64 [num_uses].
    """

    begin_s: FloatArray
    until_next_s: FloatArray
    num_blocks: IntArray

    @classmethod
    def of(cls, prompts: PromptBlocks) -> "_Uses":
        request, following = prompts.requests, prompts.next_event
        next_request = np.full(len(request), prompts.num_requests)
        is_followed = following != NEVER
        next_request[is_followed] = request[following[is_followed]]
        is_first = np.ones(len(request), dtype=bool)
        is_first[1:] = (request[1:] != request[:-1]) | (next_request[1:] != next_request[:-1])
        at = np.flatnonzero(is_first)
        arrivals = np.append(prompts.arrivals_s, np.inf)  # of the request that never comes
        begin = arrivals[request[at]]
        return cls(begin, arrivals[next_request[at]] - begin, np.add.reduceat(prompts.events_in_cache, at))


def _working_set(window_s: float, uses: _Uses, arrivals: FloatArray) -> WorkingSet:
    begin, num_blocks = uses.begin_s, uses.num_blocks
    first, last = float(arrivals[0]), float(arrivals[-1])
    end = begin + np.minimum(window_s, uses.until_next_s)
    mean = float((num_blocks * (np.minimum(end, last) - begin)).sum()) / (last - first)
    # The set grows at arrivals only, so it is largest right after one: what began by then, less what ended by then.
    begun = sums_before(num_blocks)[np.searchsorted(begin, arrivals, side="right")]
    order = np.argsort(end, kind="stable")
    ended = sums_before(num_blocks[order])[np.searchsorted(end[order], arrivals, side="right")]
    return WorkingSet(window_s, mean, int((begun - ended).max()))


def reuse_as_dict(
    prompts: PromptBlocks, curve: LruCurve, block_size: int, bytes_per_block: int | None = None
) -> dict[str, Any]:
    """Return all of it for JSON, blocks with their tokens (and bytes)."""

    def sized(num_blocks: float) -> dict[str, float]:
        size = {"tokens": num_blocks * block_size}
        return size if bytes_per_block is None else {**size, "bytes": num_blocks * bytes_per_block}

    return {
        "reuse_distance_blocks": reuse_distances(curve),
        "reuse_time_s": reuse_times(prompts),
        "working_sets": [
            {
                "window_s": each.window_s,
                "mean_blocks": each.mean_blocks,
                "max_blocks": each.max_blocks,
                **{f"max_{unit}": size for unit, size in sized(each.max_blocks).items()},
            }
            for each in working_sets(prompts)
        ],
    }


BLOCK_SIZES = (1, 16, 32, 64, 128, 256, 512, 1024)


@attrs.frozen
class ReuseAtBlockSize:
    """Hits of an unlimited cache at one block size.

    Attributes:
        block_size: tokens of a block.
        hit_tokens: tokens of full blocks found; one token a prompt is always computed.
        lost_tokens: tokens that are shared, as far as the trace knows, and not found at this size.
        near_miss_requests: requests that share tokens and hit no block.
        unknown_tokens: tokens that may be shared beyond what the trace's own blocks tell, at most; below the trace's
            own block size a cache would find them.
    """

    block_size: int
    hit_tokens: int
    lost_tokens: int
    near_miss_requests: int
    unknown_tokens: int


@attrs.frozen(eq=False)
class SharedTokens:
    """Tokens that each request shares with earlier ones: int64 [num_requests] each.

    Attributes:
        shared: tokens shared, up to the end of the last trace block that an earlier request had too.
        unknown: further tokens that may be shared inside the trace block in which the prompts part.
        input_lengths: tokens of each prompt.
    """

    shared: IntArray
    unknown: IntArray
    input_lengths: IntArray

    @property
    def sharing_requests(self) -> int:
        """Requests that share any token."""
        return int(np.count_nonzero(self.shared))

    def at(self, block_size: int) -> ReuseAtBlockSize:
        """What is found at a block size. Raises `InputError` below 1 token."""
        if block_size < 1:
            raise InputError(f"a block size of {block_size} was asked for; it must be 1 token or more")
        hits = np.minimum(self.shared, self.input_lengths - 1) // block_size * block_size
        return ReuseAtBlockSize(
            block_size=block_size,
            hit_tokens=int(hits.sum()),
            lost_tokens=int((self.shared - hits).sum()),
            near_miss_requests=int(np.count_nonzero((self.shared > 0) & (hits == 0))),
            unknown_tokens=int(self.unknown.sum()),
        )

    def table(self, block_sizes: Sequence[int]) -> list[dict[str, Any]]:
        """One row a block size, for JSON; rates are shares of all prompt tokens."""
        num_tokens = int(self.input_lengths.sum())
        rows = [self.at(block_size) for block_size in block_sizes]
        return [{**attrs.asdict(row), "hit_rate": row.hit_tokens / num_tokens if num_tokens else 0.0} for row in rows]


def shared_tokens(prompts: PromptBlocks) -> SharedTokens:
    """Per request, out of prompts at the trace's own block size (`split` 1)."""
    block_size, lengths = prompts.block_size, prompts.input_lengths
    is_known = prompts.previous_request >= 0
    num_known = np.bincount(prompts.requests[is_known], minlength=prompts.num_requests)
    shared = np.minimum(num_known * block_size, lengths)
    unknown = np.minimum(block_size - 1, lengths - shared)
    unknown[:1] = 0  # there is nothing before the first request
    return SharedTokens(shared, unknown, lengths)
