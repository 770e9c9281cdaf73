"""What holds for every plan: no rank overruns its memory, all ranks agree, and every way out of a refusal works."""

import attrs
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from kvledger.core.errors import InputError
from kvledger.core.planner.groups import group_layers
from kvledger.core.planner.inputs import PlanInputs
from kvledger.core.planner.layout import KVCacheLayout
from kvledger.core.planner.plan import KVCachePlan, plan_kv_cache
from kvledger.core.planner.report import capacity_mix
from kvledger.core.planner.specs import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaLikeSpec,
    MLASpec,
    SlidingWindowSpec,
    StateArray,
)
from kvledger.core.planner.verdict import PlanCondition

# Layers that cannot share a pool are no examples, and a busy machine is no failure.
RELAXED = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
BLOCK_SIZES = st.sampled_from([4, 8, 16])
HEADS = st.integers(1, 4)
HEAD_SIZES = st.sampled_from([8, 12, 32])


@st.composite
def layer_kinds(draw: st.DrawFn, block_size: int) -> KVCacheSpec:
    kind = draw(st.sampled_from(["full", "sliding", "chunked", "mla", "mamba"]))
    if kind == "mla":
        return MLASpec(block_size=block_size, head_size=draw(HEAD_SIZES), dtype="bf16")
    if kind == "mamba":
        return MambaLikeSpec(block_size=64, states=(StateArray((draw(st.integers(1, 500)),), "fp32"),))
    shape = {"block_size": block_size, "num_kv_heads": draw(HEADS), "head_size": draw(HEAD_SIZES), "dtype": "bf16"}
    if kind == "full":
        return FullAttentionSpec(**shape)
    if kind == "sliding":
        return SlidingWindowSpec(**shape, sliding_window=draw(st.integers(1, 100)))
    return ChunkedLocalSpec(**shape, attention_chunk_size=draw(st.integers(1, 100)))


@st.composite
def plan_inputs(draw: st.DrawFn) -> PlanInputs:
    kinds = draw(st.lists(layer_kinds(draw(BLOCK_SIZES)), min_size=1, max_size=3))
    specs = [draw(st.sampled_from(kinds)) for _ in range(draw(st.integers(1, 8)))]
    layers = {f"L{index}": spec for index, spec in enumerate(specs)}
    num_stages = draw(st.integers(1, min(3, len(specs))))
    stages = [tuple(list(layers)[stage::num_stages]) for stage in range(num_stages)]
    return PlanInputs(
        layer_specs=layers,
        available_bytes=tuple(draw(st.integers(-1000, 3_000_000)) for _ in range(num_stages)),
        rank_layers=tuple(stages),
        max_model_len=draw(st.integers(1, 3000)),
        max_in_flight_tokens=draw(st.integers(1, 300)),
        state_cache_mode=draw(st.sampled_from(["none", "align", "all"])),
        enable_prefix_caching=draw(st.booleans()),
        layout=draw(st.sampled_from([KVCacheLayout.LBNHC, KVCacheLayout.BLNHC])),
    )


def _plan(inputs: PlanInputs) -> KVCachePlan:
    """The plan, or no example where the layers cannot share a pool at all."""
    try:
        return plan_kv_cache(inputs)
    except InputError as error:
        assert "cannot share one pool" in str(error) or "cannot express" in str(error)
        assume(False)
        raise


@RELAXED
@given(plan_inputs())
def test_no_rank_uses_more_than_it_has_and_all_agree(inputs: PlanInputs) -> None:
    plan = _plan(inputs)
    for rank in plan.ranks:
        assert rank.num_blocks == plan.num_blocks
        assert rank.bytes_used <= max(rank.available_bytes, 0)
        assert rank.bytes_used + rank.idle_bytes + rank.remainder_bytes == rank.available_bytes
        assert rank.remainder_bytes < rank.bytes_per_block
    if plan.fits:
        assert [config.num_blocks for config in plan.configs()] == [plan.num_blocks] * len(plan.ranks)
        assert [config.size_bytes for config in plan.configs()] == [rank.bytes_used for rank in plan.ranks]


@RELAXED
@given(plan_inputs(), st.data())
def test_more_memory_never_means_fewer_blocks(inputs: PlanInputs, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, inputs.num_ranks - 1))
    more = list(inputs.available_bytes)
    more[rank] += data.draw(st.integers(0, 1_000_000))
    before, after = _plan(inputs), _plan(attrs.evolve(inputs, available_bytes=tuple(more)))
    assert after.num_blocks >= before.num_blocks
    assert after.fits >= before.fits
    assert min(r.largest_max_model_len for r in after.ranks) >= min(r.largest_max_model_len for r in before.ranks)


@RELAXED
@given(plan_inputs())
def test_the_largest_length_works_and_one_more_token_does_not(inputs: PlanInputs) -> None:
    longest_asked = 100_000
    fitted = _plan(attrs.evolve(inputs, max_model_len=longest_asked, auto_fit_max_model_len=True))
    if not fitted.fits:
        assert not plan_kv_cache(attrs.evolve(inputs, max_model_len=1)).fits
        return
    assert plan_kv_cache(attrs.evolve(inputs, max_model_len=fitted.max_model_len)).fits
    if fitted.max_model_len < longest_asked:
        refusal = plan_kv_cache(attrs.evolve(inputs, max_model_len=fitted.max_model_len + 1)).refusal
        assert refusal is not None
        assert refusal.largest == {"max_model_len": fitted.max_model_len}


@RELAXED
@given(plan_inputs())
def test_the_shortfall_of_a_refusal_is_what_its_rank_lacks(inputs: PlanInputs) -> None:
    plan = _plan(inputs)
    if plan.fits:
        # A rank that can hold the request but not the null block beside it.
        inputs = attrs.evolve(inputs, available_bytes=(plan.ranks[0].request_bytes, *inputs.available_bytes[1:]))
    refusal = plan_kv_cache(inputs).refusal
    assert refusal is not None
    plenty = [2**40] * inputs.num_ranks
    enough = inputs.available_bytes[refusal.rank] + refusal.shortfall_bytes
    for num_bytes, fits in ((enough, True), (enough - 1, False)):
        memory = (*plenty[: refusal.rank], num_bytes, *plenty[refusal.rank + 1 :])
        assert plan_kv_cache(attrs.evolve(inputs, available_bytes=memory)).fits is fits


@RELAXED
@given(plan_inputs())
def test_the_bytes_used_give_the_same_blocks_and_one_byte_less_gives_fewer(inputs: PlanInputs) -> None:
    plan = _plan(inputs)
    assume(plan.num_blocks > 0)
    used = tuple(rank.bytes_used for rank in plan.ranks)
    assert plan_kv_cache(attrs.evolve(inputs, available_bytes=used)).num_blocks == plan.num_blocks
    less = (used[0] - 1, *used[1:])
    assert plan_kv_cache(attrs.evolve(inputs, available_bytes=less)).num_blocks == plan.num_blocks - 1


@RELAXED
@given(plan_inputs())
def test_the_blocks_that_fit_work_as_an_override_and_one_more_does_not(inputs: PlanInputs) -> None:
    plan = _plan(inputs)
    assume(plan.num_blocks > 0)
    same = plan_kv_cache(attrs.evolve(inputs, num_gpu_blocks_override=plan.num_blocks))
    assert (same.num_blocks, same.fits) == (plan.num_blocks, plan.fits)
    refusal = plan_kv_cache(attrs.evolve(inputs, num_gpu_blocks_override=plan.num_blocks + 1)).refusal
    assert refusal is not None
    assert refusal.condition == PlanCondition.OVERRIDE_EXCEEDS_MEMORY
    assert refusal.largest == {"num_gpu_blocks_override": plan.num_blocks}


@RELAXED
@given(plan_inputs(), st.lists(st.integers(1, 3000), min_size=1, max_size=4))
def test_users_at_their_peak_are_at_most_those_who_decode_and_those_by_bytes(
    inputs: PlanInputs, lengths: list[int]
) -> None:
    for row in capacity_mix(_plan(inputs), lengths).rows:
        assert row.users <= row.decode_users <= row.floor_users


@RELAXED
@given(plan_inputs())
def test_two_plans_of_the_same_inputs_are_equal(inputs: PlanInputs) -> None:
    first, second = _plan(inputs), _plan(inputs)
    assert attrs.evolve(first, refusal=None) == attrs.evolve(second, refusal=None)
    assert str(first.refusal) == str(second.refusal)


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_equal_ranks_are_all_bottlenecks_and_leave_nothing_idle(num_ranks: int) -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype="bf16")
    inputs = PlanInputs(
        layer_specs={"L0": spec}, available_bytes=(10**7,) * num_ranks, max_model_len=100, enable_prefix_caching=True
    )
    plan = plan_kv_cache(inputs)
    assert all(rank.is_bottleneck for rank in plan.ranks)
    assert [rank.idle_bytes for rank in plan.ranks] == [0] * num_ranks


@pytest.mark.parametrize(
    "full",
    [
        FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="bf16"),
        MLASpec(block_size=4, head_size=8, dtype="bf16"),
    ],
)
def test_windows_of_uneven_pages_stay_in_one_group(full: KVCacheSpec) -> None:
    narrow, wide = (
        SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=size, dtype="bf16", sliding_window=1)
        for size in (8, 12)
    )
    layers = {"L0": full, "L1": narrow, "L2": narrow, "L3": wide}
    groups = group_layers(layers, KVCacheLayout.BLNHC, disable_hybrid_kv_cache_manager=False)
    assert [group.layer_names for group in groups] == [("L0",), ("L1", "L2", "L3")]
