"""When and how far apart blocks are asked for again, and how many are in use: the shape behind a capacity curve.

* reuse distance: the number of distinct blocks that an LRU cache must hold for a block to be still there when it is
  asked for again (the depth in the recency stack). Its distribution is the LRU curve over its ceiling.
* reuse time: seconds from one request for a block to the next one, on the trace's clock.
* working set (Denning 1968): the distinct blocks asked for within the last so many seconds.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from .lru_curve import LruCurve
from .prompt_blocks import NEVER, PromptBlocks, sums_before

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
WINDOWS_S = (10.0, 60.0, 300.0, 900.0, 1_800.0, 3_600.0)


@attrs.frozen
class WorkingSet:
    """Blocks asked for within the last `window_s` seconds: the mean over time and the most at any time."""

    window_s: float
    mean_blocks: float
    max_blocks: int


def reuse_distances(curve: LruCurve, shares: Sequence[float] = SHARES) -> dict[str, int]:
    """Distances in blocks that so many of the reuses stay within: `p50`, ... Empty where nothing is reused."""
    if not curve.infinite.hit_blocks:
        return {}
    return {f"p{share * 100:g}": curve.smallest_for(share) for share in shares}


def reuse_times(prompts: PromptBlocks, shares: Sequence[float] = SHARES) -> dict[str, float]:
    """Seconds that so many of the reuses stay within (nearest rank): `p50`, ... Empty where nothing is reused."""
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
    """The working set at windows within the trace's duration, each computed in one sweep over its block events.

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
    """Blocks asked for by one request and next by the same other one, neighbours in a prompt taken together.

    Attributes:
        begin_s: when they are asked for, float64 [num_uses], in order.
        until_next_s: how long until they are again, infinite where they never are; float64 [num_uses].
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
        arrivals = np.append(prompts.arrivals_s, np.inf)  # whoever never comes, comes at infinity
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
    """All of it for JSON, blocks with their tokens (and bytes)."""

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
