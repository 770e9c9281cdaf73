"""Decodes attended together, in plain torch: alike lengths in one batch, and what each would have alone."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="kernels need torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from kvledger.kernels import TorchKernels, kv_scale  # noqa: E402
from kvledger.kernels.paged_attention import MAX_GATHERED_NUMBERS, batches_of  # noqa: E402

from tests.kernels.cache_layouts import integers  # noqa: E402
from tests.kernels.kernel_sets import device  # noqa: E402
from tests.kernels.test_paged_attention import Batch, batch_of, put_nan_beside  # noqa: E402

pytestmark = pytest.mark.torch


@given(
    st.lists(st.one_of(st.integers(1, 200), st.integers(1, 300_000)), max_size=60),
    st.sampled_from([1, 24, 192, 1024, 1 << 20]),
)
def test_every_decode_is_in_one_batch_of_alike_ones_that_is_not_too_large(num_keys: list[int], numbers: int) -> None:
    batches = list(batches_of(num_keys, numbers))
    assert sorted(place for batch in batches for place in batch) == list(range(len(num_keys)))
    for batch in batches:
        lengths = [num_keys[place] for place in batch]
        assert max(lengths) <= max(2 * min(lengths), min(lengths) + 32)
        assert len(batch) == 1 or max(lengths) * len(batch) * numbers <= MAX_GATHERED_NUMBERS


def one_by_one(batch: Batch, **options: Any) -> Any:
    """Each sequence in a call of its own, which is attended by itself."""
    outputs = []
    for place in range(len(batch.query)):
        call = dict(batch.call)
        for name in ("rows", "seq_lens"):
            call[name] = batch.call[name][place : place + 1]
        call["query_start_loc"] = integers(0, 1)
        outputs.append(TorchKernels().paged_attention(query=batch.query[place : place + 1], **call, **options))
    return torch.cat(outputs)


@pytest.mark.parametrize(
    "options", [{}, {"window": 7}, {"window": 64}, {"softcap": 0.7}, {"window": 9, "softcap": 2.0}]
)
@pytest.mark.parametrize("heads", [(1, 1), (6, 3), (8, 1)])
def test_decodes_give_together_what_each_gives_alone(heads: tuple[int, int], options: dict[str, Any]) -> None:
    lengths = [(length, 1) for length in (70, 1, 33, 34, 150, 71, 500, 2, 16, 17)]
    batch = batch_of(lengths, heads=heads)
    put_nan_beside(batch, options.get("window"))
    together = TorchKernels().paged_attention(query=batch.query, **batch.call, **options)
    torch.testing.assert_close(together, one_by_one(batch, **options), rtol=0, atol=2e-5)


def test_padding_beside_decodes_and_a_sequence_without_keys_give_zeros() -> None:
    batch = batch_of([(20, 1), (30, 1), (40, 1)])
    expected = one_by_one(batch)
    batch.call["rows"][1] = -1
    together = TorchKernels().paged_attention(query=batch.query, **batch.call)
    assert not together[1].any()
    torch.testing.assert_close(together[[0, 2]], expected[[0, 2]], rtol=0, atol=2e-5)
    batch.call["seq_lens"][2] = 0
    together = TorchKernels().paged_attention(query=batch.query, **batch.call)
    assert not together[1:].any()


def test_scales_are_those_of_each_cache() -> None:
    batch = batch_of([(20, 1), (30, 1)])
    for name in ("key_cache", "value_cache"):
        batch.call[name] = batch.call[name].to(torch.float8_e4m3fn)
    scales = {"k_scale": kv_scale(0.5, name="k", device=device()), "v_scale": kv_scale(3.0, name="v", device=device())}
    together = TorchKernels().paged_attention(query=batch.query, **batch.call, **scales)
    torch.testing.assert_close(together, one_by_one(batch, **scales), rtol=0, atol=6e-5)
