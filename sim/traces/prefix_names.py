"""Ids that name a content become ids that name a content after one prefix, which is what a prefix cache looks up."""

from array import array

from .bad_rows import RowError
from .trace import TraceInfo

_UNSEEN = -2
_NO_PARENT = -1
FIRST_NEW_NAME = 1 << 62


class PrefixNames:
    """Renames an id wherever it follows another prefix than where it was first seen.

    An id keeps its name after the prefix of its first occurrence, so a trace whose ids have one parent each comes out
    as it is. Costs 8 bytes an id where ids are dense, and a dict entry for each that is sparse or renamed.
    """

    def __init__(self, info: TraceInfo) -> None:
        self._info = info
        self._dense = array("q")
        self._sparse: dict[int, int] = {}
        self._num_seen = 0
        self._renamed: dict[tuple[int, int], int] = {}

    def renamed(self, hash_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The same ids, those that follow an unusual prefix under new names. `RowError` for ids from 2**62 on."""
        if hash_ids:
            largest = max(hash_ids)
            if largest >= FIRST_NEW_NAME:
                raise RowError("huge", f"holds {largest}; ids of this format are below 2**62", "hash_ids")
            self._make_room(largest)
        parent = _NO_PARENT
        names: list[int] | None = None
        for position, hash_id in enumerate(hash_ids):
            name = self._name_after(parent, hash_id)
            if name != hash_id:
                if names is None:
                    names = list(hash_ids[:position])
                names.append(name)
            elif names is not None:
                names.append(name)
            parent = name
        return hash_ids if names is None else tuple(names)

    def _name_after(self, parent: int, hash_id: int) -> int:
        dense = self._dense
        is_dense = hash_id < len(dense)
        known = dense[hash_id] if is_dense else _UNSEEN
        if known == _UNSEEN and self._sparse:
            known = self._sparse.get(hash_id, _UNSEEN)
        if known == parent:
            return hash_id
        if known == _UNSEEN:
            if is_dense:
                dense[hash_id] = parent
            else:
                self._sparse[hash_id] = parent
            self._num_seen += 1
            return hash_id
        key = (parent, hash_id)
        name = self._renamed.get(key)
        if name is None:
            name = self._renamed[key] = FIRST_NEW_NAME + len(self._renamed)
            self._info.remark("blocks have an id that was seen after another prefix; they are told apart")
        return name

    def _make_room(self, largest: int) -> None:
        """Grow the dense table to hold `largest`, unless ids are so sparse that it would be mostly empty."""
        size = len(self._dense)
        if largest >= size and largest < 1024 + 8 * (self._num_seen + 1):
            self._dense.extend([_UNSEEN] * (largest + 1 + largest // 4 - size))
