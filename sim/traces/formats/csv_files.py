"""CSV files with a header, which hold lengths and times but no block ids, so that no reuse is known."""

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta, timezone

from ..format import TraceFormat, TraceSource, trace_formats
from ..lines import has_columns, number, read_cells, tokens_in
from ..rows import BadRow, Row, RowError, TurnRecord, finite_number, shown, timestamp

NANOSECONDS = 1_000_000_000
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DATE_AND_TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:(Z)|([+-])(\d\d):?(\d\d))?"
)


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
        time, turn, optional, (_, *lengths) = self.time, self.turn, self.optional, self.required

        def parse(place: int, cells: list[str | None]) -> Row:
            when = time(cells[0], source)
            num_input, num_output = tokens_in(cells[1], lengths[0]), tokens_in(cells[2], lengths[1])
            record = turn(num_input, num_output, *cells[3:]) if optional else None
            return place, when, num_input, num_output, None, record, 0

        return read_cells(source, self.required, self.optional, parse)

    def time(self, cell: str | None, source: TraceSource) -> int | float:
        """The arrival of a row, in the trace's unit."""
        return timestamp(number(cell, self.required[0]), self.required[0], source.units_per_second)

    def turn(self, num_input: int, num_output: int, *cells: str | None) -> TurnRecord | None:
        """What the cells of the optional columns say about the row's session. Raises `RowError` for a bad row."""
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
