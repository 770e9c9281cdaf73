"""Field reports on pools that several ranks share: A03, A04, A05."""

from fractions import Fraction

import pytest
from kvledger.core.errors import InputError
from kvledger.core.planner.inputs import PlanInputs
from kvledger.core.planner.parallel import kv_heads_per_rank, tensor_parallel_layers
from kvledger.core.planner.plan import KVCachePlan, plan_kv_cache
from kvledger.core.planner.specs import FullAttentionSpec

GIB = 2**30


def _layers(num_layers: int, num_kv_heads: int, block_size: int = 16) -> dict[str, FullAttentionSpec]:
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=num_kv_heads, head_size=128, dtype="bf16")
    return {f"layers.{index}": spec for index in range(num_layers)}


def _tensor_parallel_plan(layers: dict[str, FullAttentionSpec], budgets: tuple[int, ...]) -> KVCachePlan:
    return plan_kv_cache(
        PlanInputs(
            layer_specs=tensor_parallel_layers(layers, len(budgets)),
            available_bytes=budgets,
            max_model_len=8_192,
            enable_prefix_caching=True,
        )
    )


def test_a03_the_pool_is_the_minimum_over_the_ranks() -> None:
    plan = _tensor_parallel_plan(_layers(48, 8), (8_015_314_944, int(Fraction("8.69") * GIB)))
    assert [rank.bytes_per_block for rank in plan.ranks] == [1_572_864, 1_572_864]
    assert [rank.num_blocks_alone for rank in plan.ranks] == [5_096, 5_932]
    assert [rank.num_blocks for rank in plan.ranks] == [5_096, 5_096]
    assert plan.kv_cache_size_tokens == 81_536
    assert [rank.is_bottleneck for rank in plan.ranks] == [True, False]
    assert plan.ranks[0].idle_bytes == 0
    assert plan.ranks[1].idle_bytes == 836 * 1_572_864 == 1_314_914_304
    assert any("rank 1 leaves" in warning and "1,314,914,304" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("tp", "block_bytes", "num_blocks"), [(2, 1_540_096, 5_590), (4, 770_048, 11_180), (8, 770_048, 11_180)]
)
def test_a04_capacity_stops_growing_when_heads_are_replicated(tp: int, block_bytes: int, num_blocks: int) -> None:
    plan = _tensor_parallel_plan(_layers(94, 4), (8_609_136_640,) * tp)
    assert plan.ranks[0].bytes_per_block == block_bytes
    assert plan.num_blocks == num_blocks
    assert plan.kv_cache_size_tokens == num_blocks * 16


def test_a04_heads_that_neither_divide_nor_replicate_are_refused() -> None:
    with pytest.raises(InputError, match="tensor_parallel_size 3 and 4 KV heads"):
        kv_heads_per_rank(4, 3)


def test_a04_a_block_of_256_tokens_over_four_ranks() -> None:
    plan = _tensor_parallel_plan(_layers(64, 8, block_size=256), (int(Fraction("50.9") * GIB),) * 4)
    assert plan.num_blocks == 3_257
    assert plan.kv_cache_size_tokens == 833_792


def _two_stages(max_model_len: int) -> PlanInputs:
    layers = _layers(60, 8)
    names = tuple(layers)
    return PlanInputs(
        layer_specs=layers,
        available_bytes=(20 * GIB, 12 * GIB),
        rank_layers=(names[:40], names[40:]),
        max_model_len=max_model_len,
        enable_prefix_caching=True,
    )


def test_a05_the_bottleneck_is_the_least_memory_per_layer() -> None:
    plan = plan_kv_cache(_two_stages(131_072))
    assert [rank.bytes_per_block for rank in plan.ranks] == [2_621_440, 1_310_720]
    assert [rank.num_blocks_alone for rank in plan.ranks] == [8_192, 9_830]
    assert plan.num_blocks == 8_192
    assert plan.kv_cache_size_tokens == 131_072
    assert [rank.is_bottleneck for rank in plan.ranks] == [True, False]
    assert plan.ranks[1].bytes_used == 10 * GIB
    assert plan.refusal is not None
    assert plan.refusal.largest == {"max_model_len": 131_056}


def test_a05_the_usable_length_is_accepted_and_one_token_more_is_not() -> None:
    plan = plan_kv_cache(_two_stages(131_056))
    assert plan.fits
    assert [config.size_bytes for config in plan.configs()] == [20 * GIB, 10 * GIB]
    assert not plan_kv_cache(_two_stages(131_057)).fits


def test_a05_a_stage_without_layers_is_never_the_bottleneck() -> None:
    layers = _layers(2, 8)
    inputs = PlanInputs(
        layer_specs=layers,
        available_bytes=(GIB, 0),
        rank_layers=(tuple(layers), ()),
        max_model_len=1_024,
        enable_prefix_caching=True,
    )
    plan = plan_kv_cache(inputs)
    assert plan.fits
    assert [rank.is_bottleneck for rank in plan.ranks] == [True, False]
    assert [config.size_bytes for config in plan.configs()] == [GIB, 0]


def test_ranks_of_an_engine_multiply_bytes_but_hold_parts_of_the_same_tokens() -> None:
    engine = _tensor_parallel_plan(_layers(32, 8), (GIB, GIB))
    assert sum(rank.bytes_used for rank in engine.ranks) == 2 * engine.ranks[0].bytes_used
    assert engine.kv_cache_size_tokens == engine.num_blocks * 16


def test_each_data_parallel_engine_keeps_its_own_minimum() -> None:
    small = _tensor_parallel_plan(_layers(32, 8), (GIB, GIB // 2))
    large = _tensor_parallel_plan(_layers(32, 8), (GIB, GIB))
    assert large.kv_cache_size_tokens == 2 * small.kv_cache_size_tokens
    assert large.num_blocks == 2 * small.num_blocks
