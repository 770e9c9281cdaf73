"""Copy on write in device memory: whole blocks of all layers, byte for byte, in one call."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="kernels need torch")

from kvledger.kernels import BlockRegions, KernelInputError  # noqa: E402

from tests.kernels.cache_layouts import LAYOUTS, longs, paged_cache  # noqa: E402
from tests.kernels.kernel_sets import device  # noqa: E402

pytestmark = pytest.mark.torch


def noise(*shape: int, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device())


def assert_copied(kernels: Any, caches: list[Any], pairs: list[tuple[int, int]], **options: Any) -> None:
    """Every target block of every cache equals its source, and nothing else has changed."""
    expected = [cache.clone() for cache in caches]
    for source, target in pairs:
        for cache, old in zip(expected, caches, strict=True):
            if source >= 0 and target >= 0:
                cache[target] = old[source]
    sources, targets = (longs(*ids) for ids in zip(*pairs, strict=True))
    kernels.copy_blocks(caches=BlockRegions.of(caches), sources=sources, targets=targets, **options)
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("block_size", "head_size", "dtype"), [(16, 64, torch.bfloat16), (17, 9, torch.float8_e5m2)])
def test_blocks_of_every_layout_are_copied_whole(
    kernels: Any, layout: str, block_size: int, head_size: int, dtype: Any
) -> None:
    layers = [paged_cache(layout, 6, block_size, 2, head_size, dtype, seed) for seed in range(3)]
    assert_copied(kernels, [view for layer in layers for view in (layer.key, layer.value)], [(1, 4), (5, 0), (2, 3)])


def test_layers_of_different_block_sizes_are_copied_in_one_call(kernels: Any) -> None:
    caches = [
        noise(5, 48),
        noise(5, 3, 7, seed=1),
        noise(5, 40_000, seed=2),
        noise(5, 2, 16, seed=3).view(torch.float32),
    ]
    assert_copied(kernels, caches, [(0, 1), (-1, 2), (3, -1), (4, 2)], checked=True)


def test_blocks_with_heads_outside_them_are_copied_piece_by_piece(kernels: Any) -> None:
    heads_first = noise(3, 6, 4, 8).permute(1, 0, 2, 3)
    regions = BlockRegions.of([heads_first]).regions
    assert [(region.block_stride_bytes, region.num_bytes) for region in regions] == [(32, 32)] * 3
    assert_copied(kernels, [heads_first], [(2, 5), (0, 1)])


def test_a_dense_block_is_one_run_however_its_dimensions_are_ordered() -> None:
    assert len(BlockRegions.of([noise(4, 2, 8, 16).permute(0, 2, 1, 3)]).regions) == 1
    packed = paged_cache("packed", 4, 16, 2, 64, torch.bfloat16)
    assert len(BlockRegions.of([packed.raw.view(4, -1)]).regions) == 1
    assert len(BlockRegions.of([packed.key]).regions) == 16 * 2


def test_words_are_as_wide_as_all_addresses_and_lengths_allow() -> None:
    assert BlockRegions.of([noise(4, 32)]).word_bytes == 16
    assert BlockRegions.of([noise(4, 32), noise(4, 8)]).word_bytes == 8
    assert BlockRegions.of([noise(4, 33)[:, 1:]]).word_bytes == 1


def test_no_copies_copy_nothing(kernels: Any) -> None:
    cache = noise(3, 16)
    before = cache.clone()
    kernels.copy_blocks(caches=BlockRegions.of([cache]), sources=longs(), targets=longs())
    kernels.copy_blocks(caches=BlockRegions.of([cache]), sources=longs(0, 3, -1), targets=longs(3, 0, 1))
    assert torch.equal(cache, before)


def test_copies_that_depend_on_their_order_are_refused_in_checked_mode(kernels: Any) -> None:
    regions = BlockRegions.of([noise(4, 16)])
    for sources, targets, message in (
        ((0, 1), (1, 2), r"blocks \[1\] are the target of one copy and the source or target of another"),
        ((0, 1), (3, 3), r"blocks \[3\] are the target"),
        ((0, 4), (3, 2), r"\(4, 2\)\] are outside a cache of 4 blocks"),
    ):
        with pytest.raises(KernelInputError, match=message):
            kernels.copy_blocks(caches=regions, sources=longs(*sources), targets=longs(*targets), checked=True)
    with pytest.raises(KernelInputError, match="2 sources and 1 targets"):
        kernels.copy_blocks(caches=regions, sources=longs(0, 1), targets=longs(2))


def test_memory_that_cannot_be_copied_by_blocks_is_refused() -> None:
    cache = noise(4, 16)
    for caches, message in (
        ([], "at least one layer"),
        ([cache, noise(5, 16)], "cache 1 must have 4 blocks"),
        ([cache, cache], "caches 0 and 1 share an address"),
        ([cache[:1].expand(4, 16)], "blocks of cache 0 overlap"),
        ([noise(1, 70_000, 2)[:, :, 0]], "1 caches have 70000 dense runs of bytes per block, and one launch takes"),
        ([cache.view(4, 16, 1).expand(4, 16, 2)], "cache 0 holds two elements in one place"),
    ):
        with pytest.raises(KernelInputError, match=message):
            BlockRegions.of(caches)
