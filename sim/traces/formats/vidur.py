"""Vidur CSV: arrived_at (seconds), num_prefill_tokens, num_decode_tokens; optionally session_id. No block ids."""

from collections.abc import Iterator, Sequence

from ..format import TraceFormat, TraceSource, trace_formats
from ..lines import has_columns, number, read_cells, tokens_in
from ..rows import BadRow, Row, TurnRecord, timestamp

REQUIRED = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
OPTIONAL = ("session_id",)


@trace_formats.register("vidur")
class Vidur(TraceFormat):
    """Vidur CSV."""

    title = "Vidur CSV"
    timestamp_unit = "s"
    units_per_second = 1
    unit_is_settable = True
    fields = ("arrived_at", "num_prefill_tokens", "hash_ids")
    first_line = ",".join(REQUIRED)
    needs_header = True

    def matches(self, lines: Sequence[bytes]) -> bool:
        """Whether the first line is the header."""
        return has_columns(lines, REQUIRED)

    def links_turns(self, lines: Sequence[bytes]) -> bool:
        """Whether the header names sessions."""
        return has_columns(lines, OPTIONAL)

    def read_rows(self, source: TraceSource) -> Iterator[Row | BadRow]:
        """Yield a row for every line after the header."""

        def parse(place: int, cells: list[str | None]) -> Row:
            when, num_input, num_output, session = cells
            return (
                place,
                timestamp(number(when, REQUIRED[0]), REQUIRED[0], source.units_per_second),
                tokens_in(num_input, REQUIRED[1]),
                tokens_in(num_output, REQUIRED[2]),
                None,
                TurnRecord(key=session, after=(session,)) if session else None,
                0,
            )

        return read_cells(source, REQUIRED, OPTIONAL, parse)
