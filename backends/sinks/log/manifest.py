"""The files of a log: their names, the manifest that lists them, and how a file is replaced as a whole.

Needs nothing but the standard library and attrs, so that a command recognises a log before it imports pyarrow.
"""

import hashlib
import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any, Final

import attrs

from ..errors import LogDamagedError

# Version 1 had no log id, and its segments did not name the log. Its logs are read, and continued as they are.
LAYOUT_VERSION: Final = 2
READABLE_VERSIONS: Final = (1, 2)
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


def stop_name(number: int, errno: int) -> str:
    """Return the name of the empty file that tells why the writer of an open segment stopped: the system's error."""
    return f"stopped-{number:06}-{errno}"


def stop_errno(directory: Path, number: int) -> int:
    """Return the error that such a file tells of; 0 if there is none."""
    start = stop_name(number, 0)[:-1]
    told = [path.name.removeprefix(start) for path in directory.glob(f"{start}*")]
    return next((int(errno) for errno in told if errno.isdigit()), 0)


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
    # CRC-32 of the snapshot of the state after the segment; None if there is none, and in layout version 1
    snapshot_crc32: str | None = None


@attrs.frozen
class Manifest:
    """The description of a log: enough to know it without opening a segment. It is replaced whole, under a checksum."""

    header: dict[str, Any]  # description of the run, as its command wrote it (plain JSON values)
    clock: str | None  # what `time_ns` counts from: "simulated" (the start of the run), "unix", or None without times
    closed: tuple[ClosedSegment, ...] = ()  # the closed segments, in order
    open_segment: int | None = None  # number of the open segment; None once the log was closed
    next_commit: int = 0  # the first commit of the open segment, or of the segment that would come next
    log_id: str | None = None  # 32 hexadecimal digits that every segment repeats; None in layout version 1

    @property
    def layout_version(self) -> int:
        """The layout that the log was started with."""
        return 1 if self.log_id is None else 2

    def chain(self) -> list[str]:
        """Return one hash per segment, the next one included: of the log's description and all segments before it.

        Every segment states its own (32 hexadecimal digits), so a segment and a manifest of two logs do not fit.
        """
        links = [_hash([self.log_id, self.header, self.clock])]
        for segment in self.closed:
            links.append(_hash([links[-1], attrs.asdict(segment)]))
        return links

    def identities(self) -> list[dict[str, str]]:
        """Return what each segment, the next one included, states about its log, as metadata of its schema."""
        if self.log_id is None:
            return [{} for _ in range(len(self.closed) + 1)]
        return [{"kvledger.log_id": self.log_id, "kvledger.chain": link} for link in self.chain()]

    def identity(self, number: int) -> dict[str, str]:
        """Return what segment `number` states about its log."""
        return self.identities()[number]

    def save(self, directory: Path) -> None:
        """Replace the manifest of a directory."""
        described = attrs.asdict(self)
        if self.log_id is None:
            del described["log_id"]
            for segment in described["closed"]:
                del segment["snapshot_crc32"]
        plain = {"format": _FORMAT, "layout_version": self.layout_version, **described}
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
            if (directory / stream_name(0)).exists() or (directory / LOCK).exists():
                reason += "; its writer ended before it had started the log: create it again"
            raise LogDamagedError(path, reason) from None
        except ValueError as error:
            raise LogDamagedError(path, f"the manifest is no JSON: {error}") from None
        if not isinstance(plain, dict) or plain.pop("format", None) != _FORMAT:
            raise LogDamagedError(path, "this is not the manifest of an event log")
        version = plain.pop("layout_version", None)
        crc32 = plain.pop("crc32", None)
        if crc32 != _crc32({"format": _FORMAT, "layout_version": version, **plain}):
            raise LogDamagedError(path, "the manifest does not match its checksum")
        if version not in READABLE_VERSIONS:
            readable = " and ".join(map(str, READABLE_VERSIONS))
            raise LogDamagedError(path, f"the log has layout version {version}; this kvledger reads {readable}")
        try:
            closed = tuple([ClosedSegment(**each) for each in plain.pop("closed")])
            return cls(closed=closed, **plain)
        except (KeyError, TypeError) as error:
            raise LogDamagedError(
                path, f"the manifest has other fields than layout version {version}: {error}"
            ) from None


def _hash(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]


def new_log_id(header: dict[str, Any], clock: str | None) -> str:
    """Return the id of a new log: a hash of the header for a simulated run, which its header determines; else random.

    So two simulated runs of one description write the same bytes, and no two other logs can be taken for each other.
    """
    return _hash([header, clock]) if clock == "simulated" and header else os.urandom(16).hex()


def check_is_file(path: Path, what: str, commit: int | None) -> None:
    """Check that a file of a log is there and a regular file (or a link to one).

    Args:
        path: the file.
        what: what it is, for the error.
        commit: the first commit that it holds.

    Raises:
        LogDamagedError: it is missing, a directory, a dangling link, a pipe or the like.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        missing = f"the {what} is missing"
        if path.is_symlink():
            missing += f": this is a link to {os.readlink(path)}, which leads nowhere"
        elif not isinstance(error, FileNotFoundError):
            missing = f"the {what} cannot be read ({error.strerror})"
        raise LogDamagedError(path, missing, 0, commit) from None
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
        raise LogDamagedError(path, f"the {what} is missing: this is {kind}", 0, commit)


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
