"""Mooncake JSONL: one request a line, with the ids of its prompt's blocks. Timestamps are milliseconds.

Fields (Mooncake, FAST'25; field report G01): timestamp, input_length, output_length, hash_ids with
`len(hash_ids) == ceil(input_length / 512)`; the last id is a partial block unless the length is a multiple of 512. The
prompt of a line without hash_ids shares nothing.
"""

from collections.abc import Iterator, Sequence

from ..format import TraceFormat, TraceSource, trace_formats
from ..lines import read_objects
from ..rows import BadRow, Row, hash_ids, timed_lengths

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
        def parse(place: int, row: dict[str, object]) -> Row:
            lengths, ids = timed_lengths(row, source.units_per_second), row.get("hash_ids")
            return place, *lengths, None if ids is None else hash_ids(ids), None, 0

        return read_objects(source, FIELDS, parse)
