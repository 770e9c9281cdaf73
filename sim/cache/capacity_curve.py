"""Computes the share of a trace's prompts that a prefix cache serves: LRU at every capacity, other policies at some."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from ...core.errors import InputError
from ..traces import Trace, TraceInfo
from .lru_curve import CachePoint, LruCurve, lru_curve
from .policies import check_policies, replay_policy
from .prompt_blocks import PromptBlocks, at_block_size, read_prompt_blocks
from .reuse import BLOCK_SIZES, SharedTokens, reuse_as_dict, shared_tokens

ASSUMPTIONS = (
    "requests are served one after the other, each finished before the next arrives",
    "a prompt hits the longest prefix of its blocks that is cached; its own blocks are never evicted for it",
    "outputs take no blocks; capacities are usable blocks (an engine's null block comes on top)",
    "the whole window counts, from a cold cache (no warm-up)",
)


@attrs.frozen(eq=False)
class CapacityCurve:
    """Hit rates of a trace: `policies` at the requested capacities, and `lru` at every capacity.

    `num_block_events` counts the blocks of all prompts (the denominator of a block hit rate), `num_distinct_blocks`
    the different ones. `prompts` are the prompts in the cache's blocks, `shared` the tokens that they share as far as
    the trace knows. `seconds` is the wall time of reading, of the one LRU pass, and of the replays.
    """

    info: TraceInfo
    block_size: int
    num_block_events: int
    num_distinct_blocks: int
    input_tokens: int
    prompts: PromptBlocks
    shared: SharedTokens
    lru: LruCurve
    policies: dict[str, tuple[CachePoint, ...]]
    seconds: dict[str, float]

    @property
    def infinite(self) -> CachePoint:
        """An unlimited cache: the ceiling of every policy."""
        return self.lru.infinite

    def block_hit_rate(self, point: CachePoint) -> float:
        """Share of all prompt blocks; a partial last block counts as one."""
        return point.hit_blocks / self.num_block_events

    def token_hit_rate(self, point: CachePoint) -> float:
        """Share of all prompt tokens."""
        return point.hit_tokens / self.input_tokens

    def full_block_token_hit_rate(self, point: CachePoint) -> float:
        """Share of all prompt tokens where, as in vLLM, only full blocks hit and one token a prompt is computed."""
        return point.full_block_hit_tokens / self.input_tokens

    def point_as_dict(self, point: CachePoint, bytes_per_block: int | None = None) -> dict[str, Any]:
        """One point for JSON; an infinite cache is as large as the distinct blocks."""
        num_blocks = self.num_distinct_blocks if point.num_blocks is None else point.num_blocks
        size = {"num_blocks": num_blocks, "tokens": num_blocks * self.block_size}
        if bytes_per_block is not None:
            size["bytes"] = num_blocks * bytes_per_block
        return {
            **size,
            "hit_blocks": point.hit_blocks,
            "block_hit_rate": self.block_hit_rate(point),
            "token_hit_rate": self.token_hit_rate(point),
            "full_block_token_hit_rate": self.full_block_token_hit_rate(point),
        }

    @property
    def block_sizes(self) -> list[int]:
        """Block sizes at which reuse is compared: the usual ones, the trace's and the cache's."""
        return sorted({*BLOCK_SIZES, self.block_size, *filter(None, [self.info.trace_block_size])})

    def for_share_of_ceiling(self, share: float, bytes_per_block: int | None = None) -> dict[str, Any]:
        """Return the point of the smallest LRU cache that serves `share` of what an unlimited one would."""
        return {"share": share, **self.point_as_dict(self.lru.at(self.lru.smallest_for(share)), bytes_per_block)}

    def near_misses(self) -> dict[str, Any]:
        """Count tokens that are shared, as far as the trace knows, but not found at this block size (B02)."""
        here = self.shared.at(self.block_size)
        return {
            "block_size": self.block_size,
            "requests": here.near_miss_requests,
            "requests_that_share": self.shared.sharing_requests,
            "lost_tokens": here.lost_tokens,
            "lost_rate": here.lost_tokens / self.input_tokens,
            "unknown_tokens_at_most": here.unknown_tokens,
        }

    def working_set(self) -> dict[str, Any]:
        """Count distinct blocks, the LRU blocks for shares of the ceiling, and tokens shared in less than a block."""
        shares = {f"{share:.0%}": self.lru.smallest_for(share) for share in (0.5, 0.9, 0.95, 0.99, 1.0)}
        return {
            "distinct_blocks": self.num_distinct_blocks,
            "distinct_tokens": self.num_distinct_blocks * self.block_size,
            "lru_blocks_for_share_of_ceiling": shares,
            "near_miss_tokens": self.infinite.hit_tokens - self.infinite.full_block_hit_tokens,
        }

    def as_dict(self, bytes_per_block: int | None = None) -> dict[str, Any]:
        """Everything for JSON; `policy` and `points` are those of the first policy asked for."""
        points = {
            policy: [self.point_as_dict(point, bytes_per_block) for point in points]
            for policy, points in self.policies.items()
        }
        first = next(iter(points))
        return {
            "trace": self.info.as_dict(),
            "window": self.info.window_as_dict(),
            "block_size": self.block_size,
            "policy": first,
            "points": points[first],
            "infinite": self.point_as_dict(self.infinite, bytes_per_block),
            "policies": points,
            "num_block_events": self.num_block_events,
            "working_set": self.working_set(),
            "for_90_percent_of_ceiling": self.for_share_of_ceiling(0.9, bytes_per_block),
            "near_misses": self.near_misses(),
            "by_block_size": self.shared.table(self.block_sizes),
            "reuse": reuse_as_dict(self.prompts, self.lru, self.block_size, bytes_per_block),
            "assumptions": list(ASSUMPTIONS),
            "warnings": self.info.notes(),
            "timing": {f"{name}_seconds": round(spent, 4) for name, spent in self.seconds.items()},
        }


def capacity_curve(
    trace: Trace,
    *,
    capacities: Sequence[int] | None = None,
    policies: Sequence[str] = ("lru",),
    block_size: int | None = None,
    on_point: Callable[[str, int], None] | None = None,
) -> CapacityCurve:
    """Compute hit rates of `policies` at `capacities` (usable blocks; None for a 1-2-5 series up to the LRU ceiling).

    LRU costs one pass for all capacities; every other policy is replayed once per capacity, and `on_point` is called
    with its name and the capacity after each replay. `block_size` in tokens is the trace's own unless given (see
    `read_prompt_blocks`). Raises `InputError` for an unknown policy, a capacity below 1, or an unreadable trace.
    """
    _check(capacities, policies, block_size)
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    own_prompts = read_prompt_blocks(trace, block_size if trace.info.trace_block_size is None else None)
    prompts = own_prompts if block_size is None else at_block_size(own_prompts, block_size)
    seconds["read"], start = time.perf_counter() - start, time.perf_counter()
    lru = lru_curve(prompts)
    seconds["lru_all_capacities"], start = time.perf_counter() - start, time.perf_counter()
    if capacities is None:
        capacities = series_up_to(max(1, lru.smallest_for(1.0)))
    points: dict[str, tuple[CachePoint, ...]] = {}
    for policy in policies:
        if policy == "lru":
            points[policy] = tuple(map(lru.at, capacities))
            continue
        points[policy] = ()
        for num_blocks in capacities:
            points[policy] += (replay_policy(prompts, policy, num_blocks),)
            if on_point is not None:
                on_point(policy, num_blocks)
    seconds["other_policies"] = time.perf_counter() - start
    return CapacityCurve(
        info=trace.info,
        block_size=prompts.block_size,
        num_block_events=prompts.num_block_events,
        num_distinct_blocks=prompts.num_distinct_blocks,
        input_tokens=prompts.input_tokens,
        prompts=prompts,
        shared=shared_tokens(own_prompts),
        lru=lru,
        policies=points,
        seconds=seconds,
    )


def series_up_to(num_blocks: int, num_points: int = 8) -> list[int]:
    """Return the last `num_points` of 1, 2, 5, 10, 20, 50, ..., which ends with the first of at least `num_blocks`."""
    series = [1]
    while series[-1] < num_blocks:
        series.append(series[-1] * 5 // 2 if str(series[-1])[0] == "2" else series[-1] * 2)
    return series[-num_points:]


def _check(capacities: Sequence[int] | None, policies: Sequence[str], block_size: int | None) -> None:
    check_policies(policies)
    if block_size is not None and block_size < 1:
        raise InputError(f"--block-size is {block_size}; it must be 1 token or more")
    if capacities is not None:
        if not capacities:
            raise InputError("--capacities is empty; give sizes in blocks, such as 1000,5000,10000")
        bad = [num_blocks for num_blocks in capacities if num_blocks < 1]
        if bad:
            raise InputError(f"--capacities holds {', '.join(map(str, bad))}; a cache has 1 block or more")
