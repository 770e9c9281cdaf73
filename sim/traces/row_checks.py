"""The checks that every row of every format has to pass: a prompt, as many ids as blocks, one parent each, in order."""

import math
from collections.abc import Iterable, Iterator, Sequence

from ...core.errors import InputError
from .bad_rows import BadRow, RowError
from .block_size_fit import block_sizes_that_fit
from .single_parent import SingleParentCheck
from .trace import TraceInfo
from .trace_format import Row, TraceFormat

# Rows are checked together up to so many, an id counted like a row.
ROWS_AND_IDS_AT_ONCE = 4_096


class RowChecks:
    """Checks rows one after the other; a row that fails leaves no trace in what later rows are checked against."""

    def __init__(self, trace_format: TraceFormat, info: TraceInfo, units_per_second: int) -> None:
        self._info = info
        self._timestamp, self._input_length, self._hash_ids = trace_format.fields
        self._units_per_second = units_per_second
        self._parents = None if trace_format.has_one_parent_each else SingleParentCheck(self._hash_ids)
        self._latest: int | float = -math.inf

    def checked(self, rows: Iterable[Row | BadRow], num_wanted: float = math.inf) -> Iterator[Row | BadRow]:
        """The same rows in the same order, with a `BadRow` in the place of every one that fails.

        Rows are checked many at a time, and one by one where any of those is bad. Rows behind the first `num_wanted`
        are not read before they are asked for.
        """
        for batch in _batches(rows, num_wanted):
            if self._all_pass(batch):
                yield from batch
            else:
                yield from map(self._checked, batch)

    def check(self, row: Row) -> None:
        """Raise `RowError`, with the format's own name of the field, unless the row can be used."""
        when, hash_ids = row[1], row[4]
        self._check_prompt(row[2], hash_ids)
        if when < self._latest:
            raise RowError(
                "out_of_order",
                f"is earlier than the row before it (by {(self._latest - when) / self._units_per_second:g} s); a trace "
                "must be in order of arrival",
                self._timestamp,
            )
        if hash_ids is not None and self._parents is not None:
            self._parents.add(hash_ids)
        self._latest = when

    def _checked(self, row: Row | BadRow) -> Row | BadRow:
        """The row, or what is wrong with it."""
        if isinstance(row, BadRow):
            return row
        try:
            self.check(row)
        except RowError as error:
            return error.at(row[0])
        return row

    def _all_pass(self, batch: Sequence[Row | BadRow]) -> bool:
        """Whether `check` would take every row; if so they are recorded, else nothing is."""
        times: list[int | float] = [self._latest]
        prompts: list[tuple[int, ...]] = []
        for row in batch:
            if isinstance(row, BadRow):
                return False
            times.append(row[1])
            try:
                self._check_prompt(row[2], row[4])
            except RowError:
                return False
            if row[4] is not None:
                prompts.append(row[4])
        if times != sorted(times) or not (self._parents is None or self._parents.add_all(prompts)):
            return False
        self._latest = times[-1]
        return True

    def _check_prompt(self, input_length: int, hash_ids: tuple[int, ...] | None) -> None:
        """A prompt has tokens, and as many ids as blocks (field report G01)."""
        if input_length == 0:
            raise RowError("empty_prompt", "is 0: there is no prompt to serve", self._input_length)
        block_size = self._info.trace_block_size
        if hash_ids is None:
            return
        if block_size is None:
            raise RowError(
                "no_block_size",
                f"has {len(hash_ids)} ids, and nothing says how many tokens one stands for: give --trace-block-size",
                self._hash_ids,
            )
        full_only = self._info.full_blocks_only
        expected = input_length // block_size if full_only else -(-input_length // block_size)
        if len(hash_ids) == expected:
            return
        kind = "full blocks" if full_only else "blocks"
        fits = "" if full_only else f"; this line fits {block_sizes_that_fit(input_length, len(hash_ids))}"
        raise RowError(
            "hash_ids_mismatch",
            f"has {len(hash_ids)} ids for an {self._input_length} of {input_length:,}, but {kind} of {block_size} "
            f"({self._info.trace_block_size_source}) make {expected}{fits}",
            self._hash_ids,
        )


def _batches(rows: Iterable[Row | BadRow], num_wanted: float) -> Iterator[list[Row | BadRow]]:
    """The rows in groups; the first `num_wanted` end one, and each that follows them is one.

    What was read before an error is handed over before the error is raised.
    """
    batch: list[Row | BadRow] = []
    size = 0
    try:
        for num_read, row in enumerate(rows, start=1):
            batch.append(row)
            size += 1 if isinstance(row, BadRow) or row[4] is None else 1 + len(row[4])
            if size >= ROWS_AND_IDS_AT_ONCE or num_read >= num_wanted:
                yield batch
                batch, size = [], 0
    except InputError:
        yield batch
        raise
    yield batch
