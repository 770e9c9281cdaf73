"""The files of a log: their names, the manifest that lists them, and how a file is replaced as a whole.

Needs nothing but the standard library and attrs, so that a command recognises a log before it imports pyarrow.
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any, Final

import attrs

from ..errors import LogDamagedError

LAYOUT_VERSION: Final = 1
MANIFEST: Final = "manifest.json"
LOCK: Final = "lock"
_FORMAT: Final = "kvledger event log"


def parquet_name(number: int) -> str:
    """Return the file name of a closed segment."""
    return f"segment-{number:06}.parquet"


def stream_name(number: int) -> str:
    """Return the file name of an open segment."""
    return f"segment-{number:06}.arrows"


def snapshot_name(number: int) -> str:
    """Return the file name of the state at the start of a segment."""
    return f"snapshot-{number:06}.json.zst"


@attrs.frozen
class ClosedSegment:
    """The manifest's entry for a closed segment."""

    number: int  # position in the log
    file: str  # file name in the directory
    first_commit: int  # the first commit that it could hold, and the first that it holds if it holds any
    last_commit: int  # the last commit; `first_commit - 1` if it holds only notes
    num_rows: int  # events and notes
    first_time_ns: int | None  # the earliest time in it; None without a clock
    last_time_ns: int | None  # the latest time in it
    size_bytes: int  # size of the file
    crc32: str  # CRC-32 of the file, in hexadecimal digits


@attrs.frozen
class Manifest:
    """The description of a log: enough to know it without opening a segment. It is replaced whole, under a checksum."""

    header: dict[str, Any]  # description of the run, as its command wrote it (plain JSON values)
    clock: str | None  # what `time_ns` counts from: "simulated" (the start of the run), "unix", or None without times
    closed: tuple[ClosedSegment, ...] = ()  # the closed segments, in order
    open_segment: int | None = None  # number of the open segment; None once the log was closed
    next_commit: int = 0  # the first commit of the open segment, or of the segment that would come next

    def save(self, directory: Path) -> None:
        """Replace the manifest of a directory."""
        plain = {"format": _FORMAT, "layout_version": LAYOUT_VERSION, **attrs.asdict(self)}
        write_whole(directory / MANIFEST, (json.dumps({**plain, "crc32": _crc32(plain)}, indent=1) + "\n").encode())

    @classmethod
    def load(cls, directory: Path) -> "Manifest":
        """Read the manifest of a directory.

        Raises:
            LogDamagedError: it is missing, does not match its checksum, or has another layout version.
        """
        path = directory / MANIFEST
        try:
            plain = json.loads(path.read_bytes())
        except OSError as error:
            reason = f"there is no manifest to read ({error.strerror}), so this is no event log, or an incomplete one"
            raise LogDamagedError(path, reason) from None
        except ValueError as error:
            raise LogDamagedError(path, f"the manifest is no JSON: {error}") from None
        if not isinstance(plain, dict) or plain.pop("format", None) != _FORMAT:
            raise LogDamagedError(path, "this is not the manifest of an event log")
        version = plain.pop("layout_version", None)
        crc32 = plain.pop("crc32", None)
        if crc32 != _crc32({"format": _FORMAT, "layout_version": version, **plain}):
            raise LogDamagedError(path, "the manifest does not match its checksum")
        if version != LAYOUT_VERSION:
            raise LogDamagedError(path, f"the log has layout version {version}; this kvledger reads {LAYOUT_VERSION}")
        closed = tuple([ClosedSegment(**each) for each in plain.pop("closed")])
        return cls(closed=closed, **plain)


def _crc32(plain: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(plain, sort_keys=True).encode()):08x}"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file completely or not at all; it is on the device when this returns."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make renames in a directory survive a power cut."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
