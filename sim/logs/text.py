"""Describes commits and notes of a log as text and as JSON, and selects some of them."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy as np
import pyarrow.compute as pc

from ...backends.sinks.log.manifest import LOCK, MANIFEST
from ...backends.sinks.log.reader import LogReader
from ...backends.sinks.log.rows import NOTE_NAMES, LoggedCommit, LoggedNote, Record
from ...core.events import Commit, Event, Key, PoolCreated, as_ints, columns_of
from ...core.ledger.state import LedgerState
from ..figures import Document

MAX_VALUES_SHOWN = 8


def plain_key(key: Key | None) -> Any:
    """A key as a JSON value: bytes in hexadecimal, a tuple as a list."""
    if isinstance(key, bytes):
        return key.hex()
    if isinstance(key, tuple):
        return [plain_key(item) for item in key]
    return key


def plain_event(event: Event) -> Document:
    """An event's name and columns, as JSON values."""
    out: Document = {"event": type(event).__name__}
    out.update((name, _plain(value)) for name, value in columns_of(event).items())
    if isinstance(event, PoolCreated):
        out["groups"] = [str(kind) for kind in event.groups]
    return out


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return plain_key(value)


def plain_record(record: Record) -> Document:
    """A commit with its events, or a note, as JSON values."""
    if isinstance(record, LoggedCommit):
        events = [plain_event(event) for event in record.commit.events]
        return {"commit": record.commit.sequence, "time_ns": record.time_ns, "events": events}
    note = attrs.asdict(record.note)
    for name in ("prompt_keys", "output_keys"):
        if name in note:
            note[name] = [plain_key(key) for key in note[name]]
    return {"before_commit": record.next_commit, "time_ns": record.time_ns, "note": type(record.note).__name__, **note}


def described(record: Record) -> Iterator[str]:
    """One line for the record, and one for each of its events."""
    at = "" if record.time_ns is None else f"  {record.time_ns / 1e9:.6f} s"
    if isinstance(record, LoggedNote):
        yield f"note{at}  {_call(record.note, attrs.asdict(record.note, recurse=False))}"
        return
    yield f"commit {record.commit.sequence}{at}"
    for event in record.commit.events:
        yield f"  {_call(event, columns_of(event))}"


def _call(instance: Any, fields: Mapping[str, Any]) -> str:
    return f"{type(instance).__name__}({', '.join(f'{name}={_shown(value)}' for name, value in fields.items())})"


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        value = tuple(value.tolist())
    if isinstance(value, bytes):
        return value.hex()[:16] + ("..." if len(value) > 8 else "")
    if isinstance(value, tuple) and all(isinstance(item, int) for item in value) and len(value) > 2:
        return f"({_runs(value)})"
    if isinstance(value, tuple):
        more = f", ... {len(value)} in all" if len(value) > MAX_VALUES_SHOWN else ""
        return f"({', '.join(_shown(item) for item in value[:MAX_VALUES_SHOWN])}{more})"
    return str(value)


def _runs(values: tuple[int, ...]) -> str:
    """`1, 2, 3, 7` as `1..3, 7`; long lists are cut."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    shown = [str(first) if first == last else f"{first}..{last}" for first, last in runs[:MAX_VALUES_SHOWN]]
    return ", ".join(shown) + (f", ... {len(values)} in all" if len(runs) > MAX_VALUES_SHOWN else "")


def select(
    records: Iterator[Record], request: str | None = None, block: int | None = None, event: str | None = None
) -> Iterator[Record]:
    """The records that meet every criterion of `kvledger log show` that is given, in order.

    `request`: commits that name it, or its row while it has one. `block`: commits that name it. `event`: commits with
    an event of this name, or notes of this name.
    """
    rows: set[int] = set()
    for record in records:
        if isinstance(record, LoggedNote):
            about = getattr(record.note, "request_id", None)
            if event in (None, type(record.note).__name__) and block is None and request in (None, about):
                yield record
            continue
        events = record.commit.events
        touches = request is None or _touches_request(record.commit, request, rows)
        has_event = event is None or any(type(each).__name__ == event for each in events)
        if touches and has_event and (block is None or any(block in blocks_of(each) for each in events)):
            yield record


def _touches_request(commit: Commit, request: str, rows: set[int]) -> bool:
    """Whether the commit is about the request; `rows` has its current row, if any, and is updated."""
    touches = False
    for event in commit.events:
        names: tuple[str, ...] = getattr(event, "requests", ())
        touches = touches or not rows.isdisjoint(rows_of(event)) or request in names
        if request in names:
            row = as_ints(getattr(event, "rows", ()))[names.index(request)]
            (rows.discard if type(event).__name__ == "RowsReleased" else rows.add)(row)
    return touches


def rows_of(event: Event) -> tuple[int, ...]:
    """The rows that an event names."""
    return _named(event, "rows", "row", "parent_row", "child_row")


def blocks_of(event: Event) -> tuple[int, ...]:
    """The blocks that an event names."""
    return _named(event, "blocks", "source", "target")


def _named(event: Event, column: str, *fields: str) -> tuple[int, ...]:
    if hasattr(event, column):
        return as_ints(getattr(event, column))
    return tuple(getattr(event, name) for name in fields if hasattr(event, name))


def occupancy(state: LedgerState) -> Document:
    """Blocks by state (held, evictable, clean, null), and the usage of the pool (0 to 1)."""
    pool = state.pool
    evictable = pool.num_evictable_blocks()
    return {
        "num_blocks": pool.num_blocks,
        "held": pool.num_held_blocks,
        "evictable": evictable,
        "clean": pool.num_free_blocks - evictable,
        "null": 1,
        "kv_cache_usage": pool.usage,
        "keys": [len(pool.index(group)) for group in range(len(state.tables))],
    }


def state_as_dict(state: LedgerState) -> Document:
    """The whole state as JSON values, including block tables and the order of the free queue."""
    pool = state.pool
    requests = {
        request_id: {
            "row": row,
            "num_placed_tokens": state.placed[row],
            "tables": [table.blocks(row) for table in state.tables],
        }
        for request_id, row in sorted(state.row_of.items(), key=lambda item: item[1])
    }
    return {
        "next_commit": state.next_sequence,
        **occupancy(state),
        "requests": requests,
        "free_queue": pool.free_queue.order(),
    }


def log_stats(reader: LogReader) -> Document:
    """The document of `kvledger log stats --json`. Reads the log once, batch by batch."""
    rows: Counter[str] = Counter()
    blocks: Counter[str] = Counter()
    keys: Counter[str] = Counter()
    num_commits, last_commit = 0, -1
    times: list[int] = []
    for placed in reader.batches():
        batch = placed.batch
        lists = [pc.call_function("list_value_length", [batch.column(name)]) for name in ("blocks", "keys")]
        columns = (batch.column("event"), batch.column("commit"), *lists)
        for name, commit, num_blocks, num_keys in zip(*(column.to_pylist() for column in columns), strict=True):
            named = name or "(commit without events)"
            rows[named] += 1
            blocks[named] += num_blocks
            keys[named] += num_keys
            if name not in NOTE_NAMES and commit != last_commit:
                num_commits, last_commit = num_commits + 1, commit
        ends = pc.call_function("min_max", [batch.column("time_ns")]).as_py()
        if ends["min"] is not None:
            times = [min(*times, *ends.values()), max(*times, *ends.values())]
    sizes = {path.name: path.stat().st_size for path in sorted(reader.directory.iterdir())}
    of_segments = sum(size for name, size in sizes.items() if name.startswith("segment-"))
    events = sum(count for name, count in rows.items() if name not in NOTE_NAMES)
    return {
        "commits": num_commits,
        "events": events,
        "notes": sum(rows[name] for name in NOTE_NAMES),
        "bytes": sum(size for name, size in sizes.items() if name not in (LOCK, MANIFEST)),
        "segment_bytes": of_segments,
        "bytes_per_event": of_segments / events if events else None,
        "clock": reader.manifest.clock,
        "first_time_ns": times[0] if times else None,
        "last_time_ns": times[-1] if times else None,
        "by_event": [
            {"event": name, "count": count, "blocks": blocks[name], "keys": keys[name]}
            for name, count in rows.most_common()
        ],
        "closed_segments": len(reader.manifest.closed),
        "has_open_segment": reader.manifest.open_segment is not None,
        "snapshots": len(reader.snapshots()),
        "torn": reader.torn.describe() if reader.torn else None,
        "header": reader.manifest.header,
    }
