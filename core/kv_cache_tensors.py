"""Where every layer lies in a rank's raw buffer, for a given number of blocks."""

from collections.abc import Sequence

from .errors import InputError
from .kv_cache_config import KVCacheConfig, KVCacheGroup, KVCacheTensor
from .kv_cache_layout import KVCacheLayout, layout_strides_bytes
from .kv_cache_spec import KVCacheSpec


def pool_bytes_per_block(groups: Sequence[KVCacheGroup]) -> int:
    """Bytes that one block id takes on a rank: those of its widest group; 0 on a rank without layers."""
    return max((group.bytes_per_block for group in groups), default=0)


def lay_out(groups: Sequence[KVCacheGroup], num_blocks: int, layout: KVCacheLayout) -> KVCacheConfig:
    """The KV cache of one rank that holds `num_blocks` blocks.

    Every group starts at byte 0: groups overlay each other, since a block belongs to one group at a time. Within a
    group, layers of equal specs lie together, one such run after the other.

    Raises:
        InputError: the layout cannot express pages of different sizes.
    """
    require_expressible(groups, layout)
    block_bytes = pool_bytes_per_block(groups)
    size_bytes = block_bytes * num_blocks
    tensors: list[KVCacheTensor] = []
    for group in groups:
        page_bytes_before = 0
        for spec, names in _layers_by_spec(group).items():
            layer_stride, block_stride, *_ = layout_strides_bytes(
                spec,
                num_blocks,
                len(names),
                layout,
                fixed_strides=(None, block_bytes if layout.is_block_outermost else None, None, None, None),
            )
            # Layer-outermost, a layer takes a page for every block; block-outermost, a block takes a page a layer.
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


def _layers_by_spec(group: KVCacheGroup) -> dict[KVCacheSpec, list[str]]:
    layers: dict[KVCacheSpec, list[str]] = {}
    for name, spec in zip(group.layer_names, group.layer_specs, strict=True):
        layers.setdefault(spec, []).append(name)
    return layers
