"""Field reports on the size of one rank's pool: A01, A06, A07, A08, A09, A14 (test 3), A17 (the pool's part)."""

from fractions import Fraction

import attrs
import numpy as np
import pytest
from kvledger.core.planner.cache_dtype import cache_format
from kvledger.core.planner.inputs import PlanInputs
from kvledger.core.planner.plan import plan_kv_cache
from kvledger.core.planner.report import capacity_mix, plan_as_dict
from kvledger.core.planner.specs import FullAttentionSpec
from kvledger.core.planner.verdict import PlanCondition, PlanRefusedError


def _gib(figure: str) -> int:
    return int(Fraction(figure) * 2**30)


def _inputs(
    num_layers: int, num_kv_heads: int, available_bytes: int, max_model_len: int, dtype: str = "bf16"
) -> PlanInputs:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=num_kv_heads, head_size=128, dtype=dtype)
    return PlanInputs(
        layer_specs={f"layers.{index}": spec for index in range(num_layers)},
        available_bytes=(available_bytes,),
        max_model_len=max_model_len,
        enable_prefix_caching=True,
    )


def test_a01_a_70b_model_that_is_too_long_is_refused_with_the_length_that_works() -> None:
    inputs = _inputs(80, 8, _gib("23.4"), 131_072)
    plan = plan_kv_cache(inputs)
    assert plan.ranks[0].bytes_per_block == 5_242_880
    assert plan.ranks[0].available_bytes == 25_125_558_681
    assert plan.num_blocks == 4_792
    assert plan.kv_cache_size_tokens == 76_672
    with pytest.raises(PlanRefusedError) as refused:
        plan.require_fits()
    assert refused.value.condition == PlanCondition.REQUEST_DOES_NOT_FIT
    assert refused.value.needed_blocks == 8_192
    assert refused.value.needed_bytes == 42_949_672_960
    assert refused.value.available_bytes == 25_125_558_681
    assert refused.value.largest == {"max_model_len": 76_656}
    for text in ("131,072 tokens", "40.00 GiB", "23.40 GiB", "76,656", "max_num_batched_tokens"):
        assert text in str(refused.value)


def test_a01_the_length_that_works_works_and_one_token_more_does_not() -> None:
    inputs = _inputs(80, 8, _gib("23.4"), 76_656)
    assert plan_kv_cache(inputs).fits
    assert not plan_kv_cache(attrs.evolve(inputs, max_model_len=76_657)).fits


def test_a02_the_pools_of_the_three_runs() -> None:
    runs = [("3.812", 20_000, 1_951, True), ("2.892", 29_000, 1_480, False), ("5.822", 35_000, 2_980, True)]
    for available_gib, max_model_len, num_blocks, fits in runs:
        plan = plan_kv_cache(_inputs(32, 8, _gib(available_gib), max_model_len))
        assert (plan.num_blocks, plan.fits) == (num_blocks, fits)
        assert plan.blocks_per_request == -(-max_model_len // 16)


def test_a06_an_fp8_cache_holds_twice_the_blocks() -> None:
    available_bytes = 55_181_312_000
    bf16 = plan_kv_cache(_inputs(32, 8, available_bytes, 8_192))
    fp8 = plan_kv_cache(_inputs(32, 8, available_bytes, 8_192, "fp8"))
    assert (bf16.num_blocks, fp8.num_blocks) == (26_312, 52_625)


def test_a06_scales_stand_on_a_line_of_their_own() -> None:
    stored = cache_format("int8_per_token_head")
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=stored.dtype, scales=stored.scales)
    inputs = attrs.evolve(_inputs(32, 8, 55_181_312_000, 8_192), layer_specs={"layers.0": spec})
    [group] = plan_as_dict(plan_kv_cache(inputs))["groups"]
    assert {term["name"]: term["bytes"] for term in group["page_terms"]} == {
        "keys and values": 16 * 8 * 256,
        "scales": 16 * 8 * 8,
    }


def test_a07_a_block_is_paid_for_in_every_layer() -> None:
    plan = plan_kv_cache(_inputs(28, 8, 1_073_741_824, 4_096))
    assert plan.ranks[0].bytes_per_block == 1_835_008
    assert plan.num_blocks == 585
    [config] = plan.configs()
    buffer = np.empty(config.size_bytes, dtype=np.int8)
    [tensor] = config.tensors
    pages = np.lib.stride_tricks.as_strided(
        buffer,
        shape=(len(tensor.layers), config.num_blocks, 65_536),
        strides=(tensor.layer_stride_bytes, tensor.block_stride_bytes, 1),
    )
    assert buffer.nbytes == pages.nbytes == 1_073_479_680 <= 2**30


def test_a08_the_worst_case_need_is_told_and_can_be_the_cap() -> None:
    inputs = _inputs(28, 8, 20_168_572_928, 1_024)
    plan = plan_kv_cache(inputs)
    assert (plan.num_blocks, plan.kv_cache_size_tokens) == (10_991, 175_856)
    assert plan.blocks_per_request == 64
    assert 64 * plan.ranks[0].bytes_per_block == 117_440_512
    assert plan.num_usable_blocks - 64 == 10_926  # which one request can use for nothing but reuse
    capped = plan_kv_cache(attrs.evolve(inputs, cap_to_max_num_seqs=1))
    assert capped.num_blocks == 64 + 1
    assert capped.fits
    assert capped.ranks[0].bytes_used + capped.ranks[0].idle_bytes == plan.ranks[0].bytes_used


def test_a08_a_cap_never_makes_the_pool_larger() -> None:
    inputs = _inputs(28, 8, 20_168_572_928, 1_024)
    assert plan_kv_cache(attrs.evolve(inputs, cap_to_max_num_seqs=100_000)).num_blocks == 10_991


def test_a09_every_figure_uses_the_override() -> None:
    block_bytes = _inputs(32, 8, 1, 1).layer_specs["layers.0"].page_size_bytes * 32
    inputs = _inputs(32, 8, 333_325 * block_bytes, 131_072)
    profiled = plan_kv_cache(inputs)
    assert profiled.kv_cache_size_tokens == 5_333_200
    assert f"{profiled.max_concurrency:.2f}" == "40.69"
    overridden = plan_kv_cache(attrs.evolve(inputs, num_gpu_blocks_override=100))
    assert overridden.num_blocks == 100
    assert overridden.kv_cache_size_tokens == 1_600
    assert f"{overridden.max_concurrency:.2f}" == "0.01"
    assert overridden.refusal is not None
    assert overridden.refusal.needed_blocks == 8_192
    assert overridden.refusal.largest == {"max_model_len": 1_584}
    assert "1,584" in str(overridden.refusal)
    assert "333,325" in overridden.warnings[0]
    assert plan_kv_cache(attrs.evolve(inputs, num_gpu_blocks_override=100, max_model_len=1_584)).fits
    assert not plan_kv_cache(attrs.evolve(inputs, num_gpu_blocks_override=100, max_model_len=1_585)).fits


@pytest.mark.parametrize(
    ("tokens", "num_blocks", "concurrency"), [(769_888, 48_118, "334.15"), (245_840, 15_365, "106.70")]
)
def test_a14_tokens_blocks_and_concurrency_tie_out(tokens: int, num_blocks: int, concurrency: str) -> None:
    block_bytes = plan_kv_cache(_inputs(32, 8, 2**34, 2_304)).ranks[0].bytes_per_block
    plan = plan_kv_cache(_inputs(32, 8, num_blocks * block_bytes, 2_304))
    assert plan.kv_cache_size_tokens == tokens
    assert f"{plan.max_concurrency:.2f}" == concurrency


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "available_bytes", "num_blocks", "tokens", "users"),
    [
        ("bf16", 4, 3_738_490_306, 1_426, 22_816, 2),
        ("bf16", 2, 39_015_343_554, 29_766, 476_256, 58),
        ("bf16", 8, 3_738_490_306, 713, 11_408, 1),
        ("bf16", 4, 39_015_343_554, 14_883, 238_128, 29),
        ("fp8", 4, 39_015_343_554, 29_766, 476_256, 58),
    ],
)
def test_a17_users_at_8k_are_counted_in_usable_blocks(
    dtype: str, kv_heads: int, available_bytes: int, num_blocks: int, tokens: int, users: int
) -> None:
    plan = plan_kv_cache(_inputs(80, kv_heads, available_bytes, 8_192, dtype))
    assert (plan.num_blocks, plan.kv_cache_size_tokens) == (num_blocks, tokens)
    [row] = capacity_mix(plan, [8_192]).rows
    assert (row.peak_blocks, row.users) == (512, users)
