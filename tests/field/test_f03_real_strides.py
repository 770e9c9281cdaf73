"""Field report F03: caches and inputs are addressed by the strides that they have, or refused."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="kernels need torch")

from kvledger.kernels import KernelInputError  # noqa: E402

from tests.kernels.cache_layouts import distinct_slots, longs, paged_cache, rows_of  # noqa: E402
from tests.kernels.kernel_sets import KERNEL_SETS, device, kernel_set  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.parametrize("name", KERNEL_SETS)]


@pytest.mark.parametrize(
    ("block_size", "heads", "head_size", "strides", "value_offset"),
    [
        pytest.param(16, 8, 128, (32_768, 1024, 128, 1), 16_384, id="16x8x128"),
        pytest.param(64, 4, 256, (131_072, 1024, 256, 1), 65_536, id="64x4x256"),
    ],
)
def test_an_interleaved_cache_is_written_through_its_strides(
    name: str, block_size: int, heads: int, head_size: int, strides: tuple[int, ...], value_offset: int
) -> None:
    kernels, shape = kernel_set(name), (5, block_size, heads, head_size, torch.bfloat16)
    cache, expected = (paged_cache("interleaved", *shape) for _ in range(2))
    assert cache.key.stride() == cache.value.stride() == strides
    assert cache.value.storage_offset() - cache.key.storage_offset() == value_offset
    key, value = rows_of(6, heads, head_size, torch.bfloat16)
    slots = distinct_slots(5 * block_size, 6)
    dense = [view.contiguous() for view in expected.logical()]
    kernels.reshape_and_cache(key=key, value=value, key_cache=dense[0], value_cache=dense[1], slot_mapping=slots)
    for view, written in zip(expected.logical(), dense, strict=True):
        view.copy_(written)
    kernels.reshape_and_cache(key=key, value=value, **cache.views(), slot_mapping=slots)
    assert torch.equal(cache.bytes(), expected.bytes())


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_keys_sliced_from_a_fused_projection_are_written_as_dense_ones(name: str, layout: str) -> None:
    kernels, (query_heads, heads, size) = kernel_set(name), (8, 2, 64)
    fused = torch.randn(6, (query_heads + 2 * heads) * size, generator=torch.Generator().manual_seed(0))
    _, key, value = fused.half().to(device()).view(6, -1, size).split([query_heads, heads, heads], 1)
    assert key.stride(0) == (query_heads + 2 * heads) * size
    caches = [paged_cache(layout, 3, 16, heads, size, torch.float16) for _ in range(2)]
    slots = distinct_slots(48, 6)
    kernels.reshape_and_cache(key=key, value=value, **caches[0].views(), slot_mapping=slots)
    dense = {"key": key.contiguous(), "value": value.contiguous()}
    kernels.reshape_and_cache(**dense, **caches[1].views(), slot_mapping=slots)
    assert torch.equal(caches[0].bytes(), caches[1].bytes())


def test_keys_and_values_may_have_strides_of_their_own(name: str) -> None:
    kernels = kernel_set(name)
    hnd, nhd = (paged_cache(layout, 3, 16, 2, 64, torch.float16) for layout in ("HND", "NHD"))
    key, value = rows_of(5, 2, 64, torch.float16)
    # Heads first, then tokens: neither a row nor a head is where the other one has it.
    value = value.transpose(0, 1).contiguous().transpose(0, 1)
    slots = distinct_slots(48, 5)
    kernels.reshape_and_cache(key=key, value=value, key_cache=hnd.key, value_cache=nhd.value, slot_mapping=slots)
    assert torch.equal(hnd.key[slots // 16, slots % 16], key)
    assert torch.equal(nhd.value[slots // 16, slots % 16], value)


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_addresses_that_no_wide_access_divides_are_written_in_narrower_ones(name: str, offset: int) -> None:
    kernels = kernel_set(name)
    pool = torch.zeros(3 * 16 * 2 * 64 + 8, dtype=torch.float16, device=device())
    key_cache = pool[offset : -8 + offset].view(3, 16, 2, 64)
    value_cache = torch.zeros(3, 16, 2, 66, dtype=torch.float16, device=device())[..., 2:]
    key, value = rows_of(5, 2, 64, torch.float16)
    slots = distinct_slots(48, 5)
    kernels.reshape_and_cache(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slots)
    assert torch.equal(key_cache[slots // 16, slots % 16], key)
    assert torch.equal(value_cache[slots // 16, slots % 16], value)
    assert int(pool.count_nonzero()) == int(key.count_nonzero())


def test_strides_that_are_not_supported_are_errors(name: str) -> None:
    kernels, rows = kernel_set(name), torch.ones(2, 2, 64, dtype=torch.float16, device=device())
    dense = torch.zeros(3, 16, 2, 64, dtype=torch.float16, device=device())
    head_last = torch.zeros(3, 16, 64, 2, dtype=torch.float16, device=device()).transpose(2, 3)
    call: dict[str, Any] = {
        "key": rows,
        "value": rows,
        "key_cache": dense,
        "value_cache": dense.clone(),
        "slot_mapping": longs(0, 1),
    }
    for changes, message in (
        ({"key_cache": head_last}, r"key_cache needs a last stride of 1: .* strides \(2048, 128, 1, 2\)"),
        ({"value_cache": dense[:, :1].expand(3, 16, 2, 64)}, "value_cache holds two elements in one place"),
        ({"value": head_last[0, :2]}, "value needs a last stride of 1"),
    ):
        with pytest.raises(KernelInputError, match=message):
            kernels.reshape_and_cache(**(call | changes))
    assert not dense.any()
