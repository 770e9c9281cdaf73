"""The log in memory: append commits, rebuild the state from them, find the first commit that does not add up."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

from .conservation import ConservationFault, first_conservation_fault
from .errors import CorruptLedgerError, KVLedgerError
from .events import (
    BlocksAllocated,
    BlocksCached,
    BlocksFreed,
    BlocksShared,
    BlocksUncached,
    Commit,
    Event,
    FreeReason,
    PoolCreated,
    PrefixAdopted,
    RowsAssigned,
    RowsReleased,
    TokensPlaced,
)
from .eviction import EvictionOrder
from .ledger_state import LedgerState

# Events that are kept as bare tuples: (place in this list, the columns).
_BARE = (
    RowsAssigned,
    RowsReleased,
    PrefixAdopted,
    BlocksAllocated,
    BlocksCached,
    TokensPlaced,
    BlocksShared,
    BlocksUncached,
    BlocksFreed,
)
_PLACE_OF: dict[type, int] = {cls: place for place, cls in enumerate(_BARE)}
_FREED = _PLACE_OF[BlocksFreed]

# (sequence, its events, each as (place in `_BARE` or -1, columns or the event itself))
_Kept: TypeAlias = tuple[int, tuple[tuple[Any, ...], ...]]


def _kept(commit: Commit) -> _Kept:
    events: list[tuple[Any, ...]] = []
    for event in commit.events:
        place = _PLACE_OF.get(type(event))
        if place is None or not isinstance(event, tuple):
            events.append((-1, event))
        elif place == _FREED:  # the members of an enumeration are objects that the collector follows
            events.append((place, str(event[0]), *event[1:]))
        else:
            events.append((place, *event))
    return commit.sequence, tuple(events)


def _unkept(kept: _Kept) -> Commit:
    events: list[Event] = []
    place: int
    columns: list[Any]
    for place, *columns in kept[1]:
        if place == -1:
            events.append(columns[0])
        elif place == _FREED:
            events.append(BlocksFreed(FreeReason(columns[0]), *columns[1:]))
        else:
            events.append(_BARE[place](*columns))
    return Commit(kept[0], tuple(events))


class EventLog:
    """A sink that keeps every commit.

    Commits are kept as bare tuples of bare values, which the garbage collector stops following after its first look;
    as objects, a long log would be walked through again and again.

        log = EventLog()
        allocator = KVCacheAllocator(config, sinks=[log])
        ...
        assert log.replay().snapshot() == allocator.state.snapshot()

    A log that is not wanted costs nothing: give the allocator no sink.
    """

    def __init__(self, commits: Sequence[Commit] = ()) -> None:
        self._kept = [_kept(commit) for commit in commits]

    def apply(self, commit: Commit) -> None:
        """Append one commit; its sequence number must be the next one."""
        kept = self._kept
        if kept and commit.sequence != kept[-1][0] + 1:
            raise CorruptLedgerError(f"commit {commit.sequence} follows commit {kept[-1][0]}")
        kept.append(_kept(commit))

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Commit]:
        return map(_unkept, self._kept)

    def __getitem__(self, sequence: int) -> Commit:
        return _unkept(self._kept[sequence])

    @property
    def created(self) -> PoolCreated:
        """The first event of the log."""
        first = self[0].events[0] if self._kept and self[0].events else None
        if not isinstance(first, PoolCreated):
            raise CorruptLedgerError("the log does not begin with PoolCreated, so there is no pool to rebuild")
        return first

    def replay(self, stop: int | None = None, eviction: EvictionOrder | None = None) -> LedgerState:
        """The state after commits `0 .. stop - 1` (all by default), rebuilt from nothing.

        Args:
            stop: how many commits to replay.
            eviction: an empty order like the live one, where its name does not suffice to make it (Belady).
        """
        state = LedgerState(self.created, eviction)
        for commit in islice(self, stop):
            state.apply_commit(commit)
        return state

    def conservation(self) -> ConservationFault | None:
        """The first commit after which held + evictable + clean + null != num_blocks, or None (field report C02).

        Works on logs that do not replay, too: it counts on its own, see `ConservationAudit`.
        """
        return first_conservation_fault(self.created, self)

    def verify(self, eviction: EvictionOrder | None = None) -> LedgerState:
        """The state after the last commit, if every commit adds up and can be applied to what came before.

        Raises:
            CorruptLedgerError: names the first commit that does not, with sign and amount where blocks were lost or
                are there twice.
        """
        fault = self.conservation()
        if fault is not None:
            raise CorruptLedgerError(fault.describe())
        state = LedgerState(self.created, eviction)
        for commit in self:
            try:
                state.apply_commit(commit)
            except (KVLedgerError, LookupError, ValueError) as error:
                raise CorruptLedgerError(f"commit {commit.sequence} cannot be applied: {error}") from error
        return state
