"""One JSON object a line: what the readers of JSON lines share."""

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import orjson

from ..bad_rows import BadRow, RowError, shown
from ..format import Row, TraceSource

RowParser = Callable[[int, dict[str, Any]], Row]


def read_objects(source: TraceSource, fields: frozenset[str], parse: RowParser) -> Iterator[Row | BadRow]:
    """Yield what `parse(place, object)` makes of every line; names of fields outside `fields` are noted as not read.

    What counts is what Python's `json` makes of a line. orjson, several times as fast, makes the same of all that it
    accepts, but for integers beyond 64 bits: it turns them into floats of that size, which no reader takes for an
    integer, and for a number of seconds only where the integer would become the same float. So a row that `parse`
    makes of its object is right, and any other line is read again by `json`. (Fields that are not read may be nested
    deeper than `json` can follow.)
    """
    unused_fields = source.info.unused_fields

    def row_of(place: int, value: Any) -> Row:
        row = as_object(value)
        if len(row) > len(fields) or not row.keys() <= fields:
            unused_fields.update(row.keys() - fields)
        return parse(place, row)

    for place, line in source.lines():
        try:
            yield row_of(place, orjson.loads(line))
        except (orjson.JSONDecodeError, RowError, RecursionError):
            try:
                yield row_of(place, json_value(line))
            except RowError as error:
                yield error.at(place)


def json_value(line: bytes) -> Any:
    """The value on a line, or `RowError`."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RowError("not_json", f"is not JSON ({error})") from error


def as_object(value: Any) -> dict[str, Any]:
    """`value` where it is a JSON object, else `RowError`."""
    if not isinstance(value, dict):
        raise RowError("not_json", "is JSON but not an object with named fields")
    return value


def required(row: dict[str, Any], field: str) -> Any:
    """The value of a field that must be there."""
    try:
        return row[field]
    except KeyError:
        raise RowError("missing_field", "is missing", field) from None


# Comma-separated files under a header: what the readers of CSV share.

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
