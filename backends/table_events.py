"""What each event does to block tables, and which blocks it makes a copy of."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.events import (
    BlockCopied,
    BlocksAllocated,
    BlocksFreed,
    BlocksShared,
    Event,
    FreeReason,
    PrefixAdopted,
)
from .device_tables import DeviceTables
from .table_mirror import NULL_BLOCK


class TableEvents:
    """Follows events on the host; the device is brought up to date by the next upload."""

    def __init__(self, tables: DeviceTables, clears_taken_blocks: bool) -> None:
        """Follow into these tables.

        Args:
            tables: the tables.
            clears_taken_blocks: whether a taken block must not keep what another group left in it. Nobody writes the
                null block, so a copy of it clears another one.
        """
        self._tables = tables
        self._clears_taken_blocks = clears_taken_blocks
        self._handlers: dict[type, Callable[[Any], None]] = {
            PrefixAdopted: self._adopt,
            BlocksAllocated: self._extend,
            BlocksShared: self._share,
            BlockCopied: self._copy,
            BlocksFreed: self._give_back,
        }

    def apply(self, event: Event) -> None:
        """Follow one event; those that move no block (keys, tokens, rows) change nothing."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def _adopt(self, event: PrefixAdopted) -> None:
        self._tables.mirrors[event.group].append(event.row, np.asarray(event.blocks, dtype=np.int32))

    def _share(self, event: BlocksShared) -> None:
        self._tables.mirrors[event.group].append(event.child_row, np.asarray(event.blocks, dtype=np.int32))

    def _extend(self, event: BlocksAllocated) -> None:
        mirror = self._tables.mirrors[event.group]
        rows, counts = as_int64(event.rows), as_int64(event.counts)
        blocks = np.asarray(event.blocks, dtype=np.int32)
        if self._clears_taken_blocks:
            for block in blocks.tolist():
                self._tables.copies.add(event.group, NULL_BLOCK, block)
        if (counts == 1).all():
            mirror.append_one_each(rows, blocks)
            return
        ends = np.cumsum(counts)
        for row, begin, end in zip(rows.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
            mirror.append(row, blocks[begin:end])

    def _copy(self, event: BlockCopied) -> None:
        self._tables.mirrors[event.group].put(event.row, [event.index], event.target)
        self._tables.copies.add(event.group, event.source, event.target)

    def _give_back(self, event: BlocksFreed) -> None:
        begin = 0
        segments = zip(as_int64(event.groups).tolist(), as_int64(event.rows).tolist(), event.counts, strict=True)
        for group, row, count in segments:
            mirror = self._tables.mirrors[group]
            columns = event.indices[begin : begin + count]
            if event.reason is FreeReason.OUT_OF_WINDOW:
                mirror.put(row, [int(column) for column in columns], NULL_BLOCK)
            elif event.reason is FreeReason.TRUNCATED:
                mirror.cut(row, int(min(columns)))
            else:
                mirror.cut(row, 0)
            begin += int(count)


def as_int64(column: Any) -> NDArray[np.int64]:
    """An event's column as an int64 array."""
    return np.asarray(column, dtype=np.int64)
