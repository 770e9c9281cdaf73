"""Where each token of a batch is stored: its slot, for all groups of layers at once. The twin of the Triton kernel."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from .checks import MAX_LISTED, check, check_vector, describe

PADDING_SLOT = -1
# Columns of `SlotTables.descriptors`.
POINTER, ROW_STRIDE, NUM_ROWS, WIDTH, BLOCK_SIZE, IS_SHARDED = range(6)
NUM_COLUMNS = 6


@attrs.frozen(eq=False)
class SlotTables:
    """The block tables of all groups, and what a launch needs to know of them, already on the device.

    Made once (`SlotTables.of`) for tables that stay where they are, so that a step makes no tensor and a captured
    graph replays.

    Attributes:
        block_tables: int32 `[max_num_reqs, max_num_blocks_per_req]` a group; widths and row strides may differ.
        block_sizes: tokens of one table entry, by group; under context parallelism over all ranks together.
        sharded: by group, whether its tokens are dealt to the ranks (a state group's are not).
        context_rank: this rank of decode context parallelism, from 0.
        context_size: how many ranks there are.
        interleave: consecutive tokens of one rank before the next one's turn.
        max_num_positions: of the longest request that any of the tables has room for.
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
        check(len(block_tables) > 0, "slot mapping needs the block table of at least one group")
        check(
            len(block_tables) == len(block_sizes) == len(sharded),
            f"{len(block_tables)} block tables, {len(block_sizes)} block sizes and {len(sharded)} sharded flags: one "
            "of each a group",
        )
        check(
            0 <= context_rank < context_size and interleave > 0,
            f"rank {context_rank} of {context_size} with stripes of {interleave} tokens: ranks are 0 to size - 1, "
            "stripes at least 1",
        )
        device = block_tables[0].device
        for group, (table, size, is_sharded) in enumerate(zip(block_tables, block_sizes, sharded, strict=True)):
            check(
                table.dim() == 2
                and table.dtype == torch.int32
                and table.device == device
                and table.numel() > 0
                and (table.stride(1) == 1 or table.shape[1] == 1),
                f"block table of group {group} must be int32 [max_num_reqs, max_num_blocks_per_req] with dense rows on "
                f"{device}, and not empty: {describe(table)}",
            )
            stripes = context_size * interleave if is_sharded and context_size > 1 else 1
            check(
                size > 0 and size % stripes == 0,
                f"group {group}: blocks of {size} tokens do not divide into stripes of {interleave} on {context_size} "
                f"ranks; use a multiple of {stripes}",
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
    tables: SlotTables, rows: Tensor, query_start_loc: Tensor, first_positions: Tensor, slot_mapping: Tensor
) -> None:
    """Shapes, dtypes and devices of one call."""
    device = tables.descriptors.device
    check_vector(rows, torch.int32, "rows", device)
    check_vector(query_start_loc, torch.int32, "query_start_loc", device)
    check_vector(first_positions, torch.int64, "first_positions", device)
    num_reqs = len(rows)
    check(
        len(query_start_loc) == num_reqs + 1 and len(first_positions) == num_reqs,
        f"{num_reqs} rows need {num_reqs + 1} query starts and {num_reqs} first positions, not {len(query_start_loc)} "
        f"and {len(first_positions)}",
    )
    check(
        slot_mapping.dim() == 2
        and slot_mapping.dtype == torch.int64
        and slot_mapping.device == device
        and slot_mapping.shape[0] == len(tables.block_tables)
        and (slot_mapping.stride(1) == 1 or slot_mapping.shape[1] == 1),
        f"slot_mapping must be int64 [{len(tables.block_tables)}, max_num_batched_tokens] with dense rows on {device}: "
        f"{describe(slot_mapping)}",
    )


def check_batch_content(
    tables: SlotTables, rows: Tensor, query_start_loc: Tensor, first_positions: Tensor, slot_mapping: Tensor
) -> None:
    """Rows, starts and positions are inside the tables. Waits for the device: for tests and debugging."""
    starts, capacity = query_start_loc.tolist(), slot_mapping.shape[1]
    check(
        starts == sorted(starts) and starts[0] == 0 and starts[-1] <= capacity,
        f"query_start_loc must rise from 0 to at most {capacity} (max_num_batched_tokens): {starts[:MAX_LISTED]}",
    )
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
        check(
            not wrong,
            f"group {group}: (request, row, end position) {wrong[:MAX_LISTED]} lie outside a block table of {num_rows} "
            f"rows of {width} blocks of {size} tokens",
        )


def compute_slot_mapping(
    *,
    tables: SlotTables,
    rows: Tensor,
    query_start_loc: Tensor,
    first_positions: Tensor,
    slot_mapping: Tensor,
    checked: bool = False,
) -> None:
    """See `Kernels.compute_slot_mapping`. On a GPU this twin waits for the device (it reads the number of tokens)."""
    check_batch(tables, rows, query_start_loc, first_positions, slot_mapping)
    if checked:
        check_batch_content(tables, rows, query_start_loc, first_positions, slot_mapping)
    starts = query_start_loc.long()
    num_tokens = min(int(starts[-1]), slot_mapping.shape[1])
    token_rows, positions = _rows_and_positions(rows, starts, first_positions, num_tokens)
    for group, table in enumerate(tables.block_tables):
        slots = _slots(tables, group, table, token_rows, positions)
        slot_mapping[group, :num_tokens] = slots
        slot_mapping[group, num_tokens:] = PADDING_SLOT


def _rows_and_positions(
    rows: Tensor, starts: Tensor, first_positions: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """The table row and the position of every token."""
    counts = starts.diff()
    requests = torch.arange(len(rows), device=rows.device).repeat_interleave(counts)[:num_tokens]
    tokens = torch.arange(num_tokens, device=rows.device)
    return rows.long()[requests], first_positions[requests] + tokens - starts[requests]


def _slots(tables: SlotTables, group: int, table: Tensor, token_rows: Tensor, positions: Tensor) -> Tensor:
    """Slots of one group; -1 for padding requests, for other ranks' tokens and outside the table."""
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
