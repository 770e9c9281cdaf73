"""The log in memory: append commits, rebuild the state from them, find the first commit that does not add up."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeAlias, cast

import attrs

from ..errors import CorruptLedgerError, KVLedgerError, MisuseError
from ..events import BlocksFreed, Commit, Event, FreeReason, Key, PoolCreated, named_tuple
from ..pool.block_pool import BlockPool
from ..pool.eviction_order import EvictionOrder
from ..pool.free_queue import FreeQueue
from .audit import ConservationFault, first_conservation_fault
from .state import LedgerState

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


# The state of a ledger as plain data, and back: where a replay may start instead of at the first commit.


def can_be_restored(created: PoolCreated) -> bool:
    """Whether a snapshot says everything: an order that remembers more than its queue shows (lfu, sieve) must be
    replayed from the first commit.
    """
    return created.eviction == FreeQueue.name


def take_snapshot(state: LedgerState) -> dict[str, Any]:
    """Everything that a fold has become, in dicts, lists, ints, strings and keys. O(blocks + table entries).

    Raises:
        MisuseError: the eviction order cannot be restored (see `can_be_restored`).
    """
    _check(state.created)
    pool, rows = state.pool, sorted((row, request_id) for request_id, row in state.row_of.items())
    groups = range(len(state.tables))
    return {
        "next_sequence": state.next_sequence,
        "free_queue": pool.free_queue.order(),
        "referenced": [[block, count] for block, count in enumerate(pool.ref_cnts()) if count],
        "copies": [[[key, list(pool.copies(key, group))] for key in pool.index(group)] for group in groups],
        "rows": [[row, request_id, state.placed[row]] for row, request_id in rows],
        "free_rows": list(state.free_rows),
        "tables": [[table.blocks(row) for row, _ in rows] for table in state.tables],
        "considered": [[considered[row] for row, _ in rows] for considered in state.considered],
        "skipped": [[skipped[row] for row, _ in rows] for skipped in state.skipped],
        "guarded": sorted(state.guarded),
    }


def restore_snapshot(created: PoolCreated, snapshot: dict[str, Any]) -> LedgerState:
    """The state that `take_snapshot` described.

    Raises:
        CorruptLedgerError: the snapshot contradicts itself or the pool.
        MisuseError: the eviction order cannot be restored (see `can_be_restored`).
    """
    _check(created)
    state = LedgerState(created)
    try:
        if not len(snapshot["copies"]) == len(snapshot["tables"]) == len(created.groups):
            raise CorruptLedgerError(f"it is of another pool than one of {len(created.groups)} groups")
        _restore_pool(state.pool, snapshot)
        _restore_rows(state, snapshot)
        state.next_sequence = snapshot["next_sequence"]
    except (KVLedgerError, LookupError, ValueError, TypeError) as error:
        raise CorruptLedgerError(
            f"the snapshot before commit {snapshot.get('next_sequence')} is wrong: {error}"
        ) from error
    return state


def _check(created: PoolCreated) -> None:
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
