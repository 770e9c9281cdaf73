"""Making a log fit for its next writer: undo what was interrupted, cut off what was never whole, say what it was."""

import os
from pathlib import Path

import attrs
import pyarrow as pa

from ....core.errors import MisuseError
from ..errors import LogDamagedError, LogInUseError
from .manifest import Manifest
from .names import LOCK, MANIFEST, parquet_name, snapshot_name, stream_name
from .rows import NOTE_NAMES
from .stream import StreamReader, TornTail, write_whole


@attrs.frozen
class Recovery:
    """What was found when a log was opened for writing.

    Attributes:
        next_commit: the commit that the log expects next; all before it are whole.
        torn: what stood behind the last whole batch; it is kept in `kept_as`.
        kept_as: the file that holds it now.
        undone: files of an interrupted change that were removed; each repeated what another one holds.
        stream_bytes: whole bytes of the open segment; None if the log has none.
    """

    next_commit: int
    torn: TornTail | None = None
    kept_as: str | None = None
    undone: tuple[str, ...] = ()
    stream_bytes: int | None = None

    def describe(self) -> list[str]:
        """What a user should know, one sentence each; empty where the log was closed in good order."""
        out = [f"removed {name}, left behind by an interrupted change" for name in self.undone]
        if self.torn is not None:
            kept = f"dropped, and kept as {self.kept_as}"
            out.append(f"{self.torn.describe()}: {kept}; the log ends before commit {self.next_commit}")
        return out


def recover(directory: Path, manifest: Manifest) -> Recovery:
    """Check a log from its manifest to its last batch, and make it ready to be written.

    Closed segments are compared by their size only; their checksums are compared whenever they are read.

    Raises:
        LogDamagedError: something is missing, foreign or not what was written. Nothing has been changed then.
    """
    undone = check_files(directory, manifest)
    if manifest.open_segment is None:
        _remove(directory, undone)
        return Recovery(manifest.next_commit, undone=undone)
    path = directory / stream_name(manifest.open_segment)
    next_commit = manifest.next_commit
    reader = open_stream(path, manifest)
    for stored in reader.batches():
        next_commit = check_order(path, stored.offset, stored.batch, next_commit)
    _remove(directory, undone)
    if reader.torn is None:
        return Recovery(next_commit, undone=undone, stream_bytes=reader.end)
    kept_as = f"dropped-{manifest.open_segment:06}-{reader.torn.offset}.bin"
    with path.open("rb") as file:
        file.seek(reader.torn.offset)
        write_whole(directory / kept_as, file.read())
    return Recovery(next_commit, reader.torn, kept_as, undone, reader.end)


def open_stream(path: Path, manifest: Manifest) -> StreamReader:
    """The open segment, if it is the one that the manifest names."""
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
    """The commit after a batch whose commits go on from `next_commit` without a gap.

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
    """Compare the files of a log with its manifest; returns those that an interrupted change left behind.

    Raises:
        LogDamagedError: a segment is missing, has another size, or is not part of this log.
    """
    present = {path.name for path in directory.iterdir()}
    for segment in manifest.closed:
        path = directory / segment.file
        if segment.file not in present:
            raise LogDamagedError(path, "the segment is missing", 0, segment.first_commit)
        size = path.stat().st_size
        if size != segment.size_bytes:
            raise LogDamagedError(
                path,
                f"the segment has {size:,} bytes, not {segment.size_bytes:,}",
                min(size, segment.size_bytes),
                segment.first_commit,
            )
    known = {MANIFEST, LOCK, *(segment.file for segment in manifest.closed)}
    known |= {snapshot_name(segment.number + 1) for segment in manifest.closed}
    left_over: list[str] = []
    if manifest.open_segment is not None:
        number = manifest.open_segment
        known.add(stream_name(number))
        # A change that was interrupted before the manifest named its outcome.
        left_over += [parquet_name(number), snapshot_name(number + 1), stream_name(number + 1)]
    if manifest.closed:
        # One that was interrupted after.
        left_over.append(stream_name(manifest.closed[-1].number))
    foreign = [name for name in sorted(present - known - set(left_over)) if name.startswith(("segment-", "snapshot-"))]
    foreign = [name for name in foreign if not name.endswith(".tmp")]
    if foreign:
        raise LogDamagedError(directory / foreign[0], "this file is not part of the log: its manifest does not name it")
    temporary = [name for name in sorted(present) if name.endswith(".tmp")]
    return tuple([name for name in left_over if name in present] + temporary)


def _remove(directory: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (directory / name).unlink()


# One writer a log: a lock that the kernel releases however its holder ends.


class WriterLock:
    """Held from construction until `release`; the file stays, it is the lock on it that counts."""

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
