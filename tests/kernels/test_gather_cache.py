"""Reading back by block table: what was written comes back, in order, for several sequences at once."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="kernels need torch")

from kvledger.kernels import KernelInputError, SlotTables  # noqa: E402

from tests.kernels.cache_layouts import FLOATS, FP8, LAYOUTS, integers, longs, paged_cache, rows_of  # noqa: E402
from tests.kernels.kernel_sets import device  # noqa: E402
from tests.kernels.pairwise import pairwise_cover  # noqa: E402

pytestmark = pytest.mark.torch

COVER = pairwise_cover([(64, 80, 120, 576), (1, 3, 8), (1, 8, 17, 128), FLOATS + FP8, LAYOUTS])


@pytest.mark.parametrize(("head_size", "heads", "block_size", "dtype", "layout"), COVER)
def test_what_is_written_by_slot_is_read_by_block_table(
    kernels: Any, head_size: int, heads: int, block_size: int, dtype: Any, layout: str
) -> None:
    cache = paged_cache(layout, 20, block_size, heads, head_size, dtype)
    table = torch.arange(20, dtype=torch.int32, device=device()).flip(0).view(2, 10)
    count = min(9, 10 * block_size)
    key, value = rows_of(2 * count, heads, head_size, dtype)
    slots = torch.zeros(1, 2 * count, dtype=torch.int64, device=device())
    kernels.compute_slot_mapping(
        tables=SlotTables.of([table], [block_size]),
        rows=integers(1, 0),
        query_start_loc=integers(0, count, 2 * count),
        first_positions=longs(0, 0),
        slot_mapping=slots,
    )
    cache.method(kernels, "reshape_and_cache")(key=key, value=value, **cache.views(), slot_mapping=slots[0])
    read = cache.method(kernels, "gather_cache")(
        **cache.views(),
        block_table=table,
        rows=integers(0, 1, 0),
        cu_seqlens=integers(0, 1, count, count + 3),
        first_positions=longs(count - 1, 0, 2),
        num_tokens=count + 3,
        checked=True,
    )
    for rows, result in zip((key, value), read, strict=True):
        expected = torch.cat([rows[-1:], rows[: count - 1], rows[count + 2 : count + 5]])
        assert result.is_contiguous()
        assert torch.equal(result.view(torch.uint8), expected.contiguous().view(torch.uint8))


def test_a_table_of_large_blocks_reads_a_cache_in_smaller_kernel_blocks(kernels: Any) -> None:
    cache = paged_cache("NHD", 12, 16, 2, 32, torch.float16)
    smaller = {name: view.reshape(48, 4, 2, 32) for name, view in cache.views().items()}
    batch = {
        "block_table": integers(3, 11, 0).view(1, 3),
        "rows": integers(0),
        "cu_seqlens": integers(0, 30),
        "first_positions": longs(9),
        "num_tokens": 30,
    }
    whole = kernels.gather_cache(**cache.views(), **batch)
    pieces = kernels.gather_cache(**smaller, **batch, block_size=16)
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(whole, pieces, strict=True))


def test_padding_and_positions_outside_the_table_read_as_zeros(kernels: Any) -> None:
    cache = paged_cache("NHD", 3, 4, 1, 16, torch.bfloat16)
    key, value = kernels.gather_cache(
        **cache.views(),
        block_table=integers(1, -1, 9).view(1, 3),
        rows=integers(-1, 0, 7),
        cu_seqlens=integers(0, 2, 16, 18),
        num_tokens=20,
    )
    for read, view in ((key, cache.key), (value, cache.value)):
        assert torch.equal(read[2:6].view(torch.int16), view[1].view(torch.int16))
        assert not read[:2].any()
        assert not read[6:].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_block_inside_a_sequence_reads_as_zeros_and_nan_beside_is_not_read(kernels: Any, layout: str) -> None:
    cache = paged_cache(layout, 6, 4, 2, 16, torch.float16)
    cache.raw.fill_(float("nan"))
    key, value = rows_of(6, 2, 16, torch.float16)
    # Row 0 holds blocks 5, none and 2, and ends after two of the last block's slots.
    slots = longs(20, 21, 22, 23, 8, 9)
    cache.method(kernels, "reshape_and_cache")(key=key, value=value, **cache.views(), slot_mapping=slots)
    read = cache.method(kernels, "gather_cache")(
        **cache.views(),
        block_table=integers(5, -1, 2).view(1, 3),
        rows=integers(0),
        cu_seqlens=integers(0, 10),
        num_tokens=10,
        checked=True,
    )
    for rows, result in zip((key, value), read, strict=True):
        assert torch.equal(result[:4], rows[:4])
        assert not result[4:8].any()
        assert torch.equal(result[8:], rows[4:])


def test_nothing_is_read_from_no_sequences(kernels: Any) -> None:
    cache = paged_cache("NHD", 3, 4, 1, 16, torch.bfloat16)
    batch = {"block_table": integers(0).view(1, 1), "rows": integers(), "cu_seqlens": integers(0)}
    key, value = kernels.gather_cache(**cache.views(), **batch, num_tokens=0)
    assert key.shape == value.shape == (0, 1, 16)


def test_what_cannot_be_read_is_refused(kernels: Any) -> None:
    cache = paged_cache("NHD", 3, 4, 1, 16, torch.bfloat16)
    call = {
        **cache.views(),
        "block_table": integers(0, 1).view(1, 2),
        "rows": integers(0),
        "cu_seqlens": integers(0, 5),
        "num_tokens": 5,
    }
    for changes, message in (
        ({"block_size": 6}, "6 tokens is not a multiple of the cache's blocks of 4"),
        ({"block_table": longs(0, 1).view(1, 2)}, "block_table must be int32"),
        ({"cu_seqlens": integers(0, 2, 5)}, "1 rows need 2 cu_seqlens, not 3"),
        ({"first_positions": longs(0, 1)}, "1 rows, but 2 first positions"),
        ({"dtype": torch.float32}, "a torch.bfloat16 cache cannot be read as torch.float32"),
        ({"k_scale": torch.ones(1, device=device())}, "k_scale is given, but nothing is quantised"),
        ({"num_tokens": 4, "checked": True}, "cu_seqlens must rise from 0 to num_tokens = 4"),
        (
            {"first_positions": longs(4), "checked": True},
            r"\(0, 4, 9\)\] lie outside a block table of 1 rows of 2 blocks of 4",
        ),
        ({"rows": integers(1), "checked": True}, r"\(1, 0, 5\)\] lie outside"),
    ):
        with pytest.raises(KernelInputError, match=message):
            kernels.gather_cache(**(call | changes))
