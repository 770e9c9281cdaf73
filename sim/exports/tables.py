"""Writes tables of a run to CSV, JSONL or Parquet: finished requests, and KV cache usage over time."""

import contextlib
import csv
import io
import json
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ...core.errors import InputError
from ...core.scheduler.scheduler import Scheduler
from ..engine.distributions import NANOSECONDS
from ..engine.engine import RunListener
from ..engine.metrics import SERIES, RequestRecord


class _CheckedFile(io.FileIO):
    """A file whose write errors name its option."""

    def __init__(self, path: Path, option: str) -> None:
        super().__init__(path, "wb")
        self._option = option

    def write(self, data: Any, /) -> int | None:
        """Write some of the bytes. Raises InputError if the system takes none, such as on a full disk."""
        try:
            return super().write(data)
        except OSError as error:
            raise InputError(
                f"{self._option}: {error.strerror} while writing a temporary file; the file itself is unchanged"
            ) from error


class OutputFile:
    """A temporary file that replaces the real one at the end; opened early, so that errors come before the run.

    `path` is the real file, with symbolic links followed; `stream` takes the bytes.
    """

    def __init__(self, option: str, name: str) -> None:
        """Create the temporary file beside the real one.

        Raises InputError: the path is not a file, or cannot be written.
        """
        self.option = option
        self.path = Path(name).resolve()
        if self.path.exists() and not self.path.is_file():
            raise InputError(f"{option} {name} exists and is not a file; name a file")
        self._partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        try:
            self.stream = io.BufferedWriter(_CheckedFile(self._partial, option))
        except FileNotFoundError:
            raise InputError(
                f"{option} {name}: the folder {self.path.parent} does not exist; create it first"
            ) from None
        except OSError as error:
            raise InputError(f"{option} {name} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """Flush and close the stream."""
        self.stream.close()

    def publish(self) -> None:
        """Put the closed file in place; it keeps the permissions of a file that it replaces.

        Raises InputError: the folder cannot be written.
        """
        try:
            if self.path.exists():
                self._partial.chmod(stat.S_IMODE(self.path.stat().st_mode))
            self._partial.replace(self.path)
        except OSError as error:
            raise InputError(f"{self.option} {self.path} cannot be put in place: {error.strerror}") from error

    def discard(self) -> None:
        """Delete the temporary file; an existing file stays unchanged."""
        with contextlib.suppress(OSError, InputError):
            self.stream.close()
        self._partial.unlink(missing_ok=True)


ROWS_PER_GROUP = 8192

# Column name -> str, int or float. A cell may be None: empty in CSV, null elsewhere.
Columns = Mapping[str, type]


class TableWriter(ABC):
    """Writes rows one by one; memory does not grow with them."""

    @abstractmethod
    def write(self, row: Sequence[Any]) -> None:
        """Add a row: one cell per column."""

    def finish(self) -> None:  # noqa: B027
        """Write the buffered rows; the owner closes the file."""

    def abandon(self) -> None:  # noqa: B027
        """Release the file without finishing it."""


def open_table(file: OutputFile, columns: Columns) -> TableWriter:
    """The writer for the suffix of the file's name.

    Raises InputError: the name does not end in .csv, .jsonl or .parquet, or pyarrow is missing.
    """
    writer = _WRITERS.get(file.path.suffix)
    if writer is None:
        raise InputError(f"{file.option} {file.path.name}: the name must end in .csv, .jsonl or .parquet")
    return writer(file, columns)


class CsvTable(TableWriter):
    """Comma-separated values with a header; numbers in the shortest form that reads back as the same number."""

    def __init__(self, file: OutputFile, columns: Columns) -> None:
        self._text = io.TextIOWrapper(file.stream, encoding="utf-8", newline="")
        self._writer = csv.writer(self._text, lineterminator="\n")
        self._writer.writerow(columns)

    def write(self, row: Sequence[Any]) -> None:
        """Add a row."""
        self._writer.writerow(row)

    def finish(self) -> None:
        """Flush to the file."""
        self._text.detach()


class JsonlTable(TableWriter):
    """One JSON object per line."""

    def __init__(self, file: OutputFile, columns: Columns) -> None:
        self._stream = file.stream
        self._columns = tuple(columns)

    def write(self, row: Sequence[Any]) -> None:
        """Add a row."""
        line = json.dumps(dict(zip(self._columns, row, strict=True)), ensure_ascii=False, allow_nan=False)
        self._stream.write(line.encode() + b"\n")


class ParquetTable(TableWriter):
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
        """Keep pyarrow from finishing the file when the writer is deleted."""
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
# The engine of a row in a fleet; for a request, the engine on which it finished.
ENGINE_COLUMN: Columns = {"engine": str}
SERIES_COLUMNS: Columns = {"time_s": float, SERIES[0]: float, SERIES[1]: int, SERIES[2]: int}


def write_request(table: TableWriter, record: RequestRecord, *engine: str) -> None:
    """Write the row of a finished request; in a fleet, the table begins with `ENGINE_COLUMN`."""
    table.write([*engine, *(getattr(record, name) for name in REQUEST_COLUMNS)])


class SeriesTable(RunListener):
    """Writes usage of the pool, running and waiting requests at every scheduling decision.

    One decision may take several identical decode steps; their blocks count from its start.
    """

    def __init__(self, table: TableWriter, engine: str | None = None) -> None:
        """Write to a table; with an engine's name, to a table that begins with `ENGINE_COLUMN`."""
        self._table = table
        self._first = [] if engine is None else [engine]

    def scheduled(self, now_ns: int, scheduler: Scheduler) -> None:
        """Write one row."""
        usage = scheduler.allocator.pool.usage
        self._table.write([*self._first, now_ns / NANOSECONDS, usage, scheduler.num_running, scheduler.num_waiting])
