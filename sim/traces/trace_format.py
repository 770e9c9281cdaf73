"""What a trace format is to the rest of the package: how to recognise it, its units, and a reader of its rows."""

from collections.abc import Callable, Iterator

import attrs

from .bad_rows import BadRow

# (place, timestamp in the format's unit, input_length, output_length, hash_ids or None)
Row = tuple[int, int | float, int, int, tuple[int, ...] | None]


@attrs.frozen
class TraceFormat:
    """One file format. `trace_block_size` is the format's own, or None where its rows carry no block ids.

    `read_rows(lines, unused_fields)` yields a `Row` or a `BadRow` for every request, holds no more than one line, and
    adds the names of the fields that it does not read to `unused_fields`.
    """

    name: str
    title: str
    timestamp_unit: str
    units_per_second: int
    trace_block_size: int | None
    first_line: str
    needs_header: bool
    matches: Callable[[bytes], bool]
    read_rows: Callable[[Iterator[tuple[int, bytes]], set[str]], Iterator[Row | BadRow]]
