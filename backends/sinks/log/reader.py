"""Reading a log from the disk: its records in order, and the state at any commit or time."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import attrs
import pyarrow as pa
import pyarrow.compute as pc

from ....core.errors import CorruptLedgerError, InputError
from ....core.events import Commit, PoolCreated
from ....core.ledger.event_log import can_be_restored
from ....core.ledger.state import LedgerState
from ....core.pool.eviction_order import EvictionOrder
from ..errors import LogDamagedError
from .closing import load_snapshot
from .manifest import Manifest
from .names import snapshot_name, stream_name
from .parquet import ClosedSegment, read_batches
from .recovery import check_files, check_order, open_stream
from .row_codec import records
from .rows import NOTE_NAMES, LoggedCommit, LoggedNote, Record
from .stream import TornTail


@attrs.frozen
class PlacedBatch:
    """Rows, and where they stand on disk: what an error about them names."""

    batch: pa.RecordBatch
    path: Path
    offset: int
    size_bytes: int


class LogReader:
    """A log as its manifest describes it now; never changes anything, and may read while it is being written.

        reader = LogReader("run.log")
        for record in reader.records(): ...
        state = reader.state(stop=1000)          # after commits 0 .. 999

    Memory does not grow with the log: a batch or a row group at a time is held.

    Attributes:
        manifest: header, clock and segments.
        torn: what stood behind the last whole batch when the end was last read; None if nothing did.
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
                self.manifest = newer  # its writer went on in between

    # -- records -----------------------------------------------------------------------------------------------------

    def batches(self, first_commit: int = 0) -> Iterator[PlacedBatch]:
        """Every whole batch from the one that holds `first_commit` on, each checked before it is given out.

        Notes just before `first_commit` may be in an earlier segment, which is not read then.

        Raises:
            LogDamagedError: something is not what was written; what came before it has been given out.
        """
        self.torn = None
        following = None if first_commit else 0
        for segment in self.manifest.closed:
            if segment.last_commit < first_commit:
                continue
            for placed in self._of_closed(segment, first_commit):
                following = self._in_order(placed, following)
                yield placed
        if self.manifest.open_segment is None:
            return
        path = self.directory / stream_name(self.manifest.open_segment)
        if not path.exists():
            # The writer closed it since; what it holds now is in a closed segment.
            yield from self._moved_on(first_commit, following)
            return
        reader = open_stream(path, self.manifest)
        for stored in reader.batches():
            placed = PlacedBatch(stored.batch, path, stored.offset, stored.size_bytes)
            following = self._in_order(placed, following)
            yield placed
        self.torn = reader.torn

    def _of_closed(self, segment: ClosedSegment, first_commit: int) -> Iterator[PlacedBatch]:
        path = self.directory / segment.file
        for batch, offset, size_bytes in read_batches(self.directory, segment, first_commit):
            yield PlacedBatch(batch, path, offset, size_bytes)

    def _in_order(self, placed: PlacedBatch, following: int | None) -> int:
        expected = placed.batch.column("commit")[0].as_py() if following is None else following
        return check_order(placed.path, placed.offset, placed.batch, expected)

    def _moved_on(self, first_commit: int, following: int | None) -> Iterator[PlacedBatch]:
        later = LogReader(self.directory)
        if later.manifest == self.manifest:
            path = self.directory / stream_name(self.manifest.open_segment or 0)
            raise LogDamagedError(path, "the open segment is missing", 0, self.manifest.next_commit)
        self.manifest = later.manifest
        yield from later.batches(first_commit if following is None else following)
        self.torn = later.torn

    def records(self, first_commit: int = 0, stop: int | None = None) -> Iterator[Record]:
        """Commits `first_commit .. stop - 1` (to the end unless given) and the notes among them, in order."""
        for placed in self.batches(first_commit):
            for record in records([placed.batch]):
                number = record.commit.sequence if isinstance(record, LoggedCommit) else record.next_commit
                if stop is not None and number >= stop:
                    return
                if number >= first_commit:
                    yield record

    def commits(self, first_commit: int = 0, stop: int | None = None) -> Iterator[Commit]:
        """The commits alone."""
        for record in self.records(first_commit, stop):
            if isinstance(record, LoggedCommit):
                yield record.commit

    def notes(self) -> Iterator[LoggedNote]:
        """The notes alone, without making events of the other rows."""
        names = pa.array(sorted(NOTE_NAMES))
        for placed in self.batches():
            are_notes = pc.call_function("is_in", [placed.batch.column("event")], pc.SetLookupOptions(names))
            for record in records([placed.batch.filter(are_notes)]):
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
        """The state after commits `0 .. stop - 1` (all unless given): the nearest snapshot before it, and the tail.

        Args:
            stop: how many commits.
            eviction: an empty order like the live one, where its name does not suffice to make it (Belady).

        Raises:
            InputError: the log has fewer commits.
        """
        if stop is not None and stop < 0:
            raise InputError(f"a log begins with commit 0, so there is no state before commit {stop}")
        state = self._nearest_snapshot(stop) if eviction is None else None
        if state is None:
            state = LedgerState(self.created, eviction)
        for commit in self.commits(state.next_sequence, stop):
            state.apply_commit(commit)
        if stop is not None and state.next_sequence < stop:
            raise InputError(
                f"{self.directory} has {state.next_sequence} commits, so there is no state after commit {stop - 1}"
            )
        return state

    def commits_until(self, time_ns: int) -> int:
        """How many commits had happened at a time: the `stop` of the state then.

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
        """(commits before it, file) of every snapshot that is there, in order."""
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
