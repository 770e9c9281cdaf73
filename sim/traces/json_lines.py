"""One JSON object a line: what the readers of JSON lines share."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from .bad_rows import BadRow, RowError
from .trace_format import Row, TraceSource

RowParser = Callable[[int, dict[str, Any]], Row]


def read_objects(source: TraceSource, fields: frozenset[str], parse: RowParser) -> Iterator[Row | BadRow]:
    """Yield what `parse(place, object)` makes of every line; names of fields outside `fields` are noted as not read."""
    unused_fields = source.info.unused_fields
    for place, line in source.lines():
        try:
            row = json_object(line)
            if len(row) > len(fields) or not row.keys() <= fields:
                unused_fields.update(row.keys() - fields)
            yield parse(place, row)
        except RowError as error:
            yield error.at(place)


def json_object(line: bytes) -> dict[str, Any]:
    """The object on a line, or `RowError`."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RowError("not_json", f"is not JSON ({error})") from error
    return as_object(row)


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
