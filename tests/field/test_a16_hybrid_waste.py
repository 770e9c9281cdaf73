"""A16 hybrid-waste: windowed layers charged at full length (over) or at window length (under)."""

import pytest
from kvledger.core.planner.inputs import PlanInputs
from kvledger.core.planner.plan import plan_kv_cache
from kvledger.core.planner.report import capacity_mix
from kvledger.core.planner.specs import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from kvledger.core.planner.verdict import hybrid_waste


def _hybrid(num_full: int, num_sliding: int, window: int) -> dict[str, KVCacheSpec]:
    full = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=64, dtype="bf16")
    sliding = SlidingWindowSpec(block_size=16, num_kv_heads=8, head_size=64, dtype="bf16", sliding_window=window)
    return {
        **{f"sliding.{index}": sliding for index in range(num_sliding)},
        **{f"full.{index}": full for index in range(num_full)},
    }


@pytest.mark.parametrize(
    ("num_full", "num_sliding", "window", "length", "share"),
    [(1, 1, 4_096, 8_192, "25.00%"), (1, 3, 32_768, 131_072, "56.25%")],
)
def test_a16_the_share_that_full_sizing_wastes(
    num_full: int, num_sliding: int, window: int, length: int, share: str
) -> None:
    assert f"{hybrid_waste(_hybrid(num_full, num_sliding, window), length).wasted_share:.2%}" == share


def test_a16_a_batch_of_32_on_a_gpt_oss_like_model() -> None:
    waste = hybrid_waste(_hybrid(12, 12, 128), 8_192)
    assert 32 * waste.full_bytes == 12_884_901_888
    assert 32 * waste.floor_bytes == 6_543_114_240


def _inputs(disable_hybrid: bool) -> PlanInputs:
    return PlanInputs(
        layer_specs=_hybrid(12, 12, 128),
        available_bytes=(2**34,),
        max_model_len=8_192,
        max_in_flight_tokens=2_048,
        enable_prefix_caching=True,
        disable_hybrid_kv_cache_manager=disable_hybrid,
    )


def test_a16_a_planner_that_sizes_all_layers_full_says_so() -> None:
    sized_full = plan_kv_cache(_inputs(disable_hybrid=True))
    assert any("sized like full attention: 49.22%" in warning for warning in sized_full.warnings)
    assert not plan_kv_cache(_inputs(disable_hybrid=False)).warnings


def test_a16_the_table_shows_the_floor_beside_what_blocks_take() -> None:
    [row] = capacity_mix(plan_kv_cache(_inputs(disable_hybrid=False)), [8_192]).rows
    assert row.floor_bytes == 6_543_114_240 // 32
    # 512 blocks of the full layers; of the window 128 tokens with one in flight, or 127 + 2,048.
    assert row.decode_blocks == 512 + 128 // 16 + 1
    assert row.peak_blocks == 512 + -(-(127 + 2_048) // 16) + 1
    assert row.users <= row.decode_users <= row.floor_users
