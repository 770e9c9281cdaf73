"""Reads a log from disk: its records in order, and the ledger state after any commit or at any time."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from ....core.errors import CorruptLedgerError, InputError
from ....core.events import Commit, PoolCreated
from ....core.ledger.event_log import can_be_restored
from ....core.ledger.replay_checks import CheckedReplay
from ....core.ledger.state import LedgerState
from ....core.pool.eviction_order import EvictionOrder
from ..errors import LogDamagedError
from .closing import load_snapshot
from .manifest import Manifest, snapshot_name, stream_name
from .parquet import read_batches
from .recovery import check_files, check_order, open_stream
from .row_codec import records
from .rows import NOTE_NAMES, LoggedCommit, LoggedNote, Record, StoredBatch
from .stream import TornTail


class LogReader:
    """A log as its manifest describes it now. It changes nothing, and may read while the log is being written.

        reader = LogReader("run.log")
        for record in reader.records(): ...
        state = reader.state(stop=1000)          # after commits 0 .. 999

    It holds one batch or row group at a time, so memory does not grow with the log.

    Attributes:
        manifest: header, clock and segments.
        torn: the bytes after the last complete batch when the end was last read; None if there were none.
    """

    def __init__(self, directory: str | Path) -> None:
        """Read the manifest.

        Raises:
            LogDamagedError: it is missing or not what was written, or a segment is missing, cut short or foreign.
        """
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise InputError(f"{self.directory} is no directory, so it is no event log")
        self.manifest = Manifest.load(self.directory)
        self.torn: TornTail | None = None
        while True:
            try:
                check_files(self.directory, self.manifest)
                return
            except LogDamagedError:
                newer = Manifest.load(self.directory)
                if newer == self.manifest:
                    raise
                self.manifest = newer  # its writer closed a segment meanwhile

    def batches(self, first_commit: int = 0) -> Iterator[StoredBatch]:
        """Yield every complete batch from the one that holds `first_commit` on; each is checked first.

        Notes just before `first_commit` may be in an earlier segment, which is not read.

        Raises:
            LogDamagedError: something is not what was written; everything before it has been yielded.
        """
        self.torn = None
        following = None if first_commit else 0
        for segment in self.manifest.closed:
            if segment.last_commit < first_commit:
                continue
            for stored in read_batches(self.directory, segment, first_commit):
                following = _check_follows(stored, following)
                yield stored
        if self.manifest.open_segment is None:
            return
        path = self.directory / stream_name(self.manifest.open_segment)
        if path.exists():
            reader = open_stream(path, self.manifest)
            for stored in reader.batches():
                following = _check_follows(stored, following)
                yield stored
            self.torn = reader.torn
            return
        # The writer has closed the open segment since, so a closed segment holds it now.
        later = LogReader(self.directory)
        if later.manifest == self.manifest:
            raise LogDamagedError(path, "the open segment is missing", 0, self.manifest.next_commit)
        self.manifest = later.manifest
        yield from later.batches(first_commit if following is None else following)
        self.torn = later.torn

    def records(self, first_commit: int = 0, stop: int | None = None) -> Iterator[Record]:
        """Yield commits `first_commit .. stop - 1` (to the end unless given) and the notes among them, in order."""
        for stored in self.batches(first_commit):
            for record in records([stored.batch]):
                number = record.commit.sequence if isinstance(record, LoggedCommit) else record.next_commit
                if stop is not None and number >= stop:
                    return
                if number >= first_commit:
                    yield record

    def commits(self, first_commit: int = 0, stop: int | None = None) -> Iterator[Commit]:
        """Yield only the commits."""
        for record in self.records(first_commit, stop):
            if isinstance(record, LoggedCommit):
                yield record.commit

    def notes(self) -> Iterator[LoggedNote]:
        """Yield only the notes, without decoding the other rows."""
        names = pa.array(sorted(NOTE_NAMES))
        for stored in self.batches():
            are_notes = pc.call_function("is_in", [stored.batch.column("event")], pc.SetLookupOptions(names))
            for record in records([stored.batch.filter(are_notes)]):
                if isinstance(record, LoggedNote):
                    yield record

    @cached_property
    def created(self) -> PoolCreated:
        """The first event of the log."""
        for commit in self.commits(stop=1):
            if commit.events and isinstance(commit.events[0], PoolCreated):
                return commit.events[0]
        raise CorruptLedgerError(f"{self.directory} does not begin with PoolCreated, so there is no pool to rebuild")

    # -- time travel -------------------------------------------------------------------------------------------------

    def state(self, stop: int | None = None, eviction: EvictionOrder | None = None) -> LedgerState:
        """Return the state after commits `0 .. stop - 1` (all unless given): the nearest snapshot plus the rest.

        Args:
            stop: number of commits.
            eviction: an empty order like the live one, if its name alone cannot rebuild it (Belady).

        Raises:
            InputError: the log has fewer commits.
        """
        if stop is not None and stop < 0:
            raise InputError(f"a log begins with commit 0, so there is no state before commit {stop}")
        state = self._nearest_snapshot(stop) if eviction is None else None
        if state is None:
            state = LedgerState(self.created, eviction)
        replay = CheckedReplay(state)
        for commit in self.commits(state.next_sequence, stop):
            replay.apply(commit)
        if stop is not None and state.next_sequence < stop:
            raise InputError(
                f"{self.directory} has {state.next_sequence} commits, so there is no state after commit {stop - 1}"
            )
        return state

    def commits_until(self, time_ns: int) -> int:
        """Return how many commits had happened at a time: the `stop` of the state then.

        Raises:
            InputError: the log has no clock.
        """
        if self.manifest.clock is None:
            raise InputError(f"{self.directory} has no clock, so a time means nothing in it; give a commit")
        first = 0
        for segment in self.manifest.closed:
            if segment.last_time_ns is not None and segment.last_time_ns <= time_ns:
                first = segment.last_commit + 1
        stop = first
        for record in self.records(first):
            if isinstance(record, LoggedCommit):
                if record.time_ns is not None and record.time_ns > time_ns:
                    break
                stop = record.commit.sequence + 1
        return stop

    def snapshots(self) -> list[tuple[int, Path]]:
        """Return (number of commits before it, file) of every snapshot on disk, in order."""
        named = [
            (segment.last_commit + 1, self.directory / snapshot_name(segment.number + 1))
            for segment in self.manifest.closed
        ]
        return [(commits, path) for commits, path in named if path.exists()]

    def _nearest_snapshot(self, stop: int | None) -> LedgerState | None:
        at_or_before = [each for each in self.snapshots() if stop is None or each[0] <= stop]
        if not at_or_before or not can_be_restored(self.created):
            return None
        commits, path = at_or_before[-1]
        state = load_snapshot(path, self.created)
        if state.next_sequence != commits:
            raise CorruptLedgerError(
                f"{path} is a snapshot before commit {state.next_sequence}, not {commits}; delete it"
            )
        return state


def _check_follows(stored: StoredBatch, expected: int | None) -> int:
    """Check that a batch begins with the expected commit, any if None; return the commit after it."""
    if expected is None:
        expected = int(stored.batch.column("commit")[0].as_py())
    return check_order(stored.path, stored.offset, stored.batch, expected)
