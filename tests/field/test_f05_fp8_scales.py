"""Field report F05: an 8-bit cache stores saturate(x / scale) and reads stored * scale; keys and values differ."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="kernels need torch")

from kvledger.kernels import KernelInputError, MissingScaleWarning, kv_scale  # noqa: E402

from tests.kernels.cache_layouts import LAYOUTS, integers, longs, paged_cache  # noqa: E402
from tests.kernels.kernel_sets import KERNEL_SETS, device, kernel_set  # noqa: E402

pytestmark = pytest.mark.torch

# x, byte of the key at scale 0.5 and what it reads as, byte of the value at scale 2.0 and what it reads as.
LISTED = [
    (1.0, 0x40, 1.0, 0x30, 1.0),
    (150.0, 0x79, 144.0, 0x69, 144.0),
    (300.0, 0x7E, 224.0, 0x71, 288.0),
    (-300.0, 0xFE, -224.0, 0xF1, -288.0),
    (float("inf"), 0x7E, 224.0, 0x7E, 896.0),
]


def scales(k_scale: float = 0.5, v_scale: float = 2.0) -> dict[str, Any]:
    return {
        "k_scale": kv_scale(k_scale, name="k_scale", device=device()),
        "v_scale": kv_scale(v_scale, name="v_scale", device=device()),
    }


@pytest.mark.parametrize("name", KERNEL_SETS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
def test_the_listed_bytes_are_stored_and_read_as_listed(name: str, layout: str, source: Any) -> None:
    kernels = kernel_set(name)
    values = torch.tensor([row[0] for row in LISTED], device=device()).to(source)
    rows = values.view(-1, 1, 1).expand(-1, 1, 16).contiguous()
    cache = paged_cache(layout, 1, 8, 1, 16, torch.float8_e4m3fn)
    write = cache.method(kernels, "reshape_and_cache")
    write(key=rows, value=rows, **cache.views(), slot_mapping=longs(0, 1, 2, 3, 4), **scales(), checked=True)
    key, value = (view.contiguous().view(torch.uint8).flatten(2)[0, :5] for view in cache.logical())
    assert key.tolist() == [[row[1]] * 16 for row in LISTED]
    assert value.tolist() == [[row[3]] * 16 for row in LISTED]
    key, value = cache.method(kernels, "gather_cache")(
        **cache.views(),
        block_table=integers(0).view(1, 1),
        rows=integers(0),
        cu_seqlens=integers(0, 5),
        num_tokens=5,
        dtype=torch.float32,
        **scales(),
    )
    assert key.flatten(1).tolist() == [[row[2]] * 16 for row in LISTED]
    assert value.flatten(1).tolist() == [[row[4]] * 16 for row in LISTED]


def test_a_missing_scale_is_said_to_be_one() -> None:
    with pytest.warns(MissingScaleWarning, match=r"k_scale is missing .*: 1\.0 is used"):
        assert kv_scale(None, name="k_scale", device="cpu").item() == 1.0


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan")])
def test_a_scale_of_zero_a_negative_one_and_nan_are_errors(scale: float) -> None:
    with pytest.raises(KernelInputError, match="v_scale is"):
        scales(v_scale=scale)
