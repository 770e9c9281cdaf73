"""Rows into a CSV, JSONL or Parquet file as they come; memory does not grow with them."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..core.errors import InputError
from .output_file import OutputFile

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
