"""Comma-separated files under a header: what the readers of CSV share."""

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from .bad_rows import BadRow, RowError, shown
from .trace_format import Row, TraceSource

WHOLE = re.compile(r"\s*[+-]?\d{1,30}\s*")
# The cells of the required columns, in their order, then those of the optional ones; None where a column is not there.
CellParser = Callable[[int, list[str | None]], Row]


def cells(line: bytes) -> list[str]:
    """The cells of one line; a quoted cell may hold commas."""
    text = line.decode("utf-8", "replace")
    split = text.split(",")
    if '"' in text:
        # A cell may be longer than the parser takes; then cells are cut at every comma.
        with suppress(csv.Error):
            split = next(csv.reader([text]))
    return [cell.strip() for cell in split]


def has_columns(lines: Sequence[bytes], columns: Sequence[str]) -> bool:
    """Whether the first line is a header with these columns, in any order and with others beside them."""
    return bool(lines) and set(columns) <= set(cells(lines[0]))


def read_cells(
    source: TraceSource, required: Sequence[str], optional: Sequence[str], parse: CellParser
) -> Iterator[Row | BadRow]:
    """Yield what `parse(place, cells)` makes of every line after the header; columns not asked for are noted."""
    header: list[str] = []
    at: list[int | None] = []
    for place, line in source.lines():
        values = cells(line)
        if not header:
            header = values
            at = [header.index(name) if name in header else None for name in (*required, *optional)]
            source.info.unused_fields.update(set(header) - {*required, *optional})
            continue
        try:
            if line.count(b'"') % 2:
                raise RowError("broken_quote", "opens a quote that it does not close")
            if len(values) != len(header):
                raise RowError("missing_field", f"has {len(values)} cells under a header of {len(header)}")
            yield parse(place, [None if i is None else values[i] for i in at])
        except RowError as error:
            yield error.at(place)


def number(cell: str | None, field: str) -> int | float:
    """The number in a cell; whole ones stay exact."""
    if not cell:
        raise RowError("missing_field", "is empty", field)
    try:
        return int(cell) if WHOLE.fullmatch(cell) else float(cell)
    except ValueError:
        raise RowError("not_a_number", f"{shown(cell)} is not a number", field) from None
