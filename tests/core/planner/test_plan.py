import attrs
import pytest
from kvledger.core.errors import InputError
from kvledger.core.planner.inputs import PlanInputs
from kvledger.core.planner.plan import plan_kv_cache
from kvledger.core.planner.report import capacity_mix, explain_plan, plan_as_dict
from kvledger.core.planner.specs import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaLikeSpec,
    SlidingWindowSpec,
    StateArray,
)
from kvledger.core.planner.verdict import PlanCondition, PlanRefusedError

FULL = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bf16")
SLIDING = SlidingWindowSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bf16", sliding_window=1_024)
STATE = MambaLikeSpec(block_size=512, states=(StateArray((1_000,), "fp32"),))
BLOCK_BYTES = 32 * 65_536
LLAMA = PlanInputs(
    layer_specs={f"layers.{index}": FULL for index in range(32)},
    available_bytes=(513 * BLOCK_BYTES,),
    max_model_len=8_192,
    enable_prefix_caching=True,
)


def _hybrid(**options: object) -> PlanInputs:
    layers: dict[str, KVCacheSpec] = {"f": FULL, "s": SLIDING}
    return attrs.evolve(LLAMA, layer_specs=layers, max_in_flight_tokens=2_048, **options)


def test_one_block_more_than_the_request_is_just_enough() -> None:
    assert plan_kv_cache(LLAMA).fits
    refusal = plan_kv_cache(attrs.evolve(LLAMA, available_bytes=(513 * BLOCK_BYTES - 1,))).refusal
    assert refusal is not None
    assert refusal.condition == PlanCondition.REQUEST_DOES_NOT_FIT
    assert refusal.shortfall_bytes == 1


@pytest.mark.parametrize(
    ("available_bytes", "condition"),
    [
        (-5, PlanCondition.NO_AVAILABLE_MEMORY),
        (0, PlanCondition.NO_AVAILABLE_MEMORY),
        (BLOCK_BYTES, PlanCondition.NO_AVAILABLE_MEMORY),
        (BLOCK_BYTES + 1, PlanCondition.REQUEST_DOES_NOT_FIT),
    ],
)
def test_memory_of_no_more_than_the_null_block_is_no_memory(available_bytes: int, condition: PlanCondition) -> None:
    plan = plan_kv_cache(attrs.evolve(LLAMA, available_bytes=(available_bytes,)))
    assert plan.refusal is not None
    assert plan.refusal.condition == condition
    assert plan.refusal.largest == {}
    assert "not even 1 token" in str(plan.refusal)
    assert plan.num_blocks >= 0


def test_a_refused_plan_hands_out_no_configuration() -> None:
    plan = plan_kv_cache(attrs.evolve(LLAMA, available_bytes=(0,)))
    with pytest.raises(PlanRefusedError):
        plan.configs()


def test_auto_fit_lowers_the_length_to_the_largest_that_fits() -> None:
    inputs = attrs.evolve(LLAMA, max_model_len=131_072, auto_fit_max_model_len=True)
    plan = plan_kv_cache(inputs)
    assert plan.fits
    assert plan.max_model_len == 8_192


def test_auto_fit_with_room_for_no_token_is_refused() -> None:
    inputs = attrs.evolve(LLAMA, available_bytes=(BLOCK_BYTES,), auto_fit_max_model_len=True)
    refusal = plan_kv_cache(inputs).refusal
    assert refusal is not None
    assert refusal.condition == PlanCondition.AUTO_FIT_ZERO
    assert (refusal.needed_blocks, refusal.shortfall_bytes) == (1, BLOCK_BYTES)
    enough = attrs.evolve(inputs, available_bytes=(BLOCK_BYTES + refusal.shortfall_bytes,))
    assert plan_kv_cache(enough).max_model_len == 16


def test_an_override_beyond_the_memory_is_refused_with_the_largest_that_fits() -> None:
    refusal = plan_kv_cache(attrs.evolve(LLAMA, num_gpu_blocks_override=600)).refusal
    assert refusal is not None
    assert refusal.condition == PlanCondition.OVERRIDE_EXCEEDS_MEMORY
    assert refusal.largest == {"num_gpu_blocks_override": 513}
    assert refusal.shortfall_bytes == 87 * BLOCK_BYTES
    assert plan_kv_cache(attrs.evolve(LLAMA, num_gpu_blocks_override=513)).fits


def test_an_override_is_taken_as_given_where_validation_is_off() -> None:
    plan = plan_kv_cache(attrs.evolve(LLAMA, num_gpu_blocks_override=600, validate_override=False))
    assert plan.fits
    assert plan.num_blocks == 600
    assert not any(rank.is_bottleneck for rank in plan.ranks)


def test_without_prefix_caching_hashes_stay_as_coarse_as_the_schedule() -> None:
    layers: dict[str, KVCacheSpec] = {
        "f": FULL,
        "s": SlidingWindowSpec(block_size=16, num_kv_heads=4, head_size=128, dtype="bf16", sliding_window=64),
    }
    cached = plan_kv_cache(attrs.evolve(_hybrid(), layer_specs=layers))
    assert (cached.scheduler_block_size, cached.hash_block_size) == (32, 16)
    uncached = plan_kv_cache(attrs.evolve(_hybrid(), layer_specs=layers, enable_prefix_caching=False))
    assert (uncached.scheduler_block_size, uncached.hash_block_size) == (32, 32)


@pytest.mark.parametrize(("mode", "hash_block_size"), [("none", 512), ("all", 512), ("align", 16)])
def test_hashes_are_fine_beside_states_only_in_align_mode(mode: str, hash_block_size: int) -> None:
    layers: dict[str, KVCacheSpec] = {"f": FULL, "m": STATE}
    plan = plan_kv_cache(attrs.evolve(LLAMA, layer_specs=layers, state_cache_mode=mode))
    assert (plan.scheduler_block_size, plan.hash_block_size) == (512, hash_block_size)


def test_decode_context_parallelism_widens_attention_blocks_but_not_states() -> None:
    layers: dict[str, KVCacheSpec] = {"f": FULL, "m": STATE}
    inputs = attrs.evolve(LLAMA, layer_specs=layers, state_cache_mode="align", decode_context_parallel_size=2)
    plan = plan_kv_cache(inputs)
    assert [group.tokens_per_block(2) for group in plan.groups] == [32, 512]
    assert plan.hash_block_size == 32


def test_every_figure_of_the_json_is_the_plans() -> None:
    told = plan_as_dict(plan_kv_cache(LLAMA))
    assert told["num_gpu_blocks"] == 513
    assert told["num_usable_blocks"] == 512
    assert told["kv_cache_tokens"] == 8_208
    assert told["bytes_per_block"] == BLOCK_BYTES
    assert told["page_size_bytes"] == 65_536
    assert told["fits"] is True
    assert told["refusal"] is None
    [rank] = told["ranks"]
    assert rank["bytes_used"] + rank["idle_bytes"] + rank["remainder_bytes"] == rank["available_bytes"]
    assert rank["bottleneck"] is True
    [group] = told["groups"]
    assert sum(term["bytes"] for term in group["page_terms"]) == group["page_size_bytes"]


def test_the_explanation_substitutes_the_numbers() -> None:
    lines = explain_plan(plan_kv_cache(_hybrid(available_bytes=(2**30,), max_model_len=32_768)))
    text = "\n".join(lines)
    assert "group 1 (sliding) keys and values: 16 tokens x 8 heads x (128 + 128) x 2 B (bf16) = 65,536 B" in text
    assert "rank 0 bytes per block: 1 layers x 65,536 B of the widest group = 65,536 B" in text
    assert "floor(1,073,741,824 B / 65,536 B) = 16,384" in text
    assert (
        "(ceil(32768 tokens / 16) = 2,048) + "
        "(ceil(min(1024 window - 1 + 2048 in flight, 32768 tokens) / 16) + 1 = 193) = 2,241"
    ) in text


def test_padding_and_unequal_groups_are_warned_of() -> None:
    layers: dict[str, KVCacheSpec] = {"f": FULL, "m": STATE, "f2": FULL, "m2": STATE, "m3": STATE}
    plan = plan_kv_cache(attrs.evolve(LLAMA, layer_specs=layers, state_cache_mode="none"))
    assert any("padded by 61,536 of 65,536 bytes" in warning for warning in plan.warnings)
    assert any("16.67% of a block is unused" in warning for warning in plan.warnings)


def test_users_are_counted_at_every_length() -> None:
    plan = plan_kv_cache(attrs.evolve(LLAMA, available_bytes=(10_241 * BLOCK_BYTES,), max_model_len=32_768))
    mix = capacity_mix(plan)
    assert [row.context_tokens for row in mix.rows] == [2_048, 8_192, 32_768, 131_072]
    assert [row.users for row in mix.rows] == [80, 20, 5, 0]
    assert [row.exceeds_max_model_len for row in mix.rows] == [False, False, False, True]
    assert mix.rows[0].floor_bytes == 2_048 * 4_096 * 32
    assert mix.users_in_mix is None


def test_users_of_a_mix_share_the_blocks() -> None:
    plan = plan_kv_cache(attrs.evolve(LLAMA, available_bytes=(10_241 * BLOCK_BYTES,), max_model_len=32_768))
    # Half the users take 128 blocks and half 512: 320 on average, of 10,240.
    assert capacity_mix(plan, shares={2_048: 0.5, 8_192: 0.5}).users_in_mix == 32
    assert capacity_mix(plan, shares={2_048: 0.5, 131_072: 0.5}).users_in_mix == 0
    with pytest.raises(InputError, match="add up to 1"):
        capacity_mix(plan, shares={2_048: 0.5})


def test_a_last_block_that_is_not_full_is_paid_for_in_blocks_but_not_in_the_floor() -> None:
    plan = plan_kv_cache(LLAMA)
    [row] = capacity_mix(plan, [17]).rows
    assert row.decode_blocks == row.peak_blocks == 2
    assert row.floor_bytes == 17 * 4_096 * 32
    assert row.floor_users > row.users == 256


def test_encoder_tokens_count_in_the_floor_of_cross_attention() -> None:
    cross = CrossAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bf16")
    layers: dict[str, KVCacheSpec] = {"self": FULL, "cross": cross}
    plan = plan_kv_cache(attrs.evolve(LLAMA, layer_specs=layers, max_encoder_tokens=1_500))
    [row] = capacity_mix(plan, [448]).rows
    assert row.floor_bytes == (448 + 1_500) * 4_096
    assert row.peak_blocks == 448 // 16 + 94


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_specs": {}}, "no layer stores a KV cache"),
        ({"available_bytes": ()}, "at least one rank"),
        ({"rank_layers": (("layers.0",), ("layers.1",))}, "names 2 ranks, available_bytes 1"),
        ({"rank_layers": (("layers.99",),)}, "layers.99"),
        ({"rank_layers": (("layers.0", "layers.0"),)}, "a name occurs twice"),
        ({"rank_layers": (("layers.0",),)}, "no rank holds the layers layers.1"),
        ({"available_bytes": (2.5,)}, "whole bytes"),
        ({"state_cache_mode": "some"}, "state_cache_mode is 'some'"),
        ({"max_model_len": 0}, "max_model_len is 0; it must be .* \\(PlanInputs\\)"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override is 0; it must be .* \\(PlanInputs\\)"),
    ],
)
def test_inputs_that_make_no_engine_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        attrs.evolve(LLAMA, **changes)
