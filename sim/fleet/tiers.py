"""Where evicted blocks go: host memory, then SSD. Known from the engine's events alone; copied back on a hit.

Tiers are exclusive: a key is findable in the pool, or kept in one tier, or nowhere. A key that the last block of the
pool loses is written back to the first tier; what overflows there moves to the next, and out of the last one it is
gone. A hit promotes: the key leaves its tier and is findable in the pool again. Each tier forgets what came first.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Protocol

import attrs

from ...core.allocator.config import AllocatorConfig
from ...core.cache_kinds import FullAttention
from ...core.errors import CorruptLedgerError, InputError
from ...core.events import (
    POOL,
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksMoved,
    BlocksUncached,
    CacheReset,
    Commit,
    Key,
    MoveReason,
    RowsAssigned,
    TierCommit,
    TierEvent,
    TiersCreated,
)
from ...core.types import LatencyModel, Request, StepLoad

# The tiers as the fold of their events: live operation and replay share this one path.


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


class TierState:
    """Which keys each tier keeps, in the order in which it forgets them, and how they came and went.

    Attributes:
        created: names and sizes.
        kept: by tier, the keys; the first one is forgotten first.
        counts: by tier.
        next_sequence: of the next commit.
    """

    def __init__(self, created: TiersCreated) -> None:
        self.created = created
        self.kept: list[OrderedDict[Key, None]] = [OrderedDict() for _ in created.names]
        self.counts = [TierCounts() for _ in created.names]
        self.next_sequence = 0

    @classmethod
    def replay(cls, commits: Iterable[TierCommit]) -> "TierState":
        """The state after a log.

        Raises:
            CorruptLedgerError: the log does not begin with `TiersCreated`, misses a commit, or moves what is not there.
        """
        state: TierState | None = None
        for commit in commits:
            if state is None:
                created = commit.events[0] if commit.events else None
                if not isinstance(created, TiersCreated):
                    raise CorruptLedgerError(f"a tier log begins with TiersCreated, not with {created}")
                state = cls(created)
            state.apply_commit(commit)
        if state is None:
            raise CorruptLedgerError("an empty tier log says nothing of its tiers")
        return state

    def apply_commit(self, commit: TierCommit) -> None:
        """Replay one commit; its sequence number must be the next one."""
        if commit.sequence != self.next_sequence:
            raise CorruptLedgerError(f"tier commit {commit.sequence} follows {self.next_sequence - 1}: one is missing")
        for event in commit.events:
            self.apply(event)
        self.next_sequence += 1

    def apply(self, event: TierEvent) -> None:
        """Change the state by one event."""
        if isinstance(event, TiersCreated):
            if event != self.created or self.next_sequence:
                raise CorruptLedgerError(f"a tier log creates its tiers once, in its first commit; found {event}")
            return
        if event.from_tier != POOL:
            self._leave(event)
        if event.to_tier is not None and event.to_tier != POOL:
            self.kept[event.to_tier - 1].update(dict.fromkeys(event.keys))
            self.counts[event.to_tier - 1].came_in += len(event.keys)

    def _leave(self, event: BlocksMoved) -> None:
        tier = event.from_tier - 1
        kept, counts, number = self.kept[tier], self.counts[tier], len(event.keys)
        for key in event.keys:
            if key not in kept:
                raise CorruptLedgerError(f"{event.reason}: the {self.created.names[tier]} tier does not keep {key!r}")
            del kept[key]
        if event.reason is MoveReason.PROMOTED:
            counts.promoted += number
        elif event.reason is MoveReason.SUPERSEDED:
            counts.superseded += number
        elif event.reason is MoveReason.CLEARED:
            counts.cleared += number
        else:
            counts.moved_on += number

    def tier_of(self, key: Key) -> int | None:
        """The tier that keeps a key, from 1; None: none does."""
        return next((index for index, kept in enumerate(self.kept, 1) if key in kept), None)

    def snapshot(self) -> dict[str, object]:
        """Everything that must be equal when two folds are equal."""
        return {
            "next_sequence": self.next_sequence,
            "kept": [list(kept) for kept in self.kept],
            "counts": [attrs.asdict(counts) for counts in self.counts],
        }


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
