"""The log in memory, and snapshots of the state that it leads to.

The log keeps commits, rebuilds the state from them, and finds the first commit that breaks the block balance. A replay
may start from a snapshot instead of the first commit.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeAlias

import attrs

from ..errors import CorruptLedgerError, KVLedgerError, MisuseError
from ..events import BlocksFreed, Commit, Event, FreeReason, Key, PoolCreated, named_tuple
from ..pool.block_pool import BlockPool
from ..pool.eviction_order import EvictionOrder
from ..pool.free_queue import FreeQueue
from .audit import ConservationAudit, ConservationFault
from .replay_checks import CheckedReplay
from .state import LedgerState

# (sequence, number of the commit's shape, then the columns of all events in order)
_Kept: TypeAlias = tuple[Any, ...]


@attrs.frozen
class _Shape:
    """The sequence of event classes in a commit; most commits of a log share a few of them."""

    number: int  # index among the shapes of one log
    classes: tuple[type[Event], ...]  # the classes of the events, in order
    # How many columns each event has; 0 for an event that is not a tuple and is kept as an object (rare).
    widths: tuple[int, ...]
    # Indices in the kept tuple of the reasons of `BlocksFreed`. They are kept as plain strings, because the garbage
    # collector would follow the enum objects.
    reasons: tuple[int, ...]
    is_bare: bool  # whether all columns are kept unchanged


class EventLog:
    """A sink that keeps every commit.

    A commit is kept as one flat tuple of plain values, which the garbage collector stops tracking once it has looked
    at it; it would walk through a long log of event objects again and again.

        log = EventLog()
        allocator = KVCacheAllocator(config, sinks=[log])
        ...
        assert log.replay().snapshot() == allocator.state.snapshot()

    Without a log there is no cost: give the allocator no sink.
    """

    def __init__(self, commits: Sequence[Commit] = ()) -> None:
        self._shapes: list[_Shape] = []
        self._shape_of: dict[tuple[type[Event], ...], _Shape] = {}
        self._kept: list[_Kept] = []
        for commit in commits:
            self.apply(commit)

    def apply(self, commit: Commit) -> None:
        """Append one commit; its sequence number must be the next one."""
        sequence, events = commit
        if self._kept and sequence != self._kept[-1][0] + 1:
            raise CorruptLedgerError(f"commit {sequence} follows commit {self._kept[-1][0]}")
        classes = tuple(map(type, events))
        shape = self._shape_of.get(classes) or self._new_shape(classes)
        columns: Any = events
        if shape.is_bare:
            self._kept.append((sequence, shape.number, *chain.from_iterable(columns)))
            return
        if 0 in shape.widths:
            columns = [event if isinstance(event, tuple) else (event,) for event in events]
        kept: list[Any] = [sequence, shape.number, *chain.from_iterable(columns)]
        for place in shape.reasons:
            kept[place] = str(kept[place])
        self._kept.append(tuple(kept))

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Commit]:
        return map(self._unkept, self._kept)

    def __getitem__(self, sequence: int) -> Commit:
        return self._unkept(self._kept[sequence])

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
        """Return the first event of the log.

        Raises:
            CorruptLedgerError: the log does not begin with `PoolCreated`.
        """
        first = self[0].events[0] if self._kept and self[0].events else None
        if not isinstance(first, PoolCreated):
            raise CorruptLedgerError("the log does not begin with PoolCreated, so there is no pool to rebuild")
        return first

    def replay(self, stop: int | None = None, eviction: EvictionOrder | None = None) -> LedgerState:
        """Rebuild the state after commits `0 .. stop - 1` (default: all) from an empty pool, each event checked.

        Args:
            stop: how many commits to replay.
            eviction: an empty order like the live one, where its name is not enough to make it (Belady).

        Raises:
            CorruptLedgerError, MisuseError: an event could not follow the ones before it; see `CheckedReplay.apply`.
        """
        replay = CheckedReplay(LedgerState(self.created, eviction))
        for commit in islice(self, stop):
            replay.apply(commit)
        return replay.state

    def conservation(self) -> ConservationFault | None:
        """Find the first commit after which held + evictable + clean + null != num_blocks; None: it always adds up.

        This also works on logs that do not replay, because `ConservationAudit` counts on its own (field report C02).

        Raises:
            CorruptLedgerError: an event names a block that the pool does not have, or its columns differ in length.
        """
        audit = ConservationAudit(self.created)
        for commit in self:
            audit.apply(commit)
            if audit.balance.difference:
                return ConservationFault(commit.sequence, audit.balance, audit.miscounted_blocks())
        return None

    def verify(self, eviction: EvictionOrder | None = None) -> LedgerState:
        """Check the balance and every event of every commit. Returns the state after the last commit.

        Raises:
            CorruptLedgerError: names the first bad commit, with sign and amount where blocks leaked or were freed
                twice.
        """
        fault = self.conservation()
        if fault is not None:
            raise CorruptLedgerError(fault.describe())
        replay = CheckedReplay(LedgerState(self.created, eviction))
        for commit in self:
            try:
                replay.apply(commit)
            except (KVLedgerError, LookupError, ValueError) as error:
                raise CorruptLedgerError(f"commit {commit.sequence} cannot be applied: {error}") from error
        return replay.state


def can_be_restored(created: PoolCreated) -> bool:
    """Whether a snapshot holds the whole state.

    Under an eviction order that remembers more than its queue shows (lfu, sieve), a replay must start at the first
    commit.
    """
    return created.eviction == FreeQueue.name


def take_snapshot(state: LedgerState) -> dict[str, Any]:
    """Return `state.snapshot()`, from which `restore_snapshot` can rebuild the state.

    Raises:
        MisuseError: the eviction order cannot be restored (see `can_be_restored`).
    """
    _check_restorable(state.created)
    return state.snapshot()


def restore_snapshot(created: PoolCreated, snapshot: dict[str, Any]) -> LedgerState:
    """Rebuild the state from what `take_snapshot` returned.

    Raises:
        CorruptLedgerError: the snapshot contradicts itself or the pool.
        MisuseError: the eviction order cannot be restored (see `can_be_restored`).
    """
    _check_restorable(created)
    state = LedgerState(created)
    try:
        if not len(snapshot["copies"]) == len(snapshot["tables"]) == len(created.groups):
            raise CorruptLedgerError(f"it belongs to a pool with another number of groups than {len(created.groups)}")
        _restore_pool(state.pool, snapshot)
        _restore_rows(state, snapshot)
        state.next_sequence = snapshot["next_sequence"]
    except (KVLedgerError, LookupError, ValueError, TypeError) as error:
        raise CorruptLedgerError(
            f"the snapshot before commit {snapshot.get('next_sequence')} is wrong: {error}"
        ) from error
    return state


def _check_restorable(created: PoolCreated) -> None:
    if not can_be_restored(created):
        raise MisuseError(
            f"eviction order {created.eviction!r} remembers more than a snapshot shows; replay from the first commit"
        )


def _restore_pool(pool: BlockPool, snapshot: dict[str, Any]) -> None:
    referenced: dict[int, int] = {block: count for block, count in snapshot["referenced"] if block}
    copies: list[list[tuple[Key, list[int]]]] = snapshot["copies"]
    keyed = [block for of_group in copies for _, blocks in of_group for block in blocks]
    taken = list(dict.fromkeys([*keyed, *referenced]))
    pool.take(tuple(taken))
    for group, of_group in enumerate(copies):
        flat = [(block, key) for key, blocks in of_group for block in blocks]
        pool.cache(group, [block for block, _ in flat], [key for _, key in flat], [0] * len(flat))
    most = max(referenced.values(), default=0)
    for count in range(2, most + 1):
        pool.adopt([block for block, wanted in referenced.items() if wanted >= count])
    pool.release([block for block in taken if block not in referenced])
    queue: list[int] = snapshot["free_queue"]
    if sorted(queue) != sorted(pool.free_queue.order()):
        raise CorruptLedgerError("its free queue does not hold the blocks that nothing references")
    pool.free_queue.remove(queue)
    pool.free_queue.append(queue)


def _restore_rows(state: LedgerState, snapshot: dict[str, Any]) -> None:
    for place, (row, request_id, placed) in enumerate(snapshot["rows"]):
        state.row_of[request_id] = row
        state.request_of[row] = request_id
        state.row_is_held[row] = True
        state.placed[row] = placed
        for group, table in enumerate(state.tables):
            table.extend(row, snapshot["tables"][group][place])
            state.considered[group][row] = snapshot["considered"][group][place]
            state.skipped[group][row] = snapshot["skipped"][group][place]
    state.free_rows = list(snapshot["free_rows"])
    if sorted([*state.free_rows, *state.row_of.values()]) != list(range(state.created.max_num_reqs)):
        raise CorruptLedgerError("its rows are not each held once or free")
    state.guarded = set(snapshot["guarded"])
    state.outdated = set(snapshot.get("outdated", ()))
