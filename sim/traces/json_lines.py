"""One JSON object a line: what the readers of JSON lines share."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import orjson

from .bad_rows import BadRow, RowError
from .trace_format import Row, TraceSource

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
