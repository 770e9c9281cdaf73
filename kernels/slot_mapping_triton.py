"""The slot-mapping kernel: one launch for all groups, sizes read on the device."""

# Type checkers cannot follow what Triton makes of annotations and ranges.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportOptionalSubscript=false, reportArgumentType=false

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["slot_stride", "slot_width", "num_reqs"],
    do_not_specialize_on_alignment=[
        "descriptors_ptr",
        "rows_ptr",
        "query_start_loc_ptr",
        "first_positions_ptr",
        "slots_ptr",
    ],
)
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
    TILE: tl.constexpr,
):
    """Program (group, request, lane) takes turns at a request's tiles; request num_reqs is the tail."""
    group = tl.program_id(0).to(tl.int64)
    request = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(2).to(tl.int64)
    lanes = tl.arange(0, TILE)
    out_ptr = slots_ptr + group * slot_stride
    begin = tl.load(query_start_loc_ptr + request).to(tl.int64)
    if request == num_reqs:
        for start in tl.range(begin + lane * TILE, slot_width, tl.num_programs(2) * TILE):
            tokens = start + lanes
            tl.store(out_ptr + tokens, tl.full([TILE], -1, tl.int64), mask=tokens < slot_width)
    else:
        end = tl.minimum(tl.load(query_start_loc_ptr + request + 1).to(tl.int64), slot_width)
        row = tl.load(rows_ptr + request).to(tl.int64)
        first = tl.load(first_positions_ptr + request)
        descriptor = descriptors_ptr + group * NUM_COLUMNS
        table_ptr = tl.load(descriptor).to(tl.pointer_type(tl.int32))
        row_stride = tl.load(descriptor + 1)
        num_rows = tl.load(descriptor + 2)
        width = tl.load(descriptor + 3)
        block_size = tl.load(descriptor + 4)
        is_sharded = tl.load(descriptor + 5)
        is_row = (row >= 0) & (row < num_rows)
        for start in tl.range(begin + lane * TILE, end, tl.num_programs(2) * TILE):
            tokens = start + lanes
            positions = first + tokens - begin
            indices = positions // block_size
            offsets = positions - indices * block_size
            is_here = (tokens < end) & is_row & (positions >= 0) & (indices < width)
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
