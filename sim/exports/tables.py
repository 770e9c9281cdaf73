"""Tables of a run: one row a finished request, and occupancy over time."""

import contextlib
import csv
import io
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

from ...core.errors import InputError
from ...core.scheduler.scheduler import Scheduler
from ..engine.distributions import NANOSECONDS
from ..engine.engine import RunListener
from ..engine.metrics import SERIES, RequestRecord

# A file that a run leaves behind: written beside its place, and put there whole when the run has ended.


class _CheckedFile(io.FileIO):
    """A file whose failed writes name the option that asked for it."""

    def __init__(self, path: Path, option: str) -> None:
        super().__init__(path, "wb")
        self._option = option

    def write(self, data: Any, /) -> int | None:
        """Write some of the bytes. Raises InputError where the system takes none, such as on a full disk."""
        try:
            return super().write(data)
        except OSError as error:
            raise InputError(
                f"{self._option}: {error.strerror} while writing beside its place; nothing was changed there"
            ) from error


class OutputFile:
    """Open for writing from the start, so that a place that cannot be written is known before the run.

    Attributes:
        option: the option that asked for it, as error messages name it.
        path: where it will stand, symbolic links followed.
        stream: takes the bytes.
    """

    def __init__(self, option: str, name: str) -> None:
        """Create the file beside its place.

        Raises:
            InputError: that is no place for a file, or it cannot be written.
        """
        self.option = option
        self.path = Path(name).resolve()
        if self.path.exists() and not self.path.is_file():
            raise InputError(f"{option} {name}: there is something that is not a file; name a file")
        self._partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        try:
            self.stream = io.BufferedWriter(_CheckedFile(self._partial, option))
        except FileNotFoundError:
            raise InputError(f"{option} {name}: there is no folder {self.path.parent}; create it first") from None
        except OSError as error:
            raise InputError(f"{option} {name} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """Write what is buffered."""
        self.stream.close()

    def publish(self) -> None:
        """Put the closed file in its place, over one that is there (whose permissions it takes).

        Raises:
            InputError: the folder does not let it.
        """
        try:
            if self.path.exists():
                self._partial.chmod(stat.S_IMODE(self.path.stat().st_mode))
            self._partial.replace(self.path)
        except OSError as error:
            raise InputError(f"{self.option} {self.path} cannot be put in place: {error.strerror}") from error

    def discard(self) -> None:
        """Leave nothing behind; a file that was there stays as it was."""
        with contextlib.suppress(OSError, InputError):
            self.stream.close()
        self._partial.unlink(missing_ok=True)


# Rows into a CSV, JSONL or Parquet file as they come; memory does not grow with them.

ROWS_PER_GROUP = 8192

# Column name -> str, int or float. A cell may be None: empty in CSV, null elsewhere.
Columns = Mapping[str, type]


class TableWriter(Protocol):
    """Takes one row after the other."""

    def write(self, row: Sequence[Any]) -> None:
        """Add a row: one cell a column."""
        ...

    def finish(self) -> None:
        """Write what is gathered; the file itself is closed by its owner."""
        ...

    def abandon(self) -> None:
        """Let go of a file that is given up."""
        ...


def open_table(file: OutputFile, columns: Columns) -> TableWriter:
    """The writer for the kind of file that its name asks for.

    Raises:
        InputError: the name ends neither in .csv nor .jsonl nor .parquet, or Parquet's library is missing.
    """
    writer = _WRITERS.get(file.path.suffix)
    if writer is None:
        raise InputError(f"{file.option} {file.path.name}: the name must end in .csv, .jsonl or .parquet")
    return writer(file, columns)


class CsvTable:
    """Comma-separated values with a header; numbers in the shortest form that reads back as the same number."""

    def __init__(self, file: OutputFile, columns: Columns) -> None:
        self._text = io.TextIOWrapper(file.stream, encoding="utf-8", newline="")
        self._writer = csv.writer(self._text, lineterminator="\n")
        self._writer.writerow(columns)

    def write(self, row: Sequence[Any]) -> None:
        """Add a row."""
        self._writer.writerow(row)

    def finish(self) -> None:
        """Hand what is buffered to the file."""
        self._text.detach()

    def abandon(self) -> None:
        """Nothing is held but a buffer."""


class JsonlTable:
    """One JSON object a line."""

    def __init__(self, file: OutputFile, columns: Columns) -> None:
        self._stream = file.stream
        self._columns = tuple(columns)

    def write(self, row: Sequence[Any]) -> None:
        """Add a row."""
        line = json.dumps(dict(zip(self._columns, row, strict=True)), ensure_ascii=False, allow_nan=False)
        self._stream.write(line.encode() + b"\n")

    def finish(self) -> None:
        """Every line is with the file already."""

    def abandon(self) -> None:
        """Nothing is held."""


class ParquetTable:
    """Columns of int64, float64 and strings, in row groups of 8,192 rows."""

    def __init__(self, file: OutputFile, columns: Columns) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            raise InputError(
                f"{file.option} {file.path.name}: Parquet needs pyarrow, which is not installed; install the extra "
                "`log` (pip install 'kvledger[log]'), or name a .csv or .jsonl file"
            ) from None
        types = {str: pa.string(), int: pa.int64(), float: pa.float64()}
        self._schema = pa.schema([(name, types[kind]) for name, kind in columns.items()])
        self._writer = pq.ParquetWriter(file.stream, self._schema, compression="zstd")
        self._batch_of = pa.RecordBatch.from_arrays
        self._array_of = pa.array
        self._rows: list[Sequence[Any]] = []

    def write(self, row: Sequence[Any]) -> None:
        """Add a row."""
        self._rows.append(row)
        if len(self._rows) == ROWS_PER_GROUP:
            self._flush()

    def finish(self) -> None:
        """Write the last rows and the file's footer."""
        if self._rows:
            self._flush()
        self._writer.close()

    def abandon(self) -> None:
        """Keep the library from finishing the file when the writer goes."""
        self._writer.is_open = False

    def _flush(self) -> None:
        columns = zip(*self._rows, strict=True)
        arrays = [self._array_of(cells, field.type) for cells, field in zip(columns, self._schema, strict=True)]
        self._writer.write_batch(self._batch_of(arrays, schema=self._schema))
        self._rows.clear()


_WRITERS = {".csv": CsvTable, ".jsonl": JsonlTable, ".parquet": ParquetTable}

REQUEST_COLUMNS: Columns = {
    field.name: float if field.name.endswith("_s") else int if field.name.startswith("num_") else str
    for field in attrs.fields(RequestRecord)
}
# In a fleet: which engine a row is of; a request's is the one that it finished on.
ENGINE_COLUMN: Columns = {"engine": str}
SERIES_COLUMNS: Columns = {"time_s": float, SERIES[0]: float, SERIES[1]: int, SERIES[2]: int}


class RequestTable:
    """Writes the record of each request as it finishes, in that order."""

    def __init__(self, table: TableWriter) -> None:
        self._table = table

    def add(self, record: RequestRecord) -> None:
        """Write one row."""
        self._table.write([getattr(record, name) for name in REQUEST_COLUMNS])

    def add_of_engine(self, engine: str, record: RequestRecord) -> None:
        """Write one row of a fleet's table, which has `ENGINE_COLUMN` first."""
        self._table.write([engine, *(getattr(record, name) for name in REQUEST_COLUMNS)])


class SeriesTable(RunListener):
    """Writes usage of the pool, running and waiting requests at every scheduling decision, none left out.

    Several identical decode steps may be taken in one decision; their blocks are counted from its start on.
    """

    def __init__(self, table: TableWriter, engine: str | None = None) -> None:
        """Write to a table; with the name of an engine, to one that has `ENGINE_COLUMN` first."""
        self._table = table
        self._first = [] if engine is None else [engine]

    def scheduled(self, now_ns: int, scheduler: Scheduler) -> None:
        """Write one row."""
        usage = scheduler.allocator.pool.usage
        self._table.write([*self._first, now_ns / NANOSECONDS, usage, scheduler.num_running, scheduler.num_waiting])
