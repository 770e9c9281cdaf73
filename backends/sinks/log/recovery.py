"""Prepares a log for its next writer: undoes interrupted changes, cuts off incomplete batches, and reports both."""

import os
from pathlib import Path

import attrs
import pyarrow as pa

from ....core.errors import MisuseError
from ..errors import LogDamagedError, LogInUseError
from .manifest import LOCK, MANIFEST, Manifest, parquet_name, snapshot_name, stream_name, write_whole
from .parquet import check_size
from .rows import NOTE_NAMES
from .stream import StreamReader, TornTail


@attrs.frozen
class Recovery:
    """What was found when a log was opened for writing."""

    next_commit: int  # the commit that the log expects next; all commits before it are complete
    torn: TornTail | None = None  # the bytes after the last complete batch; `kept_as` holds them now
    kept_as: str | None = None  # the file that holds them
    # Files of an interrupted change that were removed; each repeated what another file holds.
    undone: tuple[str, ...] = ()
    stream_bytes: int | None = None  # complete bytes of the open segment; None if the log has none

    def describe(self) -> list[str]:
        """Return what a user should know, one sentence each; nothing if the log was closed properly."""
        out = [f"removed {name}, left behind by an interrupted change" for name in self.undone]
        if self.torn is not None:
            kept = f"dropped, and kept as {self.kept_as}"
            out.append(f"{self.torn.describe()}: {kept}; the log ends before commit {self.next_commit}")
        return out


def recover(directory: Path, manifest: Manifest) -> Recovery:
    """Check a log from its manifest to its last batch, and make it ready to be written.

    Only the sizes of closed segments are compared here; their checksums are compared whenever they are read.

    Raises:
        LogDamagedError: something is missing, foreign or not what was written. Nothing has been changed.
    """
    undone = check_files(directory, manifest)
    next_commit = manifest.next_commit
    path = reader = None
    if manifest.open_segment is not None:
        path = directory / stream_name(manifest.open_segment)
        reader = open_stream(path, manifest)
        for stored in reader.batches():
            next_commit = check_order(path, stored.offset, stored.batch, next_commit)
    for name in undone:
        (directory / name).unlink()
    if path is None or reader is None:
        return Recovery(next_commit, undone=undone)
    if reader.torn is None:
        return Recovery(next_commit, undone=undone, stream_bytes=reader.end)
    kept_as = f"dropped-{manifest.open_segment:06}-{reader.torn.offset}.bin"
    with path.open("rb") as file:
        file.seek(reader.torn.offset)
        write_whole(directory / kept_as, file.read())
    return Recovery(next_commit, reader.torn, kept_as, undone, reader.end)


def open_stream(path: Path, manifest: Manifest) -> StreamReader:
    """Open the open segment. Raises LogDamagedError if it is not the segment that the manifest names."""
    if not path.exists():
        raise LogDamagedError(path, "the open segment is missing", 0, manifest.next_commit)
    reader = StreamReader(path, manifest.next_commit)
    if (reader.segment, reader.first_commit) != (manifest.open_segment, manifest.next_commit):
        reader.close()
        raise LogDamagedError(
            path,
            f"this is segment {reader.segment}, from commit {reader.first_commit} on; expected is segment "
            f"{manifest.open_segment}, from commit {manifest.next_commit} on",
            0,
            manifest.next_commit,
        )
    return reader


def check_order(path: Path, offset: int, batch: pa.RecordBatch, next_commit: int) -> int:
    """Check that the commits of a batch continue from `next_commit` without a gap; return the commit after the batch.

    Raises:
        LogDamagedError: they do not.
    """
    current, begun = next_commit - 1, False
    for commit, name in zip(batch.column("commit").to_pylist(), batch.column("event").to_pylist(), strict=True):
        if commit == current and begun and name not in NOTE_NAMES:
            continue
        if commit != current + 1:
            raise LogDamagedError(
                path, f"commit {commit} stands where commit {current + 1} belongs", offset, current + 1
            )
        if name not in NOTE_NAMES:
            current, begun = commit, True
    return current + 1


def check_files(directory: Path, manifest: Manifest) -> tuple[str, ...]:
    """Compare the files of a log with its manifest; return those that an interrupted change left behind.

    Raises:
        LogDamagedError: a segment is missing, has another size, or is not part of this log.
    """
    for segment in manifest.closed:
        check_size(directory, segment)
    present = {path.name for path in directory.iterdir()}
    known = {MANIFEST, LOCK, *(segment.file for segment in manifest.closed)}
    known |= {snapshot_name(segment.number + 1) for segment in manifest.closed}
    left_over: list[str] = []
    if manifest.open_segment is not None:
        number = manifest.open_segment
        known.add(stream_name(number))
        # Files of a change that was interrupted before the manifest named its outcome.
        left_over += [parquet_name(number), snapshot_name(number + 1), stream_name(number + 1)]
    if manifest.closed:
        # The file of a change that was interrupted after that.
        left_over.append(stream_name(manifest.closed[-1].number))
    temporary = [name for name in sorted(present) if name.endswith(".tmp")]
    unknown = sorted(present - known - {*left_over, *temporary})
    foreign = [name for name in unknown if name.startswith(("segment-", "snapshot-"))]
    if foreign:
        raise LogDamagedError(directory / foreign[0], "this file is not part of the log: its manifest does not name it")
    return tuple([name for name in left_over if name in present] + temporary)


class WriterLock:
    """The lock of a log's one writer. The kernel releases it however its holder ends; the lock file itself stays."""

    def __init__(self, directory: Path) -> None:
        """Take the lock of a log.

        Raises:
            LogInUseError: another writer holds it.
            MisuseError: this system has no such locks.
        """
        try:
            import fcntl
        except ImportError:
            raise MisuseError("writing an event log needs POSIX file locks, which this system does not have") from None
        self._fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise LogInUseError(
                f"{directory} is being written by process {holder or 'unknown'}; a log has one writer at a time"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Let another writer in."""
        os.close(self._fd)
