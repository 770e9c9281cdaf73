"""Eight-bit numbers: rounding against the table of all numbers, saturation, scales, and the way back."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="kernels need torch")

from kvledger.kernels import KernelInputError, MissingScaleWarning, kv_scale  # noqa: E402

from tests.kernels.cache_layouts import FP8, integers  # noqa: E402
from tests.kernels.kernel_sets import device  # noqa: E402

pytestmark = pytest.mark.torch


def all_numbers(dtype: Any) -> tuple[Any, Any]:
    """Every finite number of the format, in order, and its byte; of the two zeros the positive one."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(dtype).double()
    keep = numbers.isfinite() & (codes != 0x80)
    order = numbers[keep].argsort()
    return numbers[keep][order], codes[keep][order]


def nearest_bytes(values: Any, dtype: Any) -> Any:
    """Round to nearest even by search among all numbers: neither casts nor bit tricks."""
    numbers, codes = all_numbers(dtype)
    values = values.double()
    above = torch.searchsorted(numbers, values.clamp(numbers[0], numbers[-1])).clamp(1, len(numbers) - 1)
    below = above - 1
    to_below, to_above = values - numbers[below], numbers[above] - values
    # Of two equally near numbers the one whose last mantissa bit is 0: its byte is even.
    takes_below = (to_below < to_above) | ((to_below == to_above) & (codes[below] % 2 == 0))
    nearest = codes[torch.where(takes_below, below, above)]
    is_negative_zero = (numbers[torch.where(takes_below, below, above)] == 0) & values.signbit()
    nearest = torch.where(is_negative_zero, 0x80, nearest)
    return torch.where(values.isnan(), 0x7F, nearest).to(torch.uint8)


def stored_bytes(kernels: Any, values: Any, dtype: Any, scale: float) -> Any:
    """The bytes of a vector that is stored as the keys of eight heads of 256 a token."""
    keys = values.to(device()).view(-1, 8, 256)
    caches = [torch.zeros(len(keys), 1, 8, 256, dtype=dtype, device=device()) for _ in range(2)]
    scales = {name: kv_scale(scale, name=name, device=device()) for name in ("k_scale", "v_scale")}
    slots = torch.arange(len(keys), device=device())
    kernels.reshape_and_cache(
        key=keys, value=keys, key_cache=caches[0], value_cache=caches[1], slot_mapping=slots, **scales
    )
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))
    return caches[0].view(torch.uint8).flatten().cpu()


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
def test_every_16_bit_number_is_rounded_to_the_nearest_even(kernels: Any, dtype: Any, source: Any) -> None:
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(source)
    assert torch.equal(stored_bytes(kernels, values, dtype, 1.0), nearest_bytes(values, dtype))


@pytest.mark.parametrize("dtype", FP8)
def test_a_scale_multiplies_by_its_reciprocal_in_float32(kernels: Any, dtype: Any) -> None:
    generator = torch.Generator().manual_seed(11)
    values = torch.randn(4096, generator=generator) * torch.logspace(-4, 5, 4096)
    scaled = values * (1 / torch.tensor(0.3, dtype=torch.float32))
    assert torch.equal(stored_bytes(kernels, values, dtype, 0.3), nearest_bytes(scaled, dtype))


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("out", [torch.float32, torch.float16, torch.bfloat16])
def test_every_byte_reads_back_as_its_number_times_the_scale(kernels: Any, dtype: Any, out: Any) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device()).view(1, 4, 1, 64)
    k_scale, v_scale = (kv_scale(value, name="k_scale", device=device()) for value in (0.37, 2.5))
    key, value = kernels.gather_cache(
        key_cache=codes,
        value_cache=codes.clone(),
        kv_cache_dtype="fp8_e4m3" if dtype == FP8[0] else "fp8_e5m2",
        block_table=integers(0).view(1, 1),
        rows=integers(0),
        cu_seqlens=integers(0, 4),
        num_tokens=4,
        k_scale=k_scale,
        v_scale=v_scale,
        dtype=out,
    )
    for read, scale in ((key, k_scale), (value, v_scale)):
        expected = (codes.flatten().view(dtype).float() * scale).to(out)
        assert torch.equal(read.flatten().isnan(), expected.isnan())
        assert torch.equal(read.flatten().nan_to_num(), expected.nan_to_num())


def test_an_8_bit_cache_read_as_it_is_keeps_its_bytes(kernels: Any) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device()).view(FP8[0]).view(1, 4, 1, 64)
    key, _ = kernels.gather_cache(
        key_cache=codes,
        value_cache=codes.clone(),
        block_table=integers(0).view(1, 1),
        rows=integers(0),
        cu_seqlens=integers(0, 4),
        num_tokens=4,
    )
    assert torch.equal(key.view(torch.uint8).flatten(), codes.view(torch.uint8).flatten())


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-46, 1e-39])
def test_a_scale_by_which_nothing_can_be_divided_is_refused(kernels: Any, scale: float) -> None:
    with pytest.raises(KernelInputError, match=r"k_scale is .* positive finite float32"):
        kv_scale(scale, name="k_scale", device="cpu")
    raw = torch.tensor([scale], dtype=torch.float32, device=device())
    with pytest.raises(KernelInputError, match="k_scale is"):
        _write_one(kernels, k_scale=raw, v_scale=torch.ones(1, device=device()), checked=True)


def test_a_scale_must_be_one_float32_on_the_device(kernels: Any) -> None:
    one = torch.ones(1, device=device())
    for wrong in (torch.ones(2, device=device()), one.double(), one.half()):
        with pytest.raises(KernelInputError, match="v_scale must be one float32"):
            _write_one(kernels, k_scale=one, v_scale=wrong)


def test_a_missing_scale_is_one_and_is_said() -> None:
    with pytest.warns(MissingScaleWarning, match="v_scale is missing .* 1.0 is used"):
        assert kv_scale(None, name="v_scale", device="cpu").tolist() == [1.0]


def _write_one(kernels: Any, **options: Any) -> None:
    rows = torch.ones(1, 1, 16, device=device())
    cache = torch.zeros(1, 1, 1, 16, dtype=FP8[0], device=device())
    slots = torch.zeros(1, dtype=torch.int64, device=device())
    kernels.reshape_and_cache(
        key=rows, value=rows, key_cache=cache, value_cache=cache.clone(), slot_mapping=slots, **options
    )
