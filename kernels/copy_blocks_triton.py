"""The kernel that copies blocks in the caches of all layers at once."""

# Type checkers cannot follow what Triton makes of annotations and ranges.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportOptionalSubscript=false, reportArgumentType=false

import triton.language as tl

from .launch import jit_without_alignment_of


@jit_without_alignment_of("descriptors_ptr", "sources_ptr", "targets_ptr")
def copy_blocks_kernel(
    descriptors_ptr,
    sources_ptr,
    targets_ptr,
    num_blocks: tl.int64,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ALIGNED_BYTES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (copy, region, tile) moves TILE words of one run of bytes."""
    copy = tl.program_id(0).to(tl.int64)
    descriptor = descriptors_ptr + tl.program_id(1).to(tl.int64) * 3
    first = tl.program_id(2).to(tl.int64) * TILE
    source = tl.load(sources_ptr + copy)
    target = tl.load(targets_ptr + copy)
    base = tl.load(descriptor)
    stride_bytes = tl.load(descriptor + 1)
    num_words = tl.load(descriptor + 2) // ALIGNED_BYTES * (ALIGNED_BYTES // WORD_BYTES)
    if (source >= 0) & (target >= 0) & (source < num_blocks) & (target < num_blocks):
        words = first + tl.arange(0, TILE)
        source_ptr = tl.multiple_of((base + source * stride_bytes).to(tl.pointer_type(WORD)), ALIGNED_BYTES)
        target_ptr = tl.multiple_of((base + target * stride_bytes).to(tl.pointer_type(WORD)), ALIGNED_BYTES)
        mask = words < num_words
        tl.store(target_ptr + words, tl.load(source_ptr + words, mask=mask), mask=mask)
