"""Events into rows: one pass over a commit, straight into the columns of the next batch."""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeAlias, get_args

import numpy as np
import pyarrow as pa

from ....core.errors import CorruptLedgerError, InputError
from ....core.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksFreed,
    BlocksShared,
    BlocksUncached,
    CacheReset,
    Commit,
    Event,
    FreeReason,
    IntColumn,
    PoolCreated,
    PrefixAdopted,
    RowsAssigned,
    RowsReleased,
    TokensPlaced,
)
from ....core.types import StepLoad
from .keys import decode_keys, encode_keys
from .rows import (
    LIST_COLUMNS,
    ROW_SCHEMA,
    LoggedCommit,
    LoggedNote,
    Note,
    Record,
    RequestArrived,
    RequestEnded,
    RunEnded,
    StepComputed,
    pool_as_json,
    pool_from_json,
)

# Python columns as Arrow arrays, buffer by buffer: for a batch of a few rows a tenth of what `pa.array` takes.


def number_array(entries: pa.DataType, values: "array[int]") -> pa.Array:
    """Numbers of which none is missing; copies them."""
    return pa.Array.from_buffers(entries, len(values), [None, pa.py_buffer(values.tobytes())])


def optional_number_array(entries: pa.DataType, typecode: str, values: Sequence[float | None]) -> pa.Array:
    """Numbers of which some may be None."""
    if values.count(None) == len(values):
        return pa.nulls(len(values), entries)
    data = array(typecode, [0 if value is None else value for value in values])
    return pa.Array.from_buffers(entries, len(values), [_validity(values), pa.py_buffer(data.tobytes())])


def binary_array(entries: pa.DataType, values: Sequence[bytes | None]) -> pa.Array:
    """Byte strings (or texts in UTF-8) of which some may be None.

    Raises:
        OverflowError: they have more than 2 GiB together.
    """
    if values.count(None) == len(values):
        return pa.nulls(len(values), entries)
    ends = array("i", accumulate([0 if value is None else len(value) for value in values], initial=0))
    data = b"".join([value for value in values if value is not None])
    return pa.Array.from_buffers(
        entries, len(values), [_validity(values), pa.py_buffer(ends.tobytes()), pa.py_buffer(data)]
    )


def list_array(entries: pa.DataType, ends: "array[int]", flat: pa.Array) -> pa.Array:
    """Lists of `entries`; list i is `flat[ends[i]:ends[i + 1]]`."""
    buffers = [None, pa.py_buffer(ends.tobytes())]
    return pa.Array.from_buffers(pa.list_(entries), len(ends) - 1, buffers, children=[flat])


def _validity(values: Sequence[object]) -> pa.Buffer | None:
    """One bit a value, in Arrow's order; None where all are there."""
    if None not in values:
        return None
    present = np.fromiter((value is not None for value in values), np.bool_, len(values))
    return pa.py_buffer(np.packbits(present, bitorder="little").tobytes())


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


# Rows into events: what `RowEncoder` wrote, exactly.

_KEY_COLUMNS = ("keys", "parents")
_REASONS = {reason.value: reason for reason in FreeReason}
# A row's entry of a list column, by the column's name.
_Entries: TypeAlias = Callable[[str], tuple[Any, ...]]


class RowDecoder:
    """Reads one record batch row by row. Flat columns become Python values once, rows are slices of them."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._flat: dict[str, tuple[Any, ...]] = {}
        self._ends: dict[str, list[int]] = {}
        for name in LIST_COLUMNS:
            column = batch.column(name)
            offsets = column.offsets.to_pylist()
            values = column.values.to_pylist()
            self._flat[name] = decode_keys(values) if name in _KEY_COLUMNS else tuple(values)
            self._ends[name] = offsets
        self._scalars = {
            name: batch.column(name).to_pylist()
            for name in ("commit", "time_ns", "event", "group", "reason", "arrival_s", "detail")
        }
        self._row = 0

    def rows(self) -> Iterator[tuple[int, int | None, Event | Note | None]]:
        """(commit, time, what the row says) of every row; None for the row of a commit without events.

        Raises:
            CorruptLedgerError: an event that this version does not know.
        """
        scalars = self._scalars
        for row, (commit, time_ns, name) in enumerate(
            zip(scalars["commit"], scalars["time_ns"], scalars["event"], strict=True)
        ):
            self._row = row
            if name is None:
                yield commit, time_ns, None
                continue
            decode = _DECODERS.get(name)
            if decode is None:
                raise CorruptLedgerError(f"commit {commit} holds {name!r}, which this kvledger does not know")
            yield commit, time_ns, decode(self, self.entries)

    def entries(self, name: str) -> tuple[Any, ...]:
        """The current row's entries of one list column."""
        ends = self._ends[name]
        return self._flat[name][ends[self._row] : ends[self._row + 1]]

    def scalar(self, name: str) -> Any:
        """The current row's value of one scalar column."""
        return self._scalars[name][self._row]


def records(batches: Iterable[pa.RecordBatch]) -> Iterator[Record]:
    """Commits and notes from batches in order; a commit is whole within a batch."""
    for batch in batches:
        sequence, when = -1, None
        events: list[Event] = []
        for commit, time_ns, said in RowDecoder(batch).rows():
            if commit != sequence or isinstance(said, Note):
                if sequence >= 0:
                    yield LoggedCommit(Commit(sequence, tuple(events)), when)
                sequence, when, events = -1, None, []
            if isinstance(said, Note):
                yield LoggedNote(said, time_ns, commit)
                continue
            sequence, when = commit, time_ns
            if said is not None:
                events.append(said)
        if sequence >= 0:
            yield LoggedCommit(Commit(sequence, tuple(events)), when)


def _pool_created(row: RowDecoder, of: _Entries) -> Event:
    return pool_from_json(row.scalar("detail"))


def _rows_assigned(row: RowDecoder, of: _Entries) -> Event:
    return RowsAssigned(of("requests"), of("rows"))


def _rows_released(row: RowDecoder, of: _Entries) -> Event:
    return RowsReleased(of("requests"), of("rows"))


def _prefix_adopted(row: RowDecoder, of: _Entries) -> Event:
    (adopting,) = of("rows")
    return PrefixAdopted(row.scalar("group"), adopting, of("blocks"))


def _blocks_allocated(row: RowDecoder, of: _Entries) -> Event:
    return BlocksAllocated(row.scalar("group"), of("rows"), of("counts"), of("blocks"), of("keys"), of("groups"))


def _blocks_cached(row: RowDecoder, of: _Entries) -> Event:
    return BlocksCached(
        row.scalar("group"),
        of("rows"),
        of("starts"),
        of("stops"),
        of("counts"),
        of("indices"),
        of("blocks"),
        of("keys"),
        of("parents"),
    )


def _tokens_placed(row: RowDecoder, of: _Entries) -> Event:
    return TokensPlaced(of("rows"), of("first_positions"), of("counts"))


def _blocks_shared(row: RowDecoder, of: _Entries) -> Event:
    parent, child = of("rows")
    return BlocksShared(row.scalar("group"), parent, child, of("blocks"))


def _block_copied(row: RowDecoder, of: _Entries) -> Event:
    (writer,), (index,), (source, target) = of("rows"), of("indices"), of("blocks")
    (lost_key,), (lost_group,) = of("keys"), of("groups")
    return BlockCopied(row.scalar("group"), writer, index, source, target, lost_key, lost_group)


def _blocks_freed(row: RowDecoder, of: _Entries) -> Event:
    reason = _REASONS[row.scalar("reason")]
    return BlocksFreed(reason, of("groups"), of("rows"), of("counts"), of("blocks"), of("indices"))


def _blocks_uncached(row: RowDecoder, of: _Entries) -> Event:
    return BlocksUncached(of("blocks"), of("keys"), of("groups"))


def _cache_reset(row: RowDecoder, of: _Entries) -> Event:
    return CacheReset()


def _request_arrived(row: RowDecoder, of: _Entries) -> Note:
    num_prompt_tokens, *outputs = of("counts")
    (request_id,) = of("requests")
    return RequestArrived(
        request_id,
        row.scalar("arrival_s"),
        num_prompt_tokens,
        outputs[0] if outputs else None,
        of("keys"),
        json.loads(row.scalar("detail") or "{}"),
    )


def _request_ended(row: RowDecoder, of: _Entries) -> Note:
    (request_id,), (num_output_tokens,) = of("requests"), of("counts")
    return RequestEnded(request_id, row.scalar("reason"), num_output_tokens, of("keys"))


def _step_computed(row: RowDecoder, of: _Entries) -> Note:
    nanoseconds, *counts = of("counts")
    num_figures = len(StepLoad._fields)
    checksum = counts[num_figures:]
    return StepComputed(nanoseconds, StepLoad(*counts[:num_figures]), of("rows"), checksum[0] if checksum else None)


def _run_ended(row: RowDecoder, of: _Entries) -> Note:
    return RunEnded(json.loads(row.scalar("detail")))


_DECODERS: dict[str, Callable[[RowDecoder, _Entries], Event | Note]] = {
    PoolCreated.__name__: _pool_created,
    RowsAssigned.__name__: _rows_assigned,
    RowsReleased.__name__: _rows_released,
    PrefixAdopted.__name__: _prefix_adopted,
    BlocksAllocated.__name__: _blocks_allocated,
    BlocksCached.__name__: _blocks_cached,
    TokensPlaced.__name__: _tokens_placed,
    BlocksShared.__name__: _blocks_shared,
    BlockCopied.__name__: _block_copied,
    BlocksFreed.__name__: _blocks_freed,
    BlocksUncached.__name__: _blocks_uncached,
    CacheReset.__name__: _cache_reset,
    RequestArrived.__name__: _request_arrived,
    RequestEnded.__name__: _request_ended,
    StepComputed.__name__: _step_computed,
    RunEnded.__name__: _run_ended,
}
