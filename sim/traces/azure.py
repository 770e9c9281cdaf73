"""Azure LLM inference CSV, 2023 and 2024: arrival, prompt and output lengths; no block ids, so no reuse is known.

Header TIMESTAMP,ContextTokens,GeneratedTokens, CRLF in 2023. Timestamps are wall-clock dates: 7 decimals (100 ns) and
no zone in 2023; up to 6 decimals, or none, with a zone such as +00:00 in 2024.
"""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone

from .bad_rows import BadRow, RowError, num_tokens, shown
from .trace_format import Row, TraceFormat

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
UNITS_PER_SECOND = 1_000_000_000
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DATE_AND_TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:(Z)|([+-])(\d\d):?(\d\d))?"
)
WHOLE = re.compile(r"\s*[+-]?\d{1,30}\s*")


def matches(first_line: bytes) -> bool:
    """Whether the first line of a file is this format's header (columns in any order, others beside them)."""
    return set(COLUMNS) <= set(_cells(first_line))


def read_rows(lines: Iterator[tuple[int, bytes]], unused_fields: set[str]) -> Iterator[Row | BadRow]:
    """Yield a `Row`, or a `BadRow`, for every line after the header."""
    header: list[str] = []
    at = (0, 1, 2)
    for place, line in lines:
        cells = _cells(line)
        if not header:
            header = cells
            at = tuple(header.index(name) for name in COLUMNS)
            unused_fields.update(set(header) - set(COLUMNS))
            continue
        try:
            if len(cells) != len(header):
                raise RowError("missing_field", f"has {len(cells)} cells under a header of {len(header)}")
            when, num_input, num_output = cells[at[0]], cells[at[1]], cells[at[2]]
            yield (
                place,
                _nanoseconds(when),
                num_tokens(_number(num_input, COLUMNS[1]), COLUMNS[1]),
                num_tokens(_number(num_output, COLUMNS[2]), COLUMNS[2]),
                None,
            )
        except RowError as error:
            yield error.at(place)


def _cells(line: bytes) -> list[str]:
    return [cell.strip().strip('"') for cell in line.decode("utf-8", "replace").split(",")]


def _number(cell: str, field: str) -> int | float:
    if not cell:
        raise RowError("missing_field", "is empty", field)
    try:
        return int(cell) if WHOLE.fullmatch(cell) else float(cell)
    except ValueError:
        raise RowError("not_a_number", f"{shown(cell)} is not a number", field) from None


def _nanoseconds(cell: str) -> int:
    """Nanoseconds since 1970, exact: floats hold a date of today only to some 200 ns."""
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


AZURE = TraceFormat(
    name="azure",
    title="Azure LLM inference CSV",
    timestamp_unit="wall-clock dates",
    units_per_second=UNITS_PER_SECOND,
    trace_block_size=None,
    first_line=",".join(COLUMNS),
    needs_header=True,
    matches=matches,
    read_rows=read_rows,
)
