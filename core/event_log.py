"""The log in memory: append commits, rebuild the state from them, find the first commit that does not add up."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, TypeAlias

import attrs

from .conservation import ConservationFault, first_conservation_fault
from .errors import CorruptLedgerError, KVLedgerError
from .events import BlocksFreed, Commit, Event, FreeReason, PoolCreated
from .eviction import EvictionOrder
from .ledger_state import LedgerState

# The columns of an event as a bare tuple.
_bare: Callable[[Any], tuple[Any, ...]] = itemgetter(slice(None))
# (sequence, the shape of the commit, the columns of each event as a bare tuple)
_Kept: TypeAlias = tuple[int, int, tuple[Any, ...]]


@attrs.frozen
class _Shape:
    """The classes of a commit's events, which most commits share with many others.

    Attributes:
        number: its place among the shapes of one log.
        classes: of the events, in order.
        freed: places of `BlocksFreed`, whose reason is an object that the collector would follow.
        whole: places of events that are not tuples and are kept as they are. Rare.
    """

    number: int
    classes: tuple[type[Event], ...]
    freed: tuple[int, ...]
    whole: tuple[int, ...]


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
        self._shapes: list[_Shape] = []
        self._shape_of: dict[tuple[type[Event], ...], _Shape] = {}
        self._kept: list[_Kept] = []
        for commit in commits:
            self._keep(commit)

    def apply(self, commit: Commit) -> None:
        """Append one commit; its sequence number must be the next one."""
        kept = self._kept
        if kept and commit[0] != kept[-1][0] + 1:
            raise CorruptLedgerError(f"commit {commit.sequence} follows commit {kept[-1][0]}")
        self._keep(commit)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Commit]:
        return map(self._unkept, self._kept)

    def __getitem__(self, sequence: int) -> Commit:
        return self._unkept(self._kept[sequence])

    def _keep(self, commit: Commit) -> None:
        sequence, events = commit
        classes = tuple(map(type, events))
        shape = self._shape_of.get(classes) or self._new_shape(classes)
        columns: list[Any]
        if shape.whole:
            columns = [event[:] if isinstance(event, tuple) else event for event in events]
        else:
            columns = list(map(_bare, events))
        for place in shape.freed:
            reason, *others = columns[place]
            columns[place] = (str(reason), *others)
        self._kept.append((sequence, shape.number, tuple(columns)))

    def _unkept(self, kept: _Kept) -> Commit:
        sequence, number, columns = kept
        cls: Any
        values: Any
        shape = self._shapes[number]
        events: list[Any] = []
        for place, (cls, values) in enumerate(zip(shape.classes, columns, strict=True)):
            if place in shape.whole:
                events.append(values)
            elif place in shape.freed:
                events.append(BlocksFreed(FreeReason(values[0]), *values[1:]))
            else:
                events.append(cls(*values))
        return Commit(sequence, tuple(events))

    def _new_shape(self, classes: tuple[type[Event], ...]) -> _Shape:
        freed = tuple([place for place, cls in enumerate(classes) if cls is BlocksFreed])
        whole = tuple([place for place, cls in enumerate(classes) if not issubclass(cls, tuple)])
        shape = _Shape(len(self._shapes), classes, freed, whole)
        self._shapes.append(shape)
        self._shape_of[classes] = shape
        return shape

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
