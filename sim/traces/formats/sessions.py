"""Mooncake JSONL with sessions, as AIPerf and Dynamo write it: `session_id` on each line, and `delay` on later turns.

Beside Mooncake's fields (timestamp, input_length, output_length, hash_ids):

* session_id: lines with the same value are turns of one session, in their order in the file.
* delay: time from the answer before in the session to this turn (field report G04). A turn with a delay needs no
  timestamp; the first line of a session does.

Both times are milliseconds unless `--timestamp-unit` says otherwise. Files list sessions one after the other, so lines
are sorted by time here, which holds all of them in memory. A turn without a timestamp is sorted as if the answer before
had taken no time; in a closed loop the simulated answer decides.
"""

import re
from collections.abc import Hashable, Iterator, Sequence

from ..format import TraceSource, trace_formats
from ..lines import read_objects
from ..rows import BadRow, Row, RowError, TurnRecord, hash_ids, num_tokens, required, shown, timestamp
from .mooncake import FIELDS as MOONCAKE_FIELDS
from .mooncake import Mooncake

SESSION_ID = re.compile(rb'"session_id"\s*:\s*("[^"]*"|-?\d+)')
FIELDS = MOONCAKE_FIELDS | {"session_id", "delay"}
UNTIMED = (
    "turns have a delay and no timestamp: in a closed loop they come that long after the answer before; in an open "
    "loop, as if that answer had taken no time"
)
UNUSED_DELAY = "delays on the first turn of a session follow no answer and were not used"


@trace_formats.register("mooncake-sessions")
class MooncakeSessions(Mooncake):
    """Mooncake JSONL with sessions."""

    title = "Mooncake JSONL with sessions"
    has_turns = True
    first_line = '{"session_id": ..., "timestamp": ..., "input_length": ..., "output_length": ...}, then "delay": ...'
    is_asked_last = False
    sorts_its_rows = True

    def matches(self, lines: Sequence[bytes]) -> bool:
        return any(
            (b'"session_id"' in line or b'"delay"' in line) and b'"input_length"' in line
            for line in lines
            if line.startswith(b"{")
        )

    def records_think_times(self, lines: Sequence[bytes]) -> bool:
        """Whether later turns record a delay; assumed where the first lines show no later turn."""
        sessions = SESSION_ID.findall(b"\n".join(lines))
        return b'"delay"' in b"\n".join(lines) or len(set(sessions)) == len(sessions)

    def read_rows(self, source: TraceSource) -> Iterator[Row | BadRow]:
        """Yield the bad rows, then all others in order of time."""
        read = list(read_objects(source, FIELDS, _Parser(source).row))
        yield from (row for row in read if isinstance(row, BadRow))
        yield from sorted((row for row in read if not isinstance(row, BadRow)), key=lambda row: row[1])


class _Parser:
    def __init__(self, source: TraceSource) -> None:
        self._info = source.info
        self._units_per_second = source.units_per_second
        self._latest: dict[Hashable, int | float] = {}  # session -> time of its last usable turn

    def row(self, place: int, row: dict[str, object]) -> Row:
        session, delay = _session(row), self._time(row, "delay")
        before = None if session is None else self._latest.get(session)
        when = self._when(row, session, before, delay)
        num_input, num_output = required(row, "input_length"), required(row, "output_length")
        lengths = num_tokens(num_input, "input_length"), num_tokens(num_output, "output_length")
        ids = row.get("hash_ids")
        blocks = None if ids is None else hash_ids(ids)
        if session is None:
            return place, when, *lengths, blocks, None, 0
        self._latest[session] = when
        if before is None:
            if delay:
                self._info.remark(UNUSED_DELAY)
            delay = None
        elif row.get("timestamp") is None:
            self._info.remark(UNTIMED)
        turn = TurnRecord(
            key=session, after=(session,), think_s=None if delay is None else delay / self._units_per_second
        )
        return place, when, *lengths, blocks, turn, 0

    def _when(
        self, row: dict[str, object], session: Hashable, before: int | float | None, delay: int | float | None
    ) -> int | float:
        when = self._time(row, "timestamp")
        if when is None and (delay is None or before is None):
            if session is None and delay is not None:
                raise RowError("missing_field", "is missing: a delay follows a turn of the same session", "session_id")
            raise RowError(
                "missing_field",
                "is missing: the first turn of a session needs one, and later turns need one or a delay",
                "timestamp",
            )
        if when is None:
            return (before or 0) + (delay or 0)
        if before is not None and when < before:
            raise RowError(
                "out_of_order",
                f"is {when}, earlier than the turn before it in session {shown(session)} ({before})",
                "timestamp",
            )
        return when

    def _time(self, row: dict[str, object], field: str) -> int | float | None:
        value = row.get(field)
        return None if value is None else timestamp(value, field, self._units_per_second)


def _session(row: dict[str, object]) -> str | int | None:
    value = row.get("session_id")
    if value is not None and not isinstance(value, str) and type(value) is not int:
        raise RowError("not_a_name", f"{shown(value)} is neither text nor a whole number", "session_id")
    return value
