"""Block tables on the device, kept equal to what the events say: one transfer a step, and only of what changed."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ...core.events import BlockCopied, BlocksAllocated, BlocksFreed, BlocksShared, Event, FreeReason, PrefixAdopted
from ...core.types import TokenBatch
from ...kernels.copy_blocks import BlockRegions
from ...kernels.kernel_set import Kernels
from .staging import BatchInputs, StepStaging

# Blocks to be copied before the next step writes (copy on write), in rounds that can each run in parallel.


@attrs.frozen(eq=False)
class CopyRound:
    """Copies of one group that do not touch each other's blocks: no target is another's source or target.

    Attributes:
        group: whose layers.
        sources: int64 `[num_copies]`.
        targets: int64 `[num_copies]`.
    """

    group: int
    sources: NDArray[np.int64]
    targets: NDArray[np.int64]


class PendingCopies:
    """Copies in the order in which they were decided.

    A step may hold several commands, so a target may be given back and taken again, or be copied in its turn, before
    the step runs. The order then matters, and all copies of one launch run at once; so each copy that depends on an
    earlier one starts a new round. Blocks are of the pool: groups share their bytes, so a round has one group.
    """

    def __init__(self) -> None:
        self._rounds: list[tuple[int, list[tuple[int, int]]]] = []
        self._read: set[int] = set()
        self._written: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._rounds)

    def add(self, group: int, source: int, target: int) -> None:
        """One more copy, after all that were added before."""
        depends = source in self._written or target in self._written or target in self._read
        if not self._rounds or self._rounds[-1][0] != group or depends:
            self._rounds.append((group, []))
            self._read, self._written = set(), set()
        self._rounds[-1][1].append((source, target))
        self._read.add(source)
        self._written.add(target)

    def take(self) -> list[CopyRound]:
        """The rounds, to be run one after the other; nothing is pending after this."""
        rounds, self._rounds = self._rounds, []
        self._read, self._written = set(), set()
        return [CopyRound(group, *np.array(pairs, dtype=np.int64).T.copy()) for group, pairs in rounds]


# The host's copy of one group's block table, and which of its entries the device does not have yet.

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


# Table entries and copied blocks that one transfer has room for. More are sent in several: after a long log is
# replayed, say, or when all rows are given back at once; a step of an engine changes far fewer.
MAX_STAGED_ENTRIES = 1 << 18
# An index or a source, int64, and a block or a target, int32 or int64.
ENTRY_BYTES = 16


@attrs.frozen(eq=False)
class _Piece:
    """Part of what is sent: entries of a group's table, or a round of block copies."""

    group: int
    is_copy: bool
    arrays: tuple[NDArray[Any], NDArray[Any]]


_Transfer: TypeAlias = list[_Piece]


class DeviceTables:
    """All groups' block tables on the host and on the device, and the block copies that wait for the next step.

    Attributes:
        mirrors: the host's table of each group.
        tables: int32 `[max_num_reqs, width]` a group, on the device.
        copies: blocks to be copied before the next step.
        regions: where each group's blocks lie in memory; None for a group without layers on this rank.
    """

    def __init__(
        self, device: torch.device, max_num_reqs: int, widths: Sequence[int], regions: Sequence[BlockRegions | None]
    ) -> None:
        """Empty tables.

        Args:
            device: where the tables are.
            max_num_reqs: rows of every table.
            widths: columns of each group's table.
            regions: where each group's blocks lie in memory; None for a group without layers on this rank.
        """
        self.mirrors = [TableMirror(max_num_reqs, width) for width in widths]
        self.tables = [torch.zeros((max_num_reqs, width), dtype=torch.int32, device=device) for width in widths]
        self.copies = PendingCopies()
        self.regions = list(regions)
        self._max_entries = min(MAX_STAGED_ENTRIES, max(max_num_reqs * sum(widths), 1))
        # Arrays are aligned, so each piece may take a few bytes more than its entries.
        room_bytes = ENTRY_BYTES * (self._max_entries + 2 * len(widths))
        self._staging = StepStaging(device, max_num_reqs, room_bytes)

    @property
    def inputs(self) -> BatchInputs:
        """The last batch, on the device."""
        return self._staging.inputs

    @property
    def num_transfers(self) -> int:
        """Transfers to the device so far."""
        return self._staging.num_transfers

    @property
    def num_transfer_bytes(self) -> int:
        """Bytes of all of them together."""
        return self._staging.num_bytes

    @property
    def has_changes(self) -> bool:
        """Whether the device lags behind the events."""
        return bool(self.copies) or any(mirror.has_changes for mirror in self.mirrors)

    def upload(self, batch: TokenBatch | None, kernels: Kernels) -> None:
        """Start bringing the device up to date, and to this batch; never waits for it.

        Block copies are started here, so they come before whatever the step writes.
        """
        if batch is not None:
            self._staging.set_batch(batch)
        for transfer in self._transfers():
            arrays = [array for piece in transfer for array in piece.arrays]
            sent = iter(self._staging.send(arrays))
            for piece in transfer:
                self._apply(piece, next(sent), next(sent), kernels)

    def _apply(self, piece: _Piece, first: torch.Tensor, second: torch.Tensor, kernels: Kernels) -> None:
        if not piece.is_copy:
            self.tables[piece.group].view(-1).index_copy_(0, first, second)
            return
        regions = self.regions[piece.group]
        if regions is not None:
            kernels.copy_blocks(caches=regions, sources=first, targets=second)

    def _transfers(self) -> Iterator[_Transfer]:
        """Everything that waits, in order, in as few transfers as there is room in; at least one, for the batch."""
        transfer: _Transfer = []
        free = self._max_entries
        for piece in self._pieces():
            start, length = 0, len(piece.arrays[0])
            while start < length:
                if not free:
                    yield transfer
                    transfer, free = [], self._max_entries
                count = min(free, length - start)
                arrays = (piece.arrays[0][start : start + count], piece.arrays[1][start : start + count])
                transfer.append(attrs.evolve(piece, arrays=arrays))
                start, free = start + count, free - count
        yield transfer

    def _pieces(self) -> Iterator[_Piece]:
        for group, mirror in enumerate(self.mirrors):
            if mirror.has_changes:
                changes = mirror.take_changes()
                yield _Piece(group, False, (changes.indices, changes.blocks))
        for round_ in self.copies.take():
            yield _Piece(round_.group, True, (round_.sources, round_.targets))


# What each event does to block tables, and which blocks it makes a copy of.


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
