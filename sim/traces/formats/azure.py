"""Azure LLM inference CSV, 2023 and 2024: arrival, prompt and output lengths; no block ids, so no reuse is known.

Header TIMESTAMP,ContextTokens,GeneratedTokens, CRLF in 2023. Timestamps are wall-clock dates: 7 decimals (100 ns) and
no zone in 2023; up to 6 decimals, or none, with a zone such as +00:00 in 2024.
"""

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta, timezone

from ..format import TraceFormat, TraceSource, trace_formats
from ..lines import has_columns, read_cells, tokens_in
from ..rows import BadRow, Row, RowError, shown

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
UNITS_PER_SECOND = 1_000_000_000
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DATE_AND_TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:(Z)|([+-])(\d\d):?(\d\d))?"
)


@trace_formats.register("azure")
class Azure(TraceFormat):
    """Azure LLM inference CSV."""

    title = "Azure LLM inference CSV"
    timestamp_unit = "wall-clock dates"
    units_per_second = UNITS_PER_SECOND
    fields = ("TIMESTAMP", "ContextTokens", "hash_ids")
    first_line = ",".join(COLUMNS)
    needs_header = True

    def matches(self, lines: Sequence[bytes]) -> bool:
        """Whether the first line is the header."""
        return has_columns(lines, COLUMNS)

    def read_rows(self, source: TraceSource) -> Iterator[Row | BadRow]:
        """Yield a row for every line after the header."""
        return read_cells(source, COLUMNS, (), _row)


def _row(place: int, cells: list[str | None]) -> Row:
    when, num_input, num_output = cells
    return (
        place,
        _nanoseconds(when),
        tokens_in(num_input, COLUMNS[1]),
        tokens_in(num_output, COLUMNS[2]),
        None,
        None,
        0,
    )


def _nanoseconds(cell: str | None) -> int:
    """Nanoseconds since 1970, exact: a float holds today's date only to about 200 ns."""
    if not cell:
        raise RowError("missing_field", "is empty", COLUMNS[0])
    found = DATE_AND_TIME.fullmatch(cell)
    if not found:
        raise RowError("not_a_date", f"{shown(cell)} is not a date such as 2023-11-16 18:17:03.9799600", COLUMNS[0])
    year, month, day, hour, minute, second, fraction, _, sign, zone_hours, zone_minutes = found.groups()
    zone = UTC
    try:
        if sign:
            offset = timedelta(hours=int(zone_hours), minutes=int(zone_minutes))
            zone = timezone(-offset if sign == "-" else offset)
        moment = datetime(int(year), int(month), int(day), int(hour), int(minute), int(second), tzinfo=zone)
    except ValueError as error:
        raise RowError("not_a_date", f"{shown(cell)} is not a date ({error})", COLUMNS[0]) from None
    since = moment - EPOCH
    return (since.days * 86_400 + since.seconds) * UNITS_PER_SECOND + int((fraction or "").ljust(9, "0"))
