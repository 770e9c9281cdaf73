"""Turns events and notes into rows of a record batch, and rows back into events and notes."""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from operator import setitem
from typing import Any, TypeAlias, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ....core import events
from ....core.errors import CorruptLedgerError, InputError
from ....core.events import Commit, Event, FreeReason, columns_of, named_tuple
from ....core.types import StepLoad
from . import rows
from .keys import decode_keys, encode_keys
from .rows import LIST_COLUMNS, ROW_SCHEMA, LoggedCommit, LoggedNote, Note, Record

# The column that each field of an event goes into, in the order of the fields. "*rows" is one entry of `rows`.
_FIELDS: dict[type, tuple[str, ...]] = {
    events.PoolCreated: ("detail",),
    events.RowsAssigned: ("requests", "rows"),
    events.RowsReleased: ("requests", "rows"),
    events.PrefixAdopted: ("group", "*rows", "blocks"),
    events.BlocksAllocated: ("group", "rows", "counts", "blocks", "keys", "groups"),
    events.BlocksCached: ("group", "rows", "starts", "stops", "counts", "indices", "blocks", "keys", "parents"),
    events.TokensPlaced: ("rows", "first_positions", "counts"),
    events.BlocksShared: ("group", "*rows", "*rows", "blocks"),
    events.BlockCopied: ("group", "*rows", "*indices", "*blocks", "*blocks", "*keys", "*groups"),
    events.BlocksFreed: ("reason", "groups", "rows", "counts", "blocks", "indices"),
    events.BlocksUncached: ("blocks", "keys", "groups"),
    events.CacheReset: (),
}
_NAMES = {event: event.__name__.encode() for event in _FIELDS}
_Array = np.ndarray
_KEY_COLUMNS = ("keys", "parents")
_TYPECODE = {pa.int32(): "i", pa.int64(): "q"}

# Python columns become Arrow arrays buffer by buffer: for a batch of a few rows this takes a tenth of `pa.array`.


def _number_array(entries: pa.DataType, values: "array[int]") -> pa.Array:
    """Copy numbers, none of them missing, into an Arrow array."""
    return pa.Array.from_buffers(entries, len(values), [None, pa.py_buffer(values.tobytes())])


def _optional_number_array(entries: pa.DataType, typecode: str, values: Sequence[float | None]) -> pa.Array:
    """Copy numbers, some of which may be None, into an Arrow array."""
    if values.count(None) == len(values):
        return pa.nulls(len(values), entries)
    data = array(typecode, [0 if value is None else value for value in values])
    return pa.Array.from_buffers(entries, len(values), [_validity(values), pa.py_buffer(data.tobytes())])


def _binary_array(entries: pa.DataType, values: Sequence[bytes | None]) -> pa.Array:
    """Copy byte strings (or texts in UTF-8), some of which may be None, into an Arrow array.

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


def _validity(values: Sequence[object]) -> pa.Buffer | None:
    """Return one bit per value, in Arrow's order; None if no value is missing."""
    if None not in values:
        return None
    present = np.fromiter((value is not None for value in values), np.bool_, len(values))
    return pa.py_buffer(np.packbits(present, bitorder="little").tobytes())


class RowEncoder:
    """Gathers rows until they are taken as one record batch. A commit that cannot be encoded adds nothing."""

    def __init__(self) -> None:
        self._commits = array("q")
        self._times: list[int | None] = []
        self._names: list[bytes | None] = []
        self._group: list[int | None] = []
        self._reason: list[bytes | None] = []
        self._arrival_s: list[float | None] = []
        self._detail: list[bytes | None] = []
        self._scalars = (
            *(self._commits, self._times, self._names),
            *(self._group, self._reason, self._arrival_s, self._detail),
        )
        self._lists: dict[str, Any] = {
            name: array(_TYPECODE[entries]) if entries in _TYPECODE else [] for name, entries in LIST_COLUMNS.items()
        }
        self._ends = {name: array("i", (0,)) for name in LIST_COLUMNS}
        # Bound once: every row calls them.
        self._row_enders = [(self._ends[name].append, values) for name, values in self._lists.items()]
        self._adders = {event: (tuple(map(self._adder, names)), names) for event, names in _FIELDS.items()}

    def _adder(self, column: str) -> Callable[[Any], None]:
        """Return what adds a field's value to its column, unless the value is a NumPy array."""
        name = column.removeprefix("*")
        values: Any = self._lists.get(name)
        match name:
            case "group":
                return partial(setitem, self._group, -1)
            case "detail":
                return partial(setitem, self._detail, -1)
            case "reason":
                return lambda reason: setitem(self._reason, -1, reason.value.encode())
            case "requests":
                return lambda requests: values.extend([request.encode() for request in requests])
            case "keys" | "parents" if column == name:
                return lambda keys: values.extend(encode_keys(keys))
            case "keys" | "parents":
                return lambda key: values.extend(encode_keys((key,)))
            case _:
                return values.extend if column == name else values.append

    def _add_array(self, name: str, column: NDArray[np.integer]) -> None:
        values = self._lists[name]
        itemsize = values.itemsize
        if itemsize < column.itemsize and len(column) and not -(1 << 31) <= column.min() <= column.max() < 1 << 31:
            raise OverflowError(f"{name} reaches {column.max()}; the column has {8 * itemsize} bits")
        values.frombytes(column.astype(f"i{itemsize}").tobytes())

    def clear(self) -> None:
        """Drop the rows gathered so far."""
        self._cut(0)

    @property
    def num_rows(self) -> int:
        """Rows gathered so far."""
        return len(self._names)

    def add_commit(self, commit: Commit, time_ns: int | None) -> None:
        """Add the rows of one commit.

        Raises:
            InputError: a value does not fit the columns (a key of another type, a number beyond 32 bits where blocks
                and rows are counted). The batch is unchanged.
        """
        before = self.num_rows
        try:
            for event in commit.events:
                self._begin_row()
                kind = type(event)
                values = event if isinstance(event, tuple) else _values_of(event)
                for value, add, name in zip(values, *self._adders[kind]):  # noqa: B905 - fields and table agree
                    if type(value) is _Array:
                        self._add_array(name, value)
                    else:
                        add(value)
                self._end_row(commit.sequence, time_ns, _NAMES[kind])
            if not commit.events:
                self._begin_row()
                self._end_row(commit.sequence, time_ns, None)
        except BaseException as error:
            self._cut(before)
            if isinstance(error, OverflowError):
                raise InputError(f"commit {commit.sequence} holds a number too large for a log: {error}") from error
            if isinstance(error, UnicodeEncodeError):
                raise InputError(f"commit {commit.sequence} names a request that is no text: {error}") from error
            raise

    def add_note(self, note: Note, time_ns: int | None, next_commit: int) -> None:
        """Add one note. Raises InputError like `add_commit`."""
        before = self.num_rows
        try:
            self._begin_row()
            match note:
                case rows.RequestArrived():
                    self._detail[-1] = json.dumps(note.facts).encode() if note.facts else None
                    self._arrival_s[-1] = note.arrival_s
                    outputs = () if note.num_output_tokens is None else (note.num_output_tokens,)
                    self._add_request(note.request_id, (note.num_prompt_tokens, *outputs), note.prompt_keys)
                case rows.RequestEnded():
                    self._reason[-1] = note.reason.encode()
                    self._add_request(note.request_id, (note.num_output_tokens,), note.output_keys)
                case rows.StepComputed():
                    checksum = () if note.slots_crc32 is None else (note.slots_crc32,)
                    self._lists["counts"].extend((note.nanoseconds, *note.load, *checksum))
                    self._lists["rows"].extend(note.stopped)
                case rows.RunEnded():
                    self._detail[-1] = json.dumps(note.facts).encode()
            self._end_row(next_commit, time_ns, type(note).__name__.encode())
        except BaseException:
            self._cut(before)
            raise

    def _add_request(self, request_id: str, counts: tuple[int, ...], keys: Sequence[Any]) -> None:
        self._lists["requests"].append(request_id.encode())
        self._lists["counts"].extend(counts)
        self._lists["keys"].extend(encode_keys(keys))

    def as_batch(self) -> pa.RecordBatch:
        """Copy the rows so far into one batch. They stay until `clear`."""
        columns: dict[str, pa.Array] = {
            "commit": _number_array(pa.int64(), self._commits),
            "time_ns": _optional_number_array(pa.int64(), "q", self._times),
            "event": _binary_array(pa.utf8(), self._names),
            "group": _optional_number_array(pa.int32(), "i", self._group),
            "reason": _binary_array(pa.utf8(), self._reason),
            "arrival_s": _optional_number_array(pa.float64(), "d", self._arrival_s),
            "detail": _binary_array(pa.utf8(), self._detail),
        }
        for name, entries in LIST_COLUMNS.items():
            flat = (_number_array if entries in _TYPECODE else _binary_array)(entries, self._lists[name])
            ends = self._ends[name]
            buffers = [None, pa.py_buffer(ends.tobytes())]
            columns[name] = pa.Array.from_buffers(pa.list_(entries), len(ends) - 1, buffers, children=[flat])
        return pa.RecordBatch.from_arrays([columns[name] for name in ROW_SCHEMA.names], schema=ROW_SCHEMA)

    def _begin_row(self) -> None:
        self._group.append(None)
        self._reason.append(None)
        self._arrival_s.append(None)
        self._detail.append(None)

    def _end_row(self, commit: int, time_ns: int | None, name: bytes | None) -> None:
        for append, values in self._row_enders:
            append(len(values))
        self._commits.append(commit)
        self._times.append(time_ns)
        self._names.append(name)

    def _cut(self, num_rows: int) -> None:
        """Drop everything after the first `num_rows` rows, an unfinished row included."""
        for name, ends in self._ends.items():
            del ends[num_rows + 1 :]
            del self._lists[name][ends[-1] :]
        for column in self._scalars:
            del column[num_rows:]


def _values_of(event: events.PoolCreated | events.BlockCopied | events.CacheReset) -> Iterable[Any]:
    return (rows.pool_as_json(event).encode(),) if isinstance(event, events.PoolCreated) else columns_of(event).values()


# Looks up the value of the current row by the name of a column.
_Row: TypeAlias = Callable[[str], Any]


def _decoder_of(event: Any, columns: tuple[str, ...]) -> Callable[[_Row], Any]:
    """Return the inverse of `RowEncoder.add_commit` for one type of event.

    It raises `ValueError` if a column that holds single fields has another number of entries.
    """
    if issubclass(event, tuple) and not any(name.startswith("*") for name in columns):
        # `tuple.__new__`, which `named_tuple` is, takes any iterable.
        return lambda row: named_tuple(event, cast("Any", [row(name) for name in columns]))
    make = rows.pool_from_json if event is events.PoolCreated else event
    # For each column: how many single fields its entries are; None if the whole column is one field.
    parts = {name.removeprefix("*"): columns.count(name) if name.startswith("*") else None for name in columns}

    def decode(row: _Row) -> Any:
        fields: list[Any] = []
        for name, count in parts.items():
            value = row(name)
            if count is None:
                fields.append(value)
            elif len(value) == count:
                fields += value
            else:
                raise ValueError(f"{event.__name__} has {len(value)} entries in the column {name}, not {count}")
        return make(*fields)

    return decode


def _blocks_freed(row: _Row) -> Event:
    _, *columns = _FIELDS[events.BlocksFreed]
    return events.BlocksFreed(_REASONS[row("reason")], *[row(name) for name in columns])


def _request_arrived(row: _Row) -> Note:
    (num_prompt_tokens, *outputs), (request_id,) = row("counts"), row("requests")
    facts = json.loads(row("detail") or "{}")
    num_output_tokens = outputs[0] if outputs else None
    return rows.RequestArrived(request_id, row("arrival_s"), num_prompt_tokens, num_output_tokens, row("keys"), facts)


def _request_ended(row: _Row) -> Note:
    (request_id,), (num_output_tokens,) = row("requests"), row("counts")
    return rows.RequestEnded(request_id, row("reason"), num_output_tokens, row("keys"))


def _step_computed(row: _Row) -> Note:
    nanoseconds, *counts = row("counts")
    num_figures = len(StepLoad._fields)
    load, checksum = StepLoad(*counts[:num_figures]), counts[num_figures:]
    return rows.StepComputed(nanoseconds, load, row("rows"), checksum[0] if checksum else None)


_REASONS = {reason.value: reason for reason in FreeReason}
_DECODERS: dict[str, Callable[[_Row], Event | Note]] = {
    **{event.__name__: _decoder_of(event, columns) for event, columns in _FIELDS.items()},
    "BlocksFreed": _blocks_freed,
    "RequestArrived": _request_arrived,
    "RequestEnded": _request_ended,
    "StepComputed": _step_computed,
    "RunEnded": lambda row: rows.RunEnded(json.loads(row("detail"))),
}


def _decoded_rows(batch: pa.RecordBatch) -> Iterator[tuple[int, int | None, Event | Note | None]]:
    """Yield (commit, time, event or note) for each row; None for the row of a commit without events.

    Raises:
        CorruptLedgerError: an event that this version does not know.
    """
    # Flat columns become Python values once; rows are slices of them.
    ends_of: dict[str, list[int]] = {name: batch.column(name).offsets.to_pylist() for name in LIST_COLUMNS}
    values_of: dict[str, Sequence[Any]] = {}
    for name in ROW_SCHEMA.names:
        values = (batch.column(name).values if name in ends_of else batch.column(name)).to_pylist()
        values_of[name] = decode_keys(values) if name in _KEY_COLUMNS else tuple(values)
    place = 0

    def row(name: str) -> Any:
        if name in ends_of:
            ends = ends_of[name]
            return values_of[name][ends[place] : ends[place + 1]]
        return values_of[name][place]

    for place, (commit, time_ns, name) in enumerate(  # noqa: B007 - `row` reads it
        zip(values_of["commit"], values_of["time_ns"], values_of["event"], strict=True)
    ):
        if name is not None and name not in _DECODERS:
            raise CorruptLedgerError(f"commit {commit} holds {name!r}, which this kvledger does not know")
        yield commit, time_ns, None if name is None else _DECODERS[name](row)


def records(batches: Iterable[pa.RecordBatch]) -> Iterator[Record]:
    """Yield commits and notes from batches, in order. No commit spans two batches."""
    for batch in batches:
        sequence, when = -1, None
        own: list[Event] = []
        for commit, time_ns, decoded in _decoded_rows(batch):
            if commit != sequence or isinstance(decoded, Note):
                if sequence >= 0:
                    yield LoggedCommit(Commit(sequence, tuple(own)), when)
                sequence, when, own = -1, None, []
            if isinstance(decoded, Note):
                yield LoggedNote(decoded, time_ns, commit)
                continue
            sequence, when = commit, time_ns
            if decoded is not None:
                own.append(decoded)
        if sequence >= 0:
            yield LoggedCommit(Commit(sequence, tuple(own)), when)
