"""The checks that every row of every format has to pass: a prompt, as many ids as blocks, one parent each, in order."""

import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice

import attrs
import numpy as np

from ...core.errors import InputError
from .bad_rows import BadRow, RowError
from .format import Row, TraceFormat
from .trace import TraceInfo

# Which trace block sizes explain a number of ids: the inverse of `num_ids = ceil(input_length / trace_block_size)`.


@attrs.frozen
class BlockSizes:
    """A range of block sizes in tokens, both ends included; `largest` None means no upper end."""

    smallest: int
    largest: int | None

    @property
    def is_empty(self) -> bool:
        """Whether no size at all fits."""
        return self.largest is not None and self.largest < self.smallest

    def __str__(self) -> str:
        if self.is_empty:
            return "no trace block size at all"
        if self.largest is None:
            return f"trace block sizes of {self.smallest} or more"
        if self.largest == self.smallest:
            return f"only a trace block size of {self.smallest}"
        return f"trace block sizes {self.smallest} to {self.largest}"

    def __and__(self, other: "BlockSizes") -> "BlockSizes":
        ends = [each.largest for each in (self, other) if each.largest is not None]
        return BlockSizes(max(self.smallest, other.smallest), min(ends, default=None))

    @property
    def likeliest(self) -> int:
        """The largest power of two in the range (nearly every block size is one), else the smallest size."""
        if self.largest is None:
            return 1 << (self.smallest - 1).bit_length()
        power = 1 << (self.largest.bit_length() - 1)
        return power if power >= self.smallest else self.smallest


ANY_SIZE = BlockSizes(1, None)


def block_sizes_that_fit(input_length: int, num_ids: int) -> BlockSizes:
    """Sizes s with ceil(input_length / s) == num_ids; 20 tokens under 2 ids fit 10 to 19 (field report G01)."""
    if num_ids == 0:
        return BlockSizes(1, 0)
    smallest = -(-input_length // num_ids)
    largest = None if num_ids == 1 else -(-input_length // (num_ids - 1)) - 1
    return BlockSizes(smallest, largest)


def suggest_block_size(lengths: Iterable[tuple[int, int]], at_most: int) -> str:
    """A sentence for an error message from the first `at_most` pairs of (input_length, num_ids)."""
    fits, num_rows = ANY_SIZE, 0
    for input_length, num_ids in islice(lengths, at_most):
        fits &= block_sizes_that_fit(input_length, num_ids)
        num_rows += 1
    if fits.is_empty:
        return f"No one trace block size fits the first {num_rows:,} rows."
    rows = "one row fits" if num_rows == 1 else f"first {num_rows:,} rows fit"
    return f"The {rows} {fits}: try --trace-block-size {fits.likeliest}."


# Every block id has one parent: the same id is the same tokens after the same prefix, everywhere in a trace.

_UNSEEN = -2
_NO_PARENT = -1


class SingleParentCheck:
    """Remembers the parent of every id seen: 8 bytes per id where ids are dense, a dict entry where they are sparse.

    An id under two parents would be two different contents under one name, and every hit rate computed from it would
    be wrong (field report G01: same id, same tokens, everywhere).
    """

    def __init__(self, field: str = "hash_ids") -> None:
        self._field = field
        self._dense = array("q")
        self._sparse: dict[int, int] = {}
        self._num_seen = 0

    def add(self, hash_ids: Sequence[int]) -> None:
        """Record one request's ids, or raise `RowError` and record none of them."""
        if not hash_ids:
            return
        self._make_room(max(hash_ids))
        parents = [_NO_PARENT, *hash_ids[:-1]]
        known = self._known_parents(hash_ids)
        # Whatever follows an id that was never seen was never seen either, or it would have another parent here.
        num_seen = len(known) - known.count(_UNSEEN)
        fresh = hash_ids[num_seen:]
        if known[:num_seen] != parents[:num_seen] or len(set(fresh)) < len(fresh):
            self._check_each(hash_ids, known)
        self._remember(fresh, parents[num_seen:])

    def add_all(self, rows: Sequence[Sequence[int]]) -> bool:
        """Record the ids of several requests at once and say True, or record none of them and say False.

        False means that `add` has to take them one by one: one of them may be refused, or ids are sparse.
        """
        rows = [row for row in rows if row]
        if not rows:
            return True
        ids = np.frombuffer(array("q", list(chain.from_iterable(rows))), dtype=np.int64)
        largest = int(ids.max())
        self._make_room(largest)
        if self._sparse or largest >= len(self._dense):
            return False
        parents = np.concatenate(([_NO_PARENT], ids[:-1]))
        parents[[0, *accumulate(map(len, rows[:-1]))]] = _NO_PARENT
        known = np.frombuffer(self._dense, dtype=np.int64)
        is_fresh = known[ids] == _UNSEEN
        fresh = ids[is_fresh]
        # An id that stands at several places keeps what was written last: places that read back themselves count ids,
        places = np.arange(len(fresh))
        known[fresh] = places
        num_fresh = np.count_nonzero(known[fresh] == places)
        # and one with two parents among these rows differs from the parent at one of its places.
        known[fresh] = parents[is_fresh]
        if not np.array_equal(known[ids], parents):
            known[fresh] = _UNSEEN
            return False
        self._num_seen += int(num_fresh)
        return True

    def _known_parents(self, hash_ids: Sequence[int]) -> list[int]:
        """The parent that each was first seen under."""
        dense, size, sparse = self._dense, len(self._dense), self._sparse
        if not sparse and max(hash_ids) < size:
            return list(map(dense.__getitem__, hash_ids))
        known = [dense[hash_id] if hash_id < size else _UNSEEN for hash_id in hash_ids]
        return [
            sparse.get(hash_id, _UNSEEN) if parent == _UNSEEN else parent
            for hash_id, parent in zip(hash_ids, known, strict=True)
        ]

    def _remember(self, hash_ids: Sequence[int], parents: Sequence[int]) -> None:
        dense, size = self._dense, len(self._dense)
        self._num_seen += len(hash_ids)
        if hash_ids and max(hash_ids) < size:
            deque(map(dense.__setitem__, hash_ids, parents), maxlen=0)
            return
        for hash_id, parent in zip(hash_ids, parents, strict=True):
            if hash_id < size:
                dense[hash_id] = parent
            else:
                self._sparse[hash_id] = parent

    def _check_each(self, hash_ids: Sequence[int], known: Sequence[int]) -> None:
        """Raise `RowError` at the first id that follows another one than before, on an earlier line or on this one."""
        earlier: dict[int, int] = {}
        parent = _NO_PARENT
        for position, (hash_id, known_parent) in enumerate(zip(hash_ids, known, strict=True)):
            if known_parent == _UNSEEN:
                known_parent = earlier.setdefault(hash_id, parent)
            if known_parent != parent:
                raise RowError(
                    "two_parents",
                    f"id {hash_id} follows {_named(parent)} here and {_named(known_parent)} on an earlier line or "
                    "position; one id must stand for one content after one prefix",
                    f"{self._field}[{position}]",
                )
            parent = hash_id

    def _make_room(self, largest: int) -> None:
        """Grow the dense table to hold `largest`, unless ids are so sparse that it would be mostly empty."""
        size = len(self._dense)
        if largest < size:
            return
        if largest < 1024 + 8 * (self._num_seen + 1):
            self._dense.extend(array("q", [_UNSEEN]) * (largest + 1 + largest // 4 - size))


def _named(parent: int) -> str:
    return "no block (it begins a prompt)" if parent == _NO_PARENT else f"id {parent}"


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
