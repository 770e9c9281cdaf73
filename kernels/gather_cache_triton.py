"""The kernel that reads keys and values back by block table: the inverse of the write."""

# Type checkers cannot follow what Triton makes of annotations and ranges.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportOptionalSubscript=false, reportArgumentType=false

import triton
import triton.language as tl

from .launch import jit_without_alignment_of


@triton.jit
def as_read(stored, scale_ptr, element_type: tl.constexpr, CONVERTS: tl.constexpr, HAS_SCALE: tl.constexpr):
    """Convert 8-bit numbers: the product with the scale in float32, rounded to the result's dtype."""
    if CONVERTS:
        numbers = stored.to(tl.float32)
        if HAS_SCALE:
            numbers = numbers * tl.load(scale_ptr)
        read = numbers.to(element_type)
    else:
        read = stored
    return read


@jit_without_alignment_of(
    "table_ptr", "rows_ptr", "cu_seqlens_ptr", "first_positions_ptr", "k_scale_ptr", "v_scale_ptr"
)
def gather_cache_kernel(
    key_cache_ptr,
    value_cache_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    rows_ptr,
    cu_seqlens_ptr,
    first_positions_ptr,
    k_scale_ptr,
    v_scale_ptr,
    key_block_stride: tl.int64,
    key_slot_stride: tl.int64,
    key_head_stride: tl.int64,
    key_outer_stride: tl.int64,
    value_block_stride: tl.int64,
    value_slot_stride: tl.int64,
    value_head_stride: tl.int64,
    value_dim_stride: tl.int64,
    num_slots: tl.int64,
    table_stride: tl.int64,
    num_rows: tl.int64,
    width: tl.int64,
    num_seqs: tl.int64,
    num_tokens: tl.int64,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    V_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TABLE_BLOCK_SIZE: tl.constexpr,
    CLASSIC_X: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    KEY_VEC: tl.constexpr,
    KEY_VEC_BYTES: tl.constexpr,
    VALUE_VEC: tl.constexpr,
    VALUE_VEC_BYTES: tl.constexpr,
    KEY_OUT_BYTES: tl.constexpr,
    VALUE_OUT_BYTES: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    CONVERTS: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
):
    """Program (sequence, lane, head tile) takes turns with the other lanes; sequence num_seqs is the tail, zeros."""
    sequence = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1).to(tl.int64)
    heads = tl.program_id(2).to(tl.int64) * HEADS_TILE + tl.arange(0, HEADS_TILE)
    dims = tl.arange(0, KEY_TILE)
    v_dims = tl.arange(0, VALUE_TILE)
    key_mask = (heads[:, None] < NUM_HEADS) & (dims[None, :] < HEAD_SIZE)
    value_mask = (heads[:, None] < NUM_HEADS) & (v_dims[None, :] < V_HEAD_SIZE)
    if CLASSIC_X > 0:
        key_dims = dims // CLASSIC_X * key_outer_stride * KEY_VEC + dims % CLASSIC_X
        value_dims = v_dims * value_dim_stride * VALUE_VEC
    else:
        key_dims = dims
        value_dims = v_dims
    begin = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    end = num_tokens
    row = tl.full((), -1, tl.int64)
    first = tl.full((), 0, tl.int64)
    if sequence < num_seqs:
        end = tl.minimum(tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int64), num_tokens)
        row = tl.load(rows_ptr + sequence).to(tl.int64)
        if HAS_FIRST:
            first = tl.load(first_positions_ptr + sequence)
    is_row = (row >= 0) & (row < num_rows)
    for token in tl.range(begin + lane, end, tl.num_programs(1)):
        position = first + token - begin
        index = position // TABLE_BLOCK_SIZE
        is_inside = is_row & (position >= 0) & (index < width)
        block = tl.load(table_ptr + row * table_stride + index, mask=is_inside, other=-1).to(tl.int64)
        slot = block * TABLE_BLOCK_SIZE + position % TABLE_BLOCK_SIZE
        is_inside = is_inside & (block >= 0) & (slot < num_slots)
        kernel_block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        key_slot_ptr = tl.multiple_of(
            key_cache_ptr + (kernel_block * key_block_stride + offset * key_slot_stride) * KEY_VEC, KEY_VEC_BYTES
        )
        stored = tl.load(
            key_slot_ptr + heads[:, None] * key_head_stride * KEY_VEC + key_dims[None, :],
            mask=key_mask & is_inside,
            other=0.0,
        )
        key_row_ptr = tl.multiple_of(key_ptr + token * (NUM_HEADS * HEAD_SIZE), KEY_OUT_BYTES)
        tl.store(
            key_row_ptr + heads[:, None] * HEAD_SIZE + dims[None, :],
            as_read(stored, k_scale_ptr, key_ptr.dtype.element_ty, CONVERTS, HAS_K_SCALE),
            mask=key_mask,
        )
        if HAS_VALUE:
            value_slot_ptr = tl.multiple_of(
                value_cache_ptr + (kernel_block * value_block_stride + offset * value_slot_stride) * VALUE_VEC,
                VALUE_VEC_BYTES,
            )
            stored = tl.load(
                value_slot_ptr + heads[:, None] * value_head_stride * VALUE_VEC + value_dims[None, :],
                mask=value_mask & is_inside,
                other=0.0,
            )
            value_row_ptr = tl.multiple_of(value_ptr + token * (NUM_HEADS * V_HEAD_SIZE), VALUE_OUT_BYTES)
            tl.store(
                value_row_ptr + heads[:, None] * V_HEAD_SIZE + v_dims[None, :],
                as_read(stored, v_scale_ptr, value_ptr.dtype.element_ty, CONVERTS, HAS_V_SCALE),
                mask=value_mask,
            )
