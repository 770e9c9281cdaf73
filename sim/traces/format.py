"""What a trace format is to the rest of the package: how to recognise it, its units, and a reader of its rows."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs

from .bad_rows import BadRow
from .lines import read_lines
from .sessions import TurnRecord
from .text import Tokenizer
from .trace import TraceInfo

# (place, timestamp in the format's unit, input_length, output_length, hash_ids or None, session or None, priority)
Row = tuple[int, int | float, int, int, tuple[int, ...] | None, TurnRecord | None, int]


@attrs.frozen
class TraceSource:
    """What a reader reads: files, how they were opened, and the tally that it adds its remarks to."""

    paths: tuple[Path, ...]
    info: TraceInfo
    units_per_second: int
    timestamp_unit: str | None = None
    tokenizer: Tokenizer | None = None
    request_rate: float | None = None
    seed: int = 0

    @property
    def path(self) -> Path:
        """The only file of a format that takes one."""
        return self.paths[0]

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(line number, line) of the only file."""
        return read_lines(self.path)


def never(_: Sequence[bytes]) -> bool:
    """The answer of a format that never has what it is asked for."""
    return False


def nothing(_: Sequence[bytes]) -> None:
    """The answer of a format that says no such thing in its files."""
    return


def always(_: Sequence[bytes]) -> bool:
    """The answer of a format that always has what it is asked for."""
    return True


@attrs.frozen(kw_only=True)
class TraceFormat:
    """One file format.

    Attributes:
        name: what `--format` calls it.
        title: what people call it.
        timestamp_unit: the unit of its timestamps, for the report.
        units_per_second: how many of them a second has.
        unit_is_settable: whether `--timestamp-unit` may say otherwise.
        converts_units: whether `read_rows` makes `units_per_second` of whatever unit the file has.
        trace_block_size: tokens that one hash id stands for, None where the format does not fix it.
        block_size_is_settable: whether `--trace-block-size` may say otherwise.
        text_block_size: tokens of the blocks that text is cut into where a tokenizer is named; None where text is no
            part of the format.
        block_size_in: asked with the first lines of a file: the trace block size that it states itself, if any.
        full_blocks_only: whether hash ids name full blocks only, `input_length // trace_block_size` of them.
        fields: its names for what errors call (timestamp, input_length, hash_ids).
        first_line: an example, for error messages.
        needs_header: whether only the first line can identify a file.
        matches: asked with the first lines of a file (the last may be cut off): is it of this format?
        links_turns: asked with the same lines: does the trace say which requests are turns of one session?
        records_think_times: asked with the same lines: do turns know how long their client waited?
        read_rows: yields a `Row` or a `BadRow` for every request, holding no more than it must of the file.
        checks_its_rows: whether `read_rows` has already made the checks of every row that `RowChecks` makes.
        has_one_parent_each: whether its ids cannot but have one parent each, so that this need not be checked.
        takes_many_files: whether several files, or a directory, make one trace.
        needs_tokenizer: whether lengths have to be counted in text.
        arrivals_unless_given: what is said of arrivals that it does not record, unless `--request-rate` says how fast
            they come; None where it records them.
    """

    name: str
    title: str
    timestamp_unit: str
    units_per_second: int
    unit_is_settable: bool = False
    converts_units: bool = False
    trace_block_size: int | None = None
    block_size_is_settable: bool = False
    text_block_size: int | None = None
    block_size_in: Callable[[Sequence[bytes]], int | None] = nothing
    full_blocks_only: bool = False
    fields: tuple[str, str, str] = ("timestamp", "input_length", "hash_ids")
    first_line: str
    needs_header: bool = False
    matches: Callable[[Sequence[bytes]], bool]
    links_turns: Callable[[Sequence[bytes]], bool] = never
    records_think_times: Callable[[Sequence[bytes]], bool] = never
    read_rows: Callable[[TraceSource], Iterator[Row | BadRow]]
    checks_its_rows: bool = False
    has_one_parent_each: bool = False
    takes_many_files: bool = False
    needs_tokenizer: bool = False
    arrivals_unless_given: str | None = None
