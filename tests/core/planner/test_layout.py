import itertools

import pytest
from kvledger.core.errors import InputError
from kvledger.core.planner.groups import group_layers
from kvledger.core.planner.layout import (
    KVCacheLayout,
    block_table_width,
    lay_out,
    layer_shape_bytes,
    layout_strides_bytes,
    pool_bytes_per_block,
)
from kvledger.core.planner.specs import FullAttentionSpec, KVCacheSpec, MambaLikeSpec, SlidingWindowSpec, StateArray

FULL = FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=4, dtype="bf16")


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_every_byte_of_a_buffer_belongs_to_one_cell(layout: KVCacheLayout) -> None:
    num_layers, num_blocks = 2, 3
    strides = layout_strides_bytes(FULL, num_blocks, num_layers, layout)
    shape = (num_layers, *layer_shape_bytes(FULL, num_blocks))
    addresses = [
        sum(index * stride for index, stride in zip(cell, strides, strict=True))
        for cell in itertools.product(*(range(size) for size in shape))
    ]
    assert sorted(addresses) == list(range(num_layers * num_blocks * FULL.page_size_bytes))


def test_a_kernel_block_must_divide_the_block() -> None:
    with pytest.raises(InputError, match="kernel block size 3 does not divide the block size 4"):
        layer_shape_bytes(FULL, 10, kernel_block_size=3)


def test_a_table_counted_in_kernel_blocks_is_wider() -> None:
    assert block_table_width(9, block_size=32) == 12
    assert block_table_width(9, block_size=32, kernel_block_size=16) == 24
    assert block_table_width(9, block_size=32, token_alignment=1) == 9


def test_a_table_needs_a_kernel_block_that_divides_and_an_alignment() -> None:
    with pytest.raises(InputError, match="kernel block size 5"):
        block_table_width(9, block_size=32, kernel_block_size=5)
    with pytest.raises(InputError, match="token_alignment is 0"):
        block_table_width(9, block_size=32, token_alignment=0)


@pytest.mark.parametrize("layout", [KVCacheLayout.LHBNC, KVCacheLayout.BHLNC])
def test_a_layout_that_tears_pages_apart_cannot_hold_pages_of_two_sizes(layout: KVCacheLayout) -> None:
    other = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="bf16")
    groups = group_layers({"a": FULL, "b": other}, layout, False)
    with pytest.raises(InputError, match=f"layout {layout.name} cannot express pages of different sizes"):
        lay_out(groups, 3, layout)


def test_groups_of_different_heads_cannot_overlay_each_other_with_heads_outside_blocks() -> None:
    """Block 1 of two heads would lie where one head has parts of blocks 0 and 1, although the pages are equal."""
    one_head = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="bf16", sliding_window=8)
    assert one_head.page_size_bytes == FULL.page_size_bytes
    for layout in KVCacheLayout:
        groups = group_layers({"a": FULL, "b": one_head}, layout, False)
        assert len(groups) == 2
        if layout is KVCacheLayout.LHBNC:
            with pytest.raises(InputError, match="groups of 1, 2 head slots would overwrite each other's blocks"):
                lay_out(groups, 3, layout)
        else:
            assert lay_out(groups, 3, layout).size_bytes == 3 * FULL.page_size_bytes


SLIDING = SlidingWindowSpec(block_size=4, num_kv_heads=2, head_size=4, dtype="bf16", sliding_window=8)
STATE = MambaLikeSpec(block_size=64, states=(StateArray((100,), "uint8"),))
MIXES: dict[str, dict[str, KVCacheSpec]] = {
    "one kind": {"a": FULL, "b": FULL, "c": FULL},
    "one kind, two pages": {
        "a": FULL,
        "b": FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="bf16"),
    },
    "two kinds": {"a": FULL, "b": SLIDING, "c": SLIDING},
    "padded states": {"a": FULL, "b": STATE, "c": STATE},
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("layout", [layout for layout in KVCacheLayout if layout.is_block_compact])
def test_pages_of_a_group_lie_apart_within_the_buffer(mix: str, layout: KVCacheLayout) -> None:
    num_blocks = 3
    groups = group_layers(MIXES[mix], layout, False)
    config = lay_out(groups, num_blocks, layout)
    assert config.size_bytes == num_blocks * pool_bytes_per_block(groups)
    pages = {
        name: spec.page_size_bytes
        for group in groups
        for name, spec in zip(group.layer_names, group.layer_specs, strict=True)
    }
    block_of_byte: dict[int, int] = {}
    for group in groups:
        taken: set[int] = set()
        for tensor in config.tensors:
            for index, name in enumerate(tensor.layers):
                if name not in group.layer_names:
                    continue
                for block in range(num_blocks):
                    start = tensor.offset_bytes + index * tensor.layer_stride_bytes + block * tensor.block_stride_bytes
                    page = range(start, start + pages[name])
                    assert page.stop <= config.size_bytes
                    assert taken.isdisjoint(page)
                    taken.update(page)
                    # Groups overlay each other: a byte must mean the same block to all of them.
                    assert all(block_of_byte.setdefault(byte, block) == block for byte in page)
