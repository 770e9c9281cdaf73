"""What is in a log, by event: how many, how many entries, how many bytes on disk."""

from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ...backends.sinks.log.names import LOCK, MANIFEST
from ...backends.sinks.log.reader import LogReader
from ...backends.sinks.log.rows import NOTE_NAMES


class _Tally:
    def __init__(self) -> None:
        self.rows: Counter[str] = Counter()
        self.blocks: Counter[str] = Counter()
        self.keys: Counter[str] = Counter()
        self.commits = 0
        self.times: list[int] = []
        self._last_commit = -1

    def add(self, batch: pa.RecordBatch) -> None:
        names = batch.column("event").to_pylist()
        commits = batch.column("commit").to_pylist()
        sizes = [pc.call_function("list_value_length", [batch.column(name)]).to_pylist() for name in ("blocks", "keys")]
        for name, commit, num_blocks, num_keys in zip(names, commits, *sizes, strict=True):
            named = name or "(commit without events)"
            self.rows[named] += 1
            self.blocks[named] += num_blocks
            self.keys[named] += num_keys
            if name not in NOTE_NAMES and commit != self._last_commit:
                self.commits += 1
                self._last_commit = commit
        times = pc.call_function("min_max", [batch.column("time_ns")]).as_py()
        if times["min"] is not None:
            self.times += [times["min"], times["max"]]
            self.times = [min(self.times), max(self.times)]


def log_stats(reader: LogReader) -> dict[str, Any]:
    """The answer of `kvledger log stats --json`. Reads the log once, a batch at a time."""
    tally = _Tally()
    for placed in reader.batches():
        tally.add(placed.batch)
    sizes = {path.name: path.stat().st_size for path in sorted(reader.directory.iterdir())}
    of_segments = sum(size for name, size in sizes.items() if name.startswith("segment-"))
    events = sum(count for name, count in tally.rows.items() if name not in NOTE_NAMES)
    return {
        "commits": tally.commits,
        "events": events,
        "notes": sum(tally.rows[name] for name in NOTE_NAMES),
        "bytes": sum(size for name, size in sizes.items() if name not in (LOCK, MANIFEST)),
        "segment_bytes": of_segments,
        "bytes_per_event": of_segments / events if events else None,
        "clock": reader.manifest.clock,
        "first_time_ns": tally.times[0] if tally.times else None,
        "last_time_ns": tally.times[-1] if tally.times else None,
        "by_event": [
            {"event": name, "count": count, "blocks": tally.blocks[name], "keys": tally.keys[name]}
            for name, count in tally.rows.most_common()
        ],
        "closed_segments": len(reader.manifest.closed),
        "has_open_segment": reader.manifest.open_segment is not None,
        "snapshots": len(reader.snapshots()),
        "torn": reader.torn.describe() if reader.torn else None,
        "header": reader.manifest.header,
    }


def print_stats(stats: dict[str, Any]) -> None:
    """The tables of `kvledger log stats`."""
    from ..report.console import console, table

    out = console()
    out.print(
        f"{stats['commits']:,} commits, {stats['events']:,} events, {stats['notes']:,} notes in "
        f"{stats['segment_bytes']:,} bytes",
        soft_wrap=True,
    )
    if stats["bytes_per_event"] is not None:
        out.print(f"{stats['bytes_per_event']:.1f} bytes an event")
    if stats["first_time_ns"] is not None:
        first, last = stats["first_time_ns"] / 1e9, stats["last_time_ns"] / 1e9
        out.print(f"from {first:,.3f} s to {last:,.3f} s ({stats['clock']})")
    rows = [(each["event"], each["count"], each["blocks"], each["keys"]) for each in stats["by_event"]]
    out.print(table(None, ("event", "count", "blocks", "keys"), rows))
    if stats["torn"]:
        out.print(stats["torn"], soft_wrap=True)
    if stats["header"].get("command"):
        out.print(f"recorded by kvledger {stats['header']['command']}")
