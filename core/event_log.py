"""The log in memory: append commits, rebuild the state from them, find the first commit that does not add up."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeAlias, cast

import attrs

from .conservation import ConservationFault, first_conservation_fault
from .errors import CorruptLedgerError, KVLedgerError
from .events import BlocksFreed, Commit, Event, FreeReason, PoolCreated
from .eviction import EvictionOrder
from .ledger_state import LedgerState
from .named_tuples import named_tuple

# (sequence, the number of the commit's shape, the columns of every event, one after the other)
_Kept: TypeAlias = tuple[Any, ...]


@attrs.frozen
class _Shape:
    """The classes of a commit's events, which most commits share with many others.

    Attributes:
        number: its place among the shapes of one log.
        classes: of the events, in order.
        widths: how many columns each of them has; 0 for an event that is not a tuple and is kept as it is (rare).
        reasons: where in the kept tuple the reasons of `BlocksFreed` are, objects that the collector would follow.
        is_bare: whether the columns are kept as they are.
    """

    number: int
    classes: tuple[type[Event], ...]
    widths: tuple[int, ...]
    reasons: tuple[int, ...]
    is_bare: bool


class EventLog:
    """A sink that keeps every commit.

    A commit is kept as one bare tuple of bare values, which the garbage collector stops following after its first
    look; as objects, a long log would be walked through again and again.

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
            self._keep(*commit)

    def apply(self, commit: Commit) -> None:
        """Append one commit; its sequence number must be the next one."""
        sequence, events = commit
        kept = self._kept
        if kept and sequence != kept[-1][0] + 1:
            raise CorruptLedgerError(f"commit {sequence} follows commit {kept[-1][0]}")
        self._keep(sequence, events)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Commit]:
        return map(self._unkept, self._kept)

    def __getitem__(self, sequence: int) -> Commit:
        return self._unkept(self._kept[sequence])

    def _keep(self, sequence: int, events: tuple[Event, ...]) -> None:
        classes = tuple(map(type, events))
        shape = self._shape_of.get(classes) or self._new_shape(classes)
        columns: Iterable[Iterable[Any]] = cast("tuple[tuple[Any, ...], ...]", events)
        if shape.is_bare:
            self._kept.append((sequence, shape.number, *chain.from_iterable(columns)))
            return
        if 0 in shape.widths:
            columns = [event if isinstance(event, tuple) else (event,) for event in events]
        kept: list[Any] = [sequence, shape.number, *chain.from_iterable(columns)]
        for place in shape.reasons:
            kept[place] = str(kept[place])
        self._kept.append(tuple(kept))

    def _unkept(self, kept: _Kept) -> Commit:
        number: int = kept[1]
        shape = self._shapes[number]
        events: list[Any] = []
        start = 2
        cls: Any
        for cls, width in zip(shape.classes, shape.widths, strict=True):
            stop = start + (width or 1)
            if cls is BlocksFreed:
                columns = (FreeReason(kept[start]), *kept[start + 1 : stop])
                events.append(named_tuple(BlocksFreed, columns))
            else:
                events.append(named_tuple(cls, kept[start:stop]) if width else kept[start])
            start = stop
        return Commit(kept[0], tuple(events))

    def _new_shape(self, classes: tuple[type[Event], ...]) -> _Shape:
        widths = tuple([len(cls._fields) if issubclass(cls, tuple) else 0 for cls in classes])
        starts = [2 + sum([width or 1 for width in widths[:place]]) for place in range(len(widths))]
        reasons = tuple([start for start, cls in zip(starts, classes, strict=True) if cls is BlocksFreed])
        shape = _Shape(len(self._shapes), classes, widths, reasons, is_bare=0 not in widths and not reasons)
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

        Raises:
            CorruptLedgerError: an event names a block that the pool does not have, or its columns differ in length.
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
