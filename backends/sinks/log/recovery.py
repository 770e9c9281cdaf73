"""Prepares a log for its next writer: undoes interrupted changes, cuts off incomplete batches, and reports both.

`inspect` only reads: it refuses a damaged log before anything is changed. `Recovery.carry_out` makes the changes.
"""

import os
import re
from pathlib import Path
from typing import Final

import attrs
import pyarrow as pa

from ....core.errors import MisuseError
from ..errors import LogDamagedError, LogInUseError
from .closing import check_snapshot
from .manifest import LOCK, MANIFEST, Manifest, check_is_file, parquet_name, snapshot_name, stream_name, write_whole
from .parquet import check_segment, check_size
from .rows import NOTE_NAMES
from .stream import StreamEnd, StreamReader, TornTail

_TEMPORARY: Final = re.compile(
    r"stopped-\d{6,}-\d+|(segment-\d{6,}\.(parquet|arrows)|snapshot-\d{6,}\.json\.zst|dropped-[\d-]+\.bin|manifest\.json)\.tmp"
)


@attrs.frozen
class Recovery:
    """What was found when a log was opened for writing."""

    next_commit: int  # the commit that the log expects next; all commits before it are complete
    torn: TornTail | None = None  # the bytes after the last complete batch; `kept_as` holds them now
    kept_as: str | None = None  # the file that holds them
    # Files of an interrupted change that were removed; each repeated what another file holds, or held no commit.
    undone: tuple[str, ...] = ()
    stream_end: StreamEnd | None = None  # where the open segment's complete messages end; None if the log has none

    def describe(self) -> list[str]:
        """Return what a user should know, one sentence each; nothing if the log was closed properly."""
        out = [f"removed {name}, left behind by an interrupted change" for name in self.undone]
        if self.torn is not None:
            kept = f"dropped, and kept as {self.kept_as}" if self.kept_as else "nothing is left of it"
            out.append(f"{self.torn.describe()}: {kept}; the log ends before commit {self.next_commit}")
        return out

    def carry_out(self, directory: Path) -> "Recovery":
        """Keep the torn end in a file of its own and remove the leftovers; return what was done.

        The torn end itself is cut off by the writer that opens the segment.

        Raises:
            OSError: the system's error. Whatever was not done is done by the next recovery.
        """
        kept_as = None
        if self.torn is not None and self.torn.num_bytes:
            with self.torn.path.open("rb") as file:
                file.seek(self.torn.offset)
                kept_as = _keep(directory, self.torn, file.read())
        for name in self.undone:
            (directory / name).unlink(missing_ok=True)  # keeping the torn end may have replaced one of them
        return attrs.evolve(self, kept_as=kept_as)


def _keep(directory: Path, torn: TornTail, data: bytes) -> str:
    """Write the bytes of a torn end under a name that no other end has; return the name."""
    number = torn.path.name.removeprefix("segment-").removesuffix(".arrows")
    stem = f"dropped-{number}-{torn.offset}"
    name, attempt = f"{stem}.bin", 1
    while os.path.lexists(directory / name):
        if (directory / name).is_file() and (directory / name).read_bytes() == data:
            return name  # of a recovery that was interrupted
        attempt += 1
        name = f"{stem}-{attempt}.bin"
    write_whole(directory / name, data)
    return name


def inspect(directory: Path, manifest: Manifest) -> Recovery:
    """Check a log from its manifest to its last batch; return what is to be done before it can be written.

    Reads every byte once: a writer goes on only after a log of which all is there.

    Raises:
        LogDamagedError: something is missing, foreign or not what was written.
    """
    undone = check_files(directory, manifest)
    for path in map(directory.joinpath, undone):
        if path.is_dir() and not path.is_symlink():
            raise LogDamagedError(path, "this is a directory where a writer has its temporary file; move it away")
    for segment in manifest.closed:
        check_segment(directory, segment)
        snapshot = directory / snapshot_name(segment.number + 1)
        if os.path.lexists(snapshot):
            check_snapshot(snapshot, segment.snapshot_crc32)
    next_commit = manifest.next_commit
    path = reader = None
    if manifest.open_segment is not None:
        path = directory / stream_name(manifest.open_segment)
        reader = open_stream(path, manifest)
        for stored in reader.batches():
            next_commit = check_order(path, stored.offset, stored.batch, next_commit)
    if path is None or reader is None:
        return Recovery(next_commit, undone=undone)
    end = StreamEnd(reader.end, next_commit, reader.mark, reader.last_crc)
    return Recovery(next_commit, reader.torn, None, undone, end)


def open_stream(path: Path, manifest: Manifest) -> StreamReader:
    """Open the open segment. Raises LogDamagedError if it is not the segment that the manifest names."""
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
    if reader.identity != manifest.identity(reader.segment):
        reader.close()
        own, expected = reader.identity.get("kvledger.log_id"), manifest.log_id
        reason = "this segment follows other segments than those that the manifest names"
        if own != expected:
            reason = f"this segment belongs to log {own}; its manifest is of log {expected}"
        raise LogDamagedError(path, reason, 0, manifest.next_commit)
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
    known |= {
        snapshot_name(segment.number + 1)
        for segment in manifest.closed
        if segment.snapshot_crc32 is not None or manifest.log_id is None
    }
    left_over: list[str] = []
    number = len(manifest.closed) if manifest.open_segment is None else manifest.open_segment
    unnamed = stream_name(number)
    if manifest.open_segment is not None:
        known.add(stream_name(number))
        # Files of a change that was interrupted before the manifest named its outcome.
        left_over += [parquet_name(number), snapshot_name(number + 1)]
        unnamed = stream_name(number + 1)
    if manifest.closed:
        # The file of a change that was interrupted after that.
        left_over.append(stream_name(manifest.closed[-1].number))
    if unnamed in present:
        _check_is_unused(directory / unnamed, manifest)
        left_over.append(unnamed)
    temporary = [name for name in sorted(present) if _TEMPORARY.fullmatch(name)]
    unknown = sorted(present - known - {*left_over, *temporary})
    foreign = [name for name in unknown if name.startswith(("segment-", "snapshot-"))]
    if foreign:
        raise LogDamagedError(directory / foreign[0], "this file is not part of the log: its manifest does not name it")
    return tuple([name for name in left_over if name in present] + temporary)


def _check_is_unused(path: Path, manifest: Manifest) -> None:
    """Check that a segment that the manifest does not name yet is the start of one: nothing was written to it.

    A writer creates the next segment, enters it in the manifest, and only then writes to it.

    Raises:
        LogDamagedError: it holds rows, or is of another place or log. The manifest may be an old or a foreign one.
    """
    reader = StreamReader(path)
    batch = next(reader.batches(), None)
    reader.close()
    if stream_name(reader.segment) != path.name or reader.identity.get("kvledger.log_id") != manifest.log_id:
        raise LogDamagedError(path, "this file is not part of the log: it belongs to another place or log")
    if batch is not None:
        raise LogDamagedError(
            path,
            "this file is not part of the log: its manifest does not name it, although it holds commits",
            batch.offset,
            reader.first_commit,
        )


class WriterLock:
    """The lock of a log's one writer. The kernel releases it however its holder ends; the lock file itself stays."""

    def __init__(self, directory: Path) -> None:
        """Take the lock of a log. An existing lock file is not changed before `sign`.

        Raises:
            LogInUseError: another writer holds it.
            LogDamagedError: something else than a file has the lock's name.
            MisuseError: this system has no such locks.
        """
        try:
            import fcntl
        except ImportError:
            raise MisuseError("writing an event log needs POSIX file locks, which this system does not have") from None
        if is_locked_by_file(directory):
            check_is_file(directory / LOCK, "lock", None)
        self._fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise LogInUseError(
                f"{directory} is being written by process {holder or 'unknown'}; a log has one writer at a time"
            ) from None

    def sign(self) -> None:
        """Write this process's id into the lock file, for the error that another writer gets."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Let another writer in."""
        os.close(self._fd)


def is_locked_by_file(directory: Path) -> bool:
    """Return whether a log has a lock file (held or not): only then may another writer be at work."""
    return os.path.lexists(directory / LOCK)
