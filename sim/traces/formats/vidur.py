"""Vidur CSV: arrived_at (seconds), num_prefill_tokens, num_decode_tokens; optionally session_id. No block ids."""

from collections.abc import Iterator, Sequence

from ..bad_rows import BadRow, num_tokens, timestamp
from ..format import Row, TraceFormat, TraceSource
from ..sessions import TurnRecord
from .rows import has_columns, number, read_cells

REQUIRED = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
OPTIONAL = ("session_id",)


def matches(lines: Sequence[bytes]) -> bool:
    """Whether the first line is this format's header."""
    return has_columns(lines, REQUIRED)


def links_turns(lines: Sequence[bytes]) -> bool:
    """Whether the header names sessions."""
    return has_columns(lines, OPTIONAL)


def read_rows(source: TraceSource) -> Iterator[Row | BadRow]:
    """Yield a `Row`, or a `BadRow`, for every line after the header."""

    def parse(place: int, cells: list[str | None]) -> Row:
        when, num_input, num_output, session = cells
        return (
            place,
            timestamp(number(when, REQUIRED[0]), REQUIRED[0], source.units_per_second),
            num_tokens(number(num_input, REQUIRED[1]), REQUIRED[1]),
            num_tokens(number(num_output, REQUIRED[2]), REQUIRED[2]),
            None,
            TurnRecord(key=session, after=(session,)) if session else None,
            0,
        )

    return read_cells(source, REQUIRED, OPTIONAL, parse)


VIDUR = TraceFormat(
    name="vidur",
    title="Vidur CSV",
    timestamp_unit="s",
    units_per_second=1,
    unit_is_settable=True,
    fields=("arrived_at", "num_prefill_tokens", "hash_ids"),
    first_line=",".join(REQUIRED),
    needs_header=True,
    matches=matches,
    links_turns=links_turns,
    read_rows=read_rows,
)
