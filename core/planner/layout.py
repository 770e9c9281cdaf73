"""Where a KV cache lies in memory: the six physical orders of its axes, and every layer's place in a rank's buffer.

Logical axes are `[L, B, H, N, C]`: layer, block, head slot, state, bytes of one cell. A layout names the physical
order, outermost first. Shapes and strides are in bytes (recorded in golden/layout.jsonl).
"""

import enum
import math
from collections.abc import Sequence

import attrs

from ..errors import InputError
from .specs import AttentionSpec, CompressedStateSpec, KVCacheSpec, MambaLikeSpec, MLASpec

_LAYER, _BLOCK = 0, 1

FixedStrides = tuple[int | None, int | None, int | None, int | None, int | None]
"""Strides of `[L, B, H, N, C]` in bytes that the caller fixes; None: the stride follows from the inner axes."""


class KVCacheLayout(enum.Enum):
    """A physical order of `[L, B, H, N, C]`; the value names the logical axis at each physical place."""

    LBHNC = (0, 1, 2, 3, 4)
    LBNHC = (0, 1, 3, 2, 4)
    LHBNC = (0, 2, 1, 3, 4)
    BLHNC = (1, 0, 2, 3, 4)
    BLNHC = (1, 0, 3, 2, 4)
    BHLNC = (1, 2, 0, 3, 4)

    @property
    def is_layer_outermost(self) -> bool:
        """Whether each layer's cache is one contiguous region."""
        return self.value[0] == _LAYER

    @property
    def is_block_outermost(self) -> bool:
        """Whether each block holds the pages of all layers, so that pages of different sizes can lie side by side."""
        return self.value[0] == _BLOCK

    @property
    def is_block_compact(self) -> bool:
        """Whether the page of one block in one layer is one contiguous run of bytes."""
        return set(self.value[:2]) == {_LAYER, _BLOCK}


def layer_shape_bytes(
    spec: KVCacheSpec, num_blocks: int, kernel_block_size: int | None = None
) -> tuple[int, int, int, int]:
    """Logical shape `(B, H, N, C)` of one layer, C in bytes.

    A kernel that works on smaller blocks than the block table sees each block as several (`kernel_block_size` tokens).

    Raises:
        InputError: the kernel's block size does not divide the block size.
    """
    kernel_tokens = _kernel_tokens(spec.block_size, kernel_block_size)
    kernel_blocks_per_block = spec.block_size // kernel_tokens
    return (
        num_blocks * kernel_blocks_per_block,
        spec.num_head_slots,
        spec.states_per_block(kernel_tokens),
        spec.state_content_bytes,
    )


def _kernel_tokens(block_size: int, kernel_block_size: int | None) -> int:
    kernel_tokens = block_size if kernel_block_size is None else kernel_block_size
    if kernel_tokens < 1 or block_size % kernel_tokens:
        raise InputError(f"kernel block size {kernel_tokens} does not divide the block size {block_size}")
    return kernel_tokens


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
    # The padding is at the end of a page, so everything outside the page must be whole pages: layers and blocks.
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
    """Number of columns of a block table whose rows hold `max_num_blocks` blocks.

    A row covers a whole multiple of `token_alignment` tokens, so that kernels can read it in vectors; the columns are
    kernel blocks where those are smaller than blocks.

    Raises:
        InputError: the kernel's block size does not divide the block size, or the alignment is below 1.
    """
    kernel_tokens = _kernel_tokens(block_size, kernel_block_size)
    if token_alignment < 1:
        raise InputError(f"token_alignment is {token_alignment}; it must be at least 1 token")
    aligned_blocks = token_alignment // math.gcd(token_alignment, block_size)
    return math.ceil(max_num_blocks / aligned_blocks) * aligned_blocks * block_size // kernel_tokens


@attrs.frozen
class KVCacheGroup:
    """Layers that share one block table: a block id names one page in each of them.

    Attributes:
        layer_names: the layers, in the order in which they lie in memory.
        layer_specs: the spec of each layer; both are empty on a rank that holds none of the group's layers.
        spec: the spec for the block table: block size, and the blocks that a request needs.
        is_uniform_type: whether the layers are of one kind with pages that may differ; the group's page is their sum.
    """

    layer_names: tuple[str, ...]
    layer_specs: tuple[KVCacheSpec, ...]
    spec: KVCacheSpec
    is_uniform_type: bool = False

    @property
    def kind(self) -> str:
        """`uniform_type`, or the kind of the one spec that all layers share."""
        return "uniform_type" if self.is_uniform_type else self.spec.kind

    @property
    def block_size(self) -> int:
        """Tokens that one block of this group covers on one rank."""
        return self.spec.block_size

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block: of one layer, or of all layers together where their pages may differ."""
        return self.bytes_per_block if self.is_uniform_type else self.spec.page_size_bytes

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block of this group takes in all its layers."""
        return sum(spec.page_size_bytes for spec in self.layer_specs)

    def tokens_per_block(self, decode_context_parallel_size: int) -> int:
        """Tokens of a request that one block id covers: DCP spreads attention over ranks, but never a state."""
        if isinstance(self.spec, MambaLikeSpec):
            return self.block_size
        return self.block_size * decode_context_parallel_size

    def on_rank(self, layer_names: frozenset[str]) -> "KVCacheGroup":
        """Return the group with only the layers that one rank holds; a group without layers is valid."""
        held = [index for index, name in enumerate(self.layer_names) if name in layer_names]
        return attrs.evolve(
            self,
            layer_names=tuple(self.layer_names[index] for index in held),
            layer_specs=tuple(self.layer_specs[index] for index in held),
        )


@attrs.frozen
class KVCacheTensor:
    """Place of a run of equal layers: layer `l`, block `b` starts at offset + l * layer_stride + b * block_stride.

    All tensors of a rank alias one buffer of `size_bytes`. Groups overlay each other, which is safe because a block
    belongs to one group at a time.
    """

    size_bytes: int
    layers: tuple[str, ...]
    layer_stride_bytes: int
    block_stride_bytes: int
    offset_bytes: int


@attrs.frozen
class KVCacheConfig:
    """The KV cache of one rank.

    Attributes:
        num_blocks: blocks of the pool, the null block (block 0) included; equal on all ranks.
        groups: the rank's block-table groups, in the same order on all ranks.
        tensors: where the layers lie in the rank's buffer.
        layout: physical order of the axes.
        size_bytes: bytes of the rank's one buffer.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    tensors: tuple[KVCacheTensor, ...]
    layout: KVCacheLayout
    size_bytes: int


def needs_zeroing(groups: tuple[KVCacheGroup, ...]) -> bool:
    """Whether an allocated block must be zeroed before use.

    State layers read their state before they have written all of it; groups of different precision would read each
    other's left-over bytes as NaN.
    """
    specs = [spec for group in groups for spec in (*group.layer_specs, group.spec)]
    if any(isinstance(spec, MambaLikeSpec) for spec in specs):
        return True
    precisions = {
        (spec.dtype, spec.scales, getattr(spec, "packed", None))
        if isinstance(spec, AttentionSpec | MLASpec | CompressedStateSpec)
        else ("uint8", None, None)
        for spec in specs
    }
    return len(precisions) > 1


def pool_bytes_per_block(groups: Sequence[KVCacheGroup]) -> int:
    """Bytes of one block id on a rank: those of its widest group; 0 on a rank without layers."""
    return max((group.bytes_per_block for group in groups), default=0)


def lay_out(groups: Sequence[KVCacheGroup], num_blocks: int, layout: KVCacheLayout) -> KVCacheConfig:
    """Lay out the KV cache of one rank that holds `num_blocks` blocks.

    Every group starts at byte 0: groups overlay each other, because a block belongs to one group at a time. Within a
    group, layers with equal specs lie together, one such run after the other.

    Raises:
        InputError: the layout cannot express pages of different sizes.
    """
    require_expressible(groups, layout)
    block_bytes = pool_bytes_per_block(groups)
    size_bytes = block_bytes * num_blocks
    tensors: list[KVCacheTensor] = []
    for group in groups:
        page_bytes_before = 0
        names_by_spec: dict[KVCacheSpec, list[str]] = {}
        for name, spec in zip(group.layer_names, group.layer_specs, strict=True):
            names_by_spec.setdefault(spec, []).append(name)
        for spec, names in names_by_spec.items():
            layer_stride, block_stride, *_ = layout_strides_bytes(
                spec,
                num_blocks,
                len(names),
                layout,
                fixed_strides=(None, block_bytes if layout.is_block_outermost else None, None, None, None),
            )
            # Layer-outermost, a layer takes one page per block; block-outermost, a block takes one page per layer.
            offset = page_bytes_before * max(layer_stride, spec.page_size_bytes) // spec.page_size_bytes
            tensors.append(KVCacheTensor(size_bytes, tuple(names), layer_stride, block_stride, offset))
            page_bytes_before += len(names) * spec.page_size_bytes
    return KVCacheConfig(num_blocks, tuple(groups), tuple(tensors), layout, size_bytes)


def require_expressible(groups: Sequence[KVCacheGroup], layout: KVCacheLayout) -> None:
    """Check that `layout` can hold the pages of `groups`.

    Raises:
        InputError: pages differ in size and the layout tears pages apart, or keeps layers whole across several groups;
            or groups would share bytes that belong to different blocks.
    """
    specs = [spec for group in groups for spec in group.layer_specs]
    # With heads outside blocks, a block is the same bytes in two groups only if both cut their pages alike.
    head_slots = {spec.num_head_slots for spec in specs}
    if len(groups) > 1 and len(head_slots) > 1 and not (layout.is_block_compact or layout.is_block_outermost):
        raise InputError(
            f"layout {layout.name} puts heads outside blocks, so groups of {', '.join(map(str, sorted(head_slots)))} "
            "head slots would overwrite each other's blocks; use LBNHC, LBHNC, BLNHC, BLHNC or BHLNC"
        )
    page_sizes = {spec.page_size_bytes for spec in specs}
    if len(page_sizes) <= 1:
        return
    if not layout.is_block_compact or (len(groups) > 1 and layout.is_layer_outermost):
        pages = ", ".join(f"{page:,}" for page in sorted(page_sizes))
        raise InputError(
            f"layout {layout.name} cannot express pages of different sizes ({pages} bytes) in {len(groups)} groups; "
            "use BLNHC or BLHNC"
        )
