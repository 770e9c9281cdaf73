"""Field report F04: shapes that broke other kernels, exact to the bit. (Their pairwise cover, to 8,193 tokens, is in
tests/kernels/test_reshape_and_cache.py.) And no sequence reads past the blocks that its row has.
"""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="kernels need torch")

from kvledger.kernels import KernelInputError  # noqa: E402

from tests.kernels.cache_layouts import (  # noqa: E402
    distinct_slots,
    integers,
    paged_cache,
    rows_of,
    written_by_indexing,
)
from tests.kernels.kernel_sets import KERNEL_SETS, kernel_set  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.parametrize("name", KERNEL_SETS)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("head_size", "heads", "block_size", "num_tokens"),
    [
        (64, 8, 1, 7),
        (80, 3, 8, 1),
        (96, 2, 16, 7),
        (112, 1, 17, 7),
        (120, 8, 128, 1),
        (128, 3, 256, 7),
        (192, 2, 512, 0),
        (256, 1, 784, 7),
        (576, 1, 16, 7),
    ],
)
def test_every_shape_is_written_to_the_bit(
    name: str, head_size: int, heads: int, block_size: int, num_tokens: int, dtype: Any
) -> None:
    num_blocks = num_tokens // block_size + 2
    shape = (num_blocks, block_size, heads, head_size, dtype)
    cache, expected = (paged_cache("NHD", *shape) for _ in range(2))
    key, value = rows_of(num_tokens, heads, head_size, dtype)
    slots = distinct_slots(num_blocks * block_size, num_tokens)
    kernel_set(name).reshape_and_cache(key=key, value=value, **cache.views(), slot_mapping=slots)
    for rows, view in zip((key, value), expected.logical(), strict=True):
        written_by_indexing(view, rows, slots.tolist())
    assert torch.equal(cache.bytes(), expected.bytes())


def test_a_last_page_holds_no_more_than_a_page(name: str) -> None:
    kernels, cache = kernel_set(name), paged_cache("NHD", 4, 16, 1, 32, torch.float16)
    table = {"block_table": integers(2, 1).view(1, 2), "rows": integers(0)}
    with pytest.raises(KernelInputError, match=r"\(0, 0, 33\)\] lie outside a block table of 1 rows of 2 blocks of 16"):
        kernels.gather_cache(**cache.views(), **table, cu_seqlens=integers(0, 33), num_tokens=33, checked=True)
    with pytest.raises(KernelInputError, match=r"\(0, 0, 33\)\] lie outside"):
        kernels.paged_attention(
            query=rows_of(1, 1, 32, torch.float16)[0],
            **cache.views(),
            **table,
            query_start_loc=integers(0, 1),
            seq_lens=integers(33),
            scale=1.0,
            checked=True,
        )
    key, _ = kernels.gather_cache(**cache.views(), **table, cu_seqlens=integers(0, 33), num_tokens=33)
    assert not key[32].any()
