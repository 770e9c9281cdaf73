"""The open segment: an Arrow IPC stream that grows batch by batch; each message carries checksums of its bytes.

A message is `ff ff ff ff`, the length of its metadata, the metadata, the body. Its custom metadata holds the text
`head:xxxxxxxx crc32:xxxxxxxx`: the CRC-32 of the first three parts (with both numbers as zeros) and of the whole
message (with the second number as zeros). Arrow readers ignore it; ours checks it before Arrow sees a byte. The first
number distinguishes a message that was cut short from one with a damaged length.
"""

import io
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import attrs
import pyarrow as pa

from ..errors import LogDamagedError
from .manifest import LAYOUT_VERSION, write_whole
from .rows import ROW_SCHEMA, StoredBatch, next_commit_after

_MARKER: Final = b"\xff\xff\xff\xff"
_PREFIX: Final = struct.Struct("<4sI")
_SEAL_KEY: Final = "kvledger.checks"
_BLANK: Final = b"head:00000000 crc32:00000000"
_HEAD_AT: Final = len(b"head:")
_CRC_AT: Final = len(b"head:00000000 crc32:")
_DIGITS: Final = 8


@attrs.frozen
class TornTail:
    """The bytes after the last complete batch: the beginning of a message that was never finished."""

    path: Path
    offset: int
    num_bytes: int

    def describe(self) -> str:
        """One sentence for a report."""
        return f"{self.path.name}: {self.num_bytes:,} bytes from byte {self.offset:,} on are no whole batch"


def _seal(message: bytes) -> bytes:
    """Fill the two checksums into a message that carries the blank text."""
    metadata_end = _PREFIX.size + _PREFIX.unpack_from(message)[1]
    at = message.index(_BLANK, 0, metadata_end)
    sealed = bytearray(message)
    sealed[at + _HEAD_AT : at + _HEAD_AT + _DIGITS] = _digits(zlib.crc32(sealed[:metadata_end]))
    sealed[at + _CRC_AT : at + _CRC_AT + _DIGITS] = _digits(zlib.crc32(sealed))
    return bytes(sealed)


def _digits(crc: int) -> bytes:
    return b"%08x" % crc


def _body_bytes(metadata: bytes) -> int:
    """Return `bodyLength`, the fourth field of the flatbuffer table `Message` (Arrow's Message.fbs); -1 if damaged."""
    try:
        (root,) = struct.unpack_from("<I", metadata)
        (to_vtable,) = struct.unpack_from("<i", metadata, root)
        (vtable_bytes,) = struct.unpack_from("<H", metadata, root - to_vtable)
        field = 4 + 3 * 2
        if vtable_bytes <= field:
            return 0
        (at,) = struct.unpack_from("<H", metadata, root - to_vtable + field)
        return struct.unpack_from("<q", metadata, root + at)[0] if at else 0
    except struct.error:
        return -1


class BatchSerializer:
    """Serializes record batches as messages of one stream, with their checksums."""

    def __init__(self) -> None:
        self._sink = io.BytesIO()
        self._writer = pa.ipc.new_stream(self._sink, ROW_SCHEMA)
        # The writer puts the schema before the first batch; the stream has one already, so this one is dropped.
        self._writer.write_batch(pa.RecordBatch.from_pylist([], schema=ROW_SCHEMA))

    def message(self, batch: pa.RecordBatch) -> bytes:
        """Return the message of one batch."""
        self._sink.seek(0)
        self._sink.truncate()
        self._writer.write_batch(batch, custom_metadata={_SEAL_KEY: _BLANK.decode()})
        return _seal(self._sink.getvalue())


def _metadata_bytes_now() -> int:
    """Return the size of a batch's metadata as this version of Arrow writes it; it is the same for every batch."""
    row = pa.RecordBatch.from_pylist([{"commit": 0}], schema=ROW_SCHEMA)
    return _PREFIX.unpack_from(BatchSerializer().message(row))[1]


class StreamReader:
    """Reads a segment from its start, and reports how it ends.

    Attributes:
        segment: the number that the segment states.
        first_commit: the first commit that it states.
        end: where the last complete message ends, once `batches` is exhausted.
        torn: the bytes after it; None if there are none.
    """

    def __init__(self, path: Path, next_commit: int | None = None) -> None:
        """Open the file and check its schema message.

        `next_commit` is the commit that damage at the very start would affect, for the error.

        Raises:
            LogDamagedError: the schema message is not what was written, or of a layout that this version cannot read.
        """
        self.path = path
        self.torn: TornTail | None = None
        self._commit = next_commit
        self._metadata_bytes: set[int] = set()
        self._file: BinaryIO = path.open("rb")
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            message = self._message_at(0)
            if message is None:
                raise self._damaged(0, "it does not begin with a whole schema message")
            self.end = len(message)
            schema = pa.ipc.read_schema(pa.py_buffer(message))
            stated = schema.metadata or {}
            version = stated.get(b"kvledger.layout_version", b"?").decode()
            if version != str(LAYOUT_VERSION):
                raise self._damaged(0, f"it has layout version {version}; this kvledger reads {LAYOUT_VERSION}")
            if not schema.equals(ROW_SCHEMA):
                raise self._damaged(0, "its columns are not those of an event log")
            self.segment = int(stated[b"kvledger.segment"])
            self.first_commit = int(stated[b"kvledger.first_commit"])
        except BaseException:
            self._file.close()
            raise

    def batches(self) -> Iterator[StoredBatch]:
        """Yield every complete batch, then set `end` and `torn`.

        Raises:
            LogDamagedError: a batch is not what was written.
        """
        with self._file:
            while self.end < self._size:
                offset = self.end
                message = self._message_at(offset)
                if message is None:
                    self.torn = TornTail(self.path, offset, self._size - offset)
                    return
                batch = pa.ipc.read_record_batch(pa.py_buffer(message), ROW_SCHEMA)
                batch.validate(full=True)
                self.end = offset + len(message)
                if batch.num_rows:
                    self._commit = next_commit_after(batch)
                yield StoredBatch(batch, self.path, offset, len(message))

    def close(self) -> None:
        """Close the file without reading its batches."""
        self._file.close()

    def _message_at(self, offset: int) -> bytes | None:
        """Return the bytes of the complete message at `offset`; None if the file ends inside it.

        Raises:
            LogDamagedError: the bytes there are neither a message nor the beginning of one.
        """
        self._file.seek(offset)
        left = self._size - offset
        prefix = self._file.read(min(_PREFIX.size, left))
        if not prefix.strip(b"\0") and self._is_zero_from(offset):
            return None
        if prefix[:4] != _MARKER[: len(prefix)]:
            raise self._damaged(offset, "no message begins here")
        if len(prefix) < _PREFIX.size:
            return None
        metadata_bytes = _PREFIX.unpack(prefix)[1]
        if _PREFIX.size + metadata_bytes > left:
            # All batches have equally much metadata; only another version of Arrow may write more or less.
            if offset and metadata_bytes not in self._metadata_bytes and metadata_bytes != _metadata_bytes_now():
                raise self._damaged(offset, f"a message states {metadata_bytes} bytes of metadata, more than there are")
            return None
        head = prefix + self._file.read(metadata_bytes)
        at = head.find(b"head:")
        seal = head[at : at + len(_BLANK)]
        blank = bytearray(head)
        blank[at : at + len(_BLANK)] = _BLANK
        head_crc = seal[_HEAD_AT : _HEAD_AT + _DIGITS]
        body_bytes = _body_bytes(head[_PREFIX.size :])
        if at < 0 or _digits(zlib.crc32(blank)) != head_crc or body_bytes < 0:
            raise self._damaged(offset, "a message's head does not match its checksum")
        if len(head) + body_bytes > left:
            return None
        body = self._file.read(body_bytes)
        # The message as it is but for the second number: a damaged letter of the text counts too.
        blank = bytearray(head)
        blank[at + _CRC_AT : at + _CRC_AT + _DIGITS] = b"0" * _DIGITS
        if _digits(zlib.crc32(body, zlib.crc32(blank))) != seal[_CRC_AT:]:
            raise self._damaged(offset, "a batch does not match its checksum")
        if offset:
            self._metadata_bytes.add(metadata_bytes)
        return head + body

    def _is_zero_from(self, offset: int) -> bool:
        """Return whether only zeros follow, as a file system may leave after a power cut."""
        self._file.seek(offset)
        while chunk := self._file.read(1 << 20):
            if chunk.strip(b"\0"):
                return False
        self._file.seek(offset)
        return True

    def _damaged(self, offset: int, reason: str) -> LogDamagedError:
        return LogDamagedError(self.path, reason, offset, self._commit)


class StreamWriter:
    """Appends batches to the open segment. A failed write leaves the file as it was."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        """Continue after the first `size_bytes` bytes, which are complete messages; cut off the bytes after them."""
        self.path = path
        self.size_bytes = size_bytes
        self._serializer = BatchSerializer()
        self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        os.ftruncate(self._fd, size_bytes)

    @classmethod
    def create(cls, path: Path, segment: int, first_commit: int) -> "StreamWriter":
        """Start a segment. Its file appears with a complete schema message: row schema, number and first commit."""
        stated = {
            "kvledger.layout_version": str(LAYOUT_VERSION),
            "kvledger.segment": str(segment),
            "kvledger.first_commit": str(first_commit),
            _SEAL_KEY: _BLANK.decode(),
        }
        message = _seal(ROW_SCHEMA.with_metadata(stated).serialize().to_pybytes())
        write_whole(path, message)
        return cls(path, len(message))

    def append(self, batch: pa.RecordBatch, fsync: bool = False) -> int:
        """Write one batch; return its size in bytes.

        Raises:
            OSError: the system's error; the file is cut back to the last complete batch.
        """
        message = self._serializer.message(batch)
        view = memoryview(message)
        try:
            while view:
                view = view[os.pwrite(self._fd, view, self.size_bytes + len(message) - len(view)) :]
            if fsync:
                os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self.size_bytes)
            raise
        self.size_bytes += len(message)
        return len(message)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
