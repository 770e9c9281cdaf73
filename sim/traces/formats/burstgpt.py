"""BurstGPT CSV: arrival, prompt and output lengths from a year of a university's chat service; no block ids.

Header Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type; timestamps are seconds. Its third file
also has Session ID and Elapsed time (seconds to the answer): sessions with think times. Rows without request tokens,
and rows without response tokens (the service failed), also occur in the files named "without_fails".
"""

from collections.abc import Iterator, Sequence

from ..format import TraceFormat, TraceSource, trace_formats
from ..lines import has_columns, number, read_cells, tokens_in
from ..rows import BadRow, Row, RowError, TurnRecord, finite_number, timestamp

REQUIRED = ("Timestamp", "Request tokens", "Response tokens")
OPTIONAL = ("Total tokens", "Session ID", "Elapsed time")


@trace_formats.register("burstgpt")
class BurstGPT(TraceFormat):
    """BurstGPT CSV."""

    title = "BurstGPT CSV"
    timestamp_unit = "s"
    units_per_second = 1
    unit_is_settable = True
    fields = ("Timestamp", "Request tokens", "hash_ids")
    first_line = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    needs_header = True

    def matches(self, lines: Sequence[bytes]) -> bool:
        """Whether the first line is the header."""
        return has_columns(lines, REQUIRED)

    def links_turns(self, lines: Sequence[bytes]) -> bool:
        """Whether the header names sessions."""
        return has_columns(lines, OPTIONAL[1:2])

    def records_think_times(self, lines: Sequence[bytes]) -> bool:
        """Whether the header names sessions and the time to each answer."""
        return has_columns(lines, OPTIONAL[1:])

    def read_rows(self, source: TraceSource) -> Iterator[Row | BadRow]:
        """Yield a row for every line after the header."""

        def parse(place: int, cells: list[str | None]) -> Row:
            when, request, response, total, session, elapsed = cells
            arrival = timestamp(number(when, REQUIRED[0]), REQUIRED[0], source.units_per_second)
            num_input = tokens_in(request, REQUIRED[1])
            num_output = tokens_in(response, REQUIRED[2])
            if num_input and not num_output:
                raise RowError("empty_answer", "is 0: the service failed to answer", REQUIRED[2])
            if total is not None and tokens_in(total, OPTIONAL[0]) != num_input + num_output:
                raise RowError(
                    "total_mismatch",
                    f"is {total}, but request and response tokens add up to {num_input + num_output}",
                    OPTIONAL[0],
                )
            return place, arrival, num_input, num_output, None, _turn(session, elapsed), 0

        return read_cells(source, REQUIRED, OPTIONAL, parse)


def _turn(session: str | None, elapsed: str | None) -> TurnRecord | None:
    if not session:
        return None
    answered_s = None if not elapsed else float(finite_number(number(elapsed, OPTIONAL[2]), OPTIONAL[2]))
    return TurnRecord(key=session, after=(session,), answered_s=answered_s)
