"""The attention kernel over a paged cache: online softmax, decode steps and prefill chunks alike.

A program takes the query heads that share a key head, of one or a few query tokens, as the rows of one matrix product:
for a decode the group of heads, padded to the 16 rows that a tensor core wants; for a chunk several tokens as well.

Where that makes too few programs, the keys are split along the sequence: each split leaves its own mean of the values
with the logarithm of its weights' sum, and a second kernel merges the splits (flash decoding).
"""

# Type checkers cannot follow what Triton makes of annotations and ranges.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportOptionalSubscript=false, reportArgumentType=false

import triton
import triton.language as tl

from .gather_cache_triton import as_read
from .launch import jit_without_alignment_of


@triton.jit
def load_vectors(
    head_ptr,
    rows,
    is_stored,
    dims,
    SIZE: tl.constexpr,
    scale_ptr,
    element_type: tl.constexpr,
    CONVERTS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """`[rows, dims]` of one head of a cache; zeros where nothing is stored."""
    mask = is_stored[:, None] & (dims[None, :] < SIZE)
    stored = tl.load(head_ptr + rows[:, None] + dims[None, :], mask=mask, other=0.0)
    return as_read(stored, scale_ptr, element_type, CONVERTS, HAS_SCALE)


@jit_without_alignment_of(
    "lse_ptr", "table_ptr", "rows_ptr", "query_start_loc_ptr", "seq_lens_ptr", "k_scale_ptr", "v_scale_ptr"
)
def paged_attention_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    output_ptr,
    lse_ptr,
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
    num_splits: tl.int64,
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
    KEY_TILES: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    VALUE_REST_TILE: tl.constexpr,
    MIN_SPLIT_KEYS: tl.constexpr,
    EARLY_VALUES: tl.constexpr,
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
    """Program (sequence, key head, lane and split) attends, in turn with the other lanes, tiles of QUERY_TILE query
    tokens.

    MIN_SPLIT_KEYS: the fewest keys of a split, or 0 where nothing is split. Where there are splits, output is float32
    `[num_splits, num_tokens, heads, V_HEAD_SIZE]`, and lse (log of the sum of exponentials) the same without the last
    axis, -inf for a split without keys. KEY_TILES: of a head; where there are several, queries are read again for each
    step, as no thread could hold them. VALUE_REST_TILE: the part of a value behind the first tile, or 0. EARLY_VALUES:
    whether a step asks for its values together with its keys, or, where shared memory has no room for both, later.
    """
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(2).to(tl.int64) // num_splits
    split = tl.program_id(2).to(tl.int64) % num_splits
    num_lanes = tl.num_programs(2) // num_splits
    row = tl.load(rows_ptr + sequence).to(tl.int64)
    begin = tl.load(query_start_loc_ptr + sequence).to(tl.int64)
    end = tl.minimum(tl.load(query_start_loc_ptr + sequence + 1).to(tl.int64), num_tokens)
    seq_len = tl.load(seq_lens_ptr + sequence).to(tl.int64)
    if (row < 0) | (row >= num_rows):
        end = begin
    element_type: tl.constexpr = query_ptr.dtype.element_ty
    members = tl.arange(0, QUERY_TILE * GROUP_TILE)
    member_heads = members % GROUP_TILE
    dims = tl.arange(0, KEY_TILE)
    v_dims = tl.arange(0, VALUE_TILE)
    group_query_ptr = tl.multiple_of(query_ptr + kv_head * GROUP * query_head_stride * QUERY_VEC, QUERY_VEC_BYTES)
    output_head = split * num_tokens * (NUM_KV_HEADS * GROUP) + kv_head * GROUP
    group_output_ptr = tl.multiple_of(output_ptr + output_head * V_HEAD_SIZE, OUT_BYTES)
    head_key_ptr = tl.multiple_of(key_cache_ptr + kv_head * key_head_stride * KEY_VEC, KEY_VEC_BYTES)
    head_value_ptr = tl.multiple_of(value_cache_ptr + kv_head * value_head_stride * VALUE_VEC, VALUE_VEC_BYTES)
    for tile_begin in tl.range(begin + lane * QUERY_TILE, end, num_lanes * QUERY_TILE):
        tokens = tile_begin + members // GROUP_TILE
        is_member = (tokens < end) & (member_heads < GROUP)
        positions = seq_len - end + tokens
        query_rows = (tokens * query_token_stride + member_heads * query_head_stride) * QUERY_VEC
        if KEY_TILES == 1:
            query = load_vectors(
                group_query_ptr, query_rows, is_member, dims, HEAD_SIZE, None, element_type, False, False
            )
        peak = tl.full([QUERY_TILE * GROUP_TILE], float("-inf"), tl.float32)
        total = tl.zeros([QUERY_TILE * GROUP_TILE], tl.float32)
        mixed = tl.zeros([QUERY_TILE * GROUP_TILE, VALUE_TILE], tl.float32)
        if VALUE_REST_TILE > 0:
            v_rest = VALUE_TILE + tl.arange(0, VALUE_REST_TILE)
            mixed_rest = tl.zeros([QUERY_TILE * GROUP_TILE, VALUE_REST_TILE], tl.float32)
        first_position = seq_len - end + tile_begin
        last_position = tl.minimum(first_position + QUERY_TILE, seq_len)
        first_key = tl.full((), 0, tl.int64)
        if WINDOW > 0:
            first_key = tl.maximum(first_position - WINDOW + 1, 0)
        end_key = last_position
        if MIN_SPLIT_KEYS > 0:
            num_keys = tl.maximum((last_position - first_key + num_splits - 1) // num_splits, MIN_SPLIT_KEYS)
            first_key += split * num_keys
            end_key = tl.minimum(first_key + num_keys, last_position)
        for start in tl.range(first_key, end_key, KEYS_TILE):
            keys_at = start + tl.arange(0, KEYS_TILE)
            indices = keys_at // TABLE_BLOCK_SIZE
            is_inside = (keys_at < end_key) & (indices < width)
            blocks = tl.load(table_ptr + row * table_stride + indices, mask=is_inside, other=-1).to(tl.int64)
            slots = blocks * TABLE_BLOCK_SIZE + keys_at % TABLE_BLOCK_SIZE
            is_stored = (blocks >= 0) & (slots < num_slots)
            kernel_blocks = slots // BLOCK_SIZE
            offsets = slots % BLOCK_SIZE
            key_rows = (kernel_blocks * key_block_stride + offsets * key_slot_stride) * KEY_VEC
            value_rows = (kernel_blocks * value_block_stride + offsets * value_slot_stride) * VALUE_VEC
            if EARLY_VALUES:  # on their way while the scores are worked out
                value = load_vectors(
                    head_value_ptr,
                    value_rows,
                    is_stored,
                    v_dims,
                    V_HEAD_SIZE,
                    v_scale_ptr,
                    element_type,
                    CONVERTS,
                    HAS_V_SCALE,
                )
            scores = tl.zeros([QUERY_TILE * GROUP_TILE, KEYS_TILE], tl.float32)
            for tile in tl.static_range(KEY_TILES):
                tile_dims = tile * KEY_TILE + dims
                if KEY_TILES > 1:
                    query = load_vectors(
                        group_query_ptr, query_rows, is_member, tile_dims, HEAD_SIZE, None, element_type, False, False
                    )
                key = load_vectors(
                    head_key_ptr,
                    key_rows,
                    is_stored,
                    tile_dims,
                    HEAD_SIZE,
                    k_scale_ptr,
                    element_type,
                    CONVERTS,
                    HAS_K_SCALE,
                )
                scores = tl.dot(query, tl.trans(key), acc=scores, input_precision="ieee")
            scores = scores * scale
            if SOFTCAP > 0:
                # tanh(x) by the exponential, which also runs where libdevice does not.
                scores = SOFTCAP * (1 - 2 / (tl.exp(2 * (scores / SOFTCAP)) + 1))
            is_seen = (keys_at[None, :] <= positions[:, None]) & is_stored[None, :]
            if WINDOW > 0:
                is_seen = is_seen & (keys_at[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            # A row that has seen no key yet has no peak: exp(-inf - -inf) would be NaN.
            safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp(scores - safe_peak[:, None])
            decay = tl.exp(peak - safe_peak)
            total = total * decay + tl.sum(weights, 1)
            if not EARLY_VALUES:
                value = load_vectors(
                    head_value_ptr,
                    value_rows,
                    is_stored,
                    v_dims,
                    V_HEAD_SIZE,
                    v_scale_ptr,
                    element_type,
                    CONVERTS,
                    HAS_V_SCALE,
                )
            mixed = mixed * decay[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            if VALUE_REST_TILE > 0:
                value_rest = load_vectors(
                    head_value_ptr,
                    value_rows,
                    is_stored,
                    v_rest,
                    V_HEAD_SIZE,
                    v_scale_ptr,
                    element_type,
                    CONVERTS,
                    HAS_V_SCALE,
                )
                mixed_rest = mixed_rest * decay[:, None] + tl.dot(
                    weights.to(value_rest.dtype), value_rest, input_precision="ieee"
                )
            peak = new_peak
        # Rows beside the chunk, and splits behind its end, have seen no key at all: they must not divide by 0.
        divisor = tl.where(total > 0, total, 1.0)
        output_heads = tokens * (NUM_KV_HEADS * GROUP) + member_heads
        tl.store(
            group_output_ptr + output_heads[:, None] * V_HEAD_SIZE + v_dims[None, :],
            (mixed / divisor[:, None]).to(output_ptr.dtype.element_ty),
            mask=is_member[:, None] & (v_dims[None, :] < V_HEAD_SIZE),
        )
        if VALUE_REST_TILE > 0:
            tl.store(
                group_output_ptr + output_heads[:, None] * V_HEAD_SIZE + v_rest[None, :],
                (mixed_rest / divisor[:, None]).to(output_ptr.dtype.element_ty),
                mask=is_member[:, None] & (v_rest[None, :] < V_HEAD_SIZE),
            )
        if MIN_SPLIT_KEYS > 0:
            # peak is -inf where nothing was seen, and log(1) is 0.
            tl.store(lse_ptr + output_head + output_heads, peak + tl.log(divisor), mask=is_member)


@jit_without_alignment_of("lse_ptr", "rows_ptr", "query_start_loc_ptr")
def merge_splits_kernel(
    partial_ptr,
    lse_ptr,
    output_ptr,
    rows_ptr,
    query_start_loc_ptr,
    num_rows: tl.int64,
    num_tokens: tl.int64,
    num_splits: tl.int64,
    NUM_HEADS: tl.constexpr,
    V_HEAD_SIZE: tl.constexpr,
    SPLITS_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    OUT_BYTES: tl.constexpr,
):
    """Program (sequence, query head, lane) merges, in turn with the other lanes, the splits of one query token: their
    means, weighted by the sums that lse holds.
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(2).to(tl.int64)
    row = tl.load(rows_ptr + sequence).to(tl.int64)
    begin = tl.load(query_start_loc_ptr + sequence).to(tl.int64)
    end = tl.minimum(tl.load(query_start_loc_ptr + sequence + 1).to(tl.int64), num_tokens)
    if (row < 0) | (row >= num_rows):
        end = begin
    v_dims = tl.arange(0, VALUE_TILE)
    split_stride = num_tokens * NUM_HEADS
    for token in tl.range(begin + lane, end, tl.num_programs(2)):
        token_head = token * NUM_HEADS + head
        peak = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        mixed = tl.zeros([VALUE_TILE], tl.float32)
        for first_split in tl.range(0, num_splits, SPLITS_TILE):
            splits = first_split + tl.arange(0, SPLITS_TILE)
            is_split = splits < num_splits
            rows = token_head + splits * split_stride
            lse = tl.load(lse_ptr + rows, mask=is_split, other=float("-inf"))
            partial = tl.load(
                partial_ptr + rows[:, None] * V_HEAD_SIZE + v_dims[None, :],
                mask=is_split[:, None] & (v_dims[None, :] < V_HEAD_SIZE),
                other=0.0,
            )
            new_peak = tl.maximum(peak, tl.max(lse, 0))
            safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp(lse - safe_peak)
            decay = tl.exp(peak - safe_peak)
            mixed = mixed * decay + tl.sum(partial * weights[:, None], 0)
            total = total * decay + tl.sum(weights, 0)
            peak = new_peak
        total = tl.where(total > 0, total, 1.0)
        token_output_ptr = tl.multiple_of(output_ptr + token_head * V_HEAD_SIZE, OUT_BYTES)
        tl.store(token_output_ptr + v_dims, (mixed / total).to(output_ptr.dtype.element_ty), mask=v_dims < V_HEAD_SIZE)
