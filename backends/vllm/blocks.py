"""Block ids in the shape that vLLM's scheduler passes around."""

from collections.abc import Sequence
from typing import Any

from ...core.allocator.prefix_cache import PrefixMatch
from .names import KVCacheBlocks


class LedgerBlocks(KVCacheBlocks):
    """Block ids by group; `KVCacheBlock` objects are made only for those who ask for them.

    Attributes:
        ids: for each group, block ids by logical index.
        match: the lookup that found them, for `allocate_slots`; None if they are of no lookup.
    """

    def __init__(self, ids: Sequence[Sequence[int]], objects: "BlockObjects", match: PrefixMatch | None = None) -> None:
        self.ids = ids
        self.match = match
        self._objects = objects

    @property
    def blocks(self) -> tuple[list[Any], ...]:
        """The blocks as vLLM's objects."""
        return tuple([[self._objects[block] for block in group] for group in self.ids])

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Return new lists of ids; None if `allow_none` and every group is empty."""
        groups = self.ids if group_ids is None else [self.ids[group] for group in group_ids]
        if allow_none and not any(groups):
            return None
        return tuple([list(group) for group in groups])

    def new_empty(self) -> "LedgerBlocks":
        """Return no blocks of the same groups."""
        return LedgerBlocks(((),) * len(self.ids), self._objects)


class BlockObjects(dict[int, Any]):
    """Block id -> the `KVCacheBlock` that stands for it, made on first use."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def __missing__(self, block: int) -> Any:
        made = self[block] = self._make(block, is_null=block == 0)
        return made
