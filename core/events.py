"""Events: what the allocator tells the world. Facts in the past tense, immutable, stored by column.

State is the fold of the events: replaying them from an empty pool rebuilds the ref counts, the index of block hashes,
the block tables and the order of the free queue exactly. A command produces one `Commit`. Invariants hold between
commits, and a log is never cut inside one.

Columns run over requests: `rows` holds the block-table row that a request occupies between its `RowsAssigned` and its
`RowsReleased`; `counts[i]` says how many entries of the flat columns belong to `rows[i]`. A decode step of 256
requests is therefore one commit with a handful of events, not 256 of them. Integer columns are tuples where they are
short and read-only NumPy arrays where a whole batch is written at once; both compare by value.

Events are named tuples, because one is made four times as fast as a frozen attrs object: a request's way through the
ledger makes nine. The `of...` constructors build them without the Python function that calling the class runs.
"""

from collections.abc import Hashable
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar, cast

import attrs
import numpy as np
from numpy.typing import NDArray

from .cache_kinds import CacheKind

SCHEMA_VERSION = 1

IntColumn: TypeAlias = tuple[int, ...] | NDArray[np.integer]
Key: TypeAlias = Hashable
_T = TypeVar("_T")


def as_ints(column: IntColumn) -> tuple[int, ...]:
    """The column as a tuple of Python ints, whatever it is stored as."""
    return column if isinstance(column, tuple) else tuple(column.tolist())


def without_nulls(
    blocks: tuple[int, ...], keys: tuple[Key | None, ...]
) -> tuple[tuple[int, ...], tuple[Key | None, ...]]:
    """Return the blocks that are not null, and their keys; no keys where `keys` is empty."""
    if keys:
        keys = tuple([key for block, key in zip(blocks, keys, strict=True) if block])
    return tuple(filter(None, blocks)), keys


class _MakesNamedTuple(Protocol):
    def __call__(self, cls: type[_T], values: tuple[Any, ...], /) -> _T: ...


# Makes an instance of `cls` from all its values, in order and without defaults, in half the time of calling the class.
named_tuple: _MakesNamedTuple = cast("Any", tuple).__new__


class _OneEntryColumns(dict[int, tuple[int]]):
    """Number -> the column that holds only this number: rows, groups and block counts, so there are not many.

    The garbage collector would look at a new tuple in each event once before it leaves it alone; a log keeps them all.
    """

    def __missing__(self, number: int) -> tuple[int]:
        column = self[number] = (number,)
        return column


_column_of = _OneEntryColumns()


def _plain(event: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([tuple(value.tolist()) if isinstance(value, np.ndarray) else value for value in event])


def _equals(self: tuple[Any, ...], other: Any) -> bool:
    return type(self) is type(other) and _plain(self) == _plain(other)


def _differs(self: tuple[Any, ...], other: Any) -> bool:
    return not _equals(self, other)


def _hash(self: tuple[Any, ...]) -> int:
    return hash((type(self), _plain(self)))


def quickly_made(cls: type[_T]) -> type[_T]:
    """Replace `_make` of a named tuple, which makes it from all its values in order, by one as fast as `tuple`."""
    cls._make = staticmethod(partial(named_tuple, cls))  # pyright: ignore[reportAttributeAccessIssue]
    return cls


def _compared_by_value(cls: type[_T]) -> type[_T]:
    """Make events equal when they have one class and their columns hold the same values, as tuples or arrays."""
    cls.__eq__, cls.__ne__, cls.__hash__ = _equals, _differs, _hash  # pyright: ignore[reportAttributeAccessIssue]
    return quickly_made(cls)


class FreeReason(StrEnum):
    """Why blocks were given back."""

    FINISHED = "finished"
    PREEMPTED = "preempted"
    ABORTED = "aborted"
    OUT_OF_WINDOW = "out_of_window"
    TRUNCATED = "truncated"


@attrs.frozen
class PoolCreated:
    """The first event of every log: everything that a replay needs to know before the second one."""

    num_blocks: int
    groups: tuple[CacheKind, ...]
    max_num_reqs: int
    max_model_len: int
    enable_caching: bool
    hash_block_size: int
    scheduler_block_size: int
    eviction: str
    key_algorithm: str
    schema_version: int = SCHEMA_VERSION


@_compared_by_value
class RowsAssigned(NamedTuple):
    """Requests moved into rows of the block tables; until `RowsReleased`, the row number stands for the request."""

    requests: tuple[str, ...]
    rows: IntColumn

    @classmethod
    def of(cls, request_id: str, row: int) -> Self:
        """One request and its row."""
        return named_tuple(cls, ((request_id,), _column_of[row]))


@_compared_by_value
class RowsReleased(NamedTuple):
    """Rows became free for other requests. Their blocks were freed by events before this one."""

    requests: tuple[str, ...]
    rows: IntColumn

    @classmethod
    def of(cls, request_id: str, row: int) -> Self:
        """One request and the row that it held."""
        return named_tuple(cls, ((request_id,), _column_of[row]))


@_compared_by_value
class PrefixAdopted(NamedTuple):
    """A request now holds these cached blocks (ref_cnt + 1; those at 0 left the free queue).

    `blocks` fill the start of the request's table; 0 is the null block, in place of content that its group skips.
    """

    group: int
    row: int
    blocks: IntColumn


@_compared_by_value
class BlocksAllocated(NamedTuple):
    """Blocks were taken from the head of the free queue and appended to tables.

    In a group of states the null block, 0, stands where a step leaves no state; it is taken from nowhere.
    `lost_keys` and `lost_groups` align with `blocks`: the key that each block lost by being taken (None: it had
    none) and the group of that key. Both are empty when no block of this event had a key; `lost_groups` is also empty
    where there is one group.
    """

    group: int
    rows: IntColumn
    counts: IntColumn
    blocks: IntColumn
    lost_keys: tuple[Key | None, ...] = ()
    lost_groups: tuple[int, ...] = ()

    @classmethod
    def of_row(
        cls,
        group: int,
        row: int,
        blocks: tuple[int, ...],
        lost_keys: tuple[Key | None, ...],
        lost_groups: tuple[int, ...],
    ) -> Self:
        """Blocks of one row."""
        return named_tuple(cls, (group, _column_of[row], _column_of[len(blocks)], blocks, lost_keys, lost_groups))


@_compared_by_value
class BlocksCached(NamedTuple):
    """Blocks became findable under their keys.

    For `rows[i]` the logical indices `starts[i] <= index < stops[i]` were considered and `counts[i]` of them
    registered (all of them unless the group skips or retains sparsely; possibly none). `indices`, `blocks` and `keys`
    are flat. `parents[i]` is the key of the block before `starts[i]` (None at the start); it need not be registered.

    A row with `starts[i] == stops[i]` and one index, the same, registers the block in which its prompt ends, under the
    key at that end, which lies inside the block (rule 23). The block is not considered by that.
    """

    group: int
    rows: IntColumn
    starts: IntColumn
    stops: IntColumn
    counts: IntColumn
    indices: IntColumn
    blocks: IntColumn
    keys: tuple[Key, ...]
    parents: tuple[Key | None, ...]

    @classmethod
    def of_row(
        cls,
        group: int,
        row: int,
        start: int,
        stop: int,
        blocks: tuple[int, ...],
        keys: tuple[Key, ...],
        parent: Key | None,
    ) -> Self:
        """All blocks `start <= index < stop` of one row."""
        columns = (
            group,
            _column_of[row],
            _column_of[start],
            _column_of[stop],
            _column_of[stop - start],
            tuple(range(start, stop)),
            blocks,
            keys,
            (parent,),
        )
        return named_tuple(cls, columns)


@_compared_by_value
class TokensPlaced(NamedTuple):
    """In batch order: positions `first_positions[i] <= p < first_positions[i] + counts[i]` have slots from here on.

    A first position below the row's old end is a rollback (rejected drafts, a crop): the tokens behind it are gone.
    """

    rows: IntColumn
    first_positions: IntColumn
    counts: IntColumn

    @classmethod
    def of_row(cls, row: int, first_position: int, count: int) -> Self:
        """Tokens of one row."""
        return named_tuple(cls, (_column_of[row], (first_position,), (count,)))

    @classmethod
    def of_batch(cls, rows: NDArray[np.int64], first_positions: NDArray[np.int64], counts: NDArray[np.int64]) -> Self:
        """Tokens of a whole batch, from arrays that the caller hands over: they become read-only."""
        for column in (rows, first_positions, counts):
            column.setflags(write=False)
        return named_tuple(cls, (rows, first_positions, counts))


@_compared_by_value
class BlocksShared(NamedTuple):
    """A fork: the child's row holds the parent's blocks from index 0 on (ref_cnt + 1 each; 0 is the null block)."""

    group: int
    parent_row: int
    child_row: int
    blocks: IntColumn


@attrs.frozen
class BlockCopied:
    """Copy on write: `row` was about to write into a block that others read; its table now has `target` at `index`.

    `target` came from the head of the free queue and lost `lost_key` of `lost_group`, if any; `source` lost one
    reference. A backend copies the block's bytes before the step runs.
    """

    group: int
    row: int
    index: int
    source: int
    target: int
    lost_key: Key | None = None
    lost_group: int = 0


@_compared_by_value
class BlocksFreed(NamedTuple):
    """References were given back in the order visited, as one release: segment i is `counts[i]` blocks of `rows[i]`.

    For FINISHED, PREEMPTED and ABORTED a segment empties the row's table of `groups[i]`. For OUT_OF_WINDOW the table
    slots named in `indices` became the null block; for TRUNCATED they left the table's end, those of null blocks, 0,
    included.
    """

    reason: FreeReason
    groups: IntColumn
    rows: IntColumn
    counts: IntColumn
    blocks: IntColumn
    indices: IntColumn = ()

    @classmethod
    def of_row(
        cls, reason: FreeReason, group: int, row: int, blocks: tuple[int, ...], indices: tuple[int, ...] = ()
    ) -> Self:
        """Blocks of one row in one group."""
        counts = _column_of[len(blocks)]
        return named_tuple(cls, (reason, _column_of[group], _column_of[row], counts, blocks, indices))


@_compared_by_value
class BlocksUncached(NamedTuple):
    """Blocks lost their key without being taken (evicted by id, or about to be overwritten by their only holder)."""

    blocks: IntColumn
    keys: tuple[Key, ...]
    groups: IntColumn


@attrs.frozen
class CacheReset:
    """Every key is gone; the free queue keeps its order. Rows that are held register nothing until their release."""


Event: TypeAlias = (
    PoolCreated
    | RowsAssigned
    | RowsReleased
    | PrefixAdopted
    | BlocksAllocated
    | BlocksCached
    | TokensPlaced
    | BlocksShared
    | BlockCopied
    | BlocksFreed
    | BlocksUncached
    | CacheReset
)


def columns_of(event: Event) -> dict[str, Any]:
    """An event's columns by name, as they are stored, in the order of their declaration."""
    return event._asdict() if isinstance(event, tuple) else attrs.asdict(event, recurse=False)


@_compared_by_value
class Commit(NamedTuple):
    """The result of one command: its place in the log (0, 1, 2, ...) and the events it caused, in order."""

    sequence: int
    events: tuple[Event, ...]


# Blocks that move between the pool and the tiers behind it have a log of their own; a commit of the pool causes each
# commit of that log.

POOL = 0
"""The number of the pool itself among the tiers; those behind it count from 1."""


class MoveReason(StrEnum):
    """Why content moved."""

    WRITTEN_BACK = "written_back"
    PROMOTED = "promoted"
    OVERFLOWED = "overflowed"
    SUPERSEDED = "superseded"
    CLEARED = "cleared"


@attrs.frozen
class TiersCreated:
    """The first event of a tier log: names and sizes in blocks, from the nearest to the farthest."""

    names: tuple[str, ...]
    num_blocks: tuple[int, ...]
    block_size: int


@attrs.frozen
class BlocksMoved:
    """Content went from one tier to another; `keys` name it in the order of moving.

    `from_tier` and `to_tier` count from `POOL` = 0; `to_tier` None: the content is gone. In its new tier it joins the
    end of the eviction queue.
    """

    reason: MoveReason
    keys: tuple[Key, ...]
    from_tier: int
    to_tier: int | None


TierEvent: TypeAlias = TiersCreated | BlocksMoved


@attrs.frozen
class TierCommit:
    """The moves that one commit of the pool (`pool_sequence`) caused; `sequence` counts 0, 1, 2, ..."""

    sequence: int
    pool_sequence: int
    events: tuple[TierEvent, ...]
