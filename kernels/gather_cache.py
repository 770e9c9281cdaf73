"""Reads keys and values back by block table: the inverse of the write. The twin of the Triton kernel."""

from typing import TypeAlias

import attrs
import torch
from torch import Tensor

from .checks import FLOATS, MAX_LISTED, check_block_table, check_vector
from .errors import KernelInputError
from .fp8 import dequantize
from .reshape_and_cache import Scales
from .scales import check_scale


@attrs.frozen(eq=False)
class BlockTableRows:
    """The tokens to read: rows of one group's block table, and the size of its entries."""

    block_table: Tensor  # int32 `[max_num_reqs, max_num_blocks_per_req]`
    rows: Tensor  # int32 `[num_seqs]`; -1 is a padding sequence
    block_size: int  # tokens of one table entry, a multiple of the cache's own block size


# The table, `cu_seqlens`, `first_positions` and `num_tokens` of one read.
TokensToRead: TypeAlias = tuple[BlockTableRows, Tensor, Tensor | None, int]


def check_table(block_table: Tensor, rows: Tensor, block_size: int | None, cache: Tensor) -> BlockTableRows:
    """Check the table against a cache with the slot's dimensions first."""
    device, kernel_block_size = cache.device, cache.shape[1]
    block_size = kernel_block_size if block_size is None else block_size
    check_block_table(block_table, "block_table", device)
    check_vector(rows, torch.int32, "rows", device)
    if block_size < 1 or block_size % kernel_block_size:
        raise KernelInputError(
            f"a table entry of {block_size} tokens is not a multiple of the cache's blocks of {kernel_block_size}"
        )
    return BlockTableRows(block_table, rows, block_size)


def check_gather(
    table: BlockTableRows, cu_seqlens: Tensor, first_positions: Tensor | None, num_tokens: int, checked: bool
) -> TokensToRead:
    """Check one call; in checked mode also that all positions are inside the table, which waits for the device."""
    device, num_seqs = table.rows.device, len(table.rows)
    check_vector(cu_seqlens, torch.int32, "cu_seqlens", device)
    if len(cu_seqlens) != num_seqs + 1:
        raise KernelInputError(f"{num_seqs} rows need {num_seqs + 1} cu_seqlens, not {len(cu_seqlens)}")
    if num_tokens < 0:
        raise KernelInputError(f"num_tokens is {num_tokens}; it is the last of cu_seqlens")
    if first_positions is not None:
        check_vector(first_positions, torch.int64, "first_positions", device)
        if len(first_positions) != num_seqs:
            raise KernelInputError(f"{num_seqs} rows, but {len(first_positions)} first positions")
    tokens = (table, cu_seqlens, first_positions, num_tokens)
    if not checked:
        return tokens
    starts = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] != num_tokens or starts != sorted(starts):
        raise KernelInputError(f"cu_seqlens must rise from 0 to num_tokens = {num_tokens}: {starts[:MAX_LISTED]}")
    firsts = [0] * num_seqs if first_positions is None else first_positions.tolist()
    spans = zip(table.rows.tolist(), firsts, starts, starts[1:], strict=False)
    check_positions(table, [(row, first, first + end - begin) for row, first, begin, end in spans])
    return tokens


def check_positions(table: BlockTableRows, spans: list[tuple[int, int, int]]) -> None:
    """Check that every (row, first position, end) lies inside the block table (field report F04)."""
    num_rows, width = table.block_table.shape
    capacity = width * table.block_size
    wrong = [span for span in spans if span[0] >= num_rows or span[1] < 0 or (span[0] >= 0 and span[2] > capacity)]
    if wrong:
        raise KernelInputError(
            f"(row, first position, end) {wrong[:MAX_LISTED]} lie outside a block table of {num_rows} rows of {width} "
            f"blocks of {table.block_size} tokens"
        )


def check_read(cache: Tensor, dtype: torch.dtype | None, checked: bool, **scales: Tensor | None) -> torch.dtype:
    """Check the scales of a read. Returns its dtype: the cache's own, or the float asked for of an 8-bit cache."""
    out = cache.dtype if dtype is None else dtype
    is_quantized = out != cache.dtype
    if is_quantized and not (cache.element_size() == 1 and out in FLOATS):
        raise KernelInputError(
            f"a {cache.dtype} cache cannot be read as {out}; only 8-bit caches convert, to 16- or 32-bit floats"
        )
    for name, scale in scales.items():
        check_scale(scale, is_quantized, name, cache.device, checked)
    return out


def gather(
    key_cache: Tensor, value_cache: Tensor | None, tokens: TokensToRead, dtype: torch.dtype, scales: Scales
) -> tuple[Tensor, Tensor]:
    """See `Kernels.gather_cache`."""
    slots = slots_of(*tokens)
    key = read_slots(key_cache, slots, dtype, scales[0]).flatten(2)
    return key, key if value_cache is None else read_slots(value_cache, slots, dtype, scales[1])


def slots_of(table: BlockTableRows, cu_seqlens: Tensor, first_positions: Tensor | None, num_tokens: int) -> Tensor:
    """Compute the slot of each token to read, int64 `[num_tokens]`; -1 for padding sequences and outside the table."""
    starts = cu_seqlens.long()
    sequences = torch.arange(len(table.rows), device=starts.device).repeat_interleave(starts.diff())[:num_tokens]
    positions = torch.arange(len(sequences), device=starts.device) - starts[sequences]
    if first_positions is not None:
        positions += first_positions[sequences]
    rows, (num_rows, width) = table.rows.long()[sequences], table.block_table.shape
    indices = positions // table.block_size
    is_inside = (rows >= 0) & (rows < num_rows) & (positions >= 0) & (indices < width)
    blocks = table.block_table[rows.where(is_inside, 0), indices.where(is_inside, 0)].long()
    slots = (blocks * table.block_size + positions % table.block_size).where(is_inside & (blocks >= 0), -1)
    return torch.nn.functional.pad(slots, (0, num_tokens - len(slots)), value=-1)


def read_slots(cache: Tensor, slots: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Read `cache[slot // block_size, slot % block_size]` in `dtype`; zeros for slots outside the cache."""
    num_blocks, block_size = cache.shape[:2]
    is_inside = (slots >= 0) & (slots < num_blocks * block_size)
    safe = slots.where(is_inside, 0)
    bits = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[cache.element_size()]
    read = cache.view(bits)[safe // block_size, safe % block_size]
    read = torch.where(is_inside.view(-1, *[1] * (read.dim() - 1)), read, 0).view(cache.dtype)
    return read if dtype == cache.dtype else dequantize(read, dtype, scale)
