"""Trace formats: how a file is recognised, which units it uses, and who reads its rows. See formats/.

A format is a subclass of `TraceFormat` in the registry. `open_trace` finds it by its name or by the file's content.
docs/extending.md shows one.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from ...core.errors import InputError
from ...core.registry import Registry
from .lines import first_lines
from .rows import BadRow, Row
from .text import Tokenizer
from .trace import TraceInfo

# The first rows may be the bad ones, so more than one line is compared with each format.
LINES_TO_DETECT = 20
BYTES_TO_DETECT = 1 << 16


@attrs.frozen
class TraceSource:
    """What a reader reads: the files, the options they were opened with, and the tally that it adds remarks to."""

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


class TraceFormat(ABC):
    """One file format; subclasses set the attributes and override the methods below."""

    title: str  # the name that people use
    timestamp_unit: str  # unit of its timestamps, for the report
    units_per_second: int  # timestamp units in a second
    unit_is_settable = False  # whether `--timestamp-unit` may change the unit
    converts_units = False  # whether `read_rows` converts every unit to `units_per_second`
    trace_block_size: int | None = None  # tokens that one hash id represents; None where the format does not fix it
    block_size_is_settable = False  # whether `--trace-block-size` may change it
    text_block_size: int | None = None  # tokens per block of tokenized text; None where the format has no text
    full_blocks_only = False  # whether hash ids name full blocks only, `input_length // trace_block_size` of them
    fields: tuple[str, str, str] = ("timestamp", "input_length", "hash_ids")  # its names for these, in errors
    first_line: str  # an example for error messages
    needs_header = False  # whether only the first line can identify a file
    has_turns = False  # whether every trace says which requests are turns of one session (see `links_turns`)
    has_think_times = False  # whether every trace records how long clients waited (see `records_think_times`)
    is_asked_last = False  # whether `matches` also accepts files of other formats, which are then preferred
    checks_its_rows = False  # whether `read_rows` has already made all checks of `RowChecks`
    has_one_parent_each = False  # whether each id has one parent by construction, so that this is not checked
    sorts_its_rows = False  # whether rows come in another order than the file's; checked rows are then numbered from 1
    takes_many_files = False  # whether several files, or a folder, make one trace
    needs_tokenizer = False  # whether lengths have to be counted in text
    # The note about arrivals that the file does not record, unless `--request-rate` is given; None: they are recorded.
    arrivals_unless_given: str | None = None

    def __init__(self, name: str) -> None:
        """`name` is what `--format` takes."""
        self.name = name

    @abstractmethod
    def matches(self, lines: Sequence[bytes]) -> bool:
        """Whether a file that begins with these lines has this format. The last line may be cut off."""

    @abstractmethod
    def read_rows(self, source: TraceSource) -> Iterator[Row | BadRow]:
        """Yield a `Row` or a `BadRow` for every request, holding as little of the file as possible."""

    def links_turns(self, lines: Sequence[bytes]) -> bool:
        """Whether a trace that begins with these lines says which requests are turns of one session."""
        return self.has_turns

    def records_think_times(self, lines: Sequence[bytes]) -> bool:
        """Whether turns record how long their client waited after an answer."""
        return self.has_think_times

    def block_size_in(self, lines: Sequence[bytes]) -> int | None:
        """The trace block size that the file itself states, if any."""
        return None


trace_formats: Registry[type[TraceFormat]] = Registry("trace format", "kvledger.trace_formats")


def recognise(path: Path, name: str | None) -> tuple[TraceFormat, list[bytes]]:
    """The named format, or the format that the content shows, and the file's first lines.

    Raises:
        InputError: there is no such format, or the file has none of the formats.
    """
    wanted = None if name is None else trace_formats.get(name)(name)
    numbered = first_lines(path, LINES_TO_DETECT, BYTES_TO_DETECT)
    if not numbered:
        raise InputError(f"{path}: the file is empty; a trace holds one request a line")
    place, first_line = numbered[0]
    lines = [line for _, line in numbered]
    shown_line = first_line[:80].decode("utf-8", "replace")
    if wanted is not None:
        if wanted.needs_header and not wanted.matches(lines):
            raise InputError(
                f"{path}:{place}: is not the header of {wanted.title} ({wanted.first_line}); it reads {shown_line!r}"
            )
        return wanted, lines
    formats = [trace_formats.get(each)(each) for each in trace_formats.names()]
    for each in sorted(formats, key=lambda each: each.is_asked_last):
        if each.matches(lines):
            return each, lines
    known = "; ".join(f"{each.name}: {each.first_line}" for each in formats)
    raise InputError(f"{path}:{place}: no known trace format holds a line such as {shown_line!r}. Known lines: {known}")
