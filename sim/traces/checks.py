"""The checks that every row of every format must pass: a prompt, one id per block, one parent per id, in order."""

import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice

import numpy as np

from ...core.errors import InputError
from .format import TraceFormat
from .rows import BadRow, Row, RowError
from .trace import TraceInfo

# Which trace block sizes explain a number of ids: the inverse of `num_ids = ceil(input_length / trace_block_size)`.


def _sizes_that_fit(input_length: int, num_ids: int) -> tuple[float, float]:
    """Smallest and largest size s with ceil(input_length / s) == num_ids; 20 tokens, 2 ids: 10, 19 (report G01)."""
    if num_ids == 0:
        return 1, 0
    return -(-input_length // num_ids), math.inf if num_ids == 1 else -(-input_length // (num_ids - 1)) - 1


def _sizes(smallest: float, largest: float) -> str:
    if largest < smallest:
        return "no trace block size at all"
    if largest == math.inf:
        return f"trace block sizes of {smallest} or more"
    if largest == smallest:
        return f"only a trace block size of {smallest}"
    return f"trace block sizes {smallest} to {largest}"


def suggest_block_size(lengths: Iterable[tuple[int, int]], at_most: int) -> str:
    """A sentence for an error message from the first `at_most` pairs of (input_length, num_ids)."""
    ends = [_sizes_that_fit(*each) for each in islice(lengths, at_most)]
    smallest, largest = max(end[0] for end in ends), min(end[1] for end in ends)
    if largest < smallest:
        return f"No one trace block size fits the first {len(ends):,} rows."
    # Nearly every block size is a power of two.
    power = 1 << (int(smallest - 1).bit_length() if largest == math.inf else int(largest).bit_length() - 1)
    likeliest = power if power >= smallest else smallest
    rows = "one row fits" if len(ends) == 1 else f"first {len(ends):,} rows fit"
    return f"The {rows} {_sizes(smallest, largest)}: try --trace-block-size {likeliest}."


# Every block id has one parent: the same id is the same tokens after the same prefix, everywhere in a trace.

UNSEEN = -2
NO_PARENT = -1


def make_room(parents: "array[int]", largest: int, num_seen: int) -> None:
    """Grow a dense table of parents to hold id `largest`, unless ids are so sparse that it would be mostly empty."""
    size = len(parents)
    if size <= largest < 1024 + 8 * (num_seen + 1):
        parents.extend(array("q", [UNSEEN]) * (largest + 1 + largest // 4 - size))


class SingleParentCheck:
    """Remembers the parent of every id seen: 8 bytes per id if ids are dense, a dict entry if they are sparse.

    An id with two parents would be two contents under one name, and every hit rate computed from it would be wrong
    (field report G01: same id, same tokens, everywhere).
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
        make_room(self._dense, max(hash_ids), self._num_seen)
        parents = [NO_PARENT, *hash_ids[:-1]]
        known = self._known_parents(hash_ids)
        # An id that follows an unseen id is unseen as well, or it would have another parent here.
        num_seen = len(known) - known.count(UNSEEN)
        fresh = hash_ids[num_seen:]
        if known[:num_seen] != parents[:num_seen] or len(set(fresh)) < len(fresh):
            self._check_each(hash_ids, known)
        self._remember(fresh, parents[num_seen:])

    def add_all(self, rows: Sequence[Sequence[int]]) -> bool:
        """Record the ids of several requests at once and return True, or record none of them and return False.

        After False, `add` has to take the requests one by one: one of them may be bad, or ids are sparse.
        """
        rows = [row for row in rows if row]
        if not rows:
            return True
        ids = np.frombuffer(array("q", list(chain.from_iterable(rows))), dtype=np.int64)
        largest = int(ids.max())
        make_room(self._dense, largest, self._num_seen)
        if self._sparse or largest >= len(self._dense):
            return False
        parents = np.concatenate(([NO_PARENT], ids[:-1]))
        parents[[0, *accumulate(map(len, rows[:-1]))]] = NO_PARENT
        known = np.frombuffer(self._dense, dtype=np.int64)
        is_fresh = known[ids] == UNSEEN
        fresh = ids[is_fresh]
        # An id at several places keeps the last value written, so the places that read back themselves count the ids,
        places = np.arange(len(fresh))
        known[fresh] = places
        num_fresh = np.count_nonzero(known[fresh] == places)
        # and an id with two parents in these rows differs from the parent at one of its places.
        known[fresh] = parents[is_fresh]
        if not np.array_equal(known[ids], parents):
            known[fresh] = UNSEEN
            return False
        self._num_seen += int(num_fresh)
        return True

    def _known_parents(self, hash_ids: Sequence[int]) -> list[int]:
        """The first parent of each id."""
        dense, size, sparse = self._dense, len(self._dense), self._sparse
        if not sparse and max(hash_ids) < size:
            return list(map(dense.__getitem__, hash_ids))
        known = [dense[hash_id] if hash_id < size else UNSEEN for hash_id in hash_ids]
        return [
            sparse.get(hash_id, UNSEEN) if parent == UNSEEN else parent
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
        """Raise `RowError` at the first id whose parent differs from the one on an earlier line or position."""
        earlier: dict[int, int] = {}
        parent = NO_PARENT
        for position, (hash_id, known_parent) in enumerate(zip(hash_ids, known, strict=True)):
            if known_parent == UNSEEN:
                known_parent = earlier.setdefault(hash_id, parent)
            if known_parent != parent:
                raise RowError(
                    "two_parents",
                    f"id {hash_id} follows {_named(parent)} here and {_named(known_parent)} on an earlier line or "
                    "position; one id must stand for one content after one prefix",
                    f"{self._field}[{position}]",
                )
            parent = hash_id


def _named(parent: int) -> str:
    return "no block (it begins a prompt)" if parent == NO_PARENT else f"id {parent}"


# Rows and ids that are checked in one batch at most.
ROWS_AND_IDS_AT_ONCE = 4_096


class RowChecks:
    """Checks rows one after the other; a bad row does not affect the checks of later rows."""

    def __init__(self, trace_format: TraceFormat, info: TraceInfo, units_per_second: int) -> None:
        self._info = info
        self._timestamp, self._input_length, self._hash_ids = trace_format.fields
        self._units_per_second = units_per_second
        self._parents = None if trace_format.has_one_parent_each else SingleParentCheck(self._hash_ids)
        self._latest: int | float = -math.inf

    def checked(self, rows: Iterable[Row | BadRow], num_wanted: float = math.inf) -> Iterator[Row | BadRow]:
        """The same rows in the same order, with a `BadRow` in place of each row that fails.

        Rows are checked in batches; a batch with a bad row is checked row by row. Rows after the first `num_wanted`
        are read only when they are needed.
        """
        for batch in _batches(rows, num_wanted):
            if self._all_pass(batch):
                yield from batch
            else:
                yield from map(self._checked, batch)

    def check(self, row: Row) -> None:
        """Raise `RowError`, with the format's own field name, if the row cannot be used."""
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
        """The row, or a `BadRow`."""
        if isinstance(row, BadRow):
            return row
        try:
            self.check(row)
        except RowError as error:
            return error.at(row[0])
        return row

    def _all_pass(self, batch: Sequence[Row | BadRow]) -> bool:
        """Whether every row passes `check`; if so all are recorded, else none."""
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
        """A prompt has tokens, and one id per block (field report G01)."""
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
        fits = "" if full_only else f"; this line fits {_sizes(*_sizes_that_fit(input_length, len(hash_ids)))}"
        raise RowError(
            "hash_ids_mismatch",
            f"has {len(hash_ids)} ids for an {self._input_length} of {input_length:,}, but {kind} of {block_size} "
            f"({self._info.trace_block_size_source}) make {expected}{fits}",
            self._hash_ids,
        )


def _batches(rows: Iterable[Row | BadRow], num_wanted: float) -> Iterator[list[Row | BadRow]]:
    """The rows in batches; one ends after the first `num_wanted` rows, and each later row is a batch of its own.

    Rows that were read before an error are yielded before the error is raised.
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
