"""Closes a segment: writes it as Parquet with a snapshot of the state, updates the manifest, deletes the stream.

Until the manifest names the closed segment, the open one counts. What a crash leaves behind is recognised by its name
and undone when the log is resumed.
"""

import contextlib
import json
import zlib
from pathlib import Path
from typing import Any, Final

import attrs
import pyarrow as pa

from ....core.errors import CorruptLedgerError, KVLedgerError
from ....core.events import PoolCreated
from ....core.ledger.event_log import can_be_restored, restore_snapshot, take_snapshot
from ....core.ledger.replay_checks import CheckedReplay
from ....core.ledger.state import LedgerState
from ..errors import LogDamagedError
from .keys import decode_key, encode_key
from .manifest import Manifest, check_is_file, parquet_name, snapshot_name, stream_name, sync_directory, write_whole
from .parquet import ParquetSegmentWriter
from .row_codec import records
from .rows import LoggedCommit
from .stream import StreamReader, StreamWriter

_TITLE: Final = b"kvledger snapshot 1"
_DELETE_IT: Final = "delete it, and the state is rebuilt from the commits before it"


def save_snapshot(path: Path, state: LedgerState) -> str:
    """Write the state as compressed JSON after a line with its checksum. The file appears complete or not at all.

    Returns:
        The CRC-32 of the file, in hexadecimal digits, for the manifest.
    """
    plain = take_snapshot(state)
    plain["copies"] = [
        [[encode_key(key).decode("latin-1"), *blocks] for key, blocks in each] for each in plain["copies"]
    ]
    text = json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()
    body = pa.compress(text, codec="zstd", asbytes=True)
    data = b"%s %d crc32:%08x\n%s" % (_TITLE, len(text), zlib.crc32(body), body)
    write_whole(path, data)
    return f"{zlib.crc32(data):08x}"


def check_snapshot(path: Path, crc32: str | None) -> tuple[bytes, int]:
    """Compare a snapshot with its checksum, and with the manifest's (`crc32`; None in layout version 1).

    Returns:
        The compressed state, and its size in bytes when decompressed.

    Raises:
        LogDamagedError: the file is not what was written. It can be deleted: the state is then rebuilt from commits.
    """
    check_is_file(path, "snapshot", None)
    data = path.read_bytes()
    line, _, body = data.partition(b"\n")
    title, _, rest = line.rpartition(b" ")
    title, _, size = title.rpartition(b" ")
    if title != _TITLE or rest != b"crc32:%08x" % zlib.crc32(body) or not size.isdigit():
        raise LogDamagedError(path, f"the snapshot does not match its checksum; {_DELETE_IT}")
    if crc32 is not None and crc32 != f"{zlib.crc32(data):08x}":
        raise LogDamagedError(path, f"this is not the snapshot that the manifest names; {_DELETE_IT}")
    return body, int(size)


def load_snapshot(path: Path, created: PoolCreated, crc32: str | None = None) -> LedgerState:
    """Read the state from a file. Raises `LogDamagedError` like `check_snapshot`."""
    body, size = check_snapshot(path, crc32)
    try:
        plain: dict[str, Any] = json.loads(pa.decompress(body, size, codec="zstd", asbytes=True))
        plain["copies"] = [
            [(decode_key(key.encode("latin-1")), blocks) for key, *blocks in of_group] for of_group in plain["copies"]
        ]
        return restore_snapshot(created, plain)
    except (CorruptLedgerError, pa.ArrowException, OSError, ValueError) as error:
        raise LogDamagedError(path, f"the snapshot cannot be restored ({error}); {_DELETE_IT}") from error


class SnapshotFold:
    """Folds the commits of closed segments into a state, for the snapshot at the start of each segment.

    If the pool's eviction order cannot be restored, or the commits do not replay (a log of a broken allocator, which
    `kvledger log verify` reports), no more snapshots are written. The log is complete without them.
    """

    def __init__(self, state: LedgerState | None) -> None:
        """Start from `state`, the fold of all earlier segments; None at the start of a log."""
        self.state = state
        self.is_possible = True
        self._replay: CheckedReplay | None = None

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
            self._replay = self._replay or CheckedReplay(self.state)
            self._replay.apply(record.commit)


def close_segment(
    directory: Path, manifest: Manifest, next_commit: int, fold: SnapshotFold | LedgerState, open_next: bool
) -> tuple[Manifest, StreamWriter | None]:
    """Turn the open segment into a closed one, and open the next if `open_next`.

    `next_commit` is the first commit after the segment, `fold` the state after it or the fold that will reach it.

    Returns:
        The new manifest, and the writer of the next segment.

    Raises:
        LogDamagedError: the open segment does not hold what was written to it. It stays as it is.
        OSError: the system's error. The open segment stays as it is; `fold` may have advanced.
    """
    number = manifest.open_segment
    if number is None:
        return manifest, None
    source = directory / stream_name(number)
    identity = manifest.identity(number)
    target = ParquetSegmentWriter(directory / parquet_name(number), number, manifest.next_commit, identity)
    try:
        reader = StreamReader(source, manifest.next_commit)
        if reader.identity != identity:
            raise LogDamagedError(source, "this segment belongs to another log", 0, manifest.next_commit)
        for stored in reader.batches():
            target.add(stored.batch)
            if isinstance(fold, SnapshotFold):
                fold.add(stored.batch)
        if not target.num_rows:
            target.abandon()
            manifest = attrs.evolve(manifest, open_segment=None)
            _save_or_find(manifest, directory)
            _remove(source)
            return manifest, None
        closed = target.finish(next_commit)
    except BaseException:
        target.abandon()
        raise
    sync_directory(directory)
    following = number + 1
    state = fold if isinstance(fold, LedgerState) else fold.state if fold.is_possible else None
    snapshot = directory / snapshot_name(following)
    if state is not None and can_be_restored(state.created):
        crc32 = save_snapshot(snapshot, state)
        closed = attrs.evolve(closed, snapshot_crc32=crc32 if identity else None)
    else:
        snapshot.unlink(missing_ok=True)  # of an attempt that failed
    manifest = attrs.evolve(
        manifest,
        closed=(*manifest.closed, closed),
        open_segment=following if open_next else None,
        next_commit=next_commit,
    )
    stream = None
    try:
        if open_next:
            path = directory / stream_name(following)
            stream = StreamWriter.create(path, following, next_commit, manifest.identity(following))
        _save_or_find(manifest, directory)
    except BaseException:
        if stream is not None:
            stream.close()
        raise
    _remove(source)
    return manifest, stream


def _remove(closed: Path) -> None:
    """Remove a stream that a closed segment repeats. If that fails, the next writer removes it."""
    with contextlib.suppress(OSError):
        closed.unlink()


def _save_or_find(manifest: Manifest, directory: Path) -> None:
    """Replace the manifest. If that fails after the new one is in place, go on with it: it is the one that counts."""
    try:
        manifest.save(directory)
    except OSError:
        if Manifest.load(directory) != manifest:
            raise
