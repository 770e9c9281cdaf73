import pytest
from kvledger.core.errors import InputError
from kvledger.core.planner.groups import group_layers, layers_per_group, least_padding_divisor
from kvledger.core.planner.layout import KVCacheGroup, KVCacheLayout, needs_zeroing
from kvledger.core.planner.specs import (
    ChunkedLocalSpec,
    CompressedStateSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaLikeSpec,
    MLASpec,
    OpaqueSpec,
    SlidingWindowSpec,
    StateArray,
)


def _full(num_kv_heads: int = 4, block_size: int = 16, dtype: str = "bf16") -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=num_kv_heads, head_size=64, dtype=dtype)


def _sliding(window: int, num_kv_heads: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=16, num_kv_heads=num_kv_heads, head_size=64, dtype="bf16", sliding_window=window
    )


def _state(num_bytes: int) -> MambaLikeSpec:
    return MambaLikeSpec(block_size=512, states=(StateArray((num_bytes,), "uint8"),))


def _layers(*runs: tuple[int, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    specs = [spec for count, spec in runs for _ in range(count)]
    return {f"L{index}": spec for index, spec in enumerate(specs)}


def _groups(
    layers: dict[str, KVCacheSpec], layout: KVCacheLayout = KVCacheLayout.LBNHC, disable_hybrid: bool = False
) -> tuple[KVCacheGroup, ...]:
    return group_layers(layers, layout, disable_hybrid)


def test_equal_layers_form_one_group() -> None:
    [group] = _groups(_layers((3, _full())))
    assert (group.kind, group.layer_names) == ("full", ("L0", "L1", "L2"))


def test_layers_of_one_kind_form_one_group_though_their_pages_differ() -> None:
    [group] = _groups(_layers((2, _full(4)), (1, _full(1))))
    assert group.kind == "uniform_type"
    assert group.page_size_bytes == 2 * _full(4).page_size_bytes + _full(1).page_size_bytes


def test_a_latent_and_its_indexer_form_one_group() -> None:
    mla = MLASpec(block_size=64, head_size=576, dtype="bf16")
    indexer = OpaqueSpec(block_size=64, opaque_bytes_per_token=132)
    compressed = CompressedStateSpec(block_size=64, tokens_per_state=4, head_size=512, dtype="bf16")
    [group] = _groups(_layers((61, mla), (61, indexer), (5, compressed)))
    assert group.kind == "uniform_type"
    assert group.bytes_per_block == sum(spec.page_size_bytes for spec in group.layer_specs)


def test_windows_of_two_sizes_are_two_groups() -> None:
    assert [group.kind for group in _groups(_layers((2, _sliding(128)), (2, _sliding(256))))] == ["sliding"] * 2


def test_a_page_that_divides_the_largest_gets_a_larger_block() -> None:
    small, large = _groups(_layers((2, _sliding(128, 2)), (2, _full(8))))
    assert (small.block_size, large.block_size) == (64, 16)
    assert small.page_size_bytes == large.page_size_bytes


def test_a_page_that_does_not_divide_the_largest_is_padded() -> None:
    small, large = _groups(_layers((2, _sliding(128, 3)), (2, _full(4))))
    assert small.block_size == 16
    assert small.spec.page_size_padded == large.page_size_bytes
    assert small.spec.unpadded_page_size_bytes == _sliding(128, 3).page_size_bytes


def test_a_state_is_padded_even_where_its_page_divides_the_largest() -> None:
    page = _full().page_size_bytes
    states, full = _groups(_layers((1, _state(page // 2)), (1, _full())))
    assert (states.block_size, states.page_size_bytes) == (512, full.page_size_bytes)


def test_windows_beside_a_latent_that_cannot_be_padded_are_sized_like_full_attention() -> None:
    mla = MLASpec(block_size=16, head_size=100, dtype="bf16")
    [group] = _groups(_layers((2, mla), (2, _sliding(128))))
    assert group.kind == "uniform_type"
    promoted = group.layer_specs[-1]
    assert isinstance(promoted, FullAttentionSpec)
    assert promoted.sliding_window == 128


def test_chunks_beside_a_latent_that_cannot_be_padded_are_refused_with_a_way_out() -> None:
    mla = MLASpec(block_size=16, head_size=100, dtype="bf16")
    chunked = ChunkedLocalSpec(block_size=16, num_kv_heads=4, head_size=64, dtype="bf16", attention_chunk_size=64)
    with pytest.raises(InputError, match="block-outermost layout"):
        _groups(_layers((2, mla), (2, chunked)))


def test_a_latent_a_window_and_a_state_that_cannot_share_a_pool_are_refused_for_their_pages() -> None:
    mla = MLASpec(block_size=16, head_size=100, dtype="bf16")
    with pytest.raises(InputError, match="mla 3,200 B, sliding 16,384 B, mamba 100 B"):
        _groups(_layers((1, mla), (1, _sliding(128)), (1, _state(100))))


def test_with_hybrid_allocation_off_windowed_layers_become_full_and_keep_their_window() -> None:
    [group] = _groups(_layers((2, _sliding(128)), (2, _full())), disable_hybrid=True)
    assert isinstance(group.spec, FullAttentionSpec)
    assert group.spec.sliding_window == 128
    assert len(group.layer_names) == 4


def test_with_hybrid_allocation_off_two_windows_still_share_one_block_table() -> None:
    [group] = _groups(_layers((1, _sliding(128)), (1, _sliding(256)), (1, _full())), disable_hybrid=True)
    assert group.kind == "uniform_type"


def test_with_hybrid_allocation_off_states_cannot_be_sized_like_full_attention() -> None:
    with pytest.raises(InputError, match="kinds full, mamba cannot all be sized"):
        _groups(_layers((1, _state(100)), (1, _full())), disable_hybrid=True)


@pytest.mark.parametrize(
    ("buckets", "expected"), [((2, 3), 2), ((3, 4), 4), ((10, 52), 10), ((12, 13), 13), ((8, 12), 8), ((5,), 5)]
)
def test_the_group_size_is_the_smallest_bucket_unless_the_largest_is_near(
    buckets: tuple[int, ...], expected: int
) -> None:
    assert layers_per_group(buckets) == expected


def test_groups_are_strided_so_that_stages_hold_equal_parts() -> None:
    layers = {
        "f0": _full(),
        "s0": _sliding(64),
        "s1": _sliding(64),
        "f1": _full(),
        "s2": _sliding(64),
        "s3": _sliding(64),
    }
    groups = _groups(layers)
    assert [group.layer_names for group in groups] == [("f0", "f1"), ("s0", "s2"), ("s1", "s3")]
    first_stage = frozenset(("f0", "s0", "s1"))
    assert [group.on_rank(first_stage).layer_names for group in groups] == [("f0",), ("s0",), ("s1",)]


def test_a_block_outermost_layout_keeps_block_sizes() -> None:
    groups = _groups(_layers((2, _sliding(128, 2)), (2, _full(8))), KVCacheLayout.BLNHC)
    assert [(group.kind, group.block_size) for group in groups] == [("uniform_type", 16)] * 2


def test_even_patterns_of_pages_are_cut_between_repeats() -> None:
    # 4 repeats of (8 heads, 4 heads) full layers set the size; 8 sliding layers are cut into two groups of 4.
    layers = _layers((4, _full(8)), (4, _full(4)), (8, _sliding(128, 4)))
    full, *sliding = _groups(layers, KVCacheLayout.BLHNC)
    assert len(full.layer_names) == 8
    assert [group.layer_names for group in sliding] == [("L8", "L10", "L12", "L14"), ("L9", "L11", "L13", "L15")]


def test_states_never_widen_a_packed_block() -> None:
    page = _full().page_size_bytes
    layers = _layers((2, _full()), (6, _state(page - 1)))
    full, *states = _groups(layers, KVCacheLayout.BLHNC)
    assert full.bytes_per_block == 2 * page
    assert [len(group.layer_names) for group in states] == [2, 2, 2]


@pytest.mark.parametrize(
    ("values", "lower_bound", "expected"), [([4, 8], 4, 4), ([4, 7], 4, 4), ([3, 10], 3, 5), ([2], 4, 4)]
)
def test_the_least_padding_wins_and_ties_go_to_the_larger_size(
    values: list[int], lower_bound: int, expected: int
) -> None:
    assert least_padding_divisor(values, lower_bound) == expected


def test_blocks_need_zeroing_where_states_or_precisions_share_a_pool() -> None:
    assert not needs_zeroing(_groups(_layers((2, _full()), (2, _sliding(64)))))
    assert needs_zeroing(_groups(_layers((1, _state(100)), (1, _full()))))
    assert needs_zeroing(_groups(_layers((1, _full(dtype="fp8")), (1, _sliding(64)))))
