"""The kernel that writes a latent and a rotary key side by side to their slot: one program per token."""

# Type checkers cannot follow what Triton makes of annotations and ranges.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportOptionalSubscript=false, reportArgumentType=false

import triton.language as tl

from .launch import jit_without_alignment_of
from .reshape_and_cache_triton import as_stored


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
