"""Where evicted blocks go: host memory, then SSD. Known from the engine's events alone; copied back on a hit.

Tiers are exclusive: a key is findable in the pool, or kept in one tier, or nowhere. A key that the last block of the
pool loses is written back to the first tier; what overflows there moves to the next, and out of the last one it is
gone. A hit promotes: the key leaves its tier and is findable in the pool again. Each tier forgets what came first.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Protocol

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
from ..core.tier_events import POOL, BlocksMoved, MoveReason, TierCommit, TierEvent, TiersCreated
from ..core.types import LatencyModel, Request, StepLoad
from .tier_state import TierState


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


class TierSink(Protocol):
    """Who hears of what happens behind a pool: a log, a publisher of KV events."""

    def apply(self, commit: TierCommit) -> None:
        """Take note of one commit."""
        ...


class TierStore:
    """The tiers behind one engine's pool: a sink of its commits, and the scheduler's external tokens.

    What it decides it writes down as `BlocksMoved`, one commit for each of the pool's that moves something; `state` is
    the fold of them.

    A promotion waits for its copy: `pending_s` are the seconds that the next step starts later. Copies of different
    tiers run one after the other, write-backs beside them on the other direction of the link (the step that overwrites
    a block waits for its copy). What moves from tier to tier does so in the background and delays nothing.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        config: AllocatorConfig,
        bytes_per_block: float | None,
        sinks: Iterable[TierSink] = (),
    ) -> None:
        """Start empty.

        Args:
            tiers: from the nearest to the farthest.
            config: of the pool: one full-attention group, prefix caching on.
            bytes_per_block: what one block's copy moves over a GPU's link; needed where a bandwidth is finite.
            sinks: who hears of every tier commit, once, in order.

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
        self._bytes_per_block = bytes_per_block or 0.0
        self._block_size = config.groups[0].block_size
        self._blocks_with_key: dict[Key, int] = {}
        self._asked: dict[str, frozenset[Key]] = {}
        self._read_blocks = [0] * len(tiers)
        self._written_blocks = 0
        self._sinks = tuple(sinks)
        created = TiersCreated(
            tuple([tier.name for tier in tiers]), tuple([tier.num_blocks for tier in tiers]), self._block_size
        )
        self.state = TierState(created)
        self._events: list[TierEvent] = []
        self._emit(created)
        self._commit(pool_sequence=0)

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
        """The tier that keeps a key, from 1; None: none does."""
        return self.state.tier_of(key)

    def kept(self, tier: int) -> frozenset[Key]:
        """The keys of a tier, from 1."""
        return frozenset(self.state.kept[tier - 1])

    @property
    def num_hit_blocks(self) -> int:
        """Blocks that were promoted, from any tier."""
        return sum(counts.promoted for counts in self.state.counts)

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
                self._keys_came(event.keys, promised)
            elif isinstance(event, BlocksAllocated):
                lost += self._gone(event.lost_keys)
            elif isinstance(event, BlockCopied):
                lost += self._gone((event.lost_key,))
            elif isinstance(event, BlocksUncached):
                self._gone(event.keys)  # taken back on purpose: nothing of it may be found again
            elif isinstance(event, CacheReset):
                self._clear()
        self._write_back([key for key in dict.fromkeys(lost) if key not in self._blocks_with_key])
        if self._events:
            self._commit(commit.sequence)

    def _keys_came(self, keys: Iterable[Key], promised: frozenset[Key]) -> None:
        """The pool holds these again: a hit's copy, or content that was computed anew."""
        moves: dict[tuple[int, MoveReason], list[Key]] = {}
        for key in keys:
            self._blocks_with_key[key] = self._blocks_with_key.get(key, 0) + 1
            tier = self.state.tier_of(key)
            if tier is not None and self._blocks_with_key[key] == 1:
                reason = MoveReason.PROMOTED if key in promised else MoveReason.SUPERSEDED
                moves.setdefault((tier, reason), []).append(key)
        for (tier, reason), moved in moves.items():
            if reason is MoveReason.PROMOTED:
                self._read_blocks[tier - 1] += len(moved)
            self._emit(BlocksMoved(reason, tuple(moved), tier, POOL if reason is MoveReason.PROMOTED else None))

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

    def _write_back(self, keys: Sequence[Key]) -> None:
        """Into the first tier; what is too much for a tier goes on to the next, what came first before the others."""
        if not keys:
            return
        self._written_blocks += len(keys)
        self._emit(BlocksMoved(MoveReason.WRITTEN_BACK, tuple(keys), POOL, 1))
        for index, tier in enumerate(self.tiers, 1):
            kept = self.state.kept[index - 1]
            surplus = len(kept) - tier.num_blocks
            if surplus <= 0:
                return
            target = index + 1 if index < len(self.tiers) else None
            self._emit(BlocksMoved(MoveReason.OVERFLOWED, tuple(islice(kept, surplus)), index, target))

    def _clear(self) -> None:
        self._blocks_with_key.clear()
        for index, kept in enumerate(self.state.kept, 1):
            if kept:
                self._emit(BlocksMoved(MoveReason.CLEARED, tuple(kept), index, None))

    def _emit(self, event: TierEvent) -> None:
        self.state.apply(event)
        self._events.append(event)

    def _commit(self, pool_sequence: int) -> None:
        commit = TierCommit(self.state.next_sequence, pool_sequence, tuple(self._events))
        self.state.next_sequence += 1
        self._events.clear()
        for sink in self._sinks:
            sink.apply(commit)

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
            for tier, counts, kept in zip(self.tiers, self.state.counts, self.state.kept, strict=True)
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
