"""A trace in a file: recognise the format, check every row, keep the window, count what was left out."""

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from ...core.errors import InputError
from .azure import AZURE
from .bad_rows import BadRow, RowError
from .block_size_fit import block_sizes_that_fit, suggest_block_size
from .lines import read_lines
from .mooncake import MOONCAKE
from .single_parent import SingleParentCheck
from .trace import SkippedRows, TraceInfo, TraceRequest, Window
from .trace_format import Row, TraceFormat
from .window import check_window, requests_in_window

FORMATS: dict[str, TraceFormat] = {each.name: each for each in (MOONCAKE, AZURE)}
ON_BAD_ROW = ("refuse", "skip")
# How many rows are looked at to suggest a trace block size after one row contradicts the present one.
ROWS_TO_FIT = 10_000
# The first rows may be the bad ones, so the format is looked for in more than one.
LINES_TO_DETECT = 20


def open_trace(
    path: str | Path,
    *,
    format: str | None = None,
    trace_block_size: int | None = None,
    on_bad_row: str = "refuse",
    skip_first: int = 0,
    limit: int | None = None,
    rate_scale: float = 1.0,
) -> "TraceFile":
    """Open a trace file; rows are read and checked when it is iterated.

    `format` is one of `FORMATS`, or None to go by the content. `trace_block_size` (tokens a hash id stands for) is the
    format's own unless given. `on_bad_row` is "refuse" (an error names file, line and field) or "skip" (left out and
    counted by reason). The window is `limit` requests after the first `skip_first`; `rate_scale` 2.0 halves the time
    between arrivals. Raises `InputError` for a file or an option that cannot be used.
    """
    path = Path(path)
    if on_bad_row not in ON_BAD_ROW:
        raise InputError(f"--on-bad-row is {on_bad_row!r}; it must be one of {', '.join(ON_BAD_ROW)}")
    if trace_block_size is not None and trace_block_size < 1:
        raise InputError(f"--trace-block-size is {trace_block_size}; it must be 1 token or more")
    check_window(skip_first, limit, rate_scale)
    trace_format = _format_of(path, format)
    if trace_format.trace_block_size is None and trace_block_size is not None:
        raise InputError(
            f"{path}: --trace-block-size {trace_block_size} was given, but {trace_format.title} carries no hash ids "
            "for it to apply to; leave the option out"
        )
    return TraceFile(path, trace_format, trace_block_size, on_bad_row, skip_first, limit, rate_scale)


class TraceFile:
    """A `Trace` read from a file; see `open_trace`."""

    def __init__(
        self,
        path: Path,
        trace_format: TraceFormat,
        trace_block_size: int | None,
        on_bad_row: str,
        skip_first: int,
        limit: int | None,
        rate_scale: float,
    ) -> None:
        self._path = path
        self._format = trace_format
        self._given_block_size = trace_block_size
        self._skips_bad_rows = on_bad_row == "skip"
        self._skip_first = skip_first
        self._limit = limit
        self._rate_scale = rate_scale
        self.info = self._empty_info()

    def __iter__(self) -> Iterator[TraceRequest]:
        """The requests of the window. Raises `InputError` at the first bad row unless bad rows are skipped."""
        self.info = info = self._empty_info()
        yield from requests_in_window(self._usable_rows(info), info, self._format.units_per_second)
        self._refuse_an_empty_window(info)

    def _usable_rows(self, info: TraceInfo) -> Iterator[Row]:
        """Rows that pass every check; the others end the pass or are counted in `info`."""
        parents = SingleParentCheck()
        latest: int | float = -math.inf
        for row in self._rows(info):
            if isinstance(row, BadRow):
                self._bad_row(info, row)
                continue
            try:
                self._check_prompt(row)
                if row[1] < latest:
                    raise RowError(
                        "out_of_order",
                        f"is earlier than the row before it (by {(latest - row[1]) / self._format.units_per_second:g} "
                        "s); a trace must be in order of arrival",
                        "timestamp",
                    )
                if row[4] is not None:
                    parents.add(row[4])
            except RowError as error:
                self._bad_row(info, error.at(row[0]))
                continue
            latest = row[1]
            yield row

    def _rows(self, info: TraceInfo) -> Iterator[Row | BadRow]:
        return self._format.read_rows(read_lines(self._path), info.unused_fields)

    def _check_prompt(self, row: Row) -> None:
        """A prompt has tokens, and as many ids as blocks (field report G01)."""
        _, _, input_length, _, hash_ids = row
        if input_length == 0:
            raise RowError("empty_prompt", "is 0: there is no prompt to serve", "input_length")
        block_size = self.info.trace_block_size
        if hash_ids is None or block_size is None or len(hash_ids) == -(-input_length // block_size):
            return
        raise RowError(
            "hash_ids_mismatch",
            f"has {len(hash_ids)} ids for an input_length of {input_length:,}, but blocks of {block_size} "
            f"({self.info.trace_block_size_source}) make {-(-input_length // block_size)}; this line fits "
            f"{block_sizes_that_fit(input_length, len(hash_ids))}",
            "hash_ids",
        )

    def _bad_row(self, info: TraceInfo, row: BadRow) -> None:
        """Count it, or end the pass with the place, the fault and the way out."""
        field = f" field '{row.field}'" if row.field else ""
        message = f"{self._path}:{row.place}:{field} {row.message}"
        if not self._skips_bad_rows:
            way_out = "Mend the row, or leave such rows out and count them with --on-bad-row skip."
            if row.reason == "hash_ids_mismatch":
                rows = (each for each in self._rows(info) if not isinstance(each, BadRow))
                lengths = ((each[2], len(each[4])) for each in rows if each[4] is not None)
                way_out = f"{suggest_block_size(lengths, ROWS_TO_FIT)} {way_out}"
            raise InputError(f"{message}. {way_out}")
        if row.reason in info.rows_skipped:
            info.rows_skipped[row.reason].num_rows += 1
        else:
            info.rows_skipped[row.reason] = SkippedRows(1, row.place, message)

    def _refuse_an_empty_window(self, info: TraceInfo) -> None:
        """A trace that was read to its end and gave nothing is an error, not an answer of zero."""
        if info.num_requests:
            return
        if info.num_rows_read:
            raise InputError(
                f"{self._path}: --skip-first {self._skip_first:,} leaves nothing: the trace holds "
                f"{info.num_rows_read:,} requests"
            )
        if info.rows_skipped:
            first = next(iter(info.rows_skipped.values()))
            raise InputError(
                f"{self._path}: every one of its {info.num_rows_skipped:,} rows is bad; the first: "
                f"{first.first_message}"
            )
        raise InputError(f"{self._path}: holds no requests, only a header")

    def _empty_info(self) -> TraceInfo:
        own = self._format.trace_block_size
        given = self._given_block_size
        return TraceInfo(
            name=self._path.name,
            path=str(self._path),
            format=self._format.name,
            timestamp_unit=self._format.timestamp_unit,
            trace_block_size=own if given is None else given,
            trace_block_size_source=None
            if own is None
            else (f"{self._format.title}'s own" if given is None else "given"),
            rate_scale=self._rate_scale,
            window=Window(self._skip_first, self._limit),
        )


def _format_of(path: Path, name: str | None) -> TraceFormat:
    """The format named, or the one that the first line shows; a file in no known format is refused."""
    if name is not None and name not in FORMATS:
        raise InputError(f"--format is {name!r}; the formats are {', '.join(FORMATS)}")
    lines = list(islice(read_lines(path), LINES_TO_DETECT))
    if not lines:
        raise InputError(f"{path}: the file is empty; a trace holds one request a line")
    place, first_line = lines[0]
    shown_line = first_line[:80].decode("utf-8", "replace")
    if name is not None:
        wanted = FORMATS[name]
        if wanted.needs_header and not wanted.matches(first_line):
            raise InputError(
                f"{path}:{place}: is not the header of {wanted.title} ({wanted.first_line}); it reads {shown_line!r}"
            )
        return wanted
    for _, line in lines:
        for each in FORMATS.values():
            if each.matches(line) and (line == first_line or not each.needs_header):
                return each
    known = "; ".join(f"{each.name}: {each.first_line}" for each in FORMATS.values())
    raise InputError(f"{path}:{place}: no known trace format holds a line such as {shown_line!r}. Known lines: {known}")
