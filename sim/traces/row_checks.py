"""The checks that every row of every format has to pass: a prompt, as many ids as blocks, one parent each, in order."""

import math

from .bad_rows import RowError
from .block_size_fit import block_sizes_that_fit
from .single_parent import SingleParentCheck
from .trace import TraceInfo
from .trace_format import Row, TraceFormat


class RowChecks:
    """Checks rows one after the other; a row that fails leaves no trace in what later rows are checked against."""

    def __init__(self, trace_format: TraceFormat, info: TraceInfo, units_per_second: int) -> None:
        self._info = info
        self._timestamp, self._input_length, self._hash_ids = trace_format.fields
        self._units_per_second = units_per_second
        self._parents = None if trace_format.has_one_parent_each else SingleParentCheck(self._hash_ids)
        self._latest: int | float = -math.inf

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
