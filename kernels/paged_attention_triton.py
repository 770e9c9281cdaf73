"""The attention kernel over a paged cache: online softmax, decode steps and prefill chunks alike.

A program takes the query heads that share a key head, of one or a few query tokens, as the rows of one matrix product:
for a decode the group of heads, padded to the 16 rows that a tensor core wants; for a chunk several tokens as well.
"""

# Type checkers cannot follow what Triton makes of annotations and ranges.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportOptionalSubscript=false, reportArgumentType=false

import triton
import triton.language as tl

from .gather_cache_triton import as_read


@triton.jit(
    do_not_specialize=[
        "query_token_stride",
        "query_head_stride",
        "key_block_stride",
        "key_slot_stride",
        "key_head_stride",
        "value_block_stride",
        "value_slot_stride",
        "value_head_stride",
        "num_slots",
        "table_stride",
        "num_rows",
        "width",
        "num_tokens",
    ],
    do_not_specialize_on_alignment=[
        "table_ptr",
        "rows_ptr",
        "query_start_loc_ptr",
        "seq_lens_ptr",
        "k_scale_ptr",
        "v_scale_ptr",
    ],
)
def paged_attention_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    output_ptr,
    table_ptr,
    rows_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    k_scale_ptr,
    v_scale_ptr,
    query_token_stride: tl.int64,
    query_head_stride: tl.int64,
    key_block_stride: tl.int64,
    key_slot_stride: tl.int64,
    key_head_stride: tl.int64,
    value_block_stride: tl.int64,
    value_slot_stride: tl.int64,
    value_head_stride: tl.int64,
    num_slots: tl.int64,
    table_stride: tl.int64,
    num_rows: tl.int64,
    width: tl.int64,
    num_tokens: tl.int64,
    scale: tl.float32,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    V_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TABLE_BLOCK_SIZE: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    KEYS_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    QUERY_VEC: tl.constexpr,
    QUERY_VEC_BYTES: tl.constexpr,
    KEY_VEC: tl.constexpr,
    KEY_VEC_BYTES: tl.constexpr,
    VALUE_VEC: tl.constexpr,
    VALUE_VEC_BYTES: tl.constexpr,
    OUT_BYTES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CONVERTS: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
):
    """Program (sequence, key head, lane) attends, in turn with the other lanes, tiles of QUERY_TILE query tokens."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(2).to(tl.int64)
    row = tl.load(rows_ptr + sequence).to(tl.int64)
    begin = tl.load(query_start_loc_ptr + sequence).to(tl.int64)
    end = tl.minimum(tl.load(query_start_loc_ptr + sequence + 1).to(tl.int64), num_tokens)
    seq_len = tl.load(seq_lens_ptr + sequence).to(tl.int64)
    if (row < 0) | (row >= num_rows):
        end = begin
    members = tl.arange(0, QUERY_TILE * GROUP_TILE)
    member_heads = members % GROUP_TILE
    dims = tl.arange(0, KEY_TILE)
    v_dims = tl.arange(0, VALUE_TILE)
    group_query_ptr = tl.multiple_of(query_ptr + kv_head * GROUP * query_head_stride * QUERY_VEC, QUERY_VEC_BYTES)
    group_output_ptr = tl.multiple_of(output_ptr + kv_head * (GROUP * V_HEAD_SIZE), OUT_BYTES)
    head_key_ptr = tl.multiple_of(key_cache_ptr + kv_head * key_head_stride * KEY_VEC, KEY_VEC_BYTES)
    head_value_ptr = tl.multiple_of(value_cache_ptr + kv_head * value_head_stride * VALUE_VEC, VALUE_VEC_BYTES)
    for tile_begin in tl.range(begin + lane * QUERY_TILE, end, tl.num_programs(2) * QUERY_TILE):
        tokens = tile_begin + members // GROUP_TILE
        is_member = (tokens < end) & (member_heads < GROUP)
        positions = seq_len - end + tokens
        query = tl.load(
            group_query_ptr
            + (tokens[:, None] * query_token_stride + member_heads[:, None] * query_head_stride) * QUERY_VEC
            + dims[None, :],
            mask=is_member[:, None] & (dims[None, :] < HEAD_SIZE),
            other=0.0,
        )
        peak = tl.full([QUERY_TILE * GROUP_TILE], float("-inf"), tl.float32)
        total = tl.zeros([QUERY_TILE * GROUP_TILE], tl.float32)
        mixed = tl.zeros([QUERY_TILE * GROUP_TILE, VALUE_TILE], tl.float32)
        first_position = seq_len - end + tile_begin
        last_position = tl.minimum(first_position + QUERY_TILE, seq_len)
        first_key = tl.full((), 0, tl.int64)
        if WINDOW > 0:
            first_key = tl.maximum(first_position - WINDOW + 1, 0)
        for start in tl.range(first_key, last_position, KEYS_TILE):
            keys_at = start + tl.arange(0, KEYS_TILE)
            indices = keys_at // TABLE_BLOCK_SIZE
            is_inside = (keys_at < last_position) & (indices < width)
            blocks = tl.load(table_ptr + row * table_stride + indices, mask=is_inside, other=-1).to(tl.int64)
            slots = blocks * TABLE_BLOCK_SIZE + keys_at % TABLE_BLOCK_SIZE
            is_stored = (blocks >= 0) & (slots < num_slots)
            kernel_blocks = slots // BLOCK_SIZE
            offsets = slots % BLOCK_SIZE
            key = tl.load(
                head_key_ptr
                + (kernel_blocks * key_block_stride + offsets * key_slot_stride)[:, None] * KEY_VEC
                + dims[None, :],
                mask=is_stored[:, None] & (dims[None, :] < HEAD_SIZE),
                other=0.0,
            )
            key = as_read(key, k_scale_ptr, query_ptr.dtype.element_ty, CONVERTS, HAS_K_SCALE)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            if SOFTCAP > 0:
                # tanh(x) by the exponential, which also runs where libdevice does not.
                scores = SOFTCAP * (1 - 2 / (tl.exp(2 * (scores / SOFTCAP)) + 1))
            is_seen = (keys_at[None, :] <= positions[:, None]) & (keys_at[None, :] < last_position)
            if WINDOW > 0:
                is_seen = is_seen & (keys_at[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            # A row that has seen no key yet has no peak: exp(-inf - -inf) would be NaN.
            safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp(scores - safe_peak[:, None])
            decay = tl.exp(peak - safe_peak)
            total = total * decay + tl.sum(weights, 1)
            value = tl.load(
                head_value_ptr
                + (kernel_blocks * value_block_stride + offsets * value_slot_stride)[:, None] * VALUE_VEC
                + v_dims[None, :],
                mask=is_stored[:, None] & (v_dims[None, :] < V_HEAD_SIZE),
                other=0.0,
            )
            value = as_read(value, v_scale_ptr, query_ptr.dtype.element_ty, CONVERTS, HAS_V_SCALE)
            mixed = mixed * decay[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            peak = new_peak
        # Rows beside the chunk may have seen no key at all; they are not stored, but must not divide by 0.
        total = tl.where(total > 0, total, 1.0)
        tl.store(
            group_output_ptr
            + (tokens[:, None] * (NUM_KV_HEADS * GROUP) + member_heads[:, None]) * V_HEAD_SIZE
            + v_dims[None, :],
            (mixed / total[:, None]).to(output_ptr.dtype.element_ty),
            mask=is_member[:, None] & (v_dims[None, :] < V_HEAD_SIZE),
        )
