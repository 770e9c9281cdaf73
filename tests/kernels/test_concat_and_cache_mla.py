"""Latent caches: latent and rotary key side by side in a slot, written and read back."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="kernels need torch")

from kvledger.kernels import KernelInputError, kv_scale  # noqa: E402

from tests.kernels.cache_layouts import FP8, integers, longs  # noqa: E402
from tests.kernels.kernel_sets import device  # noqa: E402

pytestmark = pytest.mark.torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def latents(num_tokens: int, latent: int, rope: int, dtype: Any) -> tuple[Any, Any]:
    """Slices of one projection whose rows are longer than both."""
    generator = torch.Generator().manual_seed(1)
    fused = (torch.randn(num_tokens, latent + rope + 16, generator=generator) * 30).to(dtype).to(device())
    return fused[:, :latent], fused[:, latent : latent + rope]


@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (24, 7), (5, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 16, 17])
def test_a_row_holds_the_latent_and_behind_it_the_rotary_key(
    kernels: Any, latent: int, rope: int, dtype: Any, block_size: int
) -> None:
    kv_c, k_pe = latents(7, latent, rope, dtype)
    cache = torch.full((20, block_size, latent + rope), 3.0, dtype=dtype, device=device())
    expected = cache.clone()
    slots = [0, -1, 20 * block_size - 1, 5, -1]
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // block_size, slot % block_size] = torch.cat([kv_c[token], k_pe[token]])
    kernels.concat_and_cache_mla(kv_c=kv_c, k_pe=k_pe, cache=cache, slot_mapping=longs(*slots), checked=True)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("dtype", FP8)
def test_an_8_bit_latent_cache_has_one_scale(kernels: Any, twins: Any, dtype: Any) -> None:
    kv_c, k_pe = latents(5, 512, 64, torch.bfloat16)
    scale = kv_scale(0.31, name="scale", device=device())
    caches = [torch.zeros(4, 16, 576, dtype=dtype, device=device()) for _ in range(2)]
    for written_by, cache in zip((kernels, twins), caches, strict=True):
        written_by.concat_and_cache_mla(
            kv_c=kv_c, k_pe=k_pe, cache=cache, slot_mapping=longs(3, 9, 63, 0, 17), scale=scale
        )
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))
    rows = torch.cat([kv_c, k_pe], 1)[:1].float() / 0.31
    largest = torch.finfo(dtype).max
    assert torch.allclose(caches[0][0, 3].float(), rows[0].clamp(-largest, largest), rtol=0.13, atol=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_read_back_by_block_table(kernels: Any, dtype: Any) -> None:
    kv_c, k_pe = latents(9, 24, 8, dtype)
    # The block stride is wider than a block: layers lie beside each other.
    cache = torch.zeros(6, 2, 4, 32, dtype=dtype, device=device())[:, 1]
    table = integers(5, 2, 3, 0, 1, 4).view(2, 3)
    slots = [20, 21, 22, 23, 8, 9, 10, 11, 12]
    kernels.concat_and_cache_mla(kv_c=kv_c, k_pe=k_pe, cache=cache, slot_mapping=longs(*slots))
    read = kernels.gather_mla_cache(
        cache=cache,
        block_table=table,
        rows=integers(0, -1, 0),
        cu_seqlens=integers(0, 3, 5, 11),
        first_positions=longs(6, 0, 1),
        num_tokens=11,
        checked=True,
    )
    whole = torch.cat([kv_c, k_pe], 1)
    assert torch.equal(read, torch.cat([whole[6:9], torch.zeros(2, 32, dtype=dtype, device=device()), whole[1:7]]))


def test_parts_that_do_not_fill_a_row_are_refused(kernels: Any) -> None:
    kv_c, k_pe = latents(3, 24, 8, torch.float16)
    cache = torch.zeros(2, 4, 40, dtype=torch.float16, device=device())
    call = {"kv_c": kv_c, "k_pe": k_pe, "cache": cache, "slot_mapping": longs(0)}
    for changes, message in (
        ({}, "latent of 24 and a rotary key of 8 do not fill a cache row of 40"),
        ({"cache": cache[..., :32], "slot_mapping": longs(0, 1, 2, 3)}, "4 slots, 3 latents"),
        ({"cache": cache[..., :32], "slot_mapping": longs(0, 8), "checked": True}, "slot 8 of token 1"),
        ({"cache": cache[..., :32].float()}, r"kv_c is torch.float16 and its cache torch.float32"),
        ({"cache": cache[..., :32].transpose(1, 2)}, "cache needs a last stride of 1"),
    ):
        with pytest.raises(KernelInputError, match=message):
            kernels.concat_and_cache_mla(**(call | changes))
    assert not cache.any()
