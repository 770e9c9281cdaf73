"""Commits and notes of a log in words and in plain JSON values, and which of them somebody asked for."""

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np

from ...backends.sinks.log.rows import LoggedCommit, LoggedNote, Record
from ...core.events import Commit, Event, Key, PoolCreated, as_ints, columns_of

MAX_VALUES_SHOWN = 8


def plain_key(key: Key | None) -> Any:
    """A key as a JSON value: bytes in hexadecimal, a tuple as a list."""
    if isinstance(key, bytes):
        return key.hex()
    if isinstance(key, tuple):
        return [plain_key(item) for item in key]
    return key


def plain_event(event: Event) -> dict[str, Any]:
    """An event's name and columns, as JSON values."""
    out: dict[str, Any] = {"event": type(event).__name__}
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


def plain_record(record: Record) -> dict[str, Any]:
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
        fields = ", ".join(_field(name, value) for name, value in attrs.asdict(record.note, recurse=False).items())
        yield f"note{at}  {type(record.note).__name__}({fields})"
        return
    yield f"commit {record.commit.sequence}{at}"
    for event in record.commit.events:
        fields = ", ".join(_field(name, value) for name, value in columns_of(event).items())
        yield f"  {type(event).__name__}({fields})"


def _field(name: str, value: Any) -> str:
    return f"{name}={_shown(value)}"


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


@attrs.frozen
class Wanted:
    """What `kvledger log show` is to show; a criterion that is None admits everything.

    Attributes:
        request: commits that name this request, or a row while it holds it.
        block: commits that name this block.
        event: commits with an event of this name, or notes of this name.
    """

    request: str | None = None
    block: int | None = None
    event: str | None = None

    def among(self, records: Iterator[Record]) -> Iterator[Record]:
        """The records that every criterion admits, in order."""
        rows: set[int] = set()
        for record in records:
            if isinstance(record, LoggedNote):
                if self._admits_note(record):
                    yield record
                continue
            touches = self.request is None or self._touches_request(record.commit, rows)
            if touches and self._admits_event(record.commit) and self._names_block(record.commit):
                yield record

    def _admits_note(self, record: LoggedNote) -> bool:
        named = self.event in (None, type(record.note).__name__)
        return named and self.block is None and self.request in (None, getattr(record.note, "request_id", None))

    def _admits_event(self, commit: Commit) -> bool:
        return self.event is None or any(type(event).__name__ == self.event for event in commit.events)

    def _names_block(self, commit: Commit) -> bool:
        return self.block is None or any(self.block in blocks_of(event) for event in commit.events)

    def _touches_request(self, commit: Commit, rows: set[int]) -> bool:
        """Whether the commit is about the request; `rows` is the row that it holds, if any, and is kept up to date."""
        touches = False
        for event in commit.events:
            names: tuple[str, ...] = getattr(event, "requests", ())
            touches = touches or not rows.isdisjoint(rows_of(event)) or self.request in names
            if self.request in names:
                row = as_ints(getattr(event, "rows", ()))[names.index(self.request)]
                (rows.discard if type(event).__name__ == "RowsReleased" else rows.add)(row)
        return touches


def rows_of(event: Event) -> tuple[int, ...]:
    """The rows that an event is about."""
    if hasattr(event, "rows"):
        return as_ints(getattr(event, "rows", ()))
    return tuple([getattr(event, name) for name in ("row", "parent_row", "child_row") if hasattr(event, name)])


def blocks_of(event: Event) -> tuple[int, ...]:
    """The blocks that an event names."""
    if hasattr(event, "blocks"):
        return as_ints(getattr(event, "blocks", ()))
    return tuple([getattr(event, name) for name in ("source", "target") if hasattr(event, name)])
