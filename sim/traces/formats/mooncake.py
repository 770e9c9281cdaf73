"""Mooncake JSONL: one request a line, with the ids of its prompt's blocks. Timestamps are milliseconds.

Fields (Mooncake, FAST'25; field report G01): timestamp, input_length, output_length, hash_ids with
`len(hash_ids) == ceil(input_length / 512)`; the last id is a partial block unless the length is a multiple. A line
without hash_ids is a request whose prompt nobody shares.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from ..bad_rows import BadRow, hash_ids, num_tokens, timestamp
from ..format import Row, TraceFormat, TraceSource
from .rows import read_objects, required

UNITS_PER_SECOND = 1_000
FIELDS = frozenset(("timestamp", "input_length", "output_length", "hash_ids"))


def matches(lines: Sequence[bytes]) -> bool:
    """Whether any of the lines looks like a request of this format, broken or incomplete as it may be.

    Other formats have some of these fields and others beside them; they are asked first.
    """
    return any(b'"%s"' % field.encode() in line for line in lines for field in FIELDS - {"timestamp"})


def read_rows(source: TraceSource) -> Iterator[Row | BadRow]:
    """Yield a `Row`, or a `BadRow`, for every line."""
    units_per_second = source.units_per_second

    def parse(place: int, row: dict[str, Any]) -> Row:
        when = required(row, "timestamp")
        num_input = required(row, "input_length")
        num_output = required(row, "output_length")
        ids = row.get("hash_ids")
        return (
            place,
            timestamp(when, "timestamp", units_per_second),
            num_tokens(num_input, "input_length"),
            num_tokens(num_output, "output_length"),
            None if ids is None else hash_ids(ids, "hash_ids"),
            None,
            0,
        )

    return read_objects(source, FIELDS, parse)


MOONCAKE = TraceFormat(
    name="mooncake",
    title="Mooncake JSONL",
    timestamp_unit="ms",
    units_per_second=UNITS_PER_SECOND,
    unit_is_settable=True,
    trace_block_size=512,
    block_size_is_settable=True,
    first_line='{"timestamp": ..., "input_length": ..., "output_length": ..., "hash_ids": [...]}',
    matches=matches,
    read_rows=read_rows,
)
