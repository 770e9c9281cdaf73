"""The host's copy of one group's block table, and which of its entries the device does not have yet."""

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

NULL_BLOCK = 0


@attrs.frozen(eq=False)
class TableChanges:
    """Entries to be written on the device, each named once.

    Attributes:
        indices: int64 `[num_entries]`, `row * width + column`.
        blocks: int32 `[num_entries]`.
    """

    indices: NDArray[np.int64]
    blocks: NDArray[np.int32]


class TableMirror:
    """One group's table as the events describe it.

    Attributes:
        table: int32 `[max_num_reqs, width]`; entries behind a row's blocks are 0, the null block.
        num_blocks_per_row: int32 `[max_num_reqs]`.
    """

    def __init__(self, max_num_reqs: int, width: int) -> None:
        self.table: NDArray[np.int32] = np.zeros((max_num_reqs, width), dtype=np.int32)
        self.num_blocks_per_row: NDArray[np.int32] = np.zeros(max_num_reqs, dtype=np.int32)
        self._width = width
        self._changed: list[NDArray[np.int64]] = []

    @property
    def has_changes(self) -> bool:
        """Whether the device lags behind."""
        return bool(self._changed)

    def take_changes(self) -> TableChanges:
        """What changed since the last call, with the values of now."""
        changed, self._changed = self._changed, []
        if len(changed) == 1:
            indices = changed[0]
        else:
            # An entry may have changed several times; a scatter must name it once, or its value is not defined.
            indices = np.unique(np.concatenate(changed)) if changed else np.empty(0, dtype=np.int64)
        return TableChanges(indices, self.table.reshape(-1)[indices])

    def append_one_each(self, rows: NDArray[np.int64], blocks: NDArray[np.int32]) -> None:
        """One more block for each of several distinct rows."""
        ends = self.num_blocks_per_row[rows]
        self._put(rows * self._width + ends, blocks)
        self.num_blocks_per_row[rows] = ends + 1

    def append(self, row: int, blocks: NDArray[np.int32]) -> None:
        """More blocks for one row."""
        end = int(self.num_blocks_per_row[row])
        self._put(row * self._width + np.arange(end, end + len(blocks), dtype=np.int64), blocks)
        self.num_blocks_per_row[row] = end + len(blocks)

    def put(self, row: int, columns: Sequence[int], block: int) -> None:
        """One block at the given places of a row (a private copy, or the null block)."""
        self._put(row * self._width + np.array(columns, dtype=np.int64), np.int32(block))

    def cut(self, row: int, num_blocks: int) -> None:
        """Keep the first `num_blocks` blocks of a row."""
        columns = np.arange(num_blocks, int(self.num_blocks_per_row[row]), dtype=np.int64)
        self._put(row * self._width + columns, np.int32(NULL_BLOCK))
        self.num_blocks_per_row[row] = num_blocks

    def _put(self, indices: NDArray[np.int64], blocks: NDArray[np.int32] | np.int32) -> None:
        if len(indices):
            self.table.reshape(-1)[indices] = blocks
            self._changed.append(indices)
