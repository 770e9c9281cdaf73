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
from typing import TypeAlias

import attrs
import numpy as np
from numpy.typing import NDArray

from .cache_kinds import CacheKind

SCHEMA_VERSION = 1

IntColumn: TypeAlias = tuple[int, ...] | NDArray[np.integer]
Key: TypeAlias = Hashable


def as_ints(column: IntColumn) -> tuple[int, ...]:
    """The column as a tuple of Python ints, whatever it is stored as."""
    return column if isinstance(column, tuple) else tuple(column.tolist())


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


@attrs.frozen
class RowsAssigned:
    """Requests moved into rows of the block tables; until `RowsReleased`, the row number stands for the request."""

    requests: tuple[str, ...]
    rows: IntColumn = attrs.field(eq=as_ints)


@attrs.frozen
class RowsReleased:
    """Rows became free for other requests. Their blocks were freed by events before this one."""

    requests: tuple[str, ...]
    rows: IntColumn = attrs.field(eq=as_ints)


@attrs.frozen
class PrefixAdopted:
    """A request now holds these cached blocks (ref_cnt + 1; those at 0 left the free queue).

    `blocks` fill the start of the request's table; 0 is the null block, standing for content that its group skips.
    """

    group: int
    row: int
    blocks: IntColumn = attrs.field(eq=as_ints)


@attrs.frozen
class BlocksAllocated:
    """Blocks taken from the head of the free queue and appended to tables.

    `lost_keys` and `lost_groups` align with `blocks`: the key that each block lost by being taken (None: it had
    none) and the group that the key belonged to. Both are empty when no block of this event carried a key.
    """

    group: int
    rows: IntColumn = attrs.field(eq=as_ints)
    counts: IntColumn = attrs.field(eq=as_ints)
    blocks: IntColumn = attrs.field(eq=as_ints)
    lost_keys: tuple[Key | None, ...] = ()
    lost_groups: tuple[int, ...] = ()


@attrs.frozen
class BlocksCached:
    """Blocks became findable under their keys.

    For `rows[i]` the logical indices `starts[i] <= index < stops[i]` were considered and `counts[i]` of them
    registered (all of them unless the group skips or retains sparsely; possibly none). `indices`, `blocks` and `keys`
    are flat. `parents[i]` is the key of the block before `starts[i]` (None at the start); it need not be registered.
    """

    group: int
    rows: IntColumn = attrs.field(eq=as_ints)
    starts: IntColumn = attrs.field(eq=as_ints)
    stops: IntColumn = attrs.field(eq=as_ints)
    counts: IntColumn = attrs.field(eq=as_ints)
    indices: IntColumn = attrs.field(eq=as_ints)
    blocks: IntColumn = attrs.field(eq=as_ints)
    keys: tuple[Key, ...]
    parents: tuple[Key | None, ...]


@attrs.frozen
class TokensPlaced:
    """In batch order: positions `first_positions[i] <= p < first_positions[i] + counts[i]` have slots from here on.

    A first position below the row's old end is a rollback (rejected drafts, a crop): what lay behind it is gone.
    """

    rows: IntColumn = attrs.field(eq=as_ints)
    first_positions: IntColumn = attrs.field(eq=as_ints)
    counts: IntColumn = attrs.field(eq=as_ints)


@attrs.frozen
class BlocksShared:
    """A fork: the child's row holds the parent's blocks from index 0 on (ref_cnt + 1 each; 0 is the null block)."""

    group: int
    parent_row: int
    child_row: int
    blocks: IntColumn = attrs.field(eq=as_ints)


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


@attrs.frozen
class BlocksFreed:
    """References given back in the order visited, as one release: segment i is `counts[i]` blocks of `rows[i]`.

    For FINISHED, PREEMPTED and ABORTED a segment empties the row's table of `groups[i]`. For OUT_OF_WINDOW the table
    slots named in `indices` became the null block; for TRUNCATED they left the table's end.
    """

    reason: FreeReason
    groups: IntColumn = attrs.field(eq=as_ints)
    rows: IntColumn = attrs.field(eq=as_ints)
    counts: IntColumn = attrs.field(eq=as_ints)
    blocks: IntColumn = attrs.field(eq=as_ints)
    indices: IntColumn = attrs.field(default=(), eq=as_ints)


@attrs.frozen
class BlocksUncached:
    """Blocks lost their key without being taken (evicted by id, or about to be overwritten by their only holder)."""

    blocks: IntColumn = attrs.field(eq=as_ints)
    keys: tuple[Key, ...]
    groups: IntColumn = attrs.field(eq=as_ints)


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


@attrs.frozen
class Commit:
    """What one command did: its place in the log (0, 1, 2, ...) and the events it caused, in order."""

    sequence: int
    events: tuple[Event, ...]
