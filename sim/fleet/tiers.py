"""Tiers for evicted blocks: host memory, then SSD. They follow the engine's events; a hit copies blocks back.

Tiers are exclusive: a block hash is cached in the pool, or kept in one tier, or nowhere. When the last block of the
pool with a hash loses it, the block is written back to the first tier; what overflows there moves to the next tier, and
is dropped from the last. A hit promotes: the block leaves its tier and is cached in the pool again. Each tier drops its
oldest entry first.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Protocol

import attrs

from ...core import events
from ...core.allocator.config import AllocatorConfig
from ...core.cache_kinds import FullAttention
from ...core.errors import CorruptLedgerError, InputError
from ...core.events import POOL, BlocksMoved, Commit, Key, MoveReason, TierCommit, TierEvent, TiersCreated
from ...core.types import LatencyModel, Request, ScheduledStep, StepLoad, scheduled_seconds


@attrs.define
class TierCounts:
    """Counts of one tier's blocks: `came_in == promoted + superseded + moved_on + cleared + held`."""

    came_in: int = 0  # written to it, from the pool or from the tier before
    promoted: int = 0  # copied back into the pool on a hit
    superseded: int = 0  # dropped because the pool computed the same content again
    moved_on: int = 0  # pushed out to the next tier, or from the last tier out of the cache
    cleared: int = 0  # dropped when the prefix cache was reset


# Counts by reason to leave a tier; other reasons are `moved_on`.
_COUNTED_AS = {each: each.name.lower() for each in (MoveReason.PROMOTED, MoveReason.SUPERSEDED, MoveReason.CLEARED)}


class TierState:
    """The block hashes that each tier keeps, in the order in which it drops them: the fold of the tiers' events.

    Live operation and replay both use this one path.
    """

    def __init__(self, created: TiersCreated) -> None:
        self.created = created  # names and sizes
        # The hashes of each tier; the first one is dropped first.
        self.kept: list[OrderedDict[Key, None]] = [OrderedDict() for _ in created.names]
        self.counts = [TierCounts() for _ in created.names]
        self.next_sequence = 0  # of the next commit

    @classmethod
    def replay(cls, commits: Iterable[TierCommit]) -> "TierState":
        """The state after a log.

        Raises:
            CorruptLedgerError: the log does not begin with `TiersCreated`, misses a commit, or moves what a tier lacks.
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
            raise CorruptLedgerError("an empty tier log does not describe its tiers")
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
        field = _COUNTED_AS.get(event.reason, "moved_on")
        setattr(counts, field, getattr(counts, field) + number)

    def tier_of(self, key: Key) -> int | None:
        """The tier that keeps a block hash, from 1; None if no tier does."""
        return next((index for index, kept in enumerate(self.kept, 1) if key in kept), None)

    def snapshot(self) -> dict[str, object]:
        """Everything that must be equal in equal states."""
        return {
            "next_sequence": self.next_sequence,
            "kept": [list(kept) for kept in self.kept],
            "counts": [attrs.asdict(counts) for counts in self.counts],
        }


@attrs.frozen(kw_only=True)
class Tier:
    """A store for evicted blocks."""

    name: str  # for example `host` or `ssd`
    num_blocks: int  # blocks that it keeps
    bytes_per_s: float = math.inf  # of copies to and from the GPU, in each direction; infinite: they take no time

    def __attrs_post_init__(self) -> None:
        if self.num_blocks < 1:
            raise InputError(f"the {self.name} tier has {self.num_blocks} blocks; it must have at least 1")
        if not self.bytes_per_s > 0:
            raise InputError(f"the {self.name} tier copies {self.bytes_per_s} bytes a second; it must be above 0")

    def __str__(self) -> str:
        """Its name, size and bandwidth, for the report."""
        has_bandwidth = math.isfinite(self.bytes_per_s)
        speed = f"{self.bytes_per_s / 1e9:g} GB/s each way" if has_bandwidth else "copies take no time"
        return f"{self.name}: {self.num_blocks:,} blocks, {speed}"


class TierSink(Protocol):
    """Receives every tier commit: a log, or a publisher of KV events."""

    def apply(self, commit: TierCommit) -> None:
        """Process one commit."""
        ...


class TierStore:
    """The tiers behind one engine's pool: a sink of its commits, and the scheduler's external tokens.

    It emits its decisions as `BlocksMoved`, one commit for each commit of the pool that moves something; `state` is the
    fold of these commits.

    A promotion waits for its copy, which delays the next step (`take_pending_s`). Copies from different tiers run one
    after the other; write-backs run beside them in the other direction of the link (the step that overwrites a block
    waits for its copy). Moves between tiers happen in the background and delay nothing.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        config: AllocatorConfig,
        bytes_per_block: float | None,
        sinks: Iterable[TierSink] = (),
    ) -> None:
        """Start empty.

        `tiers` go from the nearest to the farthest. `config` is the pool's: one full-attention group, prefix caching
        on. `bytes_per_block` are those that one block's copy moves over a GPU's link; a finite bandwidth needs them.
        Raises `InputError` for groups that cannot be copied in block by block, no tier, or no bytes where they are
        needed.
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
        self.blocks_with_key: dict[Key, int] = {}  # the pool's block hashes according to the events
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
        """Tokens of the full blocks after a hit that tiers keep, without a gap and without the request's last token."""
        if request.keys is None:
            return 0
        start, stop = num_hit_tokens // self._block_size, (request.num_tokens - 1) // self._block_size
        found: list[Key] = []
        for key in request.keys.keys(start, stop) if stop > start else ():
            if self.state.tier_of(key) is None:
                break
            found.append(key)
        self._asked = {request.request_id: frozenset(found)} if found else {}
        return len(found) * self._block_size

    # -- events ------------------------------------------------------------------------------------------------------

    def apply(self, commit: Commit) -> None:
        """Follow block hashes into and out of the pool; within a commit, promotions make room before write-backs."""
        promised: frozenset[Key] = frozenset()
        lost: list[Key] = []
        for event in commit.events:
            if isinstance(event, events.RowsAssigned):
                for request_id in event.requests:
                    promised |= self._asked.pop(request_id, frozenset())
            elif isinstance(event, events.BlocksCached):
                self._keys_came(event.keys, promised)
            elif isinstance(event, events.BlocksAllocated):
                lost += self._gone(event.lost_keys)
            elif isinstance(event, events.BlockCopied):
                lost += self._gone((event.lost_key,))
            elif isinstance(event, events.BlocksUncached):
                self._gone(event.keys)  # uncached on purpose: these must not be found again
            elif isinstance(event, events.CacheReset):
                self._clear()
        self._write_back([key for key in dict.fromkeys(lost) if key not in self.blocks_with_key])
        if self._events:
            self._commit(commit.sequence)

    def _keys_came(self, keys: Iterable[Key], promised: frozenset[Key]) -> None:
        """The pool caches these now: copies of a hit, or content that was computed again."""
        moves: dict[tuple[int, MoveReason], list[Key]] = {}
        for key in keys:
            self.blocks_with_key[key] = self.blocks_with_key.get(key, 0) + 1
            tier = self.state.tier_of(key)
            if tier is not None and self.blocks_with_key[key] == 1:
                reason = MoveReason.PROMOTED if key in promised else MoveReason.SUPERSEDED
                moves.setdefault((tier, reason), []).append(key)
        for (tier, reason), moved in moves.items():
            if reason is MoveReason.PROMOTED:
                self._read_blocks[tier - 1] += len(moved)
            self._emit(BlocksMoved(reason, tuple(moved), tier, POOL if reason is MoveReason.PROMOTED else None))

    def _gone(self, keys: Iterable[Key | None]) -> list[Key]:
        """Blocks lost these hashes; return those that no other block has."""
        out: list[Key] = []
        for key in keys:
            if key is None:
                continue
            left = self.blocks_with_key[key] - 1
            if left:
                self.blocks_with_key[key] = left
            else:
                del self.blocks_with_key[key]
                out.append(key)
        return out

    def _write_back(self, keys: Sequence[Key]) -> None:
        """Write to the first tier; each tier's surplus moves to the next one, oldest first."""
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
        self.blocks_with_key.clear()
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
        """Return the seconds that the next step waits for copies, and reset the count."""
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

    def figures(self) -> list[dict[str, object]]:
        """The report's row for each tier."""
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
    """Adds the copies between pool and tiers to another model's step. Each engine has its own."""

    def __init__(self, inner: LatencyModel, store: TierStore) -> None:
        self._inner = inner
        self._store = store

    def step_seconds(self, load: StepLoad) -> float:
        return self._store.take_pending_s() + self._inner.step_seconds(load)

    def scheduled_seconds(self, step: ScheduledStep, num_steps_later: int, load: StepLoad) -> float:
        return self._store.take_pending_s() + scheduled_seconds(self._inner, step, num_steps_later, load)

    def assumptions(self) -> dict[str, object]:
        return self._inner.assumptions()
