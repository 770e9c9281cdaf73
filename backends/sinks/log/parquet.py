"""Closed segments: Parquet files with one checksum for the file and one per row group, which locates damage."""

import io
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import attrs
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..errors import LogDamagedError
from .manifest import ClosedSegment, check_is_file
from .rows import ROW_SCHEMA, StoredBatch

ROW_GROUP_ROWS: Final = 1 << 15
_CHUNK_BYTES: Final = 1 << 20
_ROW_GROUPS_KEY: Final = "kvledger.row_groups"


@attrs.frozen
class RowGroupRange:
    """The bytes of one row group, their CRC-32 in hexadecimal digits, and the commits in it."""

    offset: int
    size_bytes: int
    crc32: str
    first_commit: int
    last_commit: int


class _CheckedFile(io.RawIOBase):
    """A file that computes the CRC-32 of all written bytes, and of each part between calls of `take_part_crc`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self.discards = False
        self.size_bytes = 0
        self.crc = 0
        self._part_crc = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.discards:
            return len(view)
        left = view
        while left:
            left = left[self._file.write(left) :]
        self.crc = zlib.crc32(view, self.crc)
        self._part_crc = zlib.crc32(view, self._part_crc)
        self.size_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size_bytes

    def take_part_crc(self) -> int:
        crc, self._part_crc = self._part_crc, 0
        return crc

    def close(self) -> None:
        if not self._file.closed:
            if not self.discards:
                os.fsync(self._file.fileno())
            self._file.close()
        super().close()


class ParquetSegmentWriter:
    """Writes one closed segment under a temporary name; `finish` renames it."""

    def __init__(self, path: Path, number: int, first_commit: int, identity: dict[str, str]) -> None:
        """Start the file. `identity` is what `Manifest.identity` states of the segment; empty in layout version 1."""
        self._identity = identity
        self._path = path
        self._temporary = path.with_name(path.name + ".tmp")
        self._number = number
        self._first_commit = first_commit
        self._file = _CheckedFile(self._temporary)
        self._writer = pq.ParquetWriter(
            pa.PythonFile(self._file, "w"), ROW_SCHEMA, compression="zstd", write_page_checksum=True
        )
        self._ranges: list[RowGroupRange] = []
        self._pending: list[pa.RecordBatch] = []
        self._num_pending = 0
        self.num_rows = 0
        self._times: list[int] = []
        self._file.take_part_crc()

    def add(self, batch: pa.RecordBatch) -> None:
        """Add a batch of complete commits."""
        self._pending.append(batch)
        self._num_pending += batch.num_rows
        self.num_rows += batch.num_rows
        if self._num_pending >= ROW_GROUP_ROWS:
            self._write_row_group()

    def finish(self, next_commit: int) -> ClosedSegment:
        """Complete the file and rename it once it is on the device; `next_commit` is the first commit after it."""
        if self._num_pending:
            self._write_row_group()
        stated = {
            "kvledger.layout_version": "2" if self._identity else "1",
            **self._identity,
            "kvledger.segment": str(self._number),
            "kvledger.first_commit": str(self._first_commit),
            _ROW_GROUPS_KEY: json.dumps([list(attrs.astuple(each)) for each in self._ranges]),
        }
        self._writer.add_key_value_metadata(stated)
        self._writer.close()
        self._file.close()
        self._temporary.replace(self._path)
        return ClosedSegment(
            number=self._number,
            file=self._path.name,
            first_commit=self._first_commit,
            last_commit=next_commit - 1,
            num_rows=self.num_rows,
            first_time_ns=min(self._times, default=None),
            last_time_ns=max(self._times, default=None),
            size_bytes=self._file.size_bytes,
            crc32=f"{self._file.crc:08x}",
        )

    def abandon(self) -> None:
        """Remove what was written."""
        # Parquet's writer always writes its footer, which a full disk would refuse again.
        self._file.discards = True
        self._writer.close()
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _write_row_group(self) -> None:
        table = pa.Table.from_batches(self._pending, ROW_SCHEMA)
        offset = self._file.size_bytes
        self._writer.write_table(table, row_group_size=table.num_rows)
        first, last = table.column("commit")[0].as_py(), table.column("commit")[-1].as_py()
        times = pc.call_function("min_max", [table.column("time_ns")]).as_py()
        if times["min"] is not None:
            self._times += [times["min"], times["max"]]
        size = self._file.size_bytes - offset
        self._ranges.append(RowGroupRange(offset, size, f"{self._file.take_part_crc():08x}", first, last))
        self._pending, self._num_pending = [], 0


def check_size(directory: Path, segment: ClosedSegment) -> None:
    """Raise `LogDamagedError` if a closed segment's file is missing or has another size than the manifest says."""
    path = directory / segment.file
    check_is_file(path, "segment", segment.first_commit)
    size = path.stat().st_size
    if size != segment.size_bytes:
        raise LogDamagedError(
            path,
            f"the segment has {size:,} bytes, not {segment.size_bytes:,}",
            min(size, segment.size_bytes),
            segment.first_commit,
        )


def check_segment(directory: Path, segment: ClosedSegment) -> None:
    """Compare a closed segment's file with its checksums; reads it once, a megabyte at a time.

    Raises:
        LogDamagedError: it is missing, shorter or longer, or holds other bytes; names the first row group affected.
    """
    check_size(directory, segment)
    path = directory / segment.file
    with path.open("rb") as file:
        if _crc_of(file, segment.size_bytes) != segment.crc32:
            raise _located(path, segment)


def _crc_of(file: io.BufferedReader, size_bytes: int) -> str:
    crc = 0
    while size_bytes:
        chunk = file.read(min(_CHUNK_BYTES, size_bytes))
        if not chunk:
            break
        crc = zlib.crc32(chunk, crc)
        size_bytes -= len(chunk)
    return f"{crc:08x}"


def _located(path: Path, segment: ClosedSegment) -> LogDamagedError:
    """Return the error for a file with a wrong checksum; it names the damaged row group if one is."""
    try:
        ranges = _row_groups(path)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError):
        return LogDamagedError(path, "the segment's footer is damaged", 0, segment.first_commit)
    with path.open("rb") as file:
        for each in ranges:
            file.seek(each.offset)
            if _crc_of(file, each.size_bytes) != each.crc32:
                return LogDamagedError(
                    path,
                    f"the row group of commits {each.first_commit} to {each.last_commit} does not match its checksum",
                    each.offset,
                    each.first_commit,
                )
    return LogDamagedError(
        path, "the segment does not match its checksum, outside its row groups", 0, segment.first_commit
    )


def _row_groups(path: Path) -> list[RowGroupRange]:
    with pq.ParquetFile(path) as file:
        stated = file.metadata.metadata or {}
        return [RowGroupRange(*each) for each in json.loads(stated[_ROW_GROUPS_KEY.encode()])]


def read_batches(
    directory: Path, segment: ClosedSegment, identity: dict[str, str], first_commit: int = 0
) -> Iterator[StoredBatch]:
    """Check a segment, then yield each of its row groups that has a commit from `first_commit` on.

    Raises:
        LogDamagedError: as `check_segment`, before the first row; or it does not state `identity`
            (`Manifest.identity`), so it belongs to another log or place.
    """
    check_segment(directory, segment)
    path = directory / segment.file
    with pq.ParquetFile(path) as file:
        stated = file.metadata.metadata or {}
        if stated.get(b"kvledger.segment") != str(segment.number).encode():
            raise LogDamagedError(path, f"this is not segment {segment.number}", 0, segment.first_commit)
        if any(stated.get(name.encode()) != value.encode() for name, value in identity.items()):
            raise LogDamagedError(path, "this segment belongs to another log", 0, segment.first_commit)
        for number, each in enumerate(_row_groups(path)):
            if each.last_commit < first_commit:
                continue
            # One batch, since a chunk's edge may cut a commit.
            table = file.read_row_group(number).combine_chunks().cast(ROW_SCHEMA)
            for batch in table.to_batches(max_chunksize=None):
                yield StoredBatch(batch, path, each.offset, each.size_bytes)
