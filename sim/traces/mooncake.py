"""Mooncake JSONL: one request a line, with the ids of its prompt's blocks. Timestamps are milliseconds.

Fields (Mooncake, FAST'25; field report G01): timestamp, input_length, output_length, hash_ids with
`len(hash_ids) == ceil(input_length / 512)`; the last id is a partial block unless the length is a multiple. A line
without hash_ids is a request whose prompt nobody shares.
"""

import json
from collections.abc import Iterator
from typing import Any

from .bad_rows import BadRow, RowError, hash_ids, num_tokens, timestamp
from .trace_format import Row, TraceFormat

UNITS_PER_SECOND = 1_000
REQUIRED = ("timestamp", "input_length", "output_length")
FIELDS = frozenset((*REQUIRED, "hash_ids"))
# Qwen-Bailian lines have the same fields and these, but count seconds and blocks of 16: reading them here would lie.
FOREIGN = (b'"chat_id"', b'"parent_chat_id"')


def matches(line: bytes) -> bool:
    """Whether a line looks like a request of this format, broken or incomplete as it may be."""
    has_a_field = any(b'"%s"' % field.encode() in line for field in FIELDS - {"timestamp"})
    return has_a_field and not any(field in line for field in FOREIGN)


def read_rows(lines: Iterator[tuple[int, bytes]], unused_fields: set[str]) -> Iterator[Row | BadRow]:
    """Yield a `Row`, or a `BadRow`, for every line; names of fields that are not read go into `unused_fields`."""
    for place, line in lines:
        try:
            yield _parse(place, line, unused_fields)
        except RowError as error:
            yield error.at(place)


def _parse(place: int, line: bytes, unused_fields: set[str]) -> Row:
    row = _json_object(line)
    for field in REQUIRED:
        if field not in row:
            raise RowError("missing_field", "is missing", field)
    if len(row) > len(FIELDS) or not row.keys() <= FIELDS:
        unused_fields.update(row.keys() - FIELDS)
    ids = row.get("hash_ids")
    return (
        place,
        timestamp(row["timestamp"], "timestamp", UNITS_PER_SECOND),
        num_tokens(row["input_length"], "input_length"),
        num_tokens(row["output_length"], "output_length"),
        None if ids is None else hash_ids(ids, "hash_ids"),
    )


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RowError("not_json", f"is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise RowError("not_json", "is JSON but not an object with named fields")
    return row


MOONCAKE = TraceFormat(
    name="mooncake",
    title="Mooncake JSONL",
    timestamp_unit="ms",
    units_per_second=UNITS_PER_SECOND,
    trace_block_size=512,
    first_line='{"timestamp": ..., "input_length": ..., "output_length": ..., "hash_ids": [...]}',
    needs_header=False,
    matches=matches,
    read_rows=read_rows,
)
