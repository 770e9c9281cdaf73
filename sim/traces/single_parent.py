"""Every block id has one parent: the same id is the same tokens after the same prefix, everywhere in a trace."""

from array import array
from collections.abc import Sequence

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
        if hash_ids:
            self._make_room(max(hash_ids))
        dense, size = self._dense, len(self._dense)
        sparse = self._sparse
        parent = _NO_PARENT
        fresh: list[int] = []
        for position, hash_id in enumerate(hash_ids):
            known = dense[hash_id] if hash_id < size else _UNSEEN
            if known == _UNSEEN and sparse:
                known = sparse.get(hash_id, _UNSEEN)
            if known == _UNSEEN:
                if hash_id < size:
                    dense[hash_id] = parent
                else:
                    sparse[hash_id] = parent
                fresh.append(hash_id)
            elif known != parent:
                self._forget(fresh)
                raise RowError(
                    "two_parents",
                    f"id {hash_id} follows {_named(parent)} here and {_named(known)} on an earlier line or position; "
                    "one id must stand for one content after one prefix",
                    f"{self._field}[{position}]",
                )
            parent = hash_id
        self._num_seen += len(fresh)

    def _make_room(self, largest: int) -> None:
        """Grow the dense table to hold `largest`, unless ids are so sparse that it would be mostly empty."""
        size = len(self._dense)
        if largest < size:
            return
        if largest < 1024 + 8 * (self._num_seen + 1):
            self._dense.extend([_UNSEEN] * (largest + 1 + largest // 4 - size))

    def _forget(self, fresh: list[int]) -> None:
        for hash_id in fresh:
            if hash_id in self._sparse:
                del self._sparse[hash_id]
            else:
                self._dense[hash_id] = _UNSEEN


def _named(parent: int) -> str:
    return "no block (it begins a prompt)" if parent == _NO_PARENT else f"id {parent}"
