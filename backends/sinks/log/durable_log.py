"""A durable event log: a sink that writes every commit to a directory (docs/event_log.md)."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from ....core.errors import InputError, KVLedgerError, MisuseError
from ....core.events import Commit
from ....core.ledger.state import LedgerState
from ..errors import LogWriteError
from .closing import SnapshotFold, close_segment
from .flush_policy import FlushPolicy
from .manifest import LOCK, MANIFEST, Manifest, new_log_id, stream_name
from .reader import LogReader
from .recovery import Recovery, WriterLock, inspect, is_locked_by_file
from .row_codec import RowEncoder
from .rows import Note
from .stream import StreamWriter

DEFAULT_SEGMENT_BYTES = 64 << 20


@attrs.frozen
class Clock:
    """The source of commit times.

    Attributes:
        name: what times count from: "simulated" (the start of the run) or "unix".
        now_ns: returns the time now, in whole nanoseconds.
    """

    name: str
    now_ns: Callable[[], int]


class DurableLog:
    """Writes commits as they happen. A crash loses at most the commits not yet flushed, never part of one.

        with DurableLog.create("run.log", flush=FlushPolicy(every_ms=50), clock=Clock("unix", time.time_ns)) as log:
            allocator = KVCacheAllocator(config, sinks=[log])

    `apply`, `note` and `flush` may be called from any thread. They raise:

        LogWriteError: the system did not take the bytes (a full disk). The file is unchanged and the commits are kept;
            call `flush` again once there is room.
        InputError: a commit holds a value that a log cannot keep (a key of another type); it is not logged.
        MisuseError: a commit out of order, or the log is closed.

    Attributes:
        recovery: what was found when the log was opened.
        live_state: the state that the commits come from, if the caller sets it. Snapshots are then taken of it;
            otherwise the log folds its own events whenever it closes a segment, which costs as much as the decisions
            did.
    """

    def __init__(
        self,
        directory: Path,
        lock: WriterLock,
        manifest: Manifest,
        stream: StreamWriter,
        recovery: Recovery,
        flush: FlushPolicy,
        clock: Clock | None,
        segment_bytes: int,
    ) -> None:
        """Use `create` or `resume` instead."""
        self.recovery = recovery
        self.live_state: LedgerState | None = None
        self._directory = directory
        self._lock_file = lock
        self._manifest = manifest
        self._stream: StreamWriter | None = stream
        self._policy = flush
        self._clock = clock
        self._segment_bytes = segment_bytes
        self._fold = SnapshotFold(None) if not manifest.closed else None
        self._encoder = RowEncoder()
        self._num_gathered = 0
        self._next_commit = recovery.next_commit
        self._mutex = threading.Lock()
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if flush.every_ms is not None:
            self._thread = threading.Thread(target=self._flush_regularly, name="kvledger-log", daemon=True)
            self._thread.start()

    @classmethod
    def create(
        cls,
        directory: str | Path,
        *,
        flush: FlushPolicy,
        clock: Clock | None = None,
        header: dict[str, Any] | None = None,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
    ) -> "DurableLog":
        """Start a log in a directory that is empty or does not exist.

        Args:
            directory: directory of the log.
            flush: when commits reach the disk.
            clock: source of their times; None: they have none.
            header: description of the run for later readers (plain JSON values).
            segment_bytes: size at which the open segment is closed.

        Raises:
            InputError: something is in the directory, or the header is no JSON.
            LogWriteError: the directory cannot be written.
        """
        path = Path(directory)
        if segment_bytes < 1:
            raise InputError(f"segment_bytes must be at least 1, not {segment_bytes}")
        try:
            described: dict[str, Any] = json.loads(json.dumps(header or {}, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise InputError(f"the header of a log must be plain JSON values: {error}") from None
        try:
            path.mkdir(parents=True, exist_ok=True)
            _check_is_empty(path)
            lock = WriterLock(path)
        except OSError as error:
            raise LogWriteError(f"{path}: cannot start a log here: {error.strerror}") from error
        stream = None
        try:
            lock.sign()
            named = clock.name if clock else None
            manifest = Manifest(described, named, open_segment=0, log_id=new_log_id(described, named))
            stream = StreamWriter.create(path / stream_name(0), 0, 0, manifest.identity(0))
            manifest.save(path)
        except OSError as error:
            if stream is not None:
                stream.close()
            lock.release()
            raise LogWriteError(f"{path}: cannot start a log here: {error.strerror}") from error
        return cls(path, lock, manifest, stream, Recovery(0), flush, clock, segment_bytes)

    @classmethod
    def resume(
        cls,
        directory: str | Path,
        *,
        flush: FlushPolicy,
        clock: Clock | None = None,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
    ) -> "DurableLog":
        """Continue a log after its last complete commit; `recovery` tells what was dropped.

        Raises:
            LogDamagedError: the log is not what was written. Nothing has been changed.
            LogInUseError: another process is writing it.
            InputError: the clock is not the log's.
        """
        path = Path(directory)
        manifest = Manifest.load(path)
        if manifest.clock != (clock.name if clock else None):
            raise InputError(f"{path} has the clock {manifest.clock!r}, so it cannot go on with {clock}")
        if not is_locked_by_file(path):
            inspect(path, manifest)  # no writer is at work: refuse a damaged log before the lock file is made
        try:
            lock = WriterLock(path)
        except OSError as error:
            raise LogWriteError(f"{path}: cannot go on with this log: {error.strerror}") from error
        try:
            manifest = Manifest.load(path)  # the previous writer may have changed it until it released the lock
            found = inspect(path, manifest)
            lock.sign()
            recovery = found.carry_out(path)
            if recovery.stream_end is not None:
                stream = StreamWriter(path / stream_name(len(manifest.closed)), recovery.stream_end)
            else:
                stream, manifest = _start_segment(path, manifest)
        except OSError as error:
            lock.release()
            raise LogWriteError(f"{path}: cannot go on with this log: {error.strerror}") from error
        except BaseException:
            lock.release()
            raise
        return cls(path, lock, manifest, stream, recovery, flush, clock, segment_bytes)

    @property
    def next_commit(self) -> int:
        """The sequence number that the log expects next."""
        return self._next_commit

    def apply(self, commit: Commit) -> None:
        """Log one commit; its sequence number must be the next one."""
        with self._mutex:
            self._check_usable()
            if commit.sequence != self._next_commit:
                raise MisuseError(
                    f"commit {commit.sequence} cannot follow commit {self._next_commit - 1} in {self._directory}"
                )
            self._encoder.add_commit(commit, self._now())
            self._next_commit += 1
            self._num_gathered += 1
            self._raise_failure()
            self._write_if_due()

    def note(self, note: Note) -> None:
        """Log a note between commits, such as a request that arrived or the end of the run."""
        with self._mutex:
            self._check_usable()
            self._encoder.add_note(note, self._now(), self._next_commit)
            self._raise_failure()
            self._write_if_due()

    def flush(self) -> None:
        """Write all gathered commits and notes."""
        with self._mutex:
            self._failure = None
            self._write()

    def close(self) -> None:
        """Flush, close the last segment and release the log. A second call does nothing."""
        self._stop_thread()
        with self._mutex:
            if self._stream is None:
                return
            self._write()
            self._close_segment(open_next=False)
            self._lock_file.release()

    def __enter__(self) -> "DurableLog":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, LogWriteError):
            self.close()
            return
        # The disk is full: end here, with everything that was written before. What is kept in memory is lost.
        self._stop_thread()
        with self._mutex:
            if self._stream is not None:
                self._stream.close()
                self._stream = None
                self._lock_file.release()

    def _stop_thread(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _now(self) -> int | None:
        return self._clock.now_ns() if self._clock else None

    def _check_usable(self) -> None:
        if self._stream is None:
            raise MisuseError(f"the log {self._directory} is closed")

    def _raise_failure(self) -> None:
        """Raise the flush thread's error, once; the commits that it could not write are kept."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _write_if_due(self) -> None:
        every = self._policy.every_commits
        if (
            (every is not None and self._num_gathered >= every)
            or self._encoder.num_rows >= self._policy.max_gathered_rows
            or (self._stream is not None and self._stream.size_bytes >= self._segment_bytes)
        ):
            self._write()

    def _write(self, may_close: bool = True) -> None:
        stream = self._stream
        if stream is None:
            raise MisuseError(f"the log {self._directory} is closed")
        if self._encoder.num_rows:
            batch = self._encoder.as_batch()
            try:
                stream.append(batch, self._policy.fsync)
            except OSError as error:
                raise LogWriteError(
                    f"{stream.path}: {self._num_gathered} commits before commit {self._next_commit} were not written "
                    f"at byte {stream.size_bytes} ({error.strerror}); they are kept: make room and flush again"
                ) from error
            self._encoder.clear()
            self._num_gathered = 0
        grown = stream.size_bytes >= self._segment_bytes and self._next_commit > self._manifest.next_commit
        if grown and may_close:
            self._close_segment(open_next=True)

    def _close_segment(self, open_next: bool) -> None:
        assert self._stream is not None
        live = self.live_state
        if live is not None and live.next_sequence != self._next_commit:
            live = None
        fold = live or self._fold or self._fold_from_log()
        self._fold = None
        try:
            self._manifest, stream = close_segment(self._directory, self._manifest, self._next_commit, fold, open_next)
        except OSError as error:
            self._stream.note_failure(error)
            raise LogWriteError(
                f"{self._stream.path}: every commit is written, but the segment could not be closed "
                f"({error.strerror}); make room and flush again"
            ) from error
        self._fold = fold if isinstance(fold, SnapshotFold) else None
        self._stream.forget_failure()
        self._stream.close()
        self._stream = stream

    def _fold_from_log(self) -> SnapshotFold:
        """Fold the closed segments, after the log was resumed or a segment could not be closed."""
        fold = SnapshotFold(None)
        if self._manifest.closed:
            try:
                fold.state = LogReader(self._directory).state(stop=self._manifest.next_commit)
            except KVLedgerError:
                fold.is_possible = False
        return fold

    def _flush_regularly(self) -> None:
        assert self._policy.every_ms is not None
        while not self._stop.wait(self._policy.every_ms / 1e3):
            try:
                with self._mutex:
                    if self._stream is not None and self._encoder.num_rows:
                        # A command may be in progress, so a snapshot cannot be taken now.
                        self._write(may_close=False)
            except Exception as error:  # the next call of `apply` raises it, since no caller waits for this thread
                self._failure = error


def _start_segment(path: Path, manifest: Manifest) -> tuple[StreamWriter, Manifest]:
    """Start the next segment of a closed log. Until the manifest names it, it is recognised as unused."""
    number = len(manifest.closed)
    stream = StreamWriter.create(path / stream_name(number), number, manifest.next_commit, manifest.identity(number))
    manifest = attrs.evolve(manifest, open_segment=number)
    try:
        manifest.save(path)
    except OSError:
        stream.close()
        raise
    return stream, manifest


def _check_is_empty(directory: Path) -> None:
    """Refuse a directory that holds anything but the files of a creation interrupted before its manifest."""
    first = stream_name(0)
    present = {each.name for each in directory.iterdir()} - {LOCK, first, f"{first}.tmp", f"{MANIFEST}.tmp"}
    if present:
        what = "a log" if MANIFEST in present else min(present)
        raise InputError(f"{directory} holds {what} already; give a directory that is empty or not there yet")
