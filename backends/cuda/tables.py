"""Block tables on the device, kept equal to what the events say: one transfer a step, and only of what changed.

The life of a `DeviceTables`: `apply` follows each event on the host and notes which entries changed and which blocks
must be copied; `upload` sends all of it with the step's batch and starts the copies.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ...core import events
from ...core.allocator.config import AllocatorConfig
from ...core.errors import InputError
from ...core.events import FreeReason, PoolCreated
from ...core.planner.layout import KVCacheConfig, block_table_width, needs_zeroing
from ...core.types import TokenBatch
from ...kernels.copy_blocks import BlockRegions
from ...kernels.kernel_set import Kernels
from ...kernels.slot_mapping import PADDING_SLOT, SlotTables
from ..context_rank import ContextRank
from .layout import LayerCache
from .staging import StepStaging

NULL_BLOCK = 0
# Table entries and block copies that one transfer has room for. More are sent in several transfers: after a long log is
# replayed, say, or when all rows are freed at once; a step of an engine changes far fewer.
MAX_STAGED_ENTRIES = 1 << 18
# An index or a source, int64, and a block or a target, int32 or int64.
ENTRY_BYTES = 16

# Part of a transfer: a group, whether these are block copies, then the indices of table entries and their blocks (int64
# and int32), or the sources and targets of the copies (both int64).
_Piece: TypeAlias = tuple[int, bool, NDArray[np.int64], NDArray[Any]]


def check_pool(pool: PoolCreated | AllocatorConfig, config: KVCacheConfig, context: ContextRank) -> None:
    """Refuse a pool that is not the planned one.

    Raises:
        InputError: other blocks or groups, or blocks that do not divide into the stripes of context parallelism.
    """
    planned = [group.tokens_per_block(context.size) for group in config.groups]
    created = [kind.block_size for kind in pool.groups]
    if planned != created or config.num_blocks != pool.num_blocks:
        raise InputError(
            f"the allocator's pool has {pool.num_blocks} blocks and groups with blocks of {created} tokens; the "
            f"plan has {config.num_blocks} blocks and {planned} tokens; make both from one plan"
        )
    for kind in pool.groups:
        if kind.holds_tokens:
            context.check_divides(kind.block_size)


class PendingCopies:
    """Block copies in the order in which they were decided, to be run before the next step writes.

    A step may hold several commands, so a target may be freed and allocated again, or be copied itself, before the step
    runs. The order then matters, and all copies of one launch run at once; so each copy that depends on an earlier one
    starts a new round. Groups share the pool's blocks and their bytes, so a round has one group.
    """

    def __init__(self) -> None:
        self._rounds: list[tuple[int, list[tuple[int, int]]]] = []
        self._read: set[int] = set()
        self._written: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._rounds)

    def add(self, group: int, source: int, target: int) -> None:
        """Add a copy that runs after all that were added before it."""
        depends = source in self._written or target in self._written or target in self._read
        if not self._rounds or self._rounds[-1][0] != group or depends:
            self._rounds.append((group, []))
            self._read, self._written = set(), set()
        self._rounds[-1][1].append((source, target))
        self._read.add(source)
        self._written.add(target)

    def take(self) -> list[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Remove and return the rounds: group, sources and targets, each int64 `[num_copies]`. Run them in order."""
        rounds, self._rounds = self._rounds, []
        self._read, self._written = set(), set()
        return [(group, *np.array(pairs, dtype=np.int64).T.copy()) for group, pairs in rounds]


class DeviceTables:
    """The block tables of one pool, on the host and on the device, with the slots and the batch of the step.

    Tensors on the device stay at their addresses, so a captured graph can read them.

    Attributes:
        host_tables: int32 `[max_num_reqs, width]` per group, as of the last event; entries behind a row's blocks are 0,
            the null block.
        num_blocks_per_row: int32 `[max_num_reqs]` per group, as of the last event.
        tables: int32 `[max_num_reqs, width]` per group on the device, as of the last upload.
        slot_tables: the device's tables as the slot kernel takes them.
        slots: int64 `[num_groups, max_num_batched_tokens]` on the device, the slots of the prepared batch.
        copies: block copies that wait for the next upload.
        staging: sends what changed; its `inputs` are the batch of the last upload.
        regions: where each group's blocks lie in memory; None for a group without layers on this rank.
        block_sizes: tokens of one table entry, by group.
        holds_tokens: by group, whether it stores tokens (a state group does not).
        max_num_reqs: rows of every table.
        max_model_len: tokens of the longest request that the tables have room for.
    """

    def __init__(
        self,
        pool: PoolCreated | AllocatorConfig,
        config: KVCacheConfig,
        caches: Sequence[LayerCache],
        *,
        device: torch.device,
        context: ContextRank,
        max_num_batched_tokens: int,
    ) -> None:
        """Make empty tables, for a pool that `check_pool` has accepted and the caches of this rank's layers."""
        kinds = pool.groups
        self.max_num_reqs, self.max_model_len = pool.max_num_reqs, pool.max_model_len
        self.block_sizes = tuple(kind.block_size for kind in kinds)
        self.holds_tokens = tuple(kind.holds_tokens for kind in kinds)
        shapes = [
            (pool.max_num_reqs, block_table_width(-(-pool.max_model_len // kind.block_size), kind.block_size))
            for kind in kinds
        ]
        self.host_tables = [np.zeros(shape, dtype=np.int32) for shape in shapes]
        self.num_blocks_per_row = [np.zeros(pool.max_num_reqs, dtype=np.int32) for _ in kinds]
        self.tables = [torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes]
        self.slot_tables = SlotTables.of(
            self.tables,
            self.block_sizes,
            context_rank=context.rank,
            context_size=context.size,
            interleave=context.interleave_tokens,
            sharded=self.holds_tokens,
        )
        shape = (len(kinds), max_num_batched_tokens)
        self.slots = torch.full(shape, PADDING_SLOT, dtype=torch.int64, device=device)
        pages = [
            [page for cache in caches if cache.group == group for page in cache.pages] for group in range(len(kinds))
        ]
        self.regions = [BlockRegions.of(group_pages) if group_pages else None for group_pages in pages]
        self.copies = PendingCopies()
        # A taken block must not keep what another group left in it. Nothing writes to the null block, so a copy of it
        # clears another one.
        self._clears_taken_blocks = needs_zeroing(config.groups)
        # For each group, indices (row * width + column) of host entries that the device does not have yet.
        self._changed: list[list[NDArray[np.int64]]] = [[] for _ in kinds]
        self._max_entries = min(MAX_STAGED_ENTRIES, max(sum(table.size for table in self.host_tables), 1))
        # Arrays are aligned, so each piece may take a few bytes more than its entries.
        self.staging = StepStaging(device, pool.max_num_reqs, ENTRY_BYTES * (self._max_entries + 2 * len(kinds)))
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.PrefixAdopted: self._on_adopted,
            events.BlocksAllocated: self._on_allocated,
            events.BlocksShared: self._on_shared,
            events.BlockCopied: self._on_copied,
            events.BlocksFreed: self._on_freed,
        }

    def check_serves(self, pool: PoolCreated | AllocatorConfig) -> None:
        """Refuse a pool that these tables, made before it, do not fit.

        Raises:
            InputError: other rows, or another longest request.
        """
        mine, created = (self.max_num_reqs, self.max_model_len), (pool.max_num_reqs, pool.max_model_len)
        if mine != created:
            raise InputError(
                f"the tables were made for max_num_reqs {mine[0]} and max_model_len {mine[1]}, and the allocator has "
                f"{created[0]} and {created[1]}; make both from one AllocatorConfig"
            )

    # -- following events on the host --------------------------------------------------------------------------------

    def apply(self, event: events.Event) -> None:
        """Follow one event on the host; events that move no block (keys, tokens, rows) change nothing."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def _on_adopted(self, event: events.PrefixAdopted) -> None:
        self._append(event.group, event.row, np.asarray(event.blocks, dtype=np.int32))

    def _on_shared(self, event: events.BlocksShared) -> None:
        self._append(event.group, event.child_row, np.asarray(event.blocks, dtype=np.int32))

    def _on_allocated(self, event: events.BlocksAllocated) -> None:
        group, rows, counts = event.group, _as_int64(event.rows), _as_int64(event.counts)
        blocks = np.asarray(event.blocks, dtype=np.int32)
        if self._clears_taken_blocks:
            for block in blocks[blocks != NULL_BLOCK].tolist():
                self.copies.add(group, NULL_BLOCK, block)
        if (counts == 1).all():  # distinct rows
            ends = self.num_blocks_per_row[group][rows]
            self._put(group, rows * self.host_tables[group].shape[1] + ends, blocks)
            self.num_blocks_per_row[group][rows] = ends + 1
            return
        ends = np.cumsum(counts)
        for row, begin, end in zip(rows.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
            self._append(group, row, blocks[begin:end])

    def _on_copied(self, event: events.BlockCopied) -> None:
        self._put_in_row(event.group, event.row, np.array([event.index]), event.target)
        self.copies.add(event.group, event.source, event.target)

    def _on_freed(self, event: events.BlocksFreed) -> None:
        begin = 0
        segments = zip(_as_int64(event.groups).tolist(), _as_int64(event.rows).tolist(), event.counts, strict=True)
        for group, row, count in segments:
            columns = _as_int64(event.indices[begin : begin + count])
            if event.reason is FreeReason.OUT_OF_WINDOW:
                self._put_in_row(group, row, columns, NULL_BLOCK)
            else:
                self._cut(group, row, int(columns.min()) if event.reason is FreeReason.TRUNCATED else 0)
            begin += int(count)

    def _append(self, group: int, row: int, blocks: NDArray[np.int32]) -> None:
        """Put blocks behind those of a row."""
        begin = int(self.num_blocks_per_row[group][row])
        end = begin + len(blocks)
        self._put_in_row(group, row, np.arange(begin, end), blocks)
        self.num_blocks_per_row[group][row] = end

    def _cut(self, group: int, row: int, num_blocks: int) -> None:
        """Keep the first `num_blocks` blocks of a row."""
        end = int(self.num_blocks_per_row[group][row])
        self._put_in_row(group, row, np.arange(num_blocks, end), NULL_BLOCK)
        self.num_blocks_per_row[group][row] = num_blocks

    def _put_in_row(self, group: int, row: int, columns: NDArray[np.int64], blocks: NDArray[np.int32] | int) -> None:
        self._put(group, row * self.host_tables[group].shape[1] + columns, blocks)

    def _put(self, group: int, indices: NDArray[np.int64], blocks: NDArray[np.int32] | int) -> None:
        if len(indices):
            self.host_tables[group].reshape(-1)[indices] = blocks
            self._changed[group].append(indices)

    # -- bringing the device up to date ------------------------------------------------------------------------------

    @property
    def has_changes(self) -> bool:
        """Whether the device lags behind the events."""
        return bool(self.copies) or any(self._changed)

    def upload(self, batch: TokenBatch | None, kernels: Kernels) -> None:
        """Start bringing the device up to date, and to this batch if one is given; never waits for the device.

        Block copies are started here, so they come before whatever the step writes.
        """
        if batch is not None:
            self.staging.set_batch(batch)
        for pieces in self._transfers():
            sent = self.staging.send([array for piece in pieces for array in piece[2:]])
            for (group, is_copy, _, _), first, second in zip(pieces, sent[::2], sent[1::2], strict=True):
                regions = self.regions[group]
                if not is_copy:
                    self.tables[group].view(-1).index_copy_(0, first, second)
                elif regions is not None:
                    kernels.copy_blocks(caches=regions, sources=first, targets=second)

    def _transfers(self) -> Iterator[list[_Piece]]:
        """Yield everything that waits, in order, in as few transfers as hold it; at least one, for the batch."""
        transfer: list[_Piece] = []
        free = self._max_entries
        for group, is_copy, first, second in self._pieces():
            start = 0
            while start < len(first):
                if not free:
                    yield transfer
                    transfer, free = [], self._max_entries
                stop = min(start + free, len(first))
                transfer.append((group, is_copy, first[start:stop], second[start:stop]))
                start, free = stop, free - (stop - start)
        yield transfer

    def _pieces(self) -> Iterator[_Piece]:
        for group, changed in enumerate(self._changed):
            if changed:
                yield (group, False, *self._take_changes(group))
        for group, sources, targets in self.copies.take():
            yield group, True, sources, targets

    def _take_changes(self, group: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Forget which entries of a group changed; return their indices, each once, and the blocks that they hold."""
        changed, self._changed[group] = self._changed[group], []
        # An entry may have changed several times; a scatter must name it once, or its value is not defined.
        indices = changed[0] if len(changed) == 1 else np.unique(np.concatenate(changed))
        return indices, self.host_tables[group].reshape(-1)[indices]


def _as_int64(column: Any) -> NDArray[np.int64]:
    """An event's column as an int64 array."""
    return np.asarray(column, dtype=np.int64)
