"""CSV files with a header, which hold lengths and times but no block ids, so that no reuse is known."""

import csv
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone

from ..format import TraceFormat, TraceSource, trace_formats
from ..lines import read_lines
from ..rows import BadRow, Row, RowError, TurnRecord, finite_number, num_tokens, shown, timestamp

NANOSECONDS = 1_000_000_000
WHOLE = re.compile(r"\s*[+-]?\d{1,30}\s*")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DATE_AND_TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:(Z)|([+-])(\d\d):?(\d\d))?"
)


def _cells(line: bytes) -> list[str]:
    """The cells of one line; a quoted cell may hold commas."""
    text = line.decode("utf-8", "replace")
    split = text.split(",")
    if '"' in text:
        # A cell may be longer than the parser accepts; then the line is cut at every comma.
        with suppress(csv.Error):
            split = next(csv.reader([text]))
    return [cell.strip() for cell in split]


def has_columns(lines: Sequence[bytes], columns: Sequence[str]) -> bool:
    """Whether the first line is a header with these columns, in any order; other columns are allowed."""
    return bool(lines) and set(columns) <= set(_cells(lines[0]))


def number(cell: str | None, field: str) -> int | float:
    """The number in a cell; whole ones stay exact."""
    if not cell:
        raise RowError("missing_field", "is empty", field)
    try:
        return int(cell) if WHOLE.fullmatch(cell) else float(cell)
    except ValueError:
        raise RowError("not_a_number", f"{shown(cell)} is not a number", field) from None


def tokens_in(cell: str | None, field: str) -> int:
    """The number of tokens in a cell."""
    return num_tokens(number(cell, field), field)


class CsvFormat(TraceFormat):
    """A CSV file with a header; subclasses name its columns and override `time` and `turn` where they differ."""

    needs_header = True
    unit_is_settable = True
    timestamp_unit = "s"
    units_per_second = 1
    required: tuple[str, str, str]  # the columns of arrival, prompt tokens and output tokens
    optional: tuple[str, ...] = ()

    def matches(self, lines: Sequence[bytes]) -> bool:
        return has_columns(lines, self.required)

    def read_rows(self, source: TraceSource) -> Iterator[Row | BadRow]:
        columns, (_, input_name, output_name) = (*self.required, *self.optional), self.required
        header: list[str] = []
        at: list[int | None] = []
        for place, line in read_lines(source.path):
            values = _cells(line)
            if not header:
                header = values
                at = [header.index(name) if name in header else None for name in columns]
                source.info.unused_fields.update(set(header) - set(columns))
                continue
            try:
                if line.count(b'"') % 2:
                    raise RowError("broken_quote", "opens a quote that it does not close")
                if len(values) != len(header):
                    raise RowError("missing_field", f"has {len(values)} cells under a header of {len(header)}")
                cells = [None if i is None else values[i] for i in at]
                when = self.time(cells[0], source)
                num_input, num_output = tokens_in(cells[1], input_name), tokens_in(cells[2], output_name)
                record = self.turn(num_input, num_output, *cells[3:]) if self.optional else None
                yield place, when, num_input, num_output, None, record, 0
            except RowError as error:
                yield error.at(place)

    def time(self, cell: str | None, source: TraceSource) -> int | float:
        """The arrival of a row, in the trace's unit."""
        return timestamp(number(cell, self.required[0]), self.required[0], source.units_per_second)

    def turn(self, num_input: int, num_output: int, *cells: str | None) -> TurnRecord | None:
        """What the cells of the optional columns (None: no such column) say about the row's session."""
        return None


@trace_formats.register("azure")
class Azure(CsvFormat):
    """Azure LLM inference CSV, 2023 and 2024.

    Timestamps are wall-clock dates: 7 decimals (100 ns) and no zone in 2023, when lines ended in CRLF; up to 6
    decimals, or none, with a zone such as +00:00 in 2024.
    """

    title = "Azure LLM inference CSV"
    timestamp_unit = "wall-clock dates"
    units_per_second = NANOSECONDS
    unit_is_settable = False
    required = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    fields = (*required[:2], "hash_ids")
    first_line = ",".join(required)

    def time(self, cell: str | None, source: TraceSource) -> int:
        """Nanoseconds since 1970, exact: a float holds today's date only to about 200 ns."""
        field = self.required[0]
        if not cell:
            raise RowError("missing_field", "is empty", field)
        found = DATE_AND_TIME.fullmatch(cell)
        if not found:
            raise RowError("not_a_date", f"{shown(cell)} is not a date such as 2023-11-16 18:17:03.9799600", field)
        year, month, day, hour, minute, second, fraction, _, sign, zone_hours, zone_minutes = found.groups()
        zone = UTC
        try:
            if sign:
                offset = timedelta(hours=int(zone_hours), minutes=int(zone_minutes))
                zone = timezone(-offset if sign == "-" else offset)
            date = datetime(int(year), int(month), int(day), int(hour), int(minute), int(second), tzinfo=zone)
        except ValueError as error:
            raise RowError("not_a_date", f"{shown(cell)} is not a date ({error})", field) from None
        since = date - EPOCH
        return (since.days * 86_400 + since.seconds) * NANOSECONDS + int((fraction or "").ljust(9, "0"))


@trace_formats.register("burstgpt")
class BurstGPT(CsvFormat):
    """BurstGPT CSV: a year of a university's chat service.

    Its third file also has Session ID and Elapsed time (seconds to the answer): sessions with think times. Rows without
    request tokens, and rows without response tokens (the service failed), also occur in files named "without_fails".
    """

    title = "BurstGPT CSV"
    required = ("Timestamp", "Request tokens", "Response tokens")
    optional = ("Total tokens", "Session ID", "Elapsed time")
    fields = (*required[:2], "hash_ids")
    first_line = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"

    def links_turns(self, lines: Sequence[bytes]) -> bool:
        return has_columns(lines, self.optional[1:2])

    def records_think_times(self, lines: Sequence[bytes]) -> bool:
        return has_columns(lines, self.optional[1:])

    def turn(self, num_input: int, num_output: int, *cells: str | None) -> TurnRecord | None:
        total, session, elapsed = cells
        if num_input and not num_output:
            raise RowError("empty_answer", "is 0: the service failed to answer", self.required[2])
        if total is not None and tokens_in(total, self.optional[0]) != num_input + num_output:
            fault = f"is {total}, but request and response tokens add up to {num_input + num_output}"
            raise RowError("total_mismatch", fault, self.optional[0])
        if not session:
            return None
        field = self.optional[2]
        answered_s = float(finite_number(number(elapsed, field), field)) if elapsed else None
        return TurnRecord(key=session, after=(session,), answered_s=answered_s)


@trace_formats.register("vidur")
class Vidur(CsvFormat):
    """Vidur CSV."""

    title = "Vidur CSV"
    required = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
    optional = ("session_id",)
    fields = (*required[:2], "hash_ids")
    first_line = ",".join(required)

    def links_turns(self, lines: Sequence[bytes]) -> bool:
        return has_columns(lines, self.optional)

    def turn(self, num_input: int, num_output: int, *cells: str | None) -> TurnRecord | None:
        (session,) = cells
        return TurnRecord(key=session, after=(session,)) if session else None
