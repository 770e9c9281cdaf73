import math

import pytest
from kvledger.core.errors import InputError
from kvledger.core.planner.cache_dtype import ScaleStorage, cache_format, canonical_dtype
from kvledger.core.planner.specs import (
    ChunkedLocalSpec,
    CompressedStateSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaLikeSpec,
    MLASpec,
    OpaqueSpec,
    ServingLimits,
    SlidingWindowSpec,
    StateArray,
)

FULL = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bf16")
SLIDING = SlidingWindowSpec(block_size=16, num_kv_heads=8, head_size=64, dtype="bf16", sliding_window=128)
CHUNKED = ChunkedLocalSpec(block_size=16, num_kv_heads=8, head_size=64, dtype="bf16", attention_chunk_size=100)
CROSS = CrossAttentionSpec(block_size=16, num_kv_heads=20, head_size=64, dtype="fp16")
MLA = MLASpec(block_size=64, head_size=576, dtype="bf16")
COMPRESSED = CompressedStateSpec(block_size=64, tokens_per_state=4, head_size=128, dtype="fp4")
OPAQUE = OpaqueSpec(block_size=64, opaque_bytes_per_token=656)
STATE = MambaLikeSpec(
    block_size=64, states=(StateArray((3, 8192), "bf16", "conv"), StateArray((64, 64, 128), "fp32", "recurrent"))
)
ALL_KINDS = (FULL, SLIDING, CHUNKED, CROSS, MLA, COMPRESSED, OPAQUE, STATE)


@pytest.mark.parametrize(
    ("spec", "page_size_bytes"),
    [
        (FULL, 16 * 8 * (128 + 128) * 2),
        (SLIDING, 16 * 8 * (64 + 64) * 2),
        (CHUNKED, 16 * 8 * (64 + 64) * 2),
        (CROSS, 16 * 20 * (64 + 64) * 2),
        (MLA, 64 * 576 * 2),
        (COMPRESSED, 64 // 4 * 128 // 2),
        (OPAQUE, 64 * 656),
        (STATE, 3 * 8192 * 2 + 64 * 64 * 128 * 4),
    ],
    ids=lambda value: value.kind if isinstance(value, KVCacheSpec) else str(value),
)
def test_a_page_holds_one_block_of_one_layer(spec: KVCacheSpec, page_size_bytes: int) -> None:
    assert spec.page_size_bytes == page_size_bytes


@pytest.mark.parametrize(
    ("dtype", "token_bytes"),
    [("fp32", 8192), ("bf16", 4096), ("fp16", 4096), ("fp8", 2048), ("fp8_e5m2", 2048), ("int8", 2048), ("fp4", 1024)],
)
def test_the_bytes_of_a_token_follow_the_dtype(dtype: str, token_bytes: int) -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=dtype)
    assert spec.bytes_per_token == token_bytes


def test_keys_and_values_may_differ_in_size() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=192, head_size_v=128, dtype="bf16")
    assert spec.page_size_bytes == 16 * 8 * (192 + 128) * 2
    assert FULL.head_size_v == FULL.head_size


def test_gpt2_at_18545_blocks_takes_911523840_bytes_a_layer() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=12, head_size=64, dtype="fp16")
    assert 18_545 * spec.page_size_bytes == 911_523_840 == math.prod((2, 18_545, 16, 12, 64)) * 2


@pytest.mark.parametrize("spec", ALL_KINDS, ids=lambda spec: spec.kind)
def test_the_lines_of_a_page_add_up_to_the_page(spec: KVCacheSpec) -> None:
    padded = spec.with_page_size(spec.page_size_bytes + 512)
    assert sum(term.num_bytes for term in spec.page_terms) == spec.page_size_bytes
    assert sum(term.num_bytes for term in padded.page_terms) == padded.page_size_bytes
    assert padded.page_terms[-1].name == "padding"
    assert f"{padded.page_size_bytes:,} B" in padded.formula()


def test_scales_are_a_line_of_their_own() -> None:
    stored = cache_format("fp8_per_token_head")
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=stored.dtype, scales=stored.scales)
    assert [(term.name, term.num_bytes) for term in spec.page_terms] == [
        ("keys and values", 16 * 8 * (128 + 128)),
        ("scales", 16 * 8 * (4 + 4)),
    ]


def test_a_scale_for_every_16_elements_takes_an_eighth_of_4_bit_elements() -> None:
    stored = cache_format("nvfp4")
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=stored.dtype, scales=stored.scales)
    data, scales = spec.page_terms
    assert (data.num_bytes, scales.num_bytes) == (16 * 8 * 128, 16 * 8 * 16)


def test_vectors_that_are_not_stored_have_no_scales() -> None:
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=512, head_size_v=0, dtype="fp8", scales=ScaleStorage(4)
    )
    assert spec.page_size_bytes == 16 * (512 + 4)


def test_the_formula_shows_the_numbers() -> None:
    assert FULL.formula().splitlines() == [
        "keys and values: 16 tokens x 8 heads x (128 + 128) x 2 B (bf16) = 65,536 B",
        "page: 65,536 B a block of 16 tokens a layer, 4,096 B a token",
    ]


@pytest.mark.parametrize("spec", ALL_KINDS, ids=lambda spec: spec.kind)
def test_the_blocks_formula_ends_in_the_blocks(spec: KVCacheSpec) -> None:
    limits = ServingLimits(
        max_model_len=1000, max_in_flight_tokens=64, max_encoder_tokens=1500, state_cache_mode="align"
    )
    assert spec.max_blocks_formula(limits).endswith(f"= {spec.max_blocks_per_request(limits)}")


def test_a_window_may_start_inside_a_block() -> None:
    limits = ServingLimits(max_model_len=10_000, max_in_flight_tokens=16)
    # 127 tokens of the window and 16 in flight are 143 tokens: 9 blocks, or 10 where the first is not full.
    assert SLIDING.max_blocks_per_request(limits) == 10


def test_a_window_never_holds_more_than_the_request_and_a_block() -> None:
    limits = ServingLimits(max_model_len=32, max_in_flight_tokens=16)
    assert SLIDING.max_blocks_per_request(limits) == 32 // 16 + 1


def test_a_chunked_layer_holds_one_chunk_and_what_is_in_flight() -> None:
    limits = ServingLimits(max_model_len=10_000, max_in_flight_tokens=20)
    assert CHUNKED.max_blocks_per_request(limits) == math.ceil((100 + 20) / 16)


def test_decode_context_parallelism_divides_tokens_of_full_layers_only() -> None:
    limits = ServingLimits(max_model_len=1001, decode_context_parallel_size=2, state_cache_mode="none")
    assert FULL.max_blocks_per_request(limits) == math.ceil(501 / 16)
    assert MLA.max_blocks_per_request(limits) == math.ceil(501 / 64)
    assert STATE.max_blocks_per_request(limits) == 1


def test_decode_context_parallelism_refuses_windows() -> None:
    limits = ServingLimits(max_model_len=1000, max_in_flight_tokens=16, decode_context_parallel_size=2)
    with pytest.raises(InputError, match="decode_context_parallel_size 2"):
        SLIDING.max_blocks_per_request(limits)


@pytest.mark.parametrize(("mode", "num_states"), [("none", 1), ("align", 2), ("all", 16)])
def test_state_layers_hold_states_by_cache_mode(mode: str, num_states: int) -> None:
    limits = ServingLimits(max_model_len=1000, state_cache_mode=mode)  # pyright: ignore[reportArgumentType]
    assert STATE.max_blocks_per_request(limits) == num_states
    drafting = MambaLikeSpec(block_size=64, states=STATE.states, num_speculative_blocks=3)
    assert drafting.max_blocks_per_request(limits) == num_states + 3


@pytest.mark.parametrize(
    ("spec", "missing"),
    [
        (SLIDING, "max_in_flight_tokens"),
        (CHUNKED, "max_in_flight_tokens"),
        (CROSS, "max_encoder_tokens"),
        (STATE, "state_cache_mode"),
    ],
    ids=lambda value: value.kind if isinstance(value, KVCacheSpec) else value,
)
def test_what_a_kind_depends_on_must_be_given(spec: KVCacheSpec, missing: str) -> None:
    with pytest.raises(InputError, match=missing):
        spec.max_blocks_per_request(ServingLimits(max_model_len=1000))


@pytest.mark.parametrize(
    ("spec", "floor_bytes"),
    [
        (FULL, 1000 * 8 * 256 * 2),
        (SLIDING, 128 * 8 * 128 * 2),
        (CHUNKED, 100 * 8 * 128 * 2),
        (MLA, 1000 * 576 * 2),
        (COMPRESSED, 1000 // 4 * 64),
        (OPAQUE, 1000 * 656),
        (STATE, STATE.page_size_bytes),
    ],
    ids=lambda value: value.kind if isinstance(value, KVCacheSpec) else str(value),
)
def test_the_floor_counts_what_is_read_again(spec: KVCacheSpec, floor_bytes: int) -> None:
    assert spec.floor_bytes(1000) == floor_bytes


def test_deepseek_v3_at_4096_tokens_takes_the_published_bytes() -> None:
    # golden/model_kv_bytes.jsonl, deepseek-v3: 61 layers of one 576-element latent.
    assert 61 * MLA.floor_bytes(4096) == 287_834_112
    fp8 = MLASpec(block_size=64, head_size=576, dtype="fp8")
    assert 61 * fp8.floor_bytes(4096) == 143_917_056


def test_a_larger_block_scales_the_page_and_its_padding() -> None:
    padded = FULL.with_page_size(70_000)
    assert padded.with_block_size(32).page_size_bytes == 140_000
    assert STATE.with_block_size(128).page_size_bytes == STATE.page_size_bytes


def test_equal_caches_are_equal_however_the_dtype_is_spelt() -> None:
    spelt = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, head_size_v=128, dtype="bfloat16")
    assert spelt == FULL
    assert hash(spelt) == hash(FULL)


@pytest.mark.parametrize("field", ["block_size", "num_kv_heads", "head_size"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "8"])
def test_a_size_that_is_no_positive_whole_number_is_refused_by_name(field: str, value: object) -> None:
    sizes = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, field: value}
    with pytest.raises(
        InputError, match=rf"^{field} is .*; it must be a whole number of at least 1 \(FullAttentionSpec\)$"
    ):
        FullAttentionSpec(**sizes, dtype="bf16")  # pyright: ignore[reportArgumentType]


def test_padding_below_the_page_is_refused() -> None:
    with pytest.raises(InputError, match="65,535 bytes, less than the page itself"):
        FULL.with_page_size(65_535)


def test_an_odd_number_of_4_bit_elements_is_refused() -> None:
    with pytest.raises(InputError, match="not a whole number of bytes"):
        FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=65, dtype="fp4")


def test_a_block_of_no_whole_number_of_states_is_refused() -> None:
    with pytest.raises(InputError, match="multiple of 128"):
        CompressedStateSpec(block_size=64, tokens_per_state=128, head_size=128, dtype="fp8")


def test_an_unknown_dtype_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"fp7.*fp8_e4m3"):
        canonical_dtype("fp7")


def test_auto_is_the_dtype_of_the_model() -> None:
    assert cache_format("auto", "bfloat16").dtype == "bf16"
    with pytest.raises(InputError, match="no model dtype was given"):
        cache_format("auto")


@pytest.mark.parametrize(
    ("spec", "max_memory_bytes"),
    [
        (FULL, 8192 // 16 * 65_536),  # a block for every 16 tokens
        (SLIDING, (-(-(127 + 2048) // 16) + 1) * 32_768),  # a window and what is in flight, and one block astride
    ],
)
def test_the_worst_case_of_a_request_is_whole_blocks(spec: KVCacheSpec, max_memory_bytes: int) -> None:
    limits = ServingLimits(max_model_len=8192, max_in_flight_tokens=2048)
    assert spec.max_blocks_per_request(limits) * spec.page_size_bytes == max_memory_bytes
