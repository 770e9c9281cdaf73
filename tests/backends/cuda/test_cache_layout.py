"""Typed views of the raw buffer: every element is where plain NumPy reshaping finds it."""

import itertools

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="cache views need torch")

from kvledger.backends.cuda.layout import (  # noqa: E402
    CacheArrangement,
    LayerCache,
    bind_layers,
    layer_caches,
)
from kvledger.core.errors import InputError  # noqa: E402
from kvledger.core.planner.cache_dtype import ScaleStorage  # noqa: E402
from kvledger.core.planner.layout import (  # noqa: E402  # noqa: E402
    KVCacheConfig,
    KVCacheGroup,
    KVCacheLayout,
    lay_out,
    layout_strides_bytes,
)
from kvledger.core.planner.specs import (  # noqa: E402  # noqa: E402
    CompressedStateSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaLikeSpec,
    MLASpec,
    OpaqueSpec,
    SlidingWindowSpec,
    StateArray,
)
from kvledger.testing.shadow_cache import ShadowCache  # noqa: E402

pytestmark = pytest.mark.torch

PACKED = CacheArrangement.PACKED
LAYER_WHOLE = (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)
PAGE_WHOLE = (*LAYER_WHOLE, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)
WHERE = [
    *itertools.product([PACKED], KVCacheLayout),
    *itertools.product([CacheArrangement.INTERLEAVED_NHD, CacheArrangement.INTERLEAVED_HND], PAGE_WHOLE),
    *itertools.product([CacheArrangement.FLASH_NHD, CacheArrangement.FLASH_HND, CacheArrangement.CLASSIC], LAYER_WHOLE),
]
where = pytest.mark.parametrize(
    ("arrangement", "layout"), WHERE, ids=[f"{a.value}-{layout.name}" for a, layout in WHERE]
)


def full(**changes) -> FullAttentionSpec:
    shape = {"block_size": 8, "num_kv_heads": 3, "head_size": 16, "dtype": "bf16"}
    return FullAttentionSpec(**(shape | changes))


def planned(*specs: KVCacheSpec, layout: KVCacheLayout, num_blocks: int = 5, layers: int = 2) -> KVCacheConfig:
    """One group a spec, each with layers `g0.l0`, `g0.l1`, ..."""
    groups = [
        KVCacheGroup(tuple(f"g{number}.l{layer}" for layer in range(layers)), (spec,) * layers, spec)
        for number, spec in enumerate(specs)
    ]
    return lay_out(groups, num_blocks, layout)


def bound(config: KVCacheConfig, arrangement=PACKED, kernel_block_size=None, element=np.uint16):
    """The torch views and the NumPy shadow of one buffer of noise."""
    (block_size,) = {group.spec.block_size for group in config.groups} if kernel_block_size else (1,)
    shadow = ShadowCache(config, arrangement.value, block_size // (kernel_block_size or block_size), element)
    raw = torch.from_numpy(shadow.buffer.copy()).view(torch.int8)
    caches = layer_caches(raw, config, arrangement, [kernel_block_size] * len(config.groups))
    return raw, caches, shadow


def viewed(config: KVCacheConfig, arrangement=PACKED, kernel_block_sizes=None) -> list[LayerCache]:
    """The views of an empty buffer."""
    return layer_caches(torch.zeros(config.size_bytes, dtype=torch.int8), config, arrangement, kernel_block_sizes)


def bits(tensor) -> np.ndarray:
    """The tensor as unsigned integers of its width, C order."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.contiguous().view(words).numpy().view(f"u{tensor.element_size()}")


def parts_of(cache: LayerCache) -> list[np.ndarray]:
    """Keys and values with the axes block, token, ... first, as the shadow has them."""
    if cache.arrangement is CacheArrangement.CLASSIC:
        return [bits(cache.key.permute(0, 3, 1, 2, 4)), bits(cache.value.permute(0, 3, 1, 2))]
    return [bits(part) for part in (cache.key, cache.value) if part is not None]


@where
@pytest.mark.parametrize("kernel_block_size", [None, 8, 4, 1])
def test_every_element_is_where_reshaping_finds_it(arrangement, layout, kernel_block_size) -> None:
    _, caches, shadow = bound(planned(full(), layout=layout), arrangement, kernel_block_size)
    assert [cache.name for cache in caches] == ["g0.l0", "g0.l1"]
    for cache in caches:
        assert cache.num_blocks_per_kv_block * cache.kernel_block_size == 8
        found = parts_of(cache)
        assert len(found) == 2
        for real, expected in zip(found, shadow.elements[cache.name], strict=True):
            assert np.array_equal(real, expected)


@where
def test_the_pages_of_all_layers_are_the_whole_buffer_once(arrangement, layout) -> None:
    config = planned(full(), layout=layout)
    for kernel_block_size in (None, 2):
        raw, caches, _ = bound(config, arrangement, kernel_block_size)
        raw.zero_()
        for block in range(config.num_blocks):
            for cache in caches:
                for pages in cache.pages:
                    pages[block] += block + 1
        assert torch.bincount(raw.long()).tolist() == [0] + [config.size_bytes // config.num_blocks] * config.num_blocks


@pytest.mark.parametrize("layout", KVCacheLayout)
@pytest.mark.parametrize("kernel_block_size", [None, 4])
def test_packed_strides_are_the_plans(layout, kernel_block_size) -> None:
    spec, layers = full(), 3
    config = planned(spec, layout=layout, layers=layers)
    _, caches, _ = bound(config, PACKED, kernel_block_size)
    strides = layout_strides_bytes(spec, config.num_blocks, layers, layout, kernel_block_size)
    for index, cache in enumerate(caches):
        assert [stride * 2 for stride in cache.view.stride()] == [*strides[1:4], 2]
        assert cache.view.storage_offset() * 2 == index * strides[0]


@pytest.mark.parametrize("layout", PAGE_WHOLE)
def test_f03_interleaved_strides(layout) -> None:
    """Field report F03: K strides and V offset of `[num_blocks, 2, 16, 8, 128]`."""
    config = planned(full(block_size=16, num_kv_heads=8, head_size=128), layout=layout, layers=1)
    _, (cache,), _ = bound(config, CacheArrangement.INTERLEAVED_NHD)
    assert cache.view.shape == (5, 2, 16, 8, 128)
    assert cache.key.stride() == (32768, 1024, 128, 1)
    assert cache.value.storage_offset() == 16384


def test_views_have_the_shapes_that_model_runners_bind() -> None:
    config = planned(full(), layout=KVCacheLayout.LBNHC)
    shapes = {arrangement: bound(config, arrangement)[1][0].view.shape for arrangement in CacheArrangement}
    assert shapes == {
        CacheArrangement.PACKED: (5, 3, 8, 32),
        CacheArrangement.FLASH_NHD: (2, 5, 8, 3, 16),
        CacheArrangement.FLASH_HND: (2, 5, 8, 3, 16),
        CacheArrangement.INTERLEAVED_NHD: (5, 2, 8, 3, 16),
        CacheArrangement.INTERLEAVED_HND: (5, 2, 8, 3, 16),
        CacheArrangement.CLASSIC: (2, 5, 8 * 3 * 16),
    }
    _, (classic, _), _ = bound(config, CacheArrangement.CLASSIC)
    assert (classic.key.shape, classic.value.shape) == ((5, 3, 2, 8, 8), (5, 3, 16, 8))


@pytest.mark.parametrize("layout", KVCacheLayout)
@pytest.mark.parametrize(
    "spec",
    [
        MLASpec(block_size=8, head_size=20, dtype="bf16"),
        CompressedStateSpec(block_size=8, tokens_per_state=4, head_size=20, dtype="bf16"),
    ],
    ids=["mla", "compressed"],
)
def test_a_latent_is_where_reshaping_finds_it(layout, spec) -> None:
    for kernel_block_size in (None, 4):
        _, caches, shadow = bound(planned(spec, layout=layout), PACKED, kernel_block_size)
        for cache in caches:
            assert cache.is_latent
            assert cache.view.shape[2] == 20
            assert np.array_equal(bits(cache.key), shadow.elements[cache.name][0])


def test_an_opaque_format_is_bytes_and_a_state_is_its_arrays() -> None:
    _, (cache, _), shadow = bound(
        planned(OpaqueSpec(block_size=4, opaque_bytes_per_token=7), layout=KVCacheLayout.BLNHC), element=np.uint8
    )
    assert cache.key.dtype == torch.uint8
    assert np.array_equal(cache.key.numpy(), shadow.elements["g0.l0"][0])
    arrays = (StateArray((3, 4), "bf16", "conv"), StateArray((2,), "fp32", "recurrent"))
    config = planned(MambaLikeSpec(block_size=16, states=arrays, page_size_padded=40), layout=KVCacheLayout.BLNHC)
    raw, (_, state), _ = bound(config)
    conv, recurrent = state.states
    assert (conv.shape, conv.dtype) == ((5, 3, 4), torch.bfloat16)
    assert (recurrent.shape, recurrent.dtype) == ((5, 2), torch.float32)
    page = raw.view(5, 2, 40)[3, 1].numpy().view(np.uint8)
    assert np.array_equal(bits(conv[3]).reshape(-1).view(np.uint8), page[:24])
    assert np.array_equal(bits(recurrent[3]).reshape(-1).view(np.uint8), page[24:32])


def test_an_offset_that_a_dtype_cannot_express_is_an_error() -> None:
    arrays = (StateArray((3,), "bf16", "conv"), StateArray((2,), "fp32", "recurrent"))
    config = planned(MambaLikeSpec(block_size=16, states=arrays), layout=KVCacheLayout.BLNHC)
    with pytest.raises(InputError, match=r"no whole numbers of torch.float32 \(4 bytes\)"):
        bound(config)


def test_keys_and_values_of_different_sizes_lie_side_by_side() -> None:
    for layout in KVCacheLayout:
        _, caches, shadow = bound(planned(full(head_size=24, head_size_v=8), layout=layout))
        for cache in caches:
            assert (cache.key.shape[-1], cache.value.shape[-1]) == (24, 8)
            for real, expected in zip(parts_of(cache), shadow.elements[cache.name], strict=True):
                assert np.array_equal(real, expected)
    with pytest.raises(InputError, match="head sizes 24 and 8; use arrangement packed"):
        viewed(planned(full(head_size=24, head_size_v=8), layout=KVCacheLayout.LBNHC), CacheArrangement.FLASH_NHD)


@pytest.mark.parametrize("layout", PAGE_WHOLE)
@pytest.mark.parametrize("arrangement", [PACKED, CacheArrangement.INTERLEAVED_HND])
def test_padding_at_the_end_of_a_page_belongs_to_nobody_but_is_copied(arrangement, layout) -> None:
    spec = full(page_size_padded=1600)
    assert spec.unpadded_page_size_bytes == 1536
    _, caches, shadow = bound(planned(spec, layout=layout), arrangement)
    for cache in caches:
        assert cache.pages[0].shape == (5, 1600)
        for real, expected in zip(parts_of(cache), shadow.elements[cache.name], strict=True):
            assert np.array_equal(real, expected)
    with pytest.raises(InputError, match="padded"):
        bound(planned(spec, layout=layout), arrangement, 4)


@where
def test_groups_of_different_block_sizes_overlay_block_by_block(arrangement, layout) -> None:
    """A block is the same bytes in every group: whoever holds it owns them."""
    wide = SlidingWindowSpec(block_size=16, num_kv_heads=3, head_size=8, dtype="bf16", sliding_window=20)
    assert wide.page_size_bytes == full().page_size_bytes
    config = planned(full(), wide, layout=layout)
    raw, caches, shadow = bound(config, arrangement)
    assert shadow.group_of == {"g0.l0": 0, "g0.l1": 0, "g1.l0": 1, "g1.l1": 1}
    owners = []
    for group in (0, 1):
        raw.zero_()
        for cache in caches:
            if cache.group == group:
                for pages in cache.pages:
                    pages[3] = 1
        owners.append(raw.clone())
    assert torch.equal(*owners)
    for cache in caches:
        for real, expected in zip(parts_of(cache), shadow.elements[cache.name], strict=True):
            assert np.array_equal(real, shadow_of(expected))


def shadow_of(expected: np.ndarray) -> np.ndarray:
    """Zeroed as the buffer above, but for the ones in block 3."""
    zeroed = np.zeros_like(expected)
    zeroed[3] = 0x0101
    return zeroed


def test_layers_of_different_pages_share_one_block() -> None:
    small, large = full(head_size=8), full()
    group = KVCacheGroup(("a", "b", "c"), (large, small, large), full(), is_uniform_type=True)
    for layout in (KVCacheLayout.BLNHC, KVCacheLayout.BLHNC):
        for kernel_block_size in (None, 4):
            config = lay_out([group], 5, layout)
            _, caches, shadow = bound(config, PACKED, kernel_block_size)
            assert [cache.name for cache in caches] == ["a", "c", "b"]
            for cache in caches:
                for real, expected in zip(parts_of(cache), shadow.elements[cache.name], strict=True):
                    assert np.array_equal(real, expected)


def test_layers_bind_in_model_order_and_by_name_and_share_a_cache() -> None:
    _, caches, _ = bound(planned(full(), full(), layout=KVCacheLayout.LBNHC))
    order = ["g0.l0", "g1.l0", "g0.l1", "g1.l1", "mtp"]
    in_order, by_name = bind_layers(caches, order, {"mtp": "g0.l1"})
    assert [cache.name for cache in in_order] == ["g0.l0", "g1.l0", "g0.l1", "g1.l1", "g0.l1"]
    assert by_name["mtp"] is by_name["g0.l1"]
    with pytest.raises(InputError, match=r"layers without a cache: other; caches without a layer: g1\.l1"):
        bind_layers(caches, ["g0.l0", "g1.l0", "g0.l1", "other"])


REFUSED = [
    (CacheArrangement.FLASH_NHD, KVCacheLayout.BLNHC, {}, "needs each layer in one piece; use layout LBNHC or LBHNC"),
    (CacheArrangement.CLASSIC, KVCacheLayout.BLHNC, {}, "needs each layer in one piece"),
    (CacheArrangement.INTERLEAVED_NHD, KVCacheLayout.LHBNC, {}, "needs whole pages, and layout LHBNC splits them"),
    (CacheArrangement.INTERLEAVED_HND, KVCacheLayout.BHLNC, {}, "needs whole pages"),
    (CacheArrangement.FLASH_HND, KVCacheLayout.LBNHC, {"page_size_padded": 1600}, "no room for padded pages"),
    (CacheArrangement.CLASSIC, KVCacheLayout.LBNHC, {"head_size": 20}, "head size 20 is not a multiple of 8"),
]


@pytest.mark.parametrize(("arrangement", "layout", "changes", "message"), REFUSED)
def test_what_a_layout_cannot_hold_is_refused(arrangement, layout, changes, message) -> None:
    config = planned(full(**changes), layout=layout)
    with pytest.raises(InputError, match=message):
        viewed(config, arrangement)


def test_a_buffer_of_another_size_or_dtype_is_refused() -> None:
    config = planned(full(), layout=KVCacheLayout.LBNHC)
    for raw in (
        torch.zeros(config.size_bytes + 1, dtype=torch.int8),
        torch.zeros(config.size_bytes, dtype=torch.uint8),
        torch.zeros(2 * config.size_bytes, dtype=torch.int8)[::2],
    ):
        with pytest.raises(InputError, match=f"the plan needs contiguous torch.int8 \\[{config.size_bytes}\\]"):
            layer_caches(raw, config)


def test_a_tensor_that_leaves_the_buffer_is_refused() -> None:
    config = planned(full(), layout=KVCacheLayout.LBNHC)
    (tensor,) = config.tensors
    beyond = attrs.evolve(config, tensors=(attrs.evolve(tensor, offset_bytes=2),))
    with pytest.raises(InputError, match="the cache ends at byte"):
        viewed(beyond)


def test_kernel_block_sizes_that_do_not_divide_are_refused() -> None:
    config = planned(full(), layout=KVCacheLayout.LBNHC)
    with pytest.raises(InputError, match="kernel block size 3 does not divide the block size 8"):
        viewed(config, PACKED, [3])
    with pytest.raises(InputError, match="2 kernel block sizes for 1 groups"):
        viewed(config, PACKED, [4, 4])
    state = MambaLikeSpec(block_size=16, states=(StateArray((4,), "bf16"),))
    with pytest.raises(InputError, match="a state is whole"):
        viewed(planned(state, layout=KVCacheLayout.LBNHC), PACKED, [8])


def test_scales_beside_the_elements_are_refused() -> None:
    config = planned(full(dtype="int8", scales=ScaleStorage(4)), layout=KVCacheLayout.LBNHC)
    with pytest.raises(InputError, match="int8 with scales stored beside the elements has no typed view"):
        bound(config)


def test_flash_beside_latents_is_refused_since_blocks_would_overlap() -> None:
    latent = MLASpec(block_size=8, head_size=96, dtype="bf16")
    with pytest.raises(InputError, match="groups of latents or states overlay with one"):
        bound(planned(full(), latent, layout=KVCacheLayout.LBNHC), CacheArrangement.FLASH_NHD)
