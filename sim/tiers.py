"""Where evicted blocks go: host memory, then SSD. Known from the engine's events alone; copied back on a hit.

Tiers are exclusive: a key is findable in the pool, or kept in one tier, or nowhere. A key that the last block of the
pool loses is written back to the first tier; what overflows there moves to the next, and out of the last one it is
gone. A hit promotes: the key leaves its tier and is findable in the pool again. Each tier forgets what came first.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from ..core.allocator_config import AllocatorConfig
from ..core.cache_kinds import FullAttention
from ..core.errors import InputError
from ..core.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksUncached,
    CacheReset,
    Commit,
    Key,
    RowsAssigned,
)
from ..core.types import LatencyModel, Request, StepLoad


@attrs.frozen(kw_only=True)
class Tier:
    """A place for evicted blocks.

    Attributes:
        name: such as `host` or `ssd`.
        num_blocks: how many it keeps.
        bytes_per_s: of copies between it and the GPU, in each direction; infinite: copies take no time.
    """

    name: str
    num_blocks: int
    bytes_per_s: float = math.inf

    def __attrs_post_init__(self) -> None:
        if self.num_blocks < 1:
            raise InputError(f"the {self.name} tier has {self.num_blocks} blocks; it must have at least 1")
        if not self.bytes_per_s > 0:
            raise InputError(f"the {self.name} tier copies {self.bytes_per_s} bytes a second; it must be above 0")


@attrs.define
class TierCounts:
    """What happened to one tier's blocks: `came_in == promoted + superseded + moved_on + cleared + held`.

    Attributes:
        came_in: blocks written to it, from the pool or from the tier before.
        promoted: copied back into the pool on a hit.
        superseded: forgotten because the pool computed the same content again.
        moved_on: pushed out: to the next tier, or, from the last one, out of the cache.
        cleared: forgotten when the prefix cache was reset.
    """

    came_in: int = 0
    promoted: int = 0
    superseded: int = 0
    moved_on: int = 0
    cleared: int = 0


class TierStore:
    """The tiers behind one engine's pool: a sink of its commits, and the scheduler's external tokens.

    A promotion waits for its copy: `pending_s` are the seconds that the next step starts later. Copies of different
    tiers run one after the other, write-backs beside them on the other direction of the link (the step that overwrites
    a block waits for its copy). What moves from tier to tier does so in the background and delays nothing.
    """

    def __init__(self, tiers: Sequence[Tier], config: AllocatorConfig, bytes_per_block: float | None) -> None:
        """Start empty.

        Args:
            tiers: from the nearest to the farthest.
            config: of the pool: one full-attention group, prefix caching on.
            bytes_per_block: what one block's copy moves over a GPU's link; needed where a bandwidth is finite.

        Raises:
            InputError: groups that cannot be copied in block by block, no tier, or no bytes for a finite bandwidth.
        """
        if len(config.groups) != 1 or not isinstance(config.groups[0], FullAttention) or not config.enable_caching:
            raise InputError(
                "tiers for evicted blocks need prefix caching and a model whose layers all attend to everything; "
                f"this pool has {', '.join(map(str, config.groups))}"
            )
        if not tiers:
            raise InputError("give at least one tier")
        finite = [tier for tier in tiers if math.isfinite(tier.bytes_per_s)]
        if finite and not bytes_per_block:
            raise InputError(f"the bandwidth of the {finite[0].name} tier needs the bytes of a block: give a model")
        self.tiers = tuple(tiers)
        self.counts = [TierCounts() for _ in tiers]
        self.num_hit_blocks = 0
        self._bytes_per_block = bytes_per_block or 0.0
        self._block_size = config.groups[0].block_size
        self._kept: list[OrderedDict[Key, None]] = [OrderedDict() for _ in tiers]
        self._blocks_with_key: dict[Key, int] = {}
        self._asked: dict[str, frozenset[Key]] = {}
        self._read_blocks = [0] * len(tiers)
        self._written_blocks = 0

    # -- the scheduler's question ------------------------------------------------------------------------------------

    def num_tokens_after(self, request: Request, num_hit_tokens: int) -> int:
        """Tokens of the whole blocks behind a hit that tiers keep, without a gap, one token short of the request."""
        if request.keys is None:
            return 0
        start, stop = num_hit_tokens // self._block_size, (request.num_tokens - 1) // self._block_size
        found: list[Key] = []
        for key in request.keys.keys(start, stop) if stop > start else ():
            if self.tier_of(key) is None:
                break
            found.append(key)
        self._asked = {request.request_id: frozenset(found)} if found else {}
        return len(found) * self._block_size

    def tier_of(self, key: Key) -> int | None:
        """The tier that keeps a key, from 0; None: none does."""
        return next((index for index, kept in enumerate(self._kept) if key in kept), None)

    def kept(self, tier: int) -> frozenset[Key]:
        """The keys of a tier."""
        return frozenset(self._kept[tier])

    @property
    def keys_in_pool(self) -> frozenset[Key]:
        """The keys that blocks of the pool carry, as the events say."""
        return frozenset(self._blocks_with_key)

    # -- events ------------------------------------------------------------------------------------------------------

    def apply(self, commit: Commit) -> None:
        """Follow keys into and out of the pool; within a commit, what comes in makes room before what goes out."""
        promised: frozenset[Key] = frozenset()
        lost: list[Key] = []
        for event in commit.events:
            if isinstance(event, RowsAssigned):
                for request_id in event.requests:
                    promised |= self._asked.pop(request_id, frozenset())
            elif isinstance(event, BlocksCached):
                for key in event.keys:
                    self._key_came(key, key in promised)
            elif isinstance(event, BlocksAllocated):
                lost += self._gone(event.lost_keys)
            elif isinstance(event, BlockCopied):
                lost += self._gone((event.lost_key,))
            elif isinstance(event, BlocksUncached):
                self._gone(event.keys)  # taken back on purpose: nothing of it may be found again
            elif isinstance(event, CacheReset):
                self._clear()
        for key in lost:
            if key not in self._blocks_with_key:
                self._written_blocks += 1
                self._put(0, key)

    def _key_came(self, key: Key, is_promised: bool) -> None:
        self._blocks_with_key[key] = self._blocks_with_key.get(key, 0) + 1
        tier = self.tier_of(key)
        if tier is None:
            return
        del self._kept[tier][key]
        if is_promised:
            self.counts[tier].promoted += 1
            self._read_blocks[tier] += 1
            self.num_hit_blocks += 1
        else:
            self.counts[tier].superseded += 1

    def _gone(self, keys: Iterable[Key | None]) -> list[Key]:
        """Blocks lost these keys; those that no other block carried."""
        out: list[Key] = []
        for key in keys:
            if key is None:
                continue
            left = self._blocks_with_key[key] - 1
            if left:
                self._blocks_with_key[key] = left
            else:
                del self._blocks_with_key[key]
                out.append(key)
        return out

    def _put(self, tier: int, key: Key) -> None:
        kept, counts = self._kept[tier], self.counts[tier]
        kept[key] = None
        counts.came_in += 1
        if len(kept) > self.tiers[tier].num_blocks:
            pushed_out, _ = kept.popitem(last=False)
            counts.moved_on += 1
            if tier + 1 < len(self.tiers):
                self._put(tier + 1, pushed_out)

    def _clear(self) -> None:
        self._blocks_with_key.clear()
        for kept, counts in zip(self._kept, self.counts, strict=True):
            counts.cleared += len(kept)
            kept.clear()

    # -- time --------------------------------------------------------------------------------------------------------

    def take_pending_s(self) -> float:
        """Seconds that the next step waits for copies; asking starts the count anew."""
        reads = sum(
            blocks * self._bytes_per_block / tier.bytes_per_s
            for blocks, tier in zip(self._read_blocks, self.tiers, strict=True)
        )
        writes = self._written_blocks * self._bytes_per_block / self.tiers[0].bytes_per_s
        self._read_blocks = [0] * len(self.tiers)
        self._written_blocks = 0
        return max(reads, writes)

    @property
    def takes_time(self) -> bool:
        """Whether any copy takes time."""
        return any(math.isfinite(tier.bytes_per_s) for tier in self.tiers)

    def figures(self) -> list[dict[str, Any]]:
        """For the report, a row for each tier."""
        return [
            {
                "tier": tier.name,
                "num_blocks": tier.num_blocks,
                "gb_s": tier.bytes_per_s / 1e9 if math.isfinite(tier.bytes_per_s) else None,
                **attrs.asdict(counts),
                "held": len(kept),
            }
            for tier, counts, kept in zip(self.tiers, self.counts, self._kept, strict=True)
        ]


class TieredLatency:
    """Another model's step, after the copies between pool and tiers that it waits for. One for each engine."""

    def __init__(self, inner: LatencyModel, store: TierStore) -> None:
        self._inner = inner
        self._store = store

    def step_seconds(self, load: StepLoad) -> float:
        """Seconds of the copies that are due and of the step."""
        return self._store.take_pending_s() + self._inner.step_seconds(load)

    def assumptions(self) -> dict[str, Any]:
        """Those of the inner model."""
        return self._inner.assumptions()
