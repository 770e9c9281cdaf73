"""Whole deployments: ranks that differ, suggested values that work again, and diagnoses of those that do not fit."""

from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvledger.core.deployment.deployment import Deployment, GivenMemory
from kvledger.core.deployment.diagnosis import (
    free_memory_but_startup_fails,
    one_request_does_not_fit,
    pool_smaller_than_expected,
    raising_utilization_gained_little,
)
from kvledger.core.deployment.plan import DeploymentPlan, plan_deployment
from kvledger.core.deployment.remedies import find_remedies, fitting_values, minimum_tensor_parallel_size
from kvledger.core.errors import InputError
from kvledger.core.memory.budget import MemoryCondition, MemoryShortfallError
from kvledger.core.memory.ledger import sum_bytes
from kvledger.core.models.geometry import builtin_geometry

GIB = 1 << 30
H100 = 85_031_714_816


def deployment(model: str = "llama-3.1-8b", **options: Any) -> Deployment:
    settings = {
        "total_bytes": H100,
        "free_bytes": options.get("total_bytes", H100),
        "utilization": 0.9,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 4096,
        "max_model_len": 8192,
    } | options
    return Deployment(geometry=builtin_geometry(model), **settings)


def plan(model: str = "llama-3.1-8b", **options: Any) -> DeploymentPlan:
    return plan_deployment(deployment(model, **options))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama-3.1-70b", {"tensor_parallel_size": 4}),
        ("llama-3.1-70b", {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}),
        ("gemma-3-27b", {"pipeline_parallel_size": 2}),
        ("qwen3.5-27b", {"tensor_parallel_size": 2}),
        ("kimi-linear-48b-a3b", {"tensor_parallel_size": 4}),
        ("deepseek-v2-lite", {"tensor_parallel_size": 2}),
        ("gpt-oss-120b", {"tensor_parallel_size": 2}),
        ("gemma-4-e2b", {}),
    ],
)
def test_ranks_agree_on_the_blocks_and_never_use_more_than_they_have(model: str, options: dict[str, Any]) -> None:
    found = plan(model, **options)
    assert found.fits
    assert {rank.num_blocks for rank in found.pool.ranks} == {found.num_blocks}
    for stage in found.stages:
        for rank in stage.ranks:
            assert found.pool.ranks[rank].bytes_used <= stage.ledger.available_bytes
        assert sum_bytes(found.rows(stage)) == H100


def test_the_last_stage_of_a_pipeline_pays_for_the_sampler_and_decides() -> None:
    found = plan("llama-3.1-70b", pipeline_parallel_size=4, max_num_seqs=512)
    assert [len(stage.layers) for stage in found.stages] == [20, 20, 20, 20]
    assert found.bottleneck_stage.stage == 3
    peaks = [stage.ledger.row("peak activation").formula.split(":")[0] for stage in found.stages]
    assert peaks == ["forward pass"] * 3 + ["sampler"]
    assert any("idle" in warning for warning in found.warnings)


def test_replicated_heads_stop_the_capacity_from_growing_in_blocks_of_a_rank() -> None:
    four, eight = (plan("qwen3-30b-a3b", tensor_parallel_size=size) for size in (4, 8))
    assert four.bytes_per_block == eight.bytes_per_block
    with pytest.raises(InputError, match="neither divides the other"):
        plan("qwen3-30b-a3b", tensor_parallel_size=3)


def test_a_models_states_decide_the_block_size_and_say_so() -> None:
    asked = deployment("qwen3.5-27b")
    block_size, why = asked.resolved_block_size()
    assert (block_size, why.split(",")[0]) == (784, "a state is one page")
    assert attrs.evolve(asked, block_size=1024).resolved_block_size() == (1024, "as given")


def test_compressed_states_need_whole_states_in_a_block() -> None:
    asked = deployment("deepseek-v4-flash", tensor_parallel_size=8)
    assert asked.resolved_block_size()[0] == 256
    with pytest.raises(InputError, match="multiple of 128"):
        plan_deployment(attrs.evolve(asked, block_size=16))


def test_prefix_caching_decides_how_many_states_a_request_holds() -> None:
    cached, uncached = (
        plan("qwen3.5-27b", tensor_parallel_size=2, enable_prefix_caching=enabled) for enabled in (True, False)
    )
    assert cached.pool.blocks_per_request > uncached.pool.blocks_per_request


def test_without_a_length_the_models_own_limit_counts() -> None:
    assert deployment(max_model_len=None).wanted_max_model_len == 131_072
    with pytest.raises(InputError, match="give at least 1"):
        plan(max_model_len=0)


def test_auto_fit_finds_the_length_that_works() -> None:
    found = plan(max_model_len=-1, utilization=0.22)
    assert found.fits
    length = found.pool.max_model_len
    assert length < 131_072
    assert plan(max_model_len=length, utilization=0.22).fits
    assert not plan(max_model_len=length + 1, utilization=0.22).fits


def test_two_sizes_for_one_pool_are_refused() -> None:
    with pytest.raises(InputError, match="give one of them"):
        plan(kv_cache_memory_bytes=GIB, num_gpu_blocks_override=5)


def test_a_startup_that_is_refused_still_shows_where_the_memory_would_go() -> None:
    found = plan(free_bytes=40 * GIB)
    assert isinstance(found.refusal, MemoryShortfallError)
    assert found.refusal.condition is MemoryCondition.FREE_BELOW_REQUESTED
    assert [row.name for row in found.rows(found.stages[0]) if row.num_bytes < 0] == ["missing"]


def test_a_warning_names_graphs_that_are_not_set_aside_and_may_not_fit() -> None:
    tight = plan(reserve_graph_memory=False, utilization=1.0)
    assert any("may run out of memory" in warning for warning in tight.warnings)
    assert not any("graphs" in warning for warning in plan(reserve_graph_memory=False).warnings)
    assert plan(reserve_graph_memory=False).num_blocks > plan().num_blocks


def test_encoders_that_the_config_does_not_describe_are_named() -> None:
    found = plan("gemma-3-27b")
    assert any("encoder_bytes" in warning for warning in found.warnings)
    fewest, most = found.blocks_range
    assert fewest < found.num_blocks < most
    text_only = plan("gemma-3-27b", given=GivenMemory(encoder_bytes=0))
    assert not any("encoder_bytes" in warning for warning in text_only.warnings)


utilizations = st.integers(400, 950).map(lambda steps: steps / 1000)
models = st.sampled_from(["llama-3.1-8b", "qwen2.5-7b", "gpt-oss-20b", "mistral-7b-v0.1"])


@settings(max_examples=25, deadline=None)
@given(model=models, utilization=utilizations, free_share=st.floats(0.5, 1))
def test_the_values_to_paste_come_back_and_a_step_more_is_refused(
    model: str, utilization: float, free_share: float
) -> None:
    asked = deployment(model, utilization=utilization, free_bytes=int(H100 * free_share), max_model_len=2048)
    found = plan_deployment(asked)
    values = fitting_values(found)
    per_block = values.to_gpu_limit.bytes_per_block

    again = plan_deployment(attrs.evolve(asked, kv_cache_memory_bytes=values.to_gpu_limit.num_bytes))
    assert again.startup_refusal is None
    assert again.num_blocks == values.to_gpu_limit.num_blocks
    more = plan_deployment(attrs.evolve(asked, kv_cache_memory_bytes=values.to_gpu_limit.num_bytes + per_block))
    assert isinstance(more.startup_refusal, MemoryShortfallError)

    blocks = plan_deployment(attrs.evolve(asked, num_gpu_blocks_override=values.to_gpu_limit.num_blocks))
    assert blocks.fits
    too_many = plan_deployment(attrs.evolve(asked, num_gpu_blocks_override=values.to_gpu_limit.num_blocks + 1))
    assert not too_many.fits

    if values.gpu_memory_utilization < 1:
        largest = attrs.evolve(asked, utilization=values.gpu_memory_utilization)
        assert plan_deployment(largest).startup_refusal is None
        beyond = attrs.evolve(asked, utilization=round(values.gpu_memory_utilization + 0.001, 3))
        assert plan_deployment(beyond).startup_refusal is not None

    same = plan_deployment(attrs.evolve(asked, kv_cache_memory_bytes=values.same_pool.num_bytes, validate=False))
    assert same.num_blocks == found.num_blocks
    for suggested, limit in (
        (values.suggested_vllm.to_requested_limit_bytes, values.to_requested_limit.num_bytes),
        (values.suggested_vllm.to_gpu_limit_bytes, values.to_gpu_limit.num_bytes),
    ):
        assert suggested <= limit


@settings(max_examples=20, deadline=None)
@given(model=st.sampled_from(["llama-3.1-8b", "qwen2.5-7b", "gpt-oss-20b"]), utilization=utilizations)
def test_the_longest_request_fits_and_one_token_more_does_not(model: str, utilization: float) -> None:
    asked = deployment(model, utilization=utilization)
    longest = fitting_values(plan_deployment(asked)).max_model_len
    assert longest is not None
    assert plan_deployment(attrs.evolve(asked, max_model_len=longest)).fits
    assert not plan_deployment(attrs.evolve(asked, max_model_len=longest + 1)).fits


def test_a_model_of_windows_only_has_no_longest_request() -> None:
    assert fitting_values(plan("mistral-7b-v0.1")).max_model_len is None


@settings(max_examples=15, deadline=None)
@given(low=utilizations, high=utilizations)
def test_blocks_are_monotone_in_memory(low: float, high: float) -> None:
    less, more = sorted((low, high))
    assert plan(utilization=less).num_blocks <= plan(utilization=more).num_blocks


def test_every_remedy_that_is_offered_was_tried_and_is_as_small_as_works() -> None:
    asked = deployment("llama-3.1-70b", tensor_parallel_size=2, max_model_len=32_768)
    found = plan_deployment(asked)
    diagnosis = one_request_does_not_fit(found)
    offered = {remedy.parameter: remedy.value for remedy in diagnosis.remedies}
    assert {"max_model_len", "gpu_memory_utilization", "tensor_parallel_size"} <= set(offered)
    for option, field, step in (
        ("max_model_len", "max_model_len", 1),
        ("gpu_memory_utilization", "utilization", -0.001),
    ):
        value = offered[option]
        assert isinstance(value, int | float)
        assert plan_deployment(attrs.evolve(asked, **{field: value})).fits
        assert not plan_deployment(attrs.evolve(asked, **{field: round(value + step, 3)})).fits
    size = int(offered["tensor_parallel_size"])
    assert plan_deployment(attrs.evolve(asked, tensor_parallel_size=size)).fits
    with pytest.raises(InputError, match="fits"):
        one_request_does_not_fit(plan())


def test_the_weights_are_named_where_nothing_else_could_matter() -> None:
    diagnosis = one_request_does_not_fit(plan("llama-3.1-70b"))
    assert diagnosis.row == "weights"
    assert minimum_tensor_parallel_size(deployment("llama-3.1-70b"), lambda found: found.fits) == 2


def test_a_pool_below_expectation_names_the_row_and_the_knobs() -> None:
    asked = deployment(max_num_seqs=1024, max_num_batched_tokens=8192)
    found = plan_deployment(asked)
    expected = found.num_blocks + 1500
    diagnosis = pool_smaller_than_expected(found, expected)
    assert diagnosis.row == "peak activation"
    offered = {remedy.parameter: remedy for remedy in diagnosis.remedies}
    fewer = offered["max_num_seqs"]
    assert plan_deployment(attrs.evolve(asked, max_num_seqs=int(fewer.value or 0))).num_blocks >= expected
    assert plan_deployment(attrs.evolve(asked, max_num_seqs=int(fewer.value or 0) + 1)).num_blocks < expected
    with pytest.raises(InputError, match="the pool holds"):
        pool_smaller_than_expected(found, found.num_blocks)


def test_the_diagnosis_says_that_ranks_do_not_add_up() -> None:
    found = plan("llama-3.1-70b", tensor_parallel_size=4)
    diagnosis = pool_smaller_than_expected(found, 4 * found.num_blocks)
    assert any("does not add up" in finding for finding in diagnosis.findings)


def test_a_pool_that_is_pinned_gains_nothing_from_utilization() -> None:
    pinned = plan(kv_cache_memory_bytes=10 * GIB)
    higher = plan(kv_cache_memory_bytes=10 * GIB, utilization=0.95)
    diagnosis = raising_utilization_gained_little(pinned, higher)
    assert diagnosis.row == "kv_cache_memory_bytes"
    assert "changes nothing" in diagnosis.findings[-1]


def test_what_utilization_gains_is_counted_in_blocks() -> None:
    diagnosis = raising_utilization_gained_little(plan(), plan(utilization=0.91))
    assert diagnosis.row == "KV cache blocks"
    assert "0.010 of 79.19 GiB" in diagnosis.findings[1]
    with pytest.raises(InputError, match="not higher"):
        raising_utilization_gained_little(plan(), plan())


def test_what_grew_at_the_same_time_is_named() -> None:
    higher = plan(utilization=0.91, max_num_seqs=512)
    diagnosis = raising_utilization_gained_little(plan(), higher)
    assert diagnosis.row == "peak activation"


def test_a_failing_start_with_free_memory_names_the_request_and_two_remedies() -> None:
    diagnosis = free_memory_but_startup_fails(deployment(free_bytes=40 * GIB))
    assert diagnosis.row == "requested"
    offered = {remedy.parameter: remedy.value for remedy in diagnosis.remedies}
    assert offered["gpu_memory_utilization"] == 0.505
    pinned = offered["kv_cache_memory_bytes"]
    assert plan(free_bytes=40 * GIB, kv_cache_memory_bytes=pinned).fits
    with pytest.raises(InputError, match="are free"):
        free_memory_but_startup_fails(deployment())


def test_no_remedy_is_offered_that_does_not_help() -> None:
    asked = deployment("llama-3.1-405b", given=GivenMemory(weights_bytes=800 * GIB))
    assert find_remedies(asked, lambda found: found.fits) == ()
