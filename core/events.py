"""The vocabulary between the allocator and the world: facts in the past tense, immutable, columnar.

State is the fold of the events: replaying them from nothing rebuilds reference counts, the key index, the block
tables and the order of the free queue exactly. A command produces one `Commit`; invariants hold between commits, and
a log is never cut inside one.

Columns run over requests: `rows` names the row of the block table that a request occupies between its `RowsAssigned`
and its `RowsReleased`; `counts[i]` says how many entries of the flat columns belong to `rows[i]`. A decode step of
256 requests is therefore one commit with a handful of events, not 256 of them. Integer columns are tuples where they
are short and read-only NumPy arrays where a whole batch is written at once; both compare by value.
"""

from collections.abc import Hashable
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast

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


def _plain(event: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([tuple(value.tolist()) if isinstance(value, np.ndarray) else value for value in event])


def _equals(self: tuple[Any, ...], other: Any) -> bool:
    return type(self) is type(other) and _plain(self) == _plain(other)


def _differs(self: tuple[Any, ...], other: Any) -> bool:
    return not _equals(self, other)


def _hash(self: tuple[Any, ...]) -> int:
    return hash((type(self), _plain(self)))


def _compared_by_value(cls: type[_T]) -> type[_T]:
    """Events are equal when they are of one class and their columns hold the same values, tuple or array.

    They are named tuples because one is made four times as fast as an attrs object that is frozen: a request's way
    through the ledger makes nine.
    """
    cls.__eq__, cls.__ne__, cls.__hash__ = _equals, _differs, _hash  # pyright: ignore[reportAttributeAccessIssue]
    return cls


def frozen_column(values: NDArray[np.integer]) -> NDArray[np.integer]:
    """Mark an array that the caller hands over as read-only, so that an event can hold it without a copy."""
    values.setflags(write=False)
    return values


class FreeReason(StrEnum):
    """Why blocks were given back."""

    FINISHED = "finished"
    PREEMPTED = "preempted"
    ABORTED = "aborted"
    OUT_OF_WINDOW = "out_of_window"
    TRUNCATED = "truncated"


@attrs.frozen
class PoolCreated:
    """The first event of every log: everything that a fold needs to know before the second one."""

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


@_compared_by_value
class RowsReleased(NamedTuple):
    """Rows became free for other requests. Their blocks were freed by events before this one."""

    requests: tuple[str, ...]
    rows: IntColumn


@_compared_by_value
class PrefixAdopted(NamedTuple):
    """A request now holds these cached blocks (ref_cnt + 1; those at 0 left the free queue).

    `blocks` fill the start of the request's table; 0 is the null block, standing for content that its group skips.
    """

    group: int
    row: int
    blocks: IntColumn


@_compared_by_value
class BlocksAllocated(NamedTuple):
    """Blocks taken from the head of the free queue and appended to tables.

    `lost_keys` and `lost_groups` align with `blocks`: the key that each block lost by being taken (None: it had
    none) and the group that the key belonged to. Both are empty when no block of this event carried a key.
    """

    group: int
    rows: IntColumn
    counts: IntColumn
    blocks: IntColumn
    lost_keys: tuple[Key | None, ...] = ()
    lost_groups: tuple[int, ...] = ()


@_compared_by_value
class BlocksCached(NamedTuple):
    """Blocks became findable under their keys.

    For `rows[i]` the logical indices `starts[i] <= index < stops[i]` were considered and `counts[i]` of them
    registered (all of them unless the group skips or retains sparsely; possibly none). `indices`, `blocks` and `keys`
    are flat. `parents[i]` is the key of the block before `starts[i]` (None at the start); it need not be registered.
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


@_compared_by_value
class TokensPlaced(NamedTuple):
    """In batch order: positions `first_positions[i] <= p < first_positions[i] + counts[i]` have slots from here on.

    A first position below the row's old end is a rollback (rejected drafts, a crop): what lay behind it is gone.
    """

    rows: IntColumn
    first_positions: IntColumn
    counts: IntColumn


@_compared_by_value
class BlocksShared(NamedTuple):
    """A fork: the child's row holds the parent's blocks from index 0 on (ref_cnt + 1 each; 0 is the null block)."""

    group: int
    parent_row: int
    child_row: int
    blocks: IntColumn


@attrs.frozen
class BlockCopied:
    """Copy on write: `row` wrote into a block that others read, so its table now names `target` at `index`.

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
    """References given back in the order visited, as one release: segment i is `counts[i]` blocks of `rows[i]`.

    For FINISHED, PREEMPTED and ABORTED a segment empties the row's table of `groups[i]`. For OUT_OF_WINDOW the table
    slots named in `indices` became the null block; for TRUNCATED they left the table's end.
    """

    reason: FreeReason
    groups: IntColumn
    rows: IntColumn
    counts: IntColumn
    blocks: IntColumn
    indices: IntColumn = ()


@_compared_by_value
class BlocksUncached(NamedTuple):
    """Blocks lost their key without being taken (evicted by id, or about to be overwritten by their only holder)."""

    blocks: IntColumn
    keys: tuple[Key, ...]
    groups: IntColumn


@attrs.frozen
class CacheReset:
    """Every key is gone; the free queue keeps its order."""


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
    """What one command did: its place in the log (0, 1, 2, ...) and the events it caused, in order."""

    sequence: int
    events: tuple[Event, ...]


# Named tuples at the price of tuples: for those that every request or step makes.


class _MakesNamedTuple(Protocol):
    def __call__(self, cls: type[_T], values: tuple[Any, ...], /) -> _T: ...


# An instance of `cls` out of all its values, in order and without defaults. Half of what calling the class takes, whose
# constructor is a function in Python.
named_tuple: _MakesNamedTuple = cast("Any", tuple).__new__

# Columns of one entry, made once: most commands are about one request, and a log keeps what it is given.


class ShortColumns(dict[int, tuple[int]]):
    """Number -> the column that holds it alone; of rows, groups and counts of blocks, so there are not many.

    A tuple made for each event would be looked at by the garbage collector before it is left alone.
    """

    def __missing__(self, number: int) -> tuple[int]:
        column = self[number] = (number,)
        return column


# What happens behind a pool: blocks that move between tiers. A log of its own, each commit caused by one of the pool.

POOL = 0
"""The tier that the pool itself is; those behind it count from 1."""


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
    """Content, by its keys in the order of moving, went from one tier to another.

    `from_tier` and `to_tier` count from `POOL` = 0; `to_tier` None: the content is gone. It joins the end of the queue
    in which its new tier forgets.
    """

    reason: MoveReason
    keys: tuple[Key, ...]
    from_tier: int
    to_tier: int | None


TierEvent: TypeAlias = TiersCreated | BlocksMoved


@attrs.frozen
class TierCommit:
    """What one commit of the pool (`pool_sequence`) brought about behind it; `sequence` counts 0, 1, 2, ..."""

    sequence: int
    pool_sequence: int
    events: tuple[TierEvent, ...]
