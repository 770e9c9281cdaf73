"""The six physical orders of a packed KV cache: shapes, byte strides, and the width of a block table.

Logical axes are `[L, B, H, N, C]`: layer, block, head slot, state, bytes of one cell. A layout names the physical
order, outermost first. Shapes and strides are in bytes (recorded in golden/layout.jsonl).
"""

import enum
import math

from .errors import InputError
from .kv_cache_spec import KVCacheSpec

_LAYER, _BLOCK = 0, 1

FixedStrides = tuple[int | None, int | None, int | None, int | None, int | None]
"""Strides of `[L, B, H, N, C]` that are given from outside, in bytes; None: follow from the axes inside."""


class KVCacheLayout(enum.Enum):
    """A physical order of `[L, B, H, N, C]`; the value is the logical axis at each physical place."""

    LBHNC = (0, 1, 2, 3, 4)
    LBNHC = (0, 1, 3, 2, 4)
    LHBNC = (0, 2, 1, 3, 4)
    BLHNC = (1, 0, 2, 3, 4)
    BLNHC = (1, 0, 3, 2, 4)
    BHLNC = (1, 2, 0, 3, 4)

    @property
    def is_layer_outermost(self) -> bool:
        """Each layer's cache is one contiguous region."""
        return self.value[0] == _LAYER

    @property
    def is_block_outermost(self) -> bool:
        """Each block holds the pages of all layers, so pages of different sizes can stand side by side."""
        return self.value[0] == _BLOCK

    @property
    def is_block_compact(self) -> bool:
        """The page of one block in one layer is one contiguous run of bytes."""
        return set(self.value[:2]) == {_LAYER, _BLOCK}


def layer_shape_bytes(
    spec: KVCacheSpec, num_blocks: int, kernel_block_size: int | None = None
) -> tuple[int, int, int, int]:
    """Logical shape `(B, H, N, C)` of one layer, C in bytes.

    A kernel that works on smaller blocks than the block table sees each block as several (`kernel_block_size` tokens).

    Raises:
        InputError: the kernel's block size does not divide the block size.
    """
    kernel_tokens = spec.block_size if kernel_block_size is None else kernel_block_size
    if kernel_tokens < 1 or spec.block_size % kernel_tokens:
        raise InputError(f"kernel block size {kernel_tokens} does not divide the block size {spec.block_size}")
    kernel_blocks_per_block = spec.block_size // kernel_tokens
    return (
        num_blocks * kernel_blocks_per_block,
        spec.num_head_slots,
        spec.states_per_block(kernel_tokens),
        spec.state_content_bytes,
    )


def layout_strides_bytes(
    spec: KVCacheSpec,
    num_blocks: int,
    num_layers: int,
    layout: KVCacheLayout,
    kernel_block_size: int | None = None,
    fixed_strides: FixedStrides = (None, None, None, None, None),
) -> tuple[int, int, int, int, int]:
    """Strides in bytes in logical order `[L, B, H, N, C]`.

    Raises:
        InputError: a padded page cannot be expressed: an axis of the page lies outside the layer and block axes, or
            the kernel splits blocks.
    """
    shape = (num_layers, *layer_shape_bytes(spec, num_blocks, kernel_block_size))
    order: tuple[int, ...] = layout.value
    padded_bytes = spec.page_size_padded
    # The padding sits at the end of a page, so everything outside the page must be whole pages: layers and blocks.
    innermost_page_axis = max(order.index(_LAYER), order.index(_BLOCK))
    if padded_bytes is not None:
        _require_expressible_padding(spec, layout, shape, innermost_page_axis, kernel_block_size)
    strides = [0, 0, 0, 0, 0]
    stride = 1
    for place in reversed(range(len(order))):
        axis = order[place]
        if padded_bytes is not None and place == innermost_page_axis:
            stride = max(stride, padded_bytes)
        strides[axis] = fixed_strides[axis] or stride
        stride = strides[axis] * shape[axis]
    return (strides[0], strides[1], strides[2], strides[3], strides[4])


def _require_expressible_padding(
    spec: KVCacheSpec,
    layout: KVCacheLayout,
    shape: tuple[int, ...],
    innermost_page_axis: int,
    kernel_block_size: int | None,
) -> None:
    if kernel_block_size is not None and kernel_block_size != spec.block_size:
        raise InputError(
            f"a page padded to {spec.page_size_bytes:,} bytes cannot be split into kernel blocks of "
            f"{kernel_block_size} tokens; use a kernel block size of {spec.block_size}"
        )
    page_grid = math.prod(shape[axis] for axis in layout.value[: innermost_page_axis + 1])
    if page_grid != shape[_LAYER] * shape[_BLOCK]:
        raise InputError(
            f"layout {layout.name} tears a page apart, so it cannot express a page padded to "
            f"{spec.page_size_bytes:,} bytes; use a layout that keeps pages whole (LBNHC, LBHNC, BLNHC, BLHNC)"
        )


def block_table_width(
    max_num_blocks: int, block_size: int, kernel_block_size: int | None = None, token_alignment: int = 128
) -> int:
    """Columns of a block table whose rows hold `max_num_blocks` blocks.

    A row covers a whole multiple of `token_alignment` tokens, so that kernels can read it in vectors; it is counted in
    kernel blocks where those are smaller than blocks.

    Raises:
        InputError: the kernel's block size does not divide the block size, or the alignment is below 1.
    """
    kernel_tokens = block_size if kernel_block_size is None else kernel_block_size
    if kernel_tokens < 1 or block_size % kernel_tokens:
        raise InputError(f"kernel block size {kernel_tokens} does not divide the block size {block_size}")
    if token_alignment < 1:
        raise InputError(f"token_alignment is {token_alignment}; it must be at least 1 token")
    aligned_blocks = token_alignment // math.gcd(token_alignment, block_size)
    return math.ceil(max_num_blocks / aligned_blocks) * aligned_blocks * block_size // kernel_tokens
