"""The slot-mapping kernel: one launch for all groups, sizes read on the device."""

# Type checkers cannot follow what Triton makes of annotations and ranges.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportOptionalSubscript=false, reportArgumentType=false

import triton.language as tl

from .launch import jit_without_alignment_of


@jit_without_alignment_of("descriptors_ptr", "rows_ptr", "query_start_loc_ptr", "first_positions_ptr", "slots_ptr")
def slot_mapping_kernel(
    descriptors_ptr,
    rows_ptr,
    query_start_loc_ptr,
    first_positions_ptr,
    slots_ptr,
    slot_stride: tl.int64,
    slot_width: tl.int64,
    num_reqs: tl.int64,
    NUM_COLUMNS: tl.constexpr,
    CONTEXT_RANK: tl.constexpr,
    CONTEXT_SIZE: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    POSITION_TYPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (request, group, lane) takes turns at a request's tiles; request num_reqs is the tail.

    POSITION_TYPE: holds every position that a table has room for. A division of 64 bits is a subroutine of a hundred
    instructions, called for each of a thread's tokens.
    """
    request = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(2).to(tl.int64)
    lanes = tl.arange(0, TILE)
    out_ptr = slots_ptr + group * slot_stride
    # All of a program's numbers are loaded before any is looked at, so that their latencies overlap.
    is_request = request < num_reqs
    begin = tl.load(query_start_loc_ptr + request).to(tl.int64)
    end = tl.load(query_start_loc_ptr + request + 1, mask=is_request, other=0).to(tl.int64)
    row = tl.load(rows_ptr + request, mask=is_request, other=-1).to(tl.int64)
    first = tl.load(first_positions_ptr + request, mask=is_request, other=0)
    descriptor = descriptors_ptr + group * NUM_COLUMNS
    table_ptr = tl.load(descriptor).to(tl.pointer_type(tl.int32))
    row_stride = tl.load(descriptor + 1)
    num_rows = tl.load(descriptor + 2)
    width = tl.load(descriptor + 3)
    block_size = tl.load(descriptor + 4)
    is_sharded = tl.load(descriptor + 5)
    if request == num_reqs:
        for start in tl.range(begin + lane * TILE, slot_width, tl.num_programs(2) * TILE):
            tokens = start + lanes
            tl.store(out_ptr + tokens, tl.full([TILE], -1, tl.int64), mask=tokens < slot_width)
    else:
        end = tl.minimum(end, slot_width)
        num_positions = width * block_size
        is_row = (row >= 0) & (row < num_rows)
        divisor = block_size.to(POSITION_TYPE)
        for start in tl.range(begin + lane * TILE, end, tl.num_programs(2) * TILE):
            tokens = start + lanes
            positions = first + tokens - begin
            is_here = (tokens < end) & is_row & (positions >= 0) & (positions < num_positions)
            inside = tl.where(is_here, positions, 0).to(POSITION_TYPE)
            indices = inside // divisor
            offsets = inside - indices * divisor
            blocks = tl.load(table_ptr + row * row_stride + indices, mask=is_here, other=-1).to(tl.int64)
            is_here = is_here & (blocks >= 0)
            slots = blocks * block_size + offsets
            if CONTEXT_SIZE > 1:
                stripes: tl.constexpr = INTERLEAVE * CONTEXT_SIZE
                local = offsets // stripes * INTERLEAVE + offsets % INTERLEAVE
                is_local = offsets // INTERLEAVE % CONTEXT_SIZE == CONTEXT_RANK
                slots = tl.where(is_sharded != 0, blocks * (block_size // CONTEXT_SIZE) + local, slots)
                is_here = is_here & (is_local | (is_sharded == 0))
            tl.store(out_ptr + tokens, tl.where(is_here, slots, -1), mask=tokens < end)
