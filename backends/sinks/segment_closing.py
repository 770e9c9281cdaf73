"""From an open segment to a closed one: Parquet beside it, then the manifest, then the stream goes.

Whatever a crash in between leaves behind is told by its name and undone when the log is resumed: until the manifest
names the closed segment, the open one is what counts.
"""

from pathlib import Path

import attrs
import pyarrow as pa

from ...core.errors import KVLedgerError
from ...core.events import PoolCreated
from ...core.ledger_state import LedgerState
from ...core.snapshot import can_be_restored
from .arrow_stream import StreamReader, StreamWriter, sync_directory
from .log_manifest import Manifest
from .log_names import parquet_name, snapshot_name, stream_name
from .log_rows import LoggedCommit
from .parquet_segment import ParquetSegmentWriter
from .row_decoder import records
from .snapshot_file import save_snapshot


class SnapshotFold:
    """Folds what is closed, to leave a snapshot at the start of each segment.

    Where the pool's eviction order cannot be restored, or the commits do not replay (a log of a broken allocator,
    which `kvledger log verify` is for), there are no snapshots from there on; the log is as good without.
    """

    def __init__(self, state: LedgerState | None) -> None:
        """`state` is the fold up to the next segment; None at the start of a log."""
        self.state = state
        self.is_possible = True

    def add(self, batch: pa.RecordBatch) -> None:
        """Apply the commits of a batch."""
        try:
            for record in records([batch]) if self.is_possible else ():
                if isinstance(record, LoggedCommit):
                    self._apply(record)
        except (KVLedgerError, LookupError, ValueError):
            self.is_possible = False

    def _apply(self, record: LoggedCommit) -> None:
        if self.state is None:
            created = record.commit.events[0]
            self.is_possible = isinstance(created, PoolCreated) and can_be_restored(created)
            if not isinstance(created, PoolCreated) or not self.is_possible:
                return
            self.state = LedgerState(created)
        if self.is_possible:
            self.state.apply_commit(record.commit)


def close_segment(
    directory: Path, manifest: Manifest, next_commit: int, fold: SnapshotFold | LedgerState, open_next: bool
) -> tuple[Manifest, StreamWriter | None]:
    """Turn the open segment into a closed one and, if wanted, open the next. Returns the new manifest.

    `fold` is what leads to the state behind the segment, or that state.

    Raises:
        LogDamagedError: the open segment does not hold what was written to it. It stays as it is.
        OSError: what the system says. The open segment stays as it is; `fold` may have gone on.
    """
    number = manifest.open_segment
    if number is None:
        return manifest, None
    source = directory / stream_name(number)
    target = ParquetSegmentWriter(directory / parquet_name(number), number, manifest.next_commit)
    try:
        reader = StreamReader(source, manifest.next_commit)
        for stored in reader.batches():
            target.add(stored.batch)
            if isinstance(fold, SnapshotFold):
                fold.add(stored.batch)
        if not target.num_rows:
            target.abandon()
            return _without_open_segment(directory, manifest, source), None
        closed = target.finish(next_commit)
    except BaseException:
        target.abandon()
        raise
    sync_directory(directory)
    following = number + 1
    state = fold if isinstance(fold, LedgerState) else fold.state if fold.is_possible else None
    if state is not None and can_be_restored(state.created):
        save_snapshot(directory / snapshot_name(following), state)
    stream = None
    if open_next:
        stream = StreamWriter.create(directory / stream_name(following), following, next_commit)
    manifest = attrs.evolve(
        manifest,
        closed=(*manifest.closed, closed),
        open_segment=following if open_next else None,
        next_commit=next_commit,
    )
    manifest.save(directory)
    source.unlink()
    return manifest, stream


def _without_open_segment(directory: Path, manifest: Manifest, source: Path) -> Manifest:
    manifest = attrs.evolve(manifest, open_segment=None)
    manifest.save(directory)
    source.unlink()
    return manifest
