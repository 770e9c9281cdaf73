"""The tiers as the fold of their events: live operation and replay share this one path."""

from collections import OrderedDict
from collections.abc import Iterable

import attrs

from ..core.errors import CorruptLedgerError
from ..core.events import Key
from ..core.tier_events import POOL, BlocksMoved, MoveReason, TierCommit, TierEvent, TiersCreated


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
