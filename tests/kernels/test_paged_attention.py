"""Attention over the cache against attention over the sequences themselves, in float64."""

from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch", reason="kernels need torch")

from kvledger.kernels import KernelInputError, kv_scale  # noqa: E402

from tests.kernels.cache_layouts import FP8, integers, paged_cache, written_by_indexing  # noqa: E402
from tests.kernels.kernel_sets import device  # noqa: E402

pytestmark = pytest.mark.torch

# Rounding of the result, of the weights (in the kernel), and of sums of up to a thousand terms in float32. Their order
# is another in each kernel and with each number of splits, so equal bits are not to be had.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@attrs.frozen(eq=False)
class Batch:
    """Sequences in a cache whose other slots hold noise, and their last tokens' queries."""

    query: Any
    call: dict[str, Any]
    keys: list[Any]
    values: list[Any]
    num_queries: list[int]


def batch_of(
    lengths: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_size: int = 32,
    block_size: int = 16,
    layout: str = "NHD",
    dtype: Any = torch.float32,
) -> Batch:
    """One sequence for each (seq_len, number of query tokens)."""
    num_q_heads, num_kv_heads = heads
    width = max(-(-seq_len // block_size) for seq_len, _ in lengths)
    num_blocks = width * len(lengths) + 1
    generator = torch.Generator().manual_seed(len(lengths))

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(dtype).to(device())

    cache = paged_cache(layout, num_blocks, block_size, num_kv_heads, head_size, dtype)
    table = torch.randperm(num_blocks, generator=generator)[:-1].view(len(lengths), width).int().to(device())
    keys, values = ([normal(seq_len, num_kv_heads, head_size) for seq_len, _ in lengths] for _ in "kv")
    for row, (key, value) in enumerate(zip(keys, values, strict=True)):
        slots = [
            int(table[row, position // block_size]) * block_size + position % block_size for position in range(len(key))
        ]
        written_by_indexing(cache.key, key, slots)
        written_by_indexing(cache.value, value, slots)
    counts = [count for _, count in lengths]
    # Queries as they lie in a fused projection.
    query = normal(sum(counts), num_q_heads + 2, head_size)[:, :num_q_heads]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    call = {
        **cache.views(),
        "block_table": table,
        "rows": torch.arange(len(lengths), dtype=torch.int32, device=device()),
        "query_start_loc": integers(*starts),
        "seq_lens": integers(*(seq_len for seq_len, _ in lengths)),
        "scale": head_size**-0.5,
    }
    return Batch(query, call, keys, values, counts)


def attention_by_hand(batch: Batch, window: int | None = None, softcap: float | None = None) -> Any:
    """Softmax of the scores that each query may see, in float64, one query at a time."""
    results, token = [], 0
    for key, value, count in zip(batch.keys, batch.values, batch.num_queries, strict=True):
        group = batch.query.shape[1] // key.shape[1]
        key, value = (rows.double().repeat_interleave(group, 1) for rows in (key, value))
        for position in range(len(key) - count, len(key)):
            first = 0 if window is None else max(0, position - window + 1)
            scores = torch.einsum("hd,thd->ht", batch.query[token].double(), key[first : position + 1])
            scores = scores * batch.call["scale"]
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            results.append(torch.einsum("ht,thd->hd", scores.softmax(-1), value[first : position + 1]))
            token += 1
    return torch.stack(results).to(batch.query.dtype)


def assert_attends(kernels: Any, batch: Batch, **options: Any) -> None:
    result = kernels.paged_attention(query=batch.query, **batch.call, **options, checked=True)
    options.pop("block_size", None)
    expected = attention_by_hand(batch, **options)
    assert result.dtype == batch.query.dtype
    torch.testing.assert_close(result, expected, rtol=0, atol=TOLERANCE[batch.query.dtype])


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 2), (9, 3), (8, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_step_attends_to_each_whole_sequence(kernels: Any, heads: tuple[int, int], dtype: Any) -> None:
    assert_attends(kernels, batch_of([(70, 1), (1, 1), (33, 1)], heads=heads, dtype=dtype))


@pytest.mark.parametrize("head_size", [64, 80, 192])
@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved", "packed"])
def test_every_layout_and_head_size_is_read_where_it_is(kernels: Any, head_size: int, layout: str) -> None:
    lengths = [(20, 1), (37, 3)]
    assert_attends(kernels, batch_of(lengths, head_size=head_size, layout=layout, dtype=torch.float16))


@pytest.mark.parametrize("block_size", [1, 17, 128])
def test_prefill_chunks_are_causal_beside_decodes(kernels: Any, block_size: int) -> None:
    assert_attends(kernels, batch_of([(50, 21), (40, 1), (19, 19), (64, 2)], block_size=block_size))


@pytest.mark.parametrize("window", [1, 5, 16, 100])
def test_a_window_counts_the_query_itself(kernels: Any, window: int) -> None:
    assert_attends(kernels, batch_of([(50, 9), (40, 1), (3, 3)]), window=window)


def test_scores_are_capped_softly(kernels: Any) -> None:
    assert_attends(kernels, batch_of([(50, 9), (40, 1)]), softcap=0.7)


def test_blocks_out_of_the_window_are_not_read(kernels: Any) -> None:
    batch = batch_of([(60, 3)])
    batch.call["block_table"][0, :2] = 0
    batch.call["key_cache"][0] = batch.call["value_cache"][0] = float("nan")
    assert_attends(kernels, batch, window=12)


def put_nan_beside(batch: Batch, window: int | None = None) -> None:
    """NaN in every slot that no query of the batch may see: of other blocks, of earlier keys, behind the last key."""
    block_size = batch.call["key_cache"].shape[1]
    live = torch.zeros(batch.call["key_cache"].shape[:2], dtype=torch.bool, device=device())
    for row, (key, count) in enumerate(zip(batch.keys, batch.num_queries, strict=True)):
        for position in range(0 if window is None else max(len(key) - count - window + 1, 0), len(key)):
            live[int(batch.call["block_table"][row, position // block_size]), position % block_size] = True
    for name in ("key_cache", "value_cache"):
        batch.call[name][~live] = float("nan")


@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved", "packed"])
def test_nan_beside_a_sequence_does_not_reach_it(kernels: Any, layout: str) -> None:
    batch = batch_of([(21, 5), (17, 1)], layout=layout)
    put_nan_beside(batch)
    assert_attends(kernels, batch)


@pytest.mark.parametrize("freed", [-1, 0])
def test_blocks_before_the_window_may_be_gone_from_the_table(kernels: Any, freed: int) -> None:
    batch = batch_of([(60, 3), (40, 1)])
    put_nan_beside(batch, window=12)
    batch.call["block_table"][0, :2] = batch.call["block_table"][1, 0] = freed
    assert_attends(kernels, batch, window=12)


def test_positions_whose_block_is_missing_are_not_attended(kernels: Any) -> None:
    batch = batch_of([(60, 2), (40, 1)])
    put_nan_beside(batch)
    batch.call["block_table"][0, 1] = -1
    held = Batch(
        batch.query,
        batch.call,
        *[[torch.cat([rows[0][:16], rows[0][32:]]), rows[1]] for rows in (batch.keys, batch.values)],
        batch.num_queries,
    )
    result = kernels.paged_attention(query=batch.query, **batch.call, checked=True)
    torch.testing.assert_close(result, attention_by_hand(held), rtol=0, atol=TOLERANCE[torch.float32])


def test_a_query_that_sees_no_key_gives_zeros(kernels: Any) -> None:
    batch = batch_of([(10, 2), (9, 1)])
    expected = attention_by_hand(batch)
    batch.call["block_table"][0] = -1
    result = kernels.paged_attention(query=batch.query, **batch.call)
    assert not result[:2].any()
    torch.testing.assert_close(result[2:], expected[2:], rtol=0, atol=TOLERANCE[torch.float32])


# -- long sequences, whose keys are split over programs ----------------------------------------------------------------


def test_splits_are_as_many_as_fill_a_gpu_and_a_sequence_has_keys_for(triton_kernels: Any) -> None:
    from kvledger.kernels.attention_launches import num_splits_for

    assert [num_splits_for(programs, 1 << 17) for programs in (1, 8, 64, 511, 512, 5000)] == [128, 64, 8, 2, 1, 1]
    assert [num_splits_for(8, keys) for keys in (1, 511, 512, 8192)] == [1, 1, 2, 32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2)])
def test_a_few_long_sequences_beside_short_ones(kernels: Any, heads: tuple[int, int], dtype: Any) -> None:
    batch = batch_of([(1000, 1), (1, 1), (300, 1), (530, 1)], heads=heads, dtype=dtype)
    put_nan_beside(batch)
    assert_attends(kernels, batch)


def test_a_chunk_of_queries_over_a_long_sequence(kernels: Any) -> None:
    assert_attends(kernels, batch_of([(800, 20), (513, 3)], heads=(4, 1)))


def test_a_window_of_several_splits(kernels: Any) -> None:
    batch = batch_of([(900, 3), (620, 1)], heads=(2, 1))
    put_nan_beside(batch, window=600)
    assert_attends(kernels, batch, window=600)


def test_a_split_that_outweighs_all_others(kernels: Any) -> None:
    batch = batch_of([(900, 1)], heads=(2, 1))
    batch.query.mul_(20)
    result = kernels.paged_attention(query=batch.query, **batch.call)
    # Scores of some hundreds: their rounding in float32 shows in the weights.
    torch.testing.assert_close(result, attention_by_hand(batch), rtol=0, atol=5e-4)


def test_a_split_without_a_key(kernels: Any) -> None:
    batch = batch_of([(800, 1), (600, 1)], heads=(2, 1))
    batch.call["block_table"][0, :20] = -1
    held = Batch(batch.query, batch.call, *[[r[0][320:], r[1]] for r in (batch.keys, batch.values)], [1, 1])
    result = kernels.paged_attention(query=batch.query, **batch.call)
    torch.testing.assert_close(result, attention_by_hand(held), rtol=0, atol=TOLERANCE[torch.float32])
    batch.call["rows"][0] = -1
    result = kernels.paged_attention(query=batch.query, **batch.call)
    assert not result[0].any()


def test_lengths_that_change_in_place_are_those_of_the_next_step(triton_kernels: Any) -> None:
    """On a GPU one captured graph is replayed with them: as many splits, over other keys."""
    batch = batch_of([(900, 1), (300, 1)], heads=(2, 1))

    def run() -> Any:
        return triton_kernels.paged_attention(query=batch.query, **batch.call)

    result, replay = run(), run
    if device().type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run()
        replay = graph.replay
    for lengths in ((900, 300), (40, 257), (513, 1)):
        batch.call["seq_lens"].copy_(integers(*lengths))
        found = replay()
        parts = [
            [rows[:length] for rows, length in zip(sequences, lengths, strict=True)]
            for sequences in (batch.keys, batch.values)
        ]
        expected = attention_by_hand(Batch(batch.query, batch.call, *parts, batch.num_queries))
        found = result if found is None else found
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[torch.float32])


@pytest.mark.parametrize("head_size", [576, 520])
def test_a_head_of_two_tiles(kernels: Any, head_size: int) -> None:
    assert_attends(kernels, batch_of([(37, 2), (20, 1)], heads=(2, 1), head_size=head_size))
    assert_attends(kernels, batch_of([(600, 1)], heads=(2, 1), head_size=head_size))


def test_padding_sequences_and_tokens_give_zeros(kernels: Any) -> None:
    batch = batch_of([(20, 2), (9, 1), (4, 1)])
    expected = attention_by_hand(batch)
    batch.call["rows"][1] = -1
    query = torch.cat([batch.query, batch.query[:3]])
    result = kernels.paged_attention(query=query, **batch.call)
    torch.testing.assert_close(result[:2], expected[:2], rtol=0, atol=2e-5)
    torch.testing.assert_close(result[3], expected[3], rtol=0, atol=2e-5)
    assert not result[2].any()
    assert not result[4:].any()


def test_a_table_of_large_blocks_serves_a_cache_in_smaller_kernel_blocks(kernels: Any) -> None:
    batch = batch_of([(50, 4), (20, 1)], block_size=16)
    for name in ("key_cache", "value_cache"):
        batch.call[name] = batch.call[name].reshape(-1, 8, *batch.call[name].shape[2:])
    assert_attends(kernels, batch, block_size=16)


@pytest.mark.parametrize("dtype", FP8)
def test_an_8_bit_cache_is_read_with_its_scales(kernels: Any, dtype: Any) -> None:
    batch = batch_of([(30, 1), (21, 4)], dtype=torch.float16)
    k_scale, v_scale = (kv_scale(value, name=f"{value}", device=device()) for value in (0.25, 2.0))
    for name, scale in (("key_cache", k_scale), ("value_cache", v_scale)):
        stored = (batch.call[name].float().clamp(-64, 64) / scale).to(dtype)
        batch.call[name] = stored
    # Powers of two scale without rounding, so the sequences are the numbers that the cache holds.
    for sequences, scale in ((batch.keys, k_scale), (batch.values, v_scale)):
        sequences[:] = [((rows.float() / scale).to(dtype).float() * scale).half() for rows in sequences]
    result = kernels.paged_attention(query=batch.query, **batch.call, k_scale=k_scale, v_scale=v_scale)
    torch.testing.assert_close(result, attention_by_hand(batch), rtol=0, atol=4e-3)


def test_what_cannot_be_attended_is_refused(kernels: Any) -> None:
    batch = batch_of([(20, 2), (9, 1)])
    for changes, message in (
        ({"query": batch.query[:, :3]}, r"query must be \[num_tokens, a multiple of 2 heads, 32\]"),
        ({"query": batch.query.half()}, "query is torch.float16 and the cache torch.float32"),
        ({"seq_lens": integers(20)}, "2 rows need 3 query starts and 2 seq_lens"),
        ({"window": 0}, "window is 0"),
        ({"softcap": 0.0}, "softcap is 0"),
        (
            {"seq_lens": integers(20, 33), "checked": True},
            r"\(1, 0, 33\)\] lie outside a block table of 2 rows of 2 blocks",
        ),
        ({"seq_lens": integers(1, 9), "checked": True}, r"\(0, 2, 1\)\]: a sequence includes its query tokens"),
        ({"query_start_loc": integers(0, 2, 4), "checked": True}, "at most 3"),
    ):
        with pytest.raises(KernelInputError, match=message):
            kernels.paged_attention(**({"query": batch.query} | batch.call | changes))
