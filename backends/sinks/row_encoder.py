"""Events into rows: one pass over a commit, straight into the columns of the next batch."""

import json
from array import array
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from ...core.errors import InputError
from ...core.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksFreed,
    BlocksShared,
    BlocksUncached,
    CacheReset,
    Commit,
    Event,
    IntColumn,
    PoolCreated,
    PrefixAdopted,
    RowsAssigned,
    RowsReleased,
    TokensPlaced,
)
from .flat_arrays import binary_array, list_array, number_array, optional_number_array
from .log_keys import encode_keys
from .log_rows import (
    LIST_COLUMNS,
    ROW_SCHEMA,
    Note,
    RequestArrived,
    RequestEnded,
    RunEnded,
    StepComputed,
    pool_as_json,
)

_TYPECODE = {pa.int32(): "i", pa.int64(): "q"}
_NAMES = {event: event.__name__.encode() for event in get_args(Event)}


class RowEncoder:
    """Gathers rows until they are taken as one record batch. What a commit added is undone if it cannot be encoded."""

    def __init__(self) -> None:
        self._handlers: dict[type, Callable[[Any], None]] = {
            PoolCreated: self._pool_created,
            RowsAssigned: self._rows_assigned,
            RowsReleased: self._rows_assigned,
            PrefixAdopted: self._prefix_adopted,
            BlocksAllocated: self._blocks_allocated,
            BlocksCached: self._blocks_cached,
            TokensPlaced: self._tokens_placed,
            BlocksShared: self._blocks_shared,
            BlockCopied: self._block_copied,
            BlocksFreed: self._blocks_freed,
            BlocksUncached: self._blocks_uncached,
            CacheReset: self._nothing,
        }
        self._note_handlers: dict[type, Callable[[Any], None]] = {
            RequestArrived: self._request_arrived,
            RequestEnded: self._request_ended,
            StepComputed: self._step_computed,
            RunEnded: self._run_ended,
        }
        self.clear()

    def clear(self) -> None:
        """Forget the rows gathered so far."""
        self._commits = array("q")
        self._times: list[int | None] = []
        self._names: list[bytes | None] = []
        self._group: list[int | None] = []
        self._reason: list[bytes | None] = []
        self._arrival_s: list[float | None] = []
        self._detail: list[bytes | None] = []
        self._numbers = {name: array(_TYPECODE[each]) for name, each in LIST_COLUMNS.items() if each in _TYPECODE}
        self._values: dict[str, list[bytes | None]] = {name: [] for name in LIST_COLUMNS if name not in self._numbers}
        self._ends = {name: array("i", (0,)) for name in LIST_COLUMNS}
        self._pairs = [(values, self._ends[name]) for name, values in (self._numbers | self._values).items()]

    @property
    def num_rows(self) -> int:
        """Rows gathered so far."""
        return len(self._names)

    def add_commit(self, commit: Commit, time_ns: int | None) -> None:
        """Add the rows of one commit.

        Raises:
            InputError: a value that the columns cannot hold (a key of another type, a number beyond 32 bits where
                blocks and rows are counted). The batch is as it was.
        """
        before = self.num_rows
        try:
            for event in commit.events:
                self._detail.append(None)
                self._arrival_s.append(None)
                self._group.append(None)
                self._reason.append(None)
                self._handlers[type(event)](event)
                self._end_row(commit.sequence, time_ns, _NAMES[type(event)])
            if not commit.events:
                self._add_scalars(None)
                self._end_row(commit.sequence, time_ns, None)
        except BaseException as error:
            self._cut(before)
            if isinstance(error, OverflowError):
                raise InputError(
                    f"commit {commit.sequence} holds a number that a log has no room for: {error}"
                ) from error
            if isinstance(error, UnicodeEncodeError):
                raise InputError(f"commit {commit.sequence} names a request that is no text: {error}") from error
            raise

    def add_note(self, note: Note, time_ns: int | None, next_commit: int) -> None:
        """Add one note. Raises InputError as `add_commit` does."""
        before = self.num_rows
        try:
            self._note_handlers[type(note)](note)
            self._end_row(next_commit, time_ns, type(note).__name__.encode())
        except BaseException:
            self._cut(before)
            raise

    def as_batch(self) -> pa.RecordBatch:
        """The rows so far as one batch, with memory of its own. They stay until `clear`."""
        columns: dict[str, pa.Array] = {
            "commit": number_array(pa.int64(), self._commits),
            "time_ns": optional_number_array(pa.int64(), "q", self._times),
            "event": binary_array(pa.utf8(), self._names),
            "group": optional_number_array(pa.int32(), "i", self._group),
            "reason": binary_array(pa.utf8(), self._reason),
            "arrival_s": optional_number_array(pa.float64(), "d", self._arrival_s),
            "detail": binary_array(pa.utf8(), self._detail),
        }
        for name, entries in LIST_COLUMNS.items():
            if entries in _TYPECODE:
                flat = number_array(entries, self._numbers[name])
            else:
                flat = binary_array(entries, self._values[name])
            columns[name] = list_array(entries, self._ends[name], flat)
        return pa.RecordBatch.from_arrays([columns[name] for name in ROW_SCHEMA.names], schema=ROW_SCHEMA)

    # -- rows --------------------------------------------------------------------------------------------------------

    def _add_scalars(self, detail: bytes | None, arrival_s: float | None = None) -> None:
        self._detail.append(detail)
        self._arrival_s.append(arrival_s)
        self._group.append(None)
        self._reason.append(None)

    def _end_row(self, commit: int, time_ns: int | None, name: bytes | None) -> None:
        for values, ends in self._pairs:
            ends.append(len(values))
        self._commits.append(commit)
        self._times.append(time_ns)
        self._names.append(name)

    def _cut(self, num_rows: int) -> None:
        """Drop everything behind the first `num_rows` rows, half a row included."""
        for values, ends in self._pairs:
            del ends[num_rows + 1 :]
            del values[ends[-1] :]
        scalars = (self._commits, self._times, self._names, self._group, self._reason, self._arrival_s, self._detail)
        for column in scalars:
            del column[num_rows:]

    def _ints(self, name: str, column: IntColumn | Sequence[int]) -> None:
        values = self._numbers[name]
        if isinstance(column, np.ndarray):
            itemsize = values.itemsize
            if itemsize < column.itemsize and len(column) and not -(1 << 31) <= column.min() <= column.max() < 1 << 31:
                raise OverflowError(f"{name} reaches {column.max()}; the column has {8 * itemsize} bits")
            values.frombytes(column.astype(f"i{itemsize}").tobytes())
        else:
            values.extend(column)

    # -- one handler an event ----------------------------------------------------------------------------------------

    def _nothing(self, event: CacheReset) -> None:
        pass

    def _pool_created(self, event: PoolCreated) -> None:
        self._detail[-1] = pool_as_json(event).encode()

    def _rows_assigned(self, event: RowsAssigned | RowsReleased) -> None:
        self._values["requests"].extend([name.encode() for name in event.requests])
        self._ints("rows", event.rows)

    def _prefix_adopted(self, event: PrefixAdopted) -> None:
        self._group[-1] = event.group
        self._ints("rows", (event.row,))
        self._ints("blocks", event.blocks)

    def _blocks_allocated(self, event: BlocksAllocated) -> None:
        self._group[-1] = event.group
        self._ints("rows", event.rows)
        self._ints("counts", event.counts)
        self._ints("blocks", event.blocks)
        self._values["keys"].extend(encode_keys(event.lost_keys))
        self._ints("groups", event.lost_groups)

    def _blocks_cached(self, event: BlocksCached) -> None:
        self._group[-1] = event.group
        self._ints("rows", event.rows)
        self._ints("starts", event.starts)
        self._ints("stops", event.stops)
        self._ints("counts", event.counts)
        self._ints("indices", event.indices)
        self._ints("blocks", event.blocks)
        self._values["keys"].extend(encode_keys(event.keys))
        self._values["parents"].extend(encode_keys(event.parents))

    def _tokens_placed(self, event: TokensPlaced) -> None:
        self._ints("rows", event.rows)
        self._ints("first_positions", event.first_positions)
        self._ints("counts", event.counts)

    def _blocks_shared(self, event: BlocksShared) -> None:
        self._group[-1] = event.group
        self._ints("rows", (event.parent_row, event.child_row))
        self._ints("blocks", event.blocks)

    def _block_copied(self, event: BlockCopied) -> None:
        self._group[-1] = event.group
        self._ints("rows", (event.row,))
        self._ints("indices", (event.index,))
        self._ints("blocks", (event.source, event.target))
        self._values["keys"].extend(encode_keys((event.lost_key,)))
        self._ints("groups", (event.lost_group,))

    def _blocks_freed(self, event: BlocksFreed) -> None:
        self._reason[-1] = event.reason.value.encode()
        self._ints("groups", event.groups)
        self._ints("rows", event.rows)
        self._ints("counts", event.counts)
        self._ints("blocks", event.blocks)
        self._ints("indices", event.indices)

    def _blocks_uncached(self, event: BlocksUncached) -> None:
        self._ints("blocks", event.blocks)
        self._values["keys"].extend(encode_keys(event.keys))
        self._ints("groups", event.groups)

    def _request_arrived(self, note: RequestArrived) -> None:
        self._add_scalars(json.dumps(note.facts).encode() if note.facts else None, note.arrival_s)
        self._values["requests"].append(note.request_id.encode())
        outputs = () if note.num_output_tokens is None else (note.num_output_tokens,)
        self._ints("counts", (note.num_prompt_tokens, *outputs))
        self._values["keys"].extend(encode_keys(note.prompt_keys))

    def _request_ended(self, note: RequestEnded) -> None:
        self._add_scalars(None)
        self._reason[-1] = note.reason.encode()
        self._values["requests"].append(note.request_id.encode())
        self._ints("counts", (note.num_output_tokens,))
        self._values["keys"].extend(encode_keys(note.output_keys))

    def _step_computed(self, note: StepComputed) -> None:
        self._add_scalars(None)
        checksum = () if note.slots_crc32 is None else (note.slots_crc32,)
        self._ints("counts", (note.nanoseconds, *note.load, *checksum))
        self._ints("rows", note.stopped)

    def _run_ended(self, note: RunEnded) -> None:
        self._add_scalars(json.dumps(note.facts).encode())
