"""A manager's state as the kit sees it: who holds which blocks, what is free, what can be found."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias

import attrs
import numpy as np
from kvledger.core import LedgerState
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int64]


def _ints(values: Any) -> IntArray:
    return np.asarray(values, dtype=np.int64)


def _maybe_ints(values: Any) -> IntArray | None:
    return None if values is None else _ints(values)


@attrs.frozen(eq=False, slots=False)
class AllocatorView:
    """A snapshot. What a manager cannot tell is None, and what depends on it is not checked.

    Attributes:
        num_blocks: blocks of the pool, a null block included.
        tables: request id -> for each group, its blocks by logical index (the null block where content is gone).
        free: unreferenced blocks, int64 `[num_free]`; the next one to be taken first if the manager has an order.
        null_block: the id that stands for no block; None if the manager has none.
        ref_cnt: int64 `[num_blocks]`, how many table entries hold each block.
        keyed: block -> (group, key) for every block that a lookup can find.
        found: (group, key) -> the blocks that carry the key, the one that a lookup returns first.
        num_placed: request id -> tokens that have slots.
        key_prefix: key -> the tokens up to the end of its block (or of a prompt that ends inside it), where keys can be
            read back.
    """

    num_blocks: int
    tables: Mapping[str, Sequence[Sequence[int]]]
    free: IntArray = attrs.field(converter=_ints)
    null_block: int | None = 0
    ref_cnt: IntArray | None = attrs.field(default=None, converter=_maybe_ints)
    keyed: Mapping[int, tuple[int, Hashable]] | None = None
    found: Mapping[tuple[int, Hashable], Sequence[int]] | None = None
    num_placed: Mapping[str, int] | None = None
    key_prefix: Callable[[Hashable], Sequence[int]] | None = None

    @property
    def num_null_blocks(self) -> int:
        """1, or 0 for a manager without a null block."""
        return int(self.null_block is not None)

    def end_of_key(self, block: int, default: int) -> int:
        """Count the tokens that the key of a block covers, from the start of its request on; `default` if unknown."""
        if self.keyed is None or self.key_prefix is None or block not in self.keyed:
            return default
        return len(self.key_prefix(self.keyed[block][1]))

    @cached_property
    def uses(self) -> IntArray:
        """How many table entries hold each block, the null block left out: int64 `[num_blocks]`."""
        tables = chain.from_iterable(self.tables.values())
        uses = np.bincount(_ints(list(chain.from_iterable(tables))), minlength=self.num_blocks)
        if self.null_block is not None:
            uses[self.null_block] = 0
        return uses

    def comparable(self) -> dict[str, Any]:
        """Everything in it, as values that compare by `==`."""
        return {
            "tables": {name: [list(table) for table in groups] for name, groups in self.tables.items()},
            "free": self.free.tolist(),
            "ref_cnt": None if self.ref_cnt is None else self.ref_cnt.tolist(),
            "keyed": None if self.keyed is None else dict(self.keyed),
            "found": None if self.found is None else {key: tuple(blocks) for key, blocks in self.found.items()},
            "num_placed": None if self.num_placed is None else dict(self.num_placed),
        }


def snapshot(view: AllocatorView, num_groups: int) -> AllocatorView:
    """A copy that stays as it is while the manager, whose own lists the view may hold, goes on.

    Raises:
        TypeError: `tables` is not one list of blocks for each group of each request, which is easily got wrong with
            one group.
    """
    tables: dict[str, list[list[int]]] = {}
    for name, groups in view.tables.items():
        if len(groups) != num_groups or not all(hasattr(table, "__len__") for table in groups):
            raise TypeError(
                f"view().tables[{name!r}] is {groups!r}, but a request has one table a group, for example "
                f"{[[1, 2]] * num_groups}"
            )
        tables[name] = [list(table) for table in groups]
    return attrs.evolve(
        view,
        tables=tables,
        free=view.free.copy(),
        ref_cnt=None if view.ref_cnt is None else view.ref_cnt.copy(),
        keyed=None if view.keyed is None else dict(view.keyed),
        found=None if view.found is None else {key: tuple(blocks) for key, blocks in view.found.items()},
        num_placed=None if view.num_placed is None else dict(view.num_placed),
    )


def view_of(state: LedgerState, key_prefix: Callable[[Hashable], Sequence[int]] | None = None) -> AllocatorView:
    """The view of a ledger. O(blocks + table entries)."""
    pool = state.pool
    groups = range(len(state.tables))
    return AllocatorView(
        num_blocks=pool.num_blocks,
        tables={name: [table.blocks(row) for table in state.tables] for name, row in state.row_of.items()},
        free=pool.free_queue.order(),
        ref_cnt=pool.ref_cnts(),
        keyed={block: (pool.group_of(block), key) for block, key in pool.keyed_blocks()},
        found={(group, key): pool.copies(key, group) for group in groups for key in pool.index(group)},
        num_placed={name: state.placed[row] for name, row in state.row_of.items()},
        key_prefix=key_prefix,
    )
