"""Mooncake JSONL: one request a line, with the ids of its prompt's blocks. Timestamps are milliseconds.

Fields (Mooncake, FAST'25; field report G01): timestamp, input_length, output_length, hash_ids with
`len(hash_ids) == ceil(input_length / 512)`; the last id is a partial block unless the length is a multiple of 512. The
prompt of a line without hash_ids shares nothing.
"""

from collections.abc import Iterator, Sequence

from ..format import TraceFormat, TraceSource, trace_formats
from ..lines import read_objects
from ..rows import BadRow, Row, hash_ids, num_tokens, required, timestamp

FIELDS = frozenset(("timestamp", "input_length", "output_length", "hash_ids"))


@trace_formats.register("mooncake")
class Mooncake(TraceFormat):
    """Mooncake JSONL."""

    title = "Mooncake JSONL"
    timestamp_unit = "ms"
    units_per_second = 1_000
    unit_is_settable = True
    trace_block_size = 512
    block_size_is_settable = True
    first_line = '{"timestamp": ..., "input_length": ..., "output_length": ..., "hash_ids": [...]}'
    # Other formats have some of these fields and more.
    is_asked_last = True

    def matches(self, lines: Sequence[bytes]) -> bool:
        return any(b'"%s"' % field.encode() in line for line in lines for field in FIELDS - {"timestamp"})

    def read_rows(self, source: TraceSource) -> Iterator[Row | BadRow]:
        units_per_second = source.units_per_second

        def parse(place: int, row: dict[str, object]) -> Row:
            when = required(row, "timestamp")
            num_input = required(row, "input_length")
            num_output = required(row, "output_length")
            ids = row.get("hash_ids")
            return (
                place,
                timestamp(when, "timestamp", units_per_second),
                num_tokens(num_input, "input_length"),
                num_tokens(num_output, "output_length"),
                None if ids is None else hash_ids(ids),
                None,
                0,
            )

        return read_objects(source, FIELDS, parse)
