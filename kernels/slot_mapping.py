"""Computes the slot where each token of a batch is stored, for all groups at once. The twin of the Triton kernel."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from .checks import MAX_LISTED, check_block_table, check_starts, check_vector, describe
from .errors import KernelInputError

PADDING_SLOT = -1
# Columns of `SlotTables.descriptors`.
POINTER, ROW_STRIDE, NUM_ROWS, WIDTH, BLOCK_SIZE, IS_SHARDED = range(6)
NUM_COLUMNS = 6


@attrs.frozen(eq=False)
class SlotTables:
    """The block tables of all groups, and their description for a launch, already on the device.

    Made once (`SlotTables.of`) for tables that keep their addresses, so that a step makes no tensor and a captured
    graph replays.

    Attributes:
        block_tables: int32 `[max_num_reqs, max_num_blocks_per_req]` per group; widths and row strides may differ.
        block_sizes: tokens of one table entry, by group; under context parallelism over all ranks together.
        sharded: by group, whether its tokens are split over the ranks (a state group's are not).
        context_rank: this rank of decode context parallelism, from 0.
        context_size: number of ranks.
        interleave: consecutive tokens of one rank before the next one's turn (a stripe).
        max_num_positions: tokens of the longest request that any of the tables has room for.
        descriptors: int64 `[num_groups, 6]` on the device: pointer, row stride, rows, width, block size, sharded.
    """

    block_tables: tuple[Tensor, ...]
    block_sizes: tuple[int, ...]
    sharded: tuple[bool, ...]
    context_rank: int
    context_size: int
    interleave: int
    max_num_positions: int
    descriptors: Tensor

    @classmethod
    def of(
        cls,
        block_tables: Sequence[Tensor],
        block_sizes: Sequence[int],
        *,
        context_rank: int = 0,
        context_size: int = 1,
        interleave: int = 1,
        sharded: Sequence[bool] | None = None,
    ) -> "SlotTables":
        """Check the tables once and put their description on the device.

        Raises:
            KernelInputError: tables that are not int32 with a dense last dimension on one device, or block sizes that
                do not divide into the ranks' stripes.
        """
        sharded = [True] * len(block_tables) if sharded is None else sharded
        if not block_tables:
            raise KernelInputError("slot mapping needs the block table of at least one group")
        if not len(block_tables) == len(block_sizes) == len(sharded):
            raise KernelInputError(
                f"{len(block_tables)} block tables, {len(block_sizes)} block sizes and {len(sharded)} sharded flags: "
                "give one of each per group"
            )
        if not 0 <= context_rank < context_size or interleave < 1:
            raise KernelInputError(
                f"rank {context_rank} of {context_size} with stripes of {interleave} tokens: ranks are 0 to size - 1, "
                "stripes at least 1"
            )
        device = block_tables[0].device
        for group, (table, size, is_sharded) in enumerate(zip(block_tables, block_sizes, sharded, strict=True)):
            check_block_table(table, f"block table of group {group}", device)
            stripes = context_size * interleave if is_sharded and context_size > 1 else 1
            if size < 1 or size % stripes:
                raise KernelInputError(
                    f"group {group}: blocks of {size} tokens do not divide into stripes of {interleave} on "
                    f"{context_size} ranks; use a multiple of {stripes}"
                )
        described = [
            (table.data_ptr(), table.stride(0), *table.shape, size, int(is_sharded))
            for table, size, is_sharded in zip(block_tables, block_sizes, sharded, strict=True)
        ]
        return cls(
            tuple(block_tables),
            tuple(block_sizes),
            tuple(bool(flag) for flag in sharded),
            context_rank,
            context_size,
            interleave,
            max(table.shape[1] * size for table, size in zip(block_tables, block_sizes, strict=True)),
            torch.tensor(described, dtype=torch.int64, device=device),
        )


def check_batch(
    tables: SlotTables,
    rows: Tensor,
    query_start_loc: Tensor,
    first_positions: Tensor,
    slot_mapping: Tensor,
    checked: bool,
) -> None:
    """Check shapes, dtypes and devices of one call; in checked mode also the contents, which waits for the device."""
    device = tables.descriptors.device
    check_vector(rows, torch.int32, "rows", device)
    check_vector(query_start_loc, torch.int32, "query_start_loc", device)
    check_vector(first_positions, torch.int64, "first_positions", device)
    num_reqs = len(rows)
    if len(query_start_loc) != num_reqs + 1 or len(first_positions) != num_reqs:
        raise KernelInputError(
            f"{num_reqs} rows need {num_reqs + 1} query starts and {num_reqs} first positions, not "
            f"{len(query_start_loc)} and {len(first_positions)}"
        )
    shape, num_groups = slot_mapping.shape, len(tables.block_tables)
    if (
        slot_mapping.dtype != torch.int64
        or slot_mapping.device != device
        or len(shape) != 2
        or shape[0] != num_groups
        or (slot_mapping.stride(1) != 1 and shape[1] != 1)
    ):
        raise KernelInputError(
            f"slot_mapping must be int64 [{num_groups}, max_num_batched_tokens] with dense rows on {device}: "
            f"{describe(slot_mapping)}"
        )
    if not checked:
        return
    starts = query_start_loc.tolist()
    check_starts(starts, slot_mapping.shape[1], "query_start_loc", "max_num_batched_tokens")
    for group, (table, size) in enumerate(zip(tables.block_tables, tables.block_sizes, strict=True)):
        num_rows, width = table.shape
        ends = [
            (request, row, first + end - begin)
            for request, (row, first, begin, end) in enumerate(
                zip(rows.tolist(), first_positions.tolist(), starts, starts[1:], strict=False)
            )
            if row >= 0
        ]
        wrong = [(i, row, end) for i, row, end in ends if row >= num_rows or end > width * size]
        if wrong:
            raise KernelInputError(
                f"group {group}: (request, row, end position) {wrong[:MAX_LISTED]} lie outside a block table of "
                f"{num_rows} rows of {width} blocks of {size} tokens"
            )


def map_slots(
    tables: SlotTables, rows: Tensor, query_start_loc: Tensor, first_positions: Tensor, slot_mapping: Tensor
) -> None:
    """See `Kernels.compute_slot_mapping`. On a GPU this twin waits for the device (it reads the number of tokens)."""
    starts = query_start_loc.long()
    num_tokens = min(int(starts[-1]), slot_mapping.shape[1])
    requests = torch.arange(len(rows), device=rows.device).repeat_interleave(starts.diff())[:num_tokens]
    token_rows = rows.long()[requests]
    positions = first_positions[requests] + torch.arange(num_tokens, device=rows.device) - starts[requests]
    for group, table in enumerate(tables.block_tables):
        slot_mapping[group, :num_tokens] = _slots(tables, group, table, token_rows, positions)
        slot_mapping[group, num_tokens:] = PADDING_SLOT


def _slots(tables: SlotTables, group: int, table: Tensor, token_rows: Tensor, positions: Tensor) -> Tensor:
    """Compute the slots of one group; -1 for padding requests, other ranks' tokens and outside the table."""
    size, (num_rows, width) = tables.block_sizes[group], table.shape
    indices, offsets = positions // size, positions % size
    is_here = (token_rows >= 0) & (token_rows < num_rows) & (positions >= 0) & (indices < width)
    blocks = table[token_rows.where(is_here, 0), indices.where(is_here, 0)].long()
    is_here &= blocks >= 0
    if tables.context_size > 1 and tables.sharded[group]:
        stripe, ranks = tables.interleave, tables.context_size
        is_here &= offsets // stripe % ranks == tables.context_rank
        offsets = offsets // (stripe * ranks) * stripe + offsets % stripe
        size //= ranks
    return (blocks * size + offsets).where(is_here, PADDING_SLOT)
