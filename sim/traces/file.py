"""Open a trace: find its format, check every row, cut the window, count the rows that were skipped."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from ...core.errors import InputError
from . import formats as formats
from .checks import RowChecks, suggest_block_size
from .format import TraceFormat, TraceSource, recognise, trace_formats
from .rows import BadRow, Row, RowTrace, check_window
from .text import HOW_TO_NAME_ONE, Tokenizer, open_tokenizer
from .trace import UNITS_PER_SECOND, SkippedRows, TraceInfo, Window

__all__ = ["TraceFile", "open_trace", "trace_formats"]

ON_BAD_ROW = ("refuse", "skip")
# Rows that are read to suggest a trace block size after one row contradicts the present one.
ROWS_TO_FIT = 10_000


@attrs.frozen
class OpenOptions:
    """The options of `open_trace`; None: not given. Raises `InputError` for a value out of range."""

    timestamp_unit: str | None
    trace_block_size: int | None
    tokenizer: str | None
    request_rate: float | None
    seed: int | None
    on_bad_row: str
    skip_first: int
    limit: int | None
    rate_scale: float

    def __attrs_post_init__(self) -> None:
        if self.on_bad_row not in ON_BAD_ROW:
            raise InputError(f"--on-bad-row is {self.on_bad_row!r}; it must be one of {', '.join(ON_BAD_ROW)}")
        if self.trace_block_size is not None and self.trace_block_size < 1:
            raise InputError(f"--trace-block-size is {self.trace_block_size}; it must be 1 token or more")
        if self.timestamp_unit is not None and self.timestamp_unit not in UNITS_PER_SECOND:
            raise InputError(f"--timestamp-unit is {self.timestamp_unit!r}; it is one of {', '.join(UNITS_PER_SECOND)}")
        if self.request_rate is not None and not (math.isfinite(self.request_rate) and self.request_rate > 0):
            raise InputError(f"--request-rate is {self.request_rate}; it must be a number of arrivals a second above 0")
        check_window(self.skip_first, self.limit, self.rate_scale)

    def check_against(self, trace_format: TraceFormat, path: Path) -> None:
        """Raise `InputError` for an option without effect on this format, and for one that it needs."""
        title, unit = trace_format.title, trace_format.timestamp_unit
        rate = None if self.request_rate is None else f"{self.request_rate:g}"
        for option, value, has_effect, reason in (
            ("trace-block-size", self.trace_block_size, trace_format.block_size_is_settable, "carries no hash ids"),
            ("timestamp-unit", self.timestamp_unit, trace_format.unit_is_settable, f"times are {unit}"),
            ("tokenizer", self.tokenizer, trace_format.text_block_size is not None, "carries token counts"),
            ("request-rate", rate, trace_format.arrivals_unless_given, "records arrivals (--rate-scale scales them)"),
        ):
            if value is not None and not has_effect:
                raise InputError(f"{path}: --{option} {value} has no effect: {title} {reason}; leave it out")
        if self.tokenizer is None and trace_format.needs_tokenizer:
            raise InputError(f"{path}: {title} holds text and no token counts; {HOW_TO_NAME_ONE}")
        if self.seed is not None and self.request_rate is None:
            raise InputError(
                f"--seed {self.seed} has no effect on a trace file"
                + (" without --request-rate" if trace_format.arrivals_unless_given else "")
                + "; leave it out"
            )

    def block_size(self, trace_format: TraceFormat, first_lines: Sequence[bytes]) -> tuple[int | None, str | None]:
        """Tokens that one hash id represents, and who chose that number."""
        if self.trace_block_size is not None:
            return self.trace_block_size, "given"
        if trace_format.trace_block_size is not None:
            return trace_format.trace_block_size, f"{trace_format.title}'s own"
        stated = trace_format.block_size_in(first_lines)
        if stated is not None:
            return stated, "stated in the file"
        if trace_format.text_block_size is not None and self.tokenizer is not None:
            return trace_format.text_block_size, "chosen for text"
        return None, None


def files_of(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Replace each folder in `paths` by its .json and .jsonl files; also return the names of the other files in it.

    Raises:
        InputError: a folder has no such files.
    """
    files: list[Path] = []
    left_out: list[str] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        found = sorted(each for each in path.iterdir() if not each.name.startswith("."))
        chosen = [each for each in found if each.is_file() and {".json", ".jsonl"} & set(each.suffixes)]
        if not chosen:
            raise InputError(f"{path}: Is a directory, and no .json or .jsonl file (plain or .gz) is in it")
        files.extend(chosen)
        left_out.extend(str(each) for each in found if each not in chosen)
    return files, left_out


def open_trace(
    path: str | Path | Sequence[str | Path],
    *,
    format: str | None = None,
    timestamp_unit: str | None = None,
    trace_block_size: int | None = None,
    tokenizer: str | None = None,
    request_rate: float | None = None,
    seed: int | None = None,
    on_bad_row: str = "refuse",
    skip_first: int = 0,
    limit: int | None = None,
    rate_scale: float = 1.0,
) -> "TraceFile":
    """Open a trace: a file, or several files or a folder if the format makes one trace of them.

    Rows are read and checked during iteration.

    Args:
        path: the file, files or folder.
        format: a name in `trace_formats`; None: detected from the content.
        timestamp_unit: s, ms, us or ns, if the file's unit is not the format's.
        trace_block_size: tokens that a hash id represents; the format's own unless given.
        tokenizer: counts tokens if the file holds text (see `open_tokenizer`).
        request_rate: arrivals per second (a Poisson process) if the file records no arrivals.
        seed: of that process; 0 unless given.
        on_bad_row: "refuse" (an error names file, line and field) or "skip" (left out and counted by reason).
        skip_first: requests to leave out at the start.
        limit: requests to use after those at most.
        rate_scale: 2.0 halves the time between arrivals, and think times too.

    Raises:
        InputError: a file or an option cannot be used, or an option has no effect on the format.
    """
    options = OpenOptions(
        timestamp_unit, trace_block_size, tokenizer, request_rate, seed, on_bad_row, skip_first, limit, rate_scale
    )
    given = [Path(path)] if isinstance(path, str | Path) else [Path(each) for each in path]
    if not given:
        raise InputError("no trace file was given")
    files, left_out = files_of(given)
    trace_format, first_lines = recognise(files[0], format)
    if len(files) > 1 and not trace_format.takes_many_files:
        raise InputError(
            f"{given[0]}: {trace_format.title} is one file a trace; {len(files):,} were given (several can be "
            "mixed as workloads)"
        )
    options.check_against(trace_format, files[0])
    block_size, source = options.block_size(trace_format, first_lines)
    reader = None if tokenizer is None else open_tokenizer(tokenizer)
    arrivals = trace_format.arrivals_unless_given
    if request_rate is not None:
        arrivals = (
            f"the file records no arrivals: {request_rate:g} a second come by a Poisson process, seed {seed or 0}"
        )
    known = TraceInfo(
        name=given[0].name if len(given) == 1 else f"{len(given):,} files",
        path=str(given[0]) if len(given) == 1 else f"{given[0]} and {len(given) - 1:,} more",
        format=trace_format.name,
        timestamp_unit=timestamp_unit or trace_format.timestamp_unit,
        trace_block_size=block_size,
        trace_block_size_source=source,
        rate_scale=rate_scale,
        window=Window(skip_first, limit),
        full_blocks_only=trace_format.full_blocks_only,
        links_turns=trace_format.links_turns(first_lines),
        records_think_times=trace_format.records_think_times(first_lines),
        arrivals=arrivals,
        tokenizer=None if reader is None else reader.name,
    )
    if left_out:
        known.remark(f"files of the folder were not read: {', '.join(left_out)}", len(left_out))
    return TraceFile(known, files, trace_format, options, reader)


class TraceFile(RowTrace):
    """A `Trace` read from files; see `open_trace`. A pass raises `InputError` at a bad row unless those are skipped."""

    def __init__(
        self,
        known: TraceInfo,
        files: Sequence[Path],
        trace_format: TraceFormat,
        options: OpenOptions,
        tokenizer: Tokenizer | None,
    ) -> None:
        units = trace_format.units_per_second
        if options.timestamp_unit is not None and not trace_format.converts_units:
            units = UNITS_PER_SECOND[options.timestamp_unit]
        super().__init__(known, self._usable_rows, units)
        self._files = tuple(files)
        self._format = trace_format
        self._options = options
        self._tokenizer = tokenizer

    def _usable_rows(self, info: TraceInfo) -> Iterator[Row]:
        """Rows that pass every check; a bad row ends the pass or is counted in `info`."""
        rows = self._read(info)
        if not self._format.checks_its_rows:
            limit = self._options.limit
            num_wanted = math.inf if limit is None else self._options.skip_first + limit
            rows = RowChecks(self._format, info, self._units_per_second).checked(rows, num_wanted)
        for row in rows:
            if isinstance(row, BadRow):
                self._bad_row(info, row)
            else:
                yield row

    def _read(self, info: TraceInfo) -> Iterator[Row | BadRow]:
        options, units = self._options, self._units_per_second
        rate, seed = options.request_rate, options.seed or 0
        source = TraceSource(self._files, info, units, options.timestamp_unit, self._tokenizer, rate, seed)
        return self._format.read_rows(source)

    def _bad_row(self, info: TraceInfo, row: BadRow) -> None:
        """Count the row, or raise `InputError` with its place, the fault and what to do."""
        field = f" field '{row.field}'" if row.field else ""
        message = f"{row.where or f'{info.path}:{row.place}'}:{field} {row.message}"
        if self._options.on_bad_row == "refuse":
            way_out = "Mend the row, or leave such rows out and count them with --on-bad-row skip."
            if row.reason == "hash_ids_mismatch" and not self._format.full_blocks_only:
                rows = (each for each in self._read(self.fresh_info()) if not isinstance(each, BadRow))
                lengths = ((each[2], len(each[4])) for each in rows if each[4] is not None)
                way_out = f"{suggest_block_size(lengths, ROWS_TO_FIT)} {way_out}"
            raise InputError(f"{message}. {way_out}")
        if row.reason in info.rows_skipped:
            info.rows_skipped[row.reason].num_rows += 1
        else:
            info.rows_skipped[row.reason] = SkippedRows(1, row.place, message)
