"""The kernels that write to slots: keys and values, one program per token and a few heads, and latents.

Strides are given in units of the elements that one access spans, and multiplied back here: that is how the compiler
learns their divisibility (a hint on a kernel argument is dropped, and what the launcher infers covers only multiples of
16). Rows are loaded before the slot is looked at, so that the two latencies overlap; a row whose slot is skipped is
loaded and dropped.
"""

# Type checkers cannot follow what Triton makes of annotations and ranges.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportOptionalSubscript=false, reportArgumentType=false

import triton
import triton.language as tl

from .launch import jit_without_alignment_of


@triton.jit
def load_row(
    rows_ptr,
    token,
    token_stride,
    head_stride,
    heads,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    VEC: tl.constexpr,
    VEC_BYTES: tl.constexpr,
):
    """`[heads, TILE]` of one token."""
    dims = tl.arange(0, TILE)
    row_ptr = tl.multiple_of(rows_ptr + token * token_stride * VEC, VEC_BYTES)
    mask = (heads[:, None] < NUM_HEADS) & (dims[None, :] < HEAD_SIZE)
    return tl.load(row_ptr + heads[:, None] * head_stride * VEC + dims[None, :], mask=mask)


@triton.jit
def as_stored(values, scale_ptr, element_type: tl.constexpr, LARGEST: tl.constexpr, HAS_SCALE: tl.constexpr):
    """Convert to an 8-bit cache: product with 1 / scale in float32, clamped explicitly (NaN passes), then rounded."""
    if LARGEST > 0:
        numbers = values.to(tl.float32)
        if HAS_SCALE:
            numbers = numbers * tl.math.div_rn(1.0, tl.load(scale_ptr))
        numbers = tl.where(numbers > LARGEST, LARGEST, numbers)
        numbers = tl.where(numbers < -LARGEST, -LARGEST, numbers)
        stored = numbers.to(element_type)
    else:
        stored = values
    return stored


@triton.jit
def are_neighbours(slots_ptr, token, slot, RUN: tl.constexpr):
    """Return whether the RUN slots from the multiple of RUN at or below this one belong to RUN consecutive tokens,
    this one among them.
    """
    numbers = tl.arange(0, RUN)
    tokens = token - slot % RUN + numbers
    is_token = (tokens >= 0) & (tokens < tl.num_programs(0))
    slots = tl.load(slots_ptr + tokens, mask=is_token, other=-1)
    return tl.min((slots == slot - slot % RUN + numbers).to(tl.int32), 0) == 1


@triton.jit
def store_run(
    rows_ptr,
    first_token,
    token_stride,
    head_stride,
    first_head,
    run_ptr,
    cache_head_stride,
    dim_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    TILE: tl.constexpr,
    ROW_VEC: tl.constexpr,
    ROW_VEC_BYTES: tl.constexpr,
    RUN: tl.constexpr,
    STEP_HEADS: tl.constexpr,
):
    """Store the values of RUN tokens that are adjacent in a classic cache, transposed, so that one access of 16 bytes
    from run_ptr on stores all of them. Works on STEP_HEADS heads at a time, which give each thread one such access.
    """
    numbers = tl.arange(0, STEP_HEADS * TILE)
    dims = numbers % TILE
    tokens = first_token + tl.arange(0, RUN)
    token_ptrs = tl.multiple_of(rows_ptr + tokens * token_stride * ROW_VEC, ROW_VEC_BYTES)
    for step in tl.static_range(HEADS_TILE // STEP_HEADS):
        heads = first_head + step * STEP_HEADS + numbers // TILE
        mask = (heads < NUM_HEADS) & (dims < HEAD_SIZE)
        row_offsets = heads * head_stride * ROW_VEC + dims
        rows = tl.load(token_ptrs[:, None] + row_offsets[None, :], mask=mask[None, :])
        dim_ptrs = tl.multiple_of(run_ptr + (heads * cache_head_stride + dims * dim_stride), 16)
        tl.store(dim_ptrs[:, None] + tl.arange(0, RUN)[None, :], tl.trans(rows), mask=mask[:, None])


@jit_without_alignment_of("slots_ptr", "k_scale_ptr", "v_scale_ptr")
def reshape_and_cache_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    k_scale_ptr,
    v_scale_ptr,
    key_token_stride: tl.int64,
    key_head_stride: tl.int64,
    value_token_stride: tl.int64,
    value_head_stride: tl.int64,
    key_block_stride: tl.int64,
    key_slot_stride: tl.int64,
    key_cache_head_stride: tl.int64,
    key_outer_stride: tl.int64,
    value_block_stride: tl.int64,
    value_slot_stride: tl.int64,
    value_cache_head_stride: tl.int64,
    value_dim_stride: tl.int64,
    num_slots: tl.int64,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    V_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CLASSIC_X: tl.constexpr,
    RUN: tl.constexpr,
    RUN_STEP_HEADS: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    ROW_VEC: tl.constexpr,
    ROW_VEC_BYTES: tl.constexpr,
    KEY_VEC: tl.constexpr,
    KEY_VEC_BYTES: tl.constexpr,
    VALUE_VEC: tl.constexpr,
    VALUE_VEC_BYTES: tl.constexpr,
    LARGEST: tl.constexpr,
    HAS_K_SCALE: tl.constexpr,
    HAS_V_SCALE: tl.constexpr,
):
    """Program (token, head tile). CLASSIC_X: a key's elements that lie together in the classic layout, or 0.

    RUN: tokens whose values fill an access of 16 bytes in the classic layout, where neighbours in a block are adjacent.
    The program of the first of RUN neighbours stores the values of all. 1: each token's program stores its own.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1).to(tl.int64) * HEADS_TILE + tl.arange(0, HEADS_TILE)
    key = load_row(
        key_ptr, token, key_token_stride, key_head_stride, heads, NUM_HEADS, HEAD_SIZE, KEY_TILE, ROW_VEC, ROW_VEC_BYTES
    )
    if RUN == 1:
        value = load_row(
            value_ptr,
            token,
            value_token_stride,
            value_head_stride,
            heads,
            NUM_HEADS,
            V_HEAD_SIZE,
            VALUE_TILE,
            ROW_VEC,
            ROW_VEC_BYTES,
        )
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        key_slot_ptr = tl.multiple_of(
            key_cache_ptr + (block * key_block_stride + offset * key_slot_stride) * KEY_VEC, KEY_VEC_BYTES
        )
        value_slot_ptr = tl.multiple_of(
            value_cache_ptr + (block * value_block_stride + offset * value_slot_stride) * VALUE_VEC, VALUE_VEC_BYTES
        )
        dims = tl.arange(0, KEY_TILE)
        v_dims = tl.arange(0, VALUE_TILE)
        if CLASSIC_X > 0:
            key_dims = dims // CLASSIC_X * key_outer_stride * KEY_VEC + dims % CLASSIC_X
            value_dims = v_dims * value_dim_stride * VALUE_VEC
        else:
            key_dims = dims
            value_dims = v_dims
        tl.store(
            key_slot_ptr + heads[:, None] * key_cache_head_stride * KEY_VEC + key_dims[None, :],
            as_stored(key, k_scale_ptr, key_cache_ptr.dtype.element_ty, LARGEST, HAS_K_SCALE),
            mask=(heads[:, None] < NUM_HEADS) & (dims[None, :] < HEAD_SIZE),
        )
        is_in_run = False
        if RUN > 1:
            is_in_run = are_neighbours(slots_ptr, token, slot, RUN)
            if is_in_run & (slot % RUN == 0):
                store_run(
                    value_ptr,
                    token,
                    value_token_stride,
                    value_head_stride,
                    tl.program_id(1).to(tl.int64) * HEADS_TILE,
                    value_slot_ptr,
                    value_cache_head_stride * VALUE_VEC,
                    value_dim_stride * VALUE_VEC,
                    NUM_HEADS,
                    V_HEAD_SIZE,
                    HEADS_TILE,
                    VALUE_TILE,
                    ROW_VEC,
                    ROW_VEC_BYTES,
                    RUN,
                    RUN_STEP_HEADS,
                )
        if not is_in_run:
            if RUN > 1:
                value = load_row(
                    value_ptr,
                    token,
                    value_token_stride,
                    value_head_stride,
                    heads,
                    NUM_HEADS,
                    V_HEAD_SIZE,
                    VALUE_TILE,
                    ROW_VEC,
                    ROW_VEC_BYTES,
                )
            tl.store(
                value_slot_ptr + heads[:, None] * value_cache_head_stride * VALUE_VEC + value_dims[None, :],
                as_stored(value, v_scale_ptr, value_cache_ptr.dtype.element_ty, LARGEST, HAS_V_SCALE),
                mask=(heads[:, None] < NUM_HEADS) & (v_dims[None, :] < V_HEAD_SIZE),
            )


@jit_without_alignment_of("slots_ptr", "scale_ptr")
def concat_and_cache_mla_kernel(
    kv_c_ptr,
    k_pe_ptr,
    cache_ptr,
    slots_ptr,
    scale_ptr,
    latent_stride: tl.int64,
    rope_stride: tl.int64,
    block_stride: tl.int64,
    slot_stride: tl.int64,
    num_slots: tl.int64,
    LATENT_SIZE: tl.constexpr,
    ROPE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    ROW_VEC: tl.constexpr,
    ROW_VEC_BYTES: tl.constexpr,
    CACHE_VEC: tl.constexpr,
    CACHE_VEC_BYTES: tl.constexpr,
    LARGEST: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    """Program (token); see `reshape_and_cache_kernel` for the units of the strides.

    Both parts are one tile: in a tile of the short rotary key alone each thread would move one element.
    """
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, ROW_TILE)
    is_latent = dims < LATENT_SIZE
    is_rope = (dims >= LATENT_SIZE) & (dims < LATENT_SIZE + ROPE_SIZE)
    latent_ptr = tl.multiple_of(kv_c_ptr + token * latent_stride * ROW_VEC, ROW_VEC_BYTES)
    rope_ptr = tl.multiple_of(k_pe_ptr + token * rope_stride * ROW_VEC, ROW_VEC_BYTES)
    latent = tl.load(latent_ptr + dims, mask=is_latent, other=0.0)
    rope = tl.load(rope_ptr + (dims - LATENT_SIZE), mask=is_rope, other=0.0)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        at = (slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride) * CACHE_VEC
        row_ptr = tl.multiple_of(cache_ptr + at, CACHE_VEC_BYTES)
        row = tl.where(is_latent, latent, rope)
        tl.store(
            row_ptr + dims,
            as_stored(row, scale_ptr, cache_ptr.dtype.element_ty, LARGEST, HAS_SCALE),
            mask=dims < LATENT_SIZE + ROPE_SIZE,
        )
