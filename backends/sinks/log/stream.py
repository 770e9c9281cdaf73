"""The open segment: an Arrow IPC stream that grows batch by batch; each message carries checksums of its bytes.

A message is `ff ff ff ff`, the length of its metadata, the metadata, the body. Its custom metadata holds the text
`head:xxxxxxxx crc32:xxxxxxxx`: the CRC-32 of the first three parts (with both numbers as zeros) and of the whole
message (with the second number as zeros). Arrow readers ignore it; ours checks it before Arrow sees a byte. The first
number distinguishes a message that was cut short from one with a damaged length.

Since layout version 2 the text begins with `prev:xxxxxxxx`, the second number of the message before, so a message that
was moved, repeated or taken from another log is noticed. The schema message also states the log and how much of the
file was written (`Mark`), so a file that lost its last messages is noticed too.
"""

import contextlib
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
from .manifest import READABLE_VERSIONS, check_is_file, stop_name, write_whole
from .rows import ROW_SCHEMA, StoredBatch, next_commit_after

_MARKER: Final = b"\xff\xff\xff\xff"
_PREFIX: Final = struct.Struct("<4sI")
_SEAL_KEY: Final = "kvledger.checks"
_BLANK: Final = b"head:00000000 crc32:00000000"
_BEFORE: Final = b"prev:%s "
_BEFORE_BYTES: Final = len(b"prev:00000000 ")
_HEAD_AT: Final = len(b"head:")
_CRC_AT: Final = len(b"head:00000000 crc32:")
_DIGITS: Final = 8
_NO_MESSAGE: Final = b"0" * _DIGITS
_MARKS_KEY: Final = "kvledger.written"
_MARKS: Final = b"written:"
_MARK_BYTES: Final = 12 + 12 + 12 + 4 + _DIGITS


@attrs.frozen
class Mark:
    """How much of an open segment was written. It stands in the schema message and is updated after each batch.

    There are two; each update overwrites the older one, so one is whole wherever a writer is killed.

    Attributes:
        serial: number of the update; the higher one counts.
        size_bytes: where the last written batch ends.
        next_commit: the commit after it.
        errno: the system's error that the last write ended with, 0 if none: why a log ends there.
    """

    serial: int
    size_bytes: int
    next_commit: int
    errno: int = 0

    def encode(self) -> bytes:
        """Return 48 hexadecimal digits, the last eight a CRC-32 of the others."""
        text = b"%012x%012x%012x%04x" % (self.serial, self.size_bytes, self.next_commit, self.errno & 0xFFFF)
        return text + _digits(zlib.crc32(text))

    @classmethod
    def decode(cls, text: bytes) -> "Mark | None":
        """Return the mark, or None if it was not written completely."""
        if text[-_DIGITS:] != _digits(zlib.crc32(text[:-_DIGITS])):
            return None
        try:
            serial, size_bytes, next_commit, errno = [
                int(text[start:stop], 16) for start, stop in ((0, 12), (12, 24), (24, 36), (36, 40))
            ]
        except ValueError:
            return None
        return cls(serial, size_bytes, next_commit, errno)


@attrs.frozen
class TornTail:
    """The end of an open segment that is no complete batch: the beginning of an unfinished message, or a loss.

    Attributes:
        path: the file.
        offset: where the last complete batch ends.
        num_bytes: how many bytes follow; 0 if the file ends there although more had been written.
        first_lost: the first commit that had been written completely and is missing; None if none is.
        stop_lost: the commit after the last missing one; equal to `first_lost` if only notes are missing.
    """

    path: Path
    offset: int
    num_bytes: int
    first_lost: int | None = None
    stop_lost: int | None = None

    def describe(self) -> str:
        """One sentence for a report."""
        said = f"{self.path.name}: {self.num_bytes:,} bytes from byte {self.offset:,} on are no whole batch"
        if self.first_lost is None or self.stop_lost is None:
            return said
        commits = f"commits {self.first_lost} to {self.stop_lost - 1}" if self.stop_lost > self.first_lost else "notes"
        return f"{said}; {commits} had been written there and are lost"


def _seal(message: bytes, has_marks: bool = False) -> bytes:
    """Fill the two checksums into a message that carries the blank text; only a schema message has marks."""
    metadata_end = _PREFIX.size + _PREFIX.unpack_from(message)[1]
    at = message.index(_BLANK, 0, metadata_end)
    sealed = bytearray(message)
    marks = _without_marks(sealed) if has_marks else None
    sealed[at + _HEAD_AT : at + _HEAD_AT + _DIGITS] = _digits(zlib.crc32(sealed[:metadata_end]))
    sealed[at + _CRC_AT : at + _CRC_AT + _DIGITS] = _digits(zlib.crc32(sealed))
    if marks is not None:
        sealed[marks : marks + 2 * _MARK_BYTES] = message[marks : marks + 2 * _MARK_BYTES]
    return bytes(sealed)


def _without_marks(message: bytearray) -> int | None:
    """Set the marks of a schema message to zeros, as its checksums see them; return where they are, None without."""
    at = message.find(_MARKS)
    if at < 0:
        return None
    at += len(_MARKS)
    message[at : at + 2 * _MARK_BYTES] = b"0" * (2 * _MARK_BYTES)
    return at


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


def _check_text(before: bytes | None) -> bytes:
    """Return the blank text of a message, after the number of the message before it (None: layout version 1)."""
    return _BLANK if before is None else _BEFORE % before + _BLANK


class BatchSerializer:
    """Serializes record batches as messages of one stream, with their checksums.

    `before` is the number of the message that the stream ends with; None in layout version 1.
    """

    def __init__(self, before: bytes | None) -> None:
        self.before = before
        self._sink = io.BytesIO()
        self._writer = pa.ipc.new_stream(self._sink, ROW_SCHEMA)
        # The writer puts the schema before the first batch; the stream has one already, so this one is dropped.
        self._writer.write_batch(pa.RecordBatch.from_pylist([], schema=ROW_SCHEMA))

    def message(self, batch: pa.RecordBatch) -> bytes:
        """Return the message of one batch."""
        self._sink.seek(0)
        self._sink.truncate()
        self._writer.write_batch(batch, custom_metadata={_SEAL_KEY: _check_text(self.before).decode()})
        return _seal(self._sink.getvalue())


def _crc_of(message: bytes) -> bytes:
    """Return the second number of a message, which the next one repeats."""
    metadata_end = _PREFIX.size + _PREFIX.unpack_from(message)[1]
    at = message.index(b"head:", 0, metadata_end) + _CRC_AT
    return message[at : at + _DIGITS]


def _metadata_bytes_now(before: bytes | None) -> int:
    """Return the size of a batch's metadata as this version of Arrow writes it; it is the same for every batch."""
    row = pa.RecordBatch.from_pylist([{"commit": 0}], schema=ROW_SCHEMA)
    return _PREFIX.unpack_from(BatchSerializer(before).message(row))[1]


class StreamReader:
    """Reads a segment from its start, and reports how it ends.

    Attributes:
        segment: the number that the segment states.
        first_commit: the first commit that it states.
        identity: what it states about its log, as `Manifest.identity`; empty in layout version 1.
        end: where the last complete message ends, once `batches` is exhausted.
        torn: what is wrong with the end; None if nothing is.
        mark: how much was written; None in layout version 1.
        last_crc: the number of the last complete message, for the writer; None in layout version 1.
    """

    def __init__(self, path: Path, next_commit: int | None = None) -> None:
        """Open the file and check its schema message.

        `next_commit` is the commit that damage at the very start would affect, for the error.

        Raises:
            LogDamagedError: the schema message is not what was written, or of a layout that this version cannot read.
        """
        check_is_file(path, "open segment", next_commit)
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
            stated = {key.decode(): value.decode(errors="replace") for key, value in (schema.metadata or {}).items()}
            version = stated.get("kvledger.layout_version", "?")
            if version not in map(str, READABLE_VERSIONS):
                readable = " and ".join(map(str, READABLE_VERSIONS))
                raise self._damaged(0, f"it has layout version {version}; this kvledger reads {readable}")
            if not schema.equals(ROW_SCHEMA):
                raise self._damaged(0, "its columns are not those of an event log")
            self.segment = int(stated["kvledger.segment"])
            self.first_commit = int(stated["kvledger.first_commit"])
            self.identity = {name: stated[name] for name in ("kvledger.log_id", "kvledger.chain") if name in stated}
            self.mark = self._newest_mark(message) if _MARKS_KEY in stated else None
            self.last_crc = None if self.mark is None else _crc_of(message)
            # The writer may have appended since; what the mark counts was there before the mark.
            self._size = os.fstat(self._file.fileno()).st_size
        except (pa.ArrowException, KeyError, ValueError) as error:
            self._file.close()
            raise self._damaged(0, f"it does not begin with the schema of an event log ({error})") from None
        except BaseException:
            self._file.close()
            raise

    def _newest_mark(self, message: bytes) -> Mark:
        at = message.index(_MARKS) + len(_MARKS)
        both = [Mark.decode(message[place : place + _MARK_BYTES]) for place in (at, at + _MARK_BYTES)]
        whole = [mark for mark in both if mark is not None]
        if not whole:
            raise self._damaged(at, "neither of its two marks of how much was written matches its checksum")
        return max(whole, key=lambda mark: mark.serial)

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
                    self.torn = self._torn_at(offset)
                    return
                try:
                    batch = pa.ipc.read_record_batch(pa.py_buffer(message), ROW_SCHEMA)
                    batch.validate(full=True)
                except (pa.ArrowException, OSError, ValueError) as error:
                    raise self._damaged(offset, f"this message is no batch of an event log ({error})") from None
                if self.last_crc is not None:
                    self._check_follows(batch, message, offset)
                    self.last_crc = _crc_of(message)
                self.end = offset + len(message)
                if batch.num_rows:
                    self._commit = next_commit_after(batch)
                yield StoredBatch(batch, self.path, offset, len(message))
            if self.mark is not None and self.end < self.mark.size_bytes:
                self.torn = self._torn_at(self.end)

    def _torn_at(self, offset: int) -> TornTail:
        """Describe the end of the file, after the last complete batch."""
        if self.mark is None or offset >= self.mark.size_bytes:
            return TornTail(self.path, offset, self._size - offset)
        first = self.first_commit if self._commit is None else self._commit
        return TornTail(self.path, offset, self._size - offset, first, self.mark.next_commit)

    def _check_follows(self, batch: pa.RecordBatch, message: bytes, offset: int) -> None:
        """Check that a message was written after the one before it."""
        at = message.index(b"head:") - _BEFORE_BYTES
        if message[at : at + _BEFORE_BYTES] == _BEFORE % self.last_crc:
            return
        if batch.num_rows and self._commit is not None and (first := batch.column("commit")[0].as_py()) != self._commit:
            raise self._damaged(offset, f"commit {first} stands where commit {self._commit} belongs")
        raise self._damaged(offset, "this batch was not written after the one before it")

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
            known = not offset or metadata_bytes in self._metadata_bytes
            if not known and metadata_bytes != _metadata_bytes_now(self.last_crc):
                raise self._damaged(offset, f"a message states {metadata_bytes} bytes of metadata, more than there are")
            return None
        head = prefix + self._file.read(metadata_bytes)
        at = head.find(b"head:")
        seal = head[at : at + len(_BLANK)]
        blank = bytearray(head)
        if not offset:
            _without_marks(blank)
        blank[at : at + len(_BLANK)] = _BLANK
        head_crc = seal[_HEAD_AT : _HEAD_AT + _DIGITS]
        body_bytes = _body_bytes(head[_PREFIX.size :])
        if at < 0 or _digits(zlib.crc32(blank)) != head_crc or body_bytes < 0:
            raise self._damaged(offset, "a message's head does not match its checksum")
        if len(head) + body_bytes > left:
            return None
        body = self._file.read(body_bytes)
        if len(body) < body_bytes:
            return None  # the writer has cut off a failed write since
        # The message as it is but for the second number: a damaged letter of the text counts too.
        blank = bytearray(head)
        if not offset:
            _without_marks(blank)
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

    def __init__(self, path: Path, end: "StreamEnd") -> None:
        """Continue after the complete messages of a file; cut off the bytes after them."""
        self.path = path
        self.size_bytes = end.size_bytes
        self._next_commit = end.next_commit
        self._mark = end.mark
        self._serializer = BatchSerializer(end.last_crc)
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._marks_at = 0
        try:
            if self._mark is not None:
                head = os.pread(self._fd, _PREFIX.size, 0)
                head += os.pread(self._fd, _PREFIX.unpack(head)[1], _PREFIX.size)
                self._marks_at = head.index(_MARKS) + len(_MARKS)
            if os.fstat(self._fd).st_size != end.size_bytes:
                os.ftruncate(self._fd, end.size_bytes)
            if self._mark is not None and (self._mark.size_bytes != end.size_bytes or self._mark.errno):
                self._write_mark()
        except BaseException:
            os.close(self._fd)
            raise
        self._has_rest = False  # bytes of a failed write that could not be cut off
        self._stop_file: Path | None = None  # tells of a failed write, where the mark could not

    @classmethod
    def create(cls, path: Path, segment: int, first_commit: int, identity: dict[str, str]) -> "StreamWriter":
        """Start a segment. Its file appears with a complete schema message: row schema, number and first commit.

        `identity` is what `Manifest.identity` states of the segment; empty in layout version 1.
        """
        stated = {
            "kvledger.layout_version": "2" if identity else "1",
            "kvledger.segment": str(segment),
            "kvledger.first_commit": str(first_commit),
            **identity,
        }
        before = _NO_MESSAGE if identity else None
        if identity:
            stated[_MARKS_KEY] = (_MARKS + b"0" * (2 * _MARK_BYTES)).decode()
        stated[_SEAL_KEY] = _check_text(before).decode()
        message = _seal(ROW_SCHEMA.with_metadata(stated).serialize().to_pybytes(), has_marks=bool(identity))
        mark = None
        if identity:
            mark = Mark(0, len(message), first_commit)
            at = message.index(_MARKS) + len(_MARKS)
            message = message[:at] + mark.encode() * 2 + message[at + 2 * _MARK_BYTES :]
        write_whole(path, message)
        return cls(path, StreamEnd(len(message), first_commit, mark, _crc_of(message) if identity else None))

    def append(self, batch: pa.RecordBatch, fsync: bool = False) -> int:
        """Write one batch; return its size in bytes.

        Raises:
            OSError: the system's error; the file is cut back to the last complete batch.
        """
        message = self._serializer.message(batch)
        try:
            if self._has_rest:
                os.ftruncate(self._fd, self.size_bytes)
                self._has_rest = False
            self._write_at(message, self.size_bytes)
            if fsync:
                os.fsync(self._fd)
            if self._mark is not None:
                self._next_commit = next_commit_after(batch)
                self._write_mark(len(message))
        except OSError as error:
            self._cut_back()
            self.note_failure(error)
            raise
        self.size_bytes += len(message)
        self.forget_failure()
        if self._mark is not None:
            self._serializer.before = _crc_of(message)
        return len(message)

    def note_failure(self, error: OSError) -> None:
        """Note that the log ends here because of this error: in the mark, else as the name of an empty file.

        Neither needs space on the device. If both fail, the log ends without a reason.
        """
        errno = error.errno or 0
        with contextlib.suppress(OSError):
            if self._mark is not None:
                self._write_mark(errno=errno)
                return
        with contextlib.suppress(OSError):
            number = int(self.path.stem.removeprefix("segment-"))
            self._stop_file = self.path.with_name(stop_name(number, errno))
            os.close(os.open(self._stop_file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))

    def forget_failure(self) -> None:
        """Remove that file, once the log goes on."""
        if self._stop_file is not None:
            with contextlib.suppress(OSError):
                self._stop_file.unlink(missing_ok=True)
            self._stop_file = None

    def _cut_back(self) -> None:
        """Cut off what a failed write left; if the system refuses that too, the next write does it."""
        self._has_rest = True
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self.size_bytes)
            self._has_rest = False

    def _write_mark(self, num_new_bytes: int = 0, errno: int = 0) -> None:
        """Overwrite the older of the two marks; this needs no new space on the device."""
        if self._mark is None:
            return
        end = self.size_bytes + num_new_bytes
        next_commit = self._next_commit if not errno else self._mark.next_commit
        mark = Mark(self._mark.serial + 1, end, next_commit, errno)
        self._write_at(mark.encode(), self._marks_at + mark.serial % 2 * _MARK_BYTES)
        self._mark = mark

    def _write_at(self, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            view = view[os.pwrite(self._fd, view, offset + len(data) - len(view)) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


@attrs.frozen
class StreamEnd:
    """Where the complete messages of an open segment end, for the writer that goes on after them.

    Attributes:
        size_bytes: their size.
        next_commit: the commit after them.
        mark: the newest mark of the file; None in layout version 1.
        last_crc: the number of the last message; None in layout version 1.
    """

    size_bytes: int
    next_commit: int
    mark: Mark | None = None
    last_crc: bytes | None = None
