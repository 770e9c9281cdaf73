"""Every block id has one parent: the same id is the same tokens after the same prefix, everywhere in a trace."""

from array import array
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np

from .bad_rows import RowError

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
