"""Field reports on where the memory went: A02, A10 to A15 and A17, by their exact integers."""

from fractions import Fraction
from typing import Any

import attrs
import pytest
from kvledger.core.deployment.deployment import Deployment, GivenMemory
from kvledger.core.deployment.diagnosis import one_request_does_not_fit
from kvledger.core.deployment.plan import DeploymentPlan, plan_deployment
from kvledger.core.deployment.remedies import fitting_values, minimum_tensor_parallel_size
from kvledger.core.memory.budget import (
    BudgetSemantics,
    MemoryCondition,
    MemoryShortfallError,
    check_explicit_kv_bytes,
    graph_utilizations,
    largest_fitting,
    largest_utilization,
    neighbour_warnings,
    request_memory,
)
from kvledger.core.memory.ledger import MemoryBudget, RowRole, measured_rows
from kvledger.core.memory.profile import MemoryProfile, MemorySnapshot
from kvledger.core.models.geometry import builtin_geometry, geometry_from_description
from kvledger.core.planner.verdict import PlanRefusedError

MIB = 1 << 20
GIB = 1 << 30


def gib(figure: str) -> int:
    return int(Fraction(figure) * GIB)


def decoder(num_layers: int, num_kv_heads: int, dtype: str = "bfloat16") -> Any:
    """A model known only by what it stores: heads of 128."""
    fields = {"num_hidden_layers": num_layers, "num_key_value_heads": num_kv_heads, "head_dim": 128}
    document = {"kind": "standard_gqa", "dtype": dtype, "max_position_embeddings": 131072, "fields": fields}
    return geometry_from_description(document, "decoder", "here")


def deployment(
    total: int, given: GivenMemory, num_layers: int = 32, num_kv_heads: int = 8, **options: Any
) -> Deployment:
    """Given rows and no graphs, so that nothing is estimated."""
    settings = {
        "free_bytes": total,
        "utilization": 0.9,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "max_model_len": 8192,
        "reserve_graph_memory": False,
        "enforce_eager": True,
    } | options
    return Deployment(geometry=decoder(32, 8), total_bytes=total, given=given, **settings)


# A02: 20k fits, 29k is refused, 35k fits, since activations follow the batched tokens.


def a02_run(peak: str, max_model_len: int) -> DeploymentPlan:
    weights = gib("14.99")
    given = GivenMemory(weights_bytes=weights, non_torch_bytes=gib("0.35"), activation_bytes=gib(peak) - weights)
    return plan_deployment(
        deployment(gib("23.58"), given, max_model_len=max_model_len, max_num_batched_tokens=max_model_len)
    )


@pytest.mark.parametrize(
    ("peak", "max_model_len", "available_gib", "num_blocks", "fits"),
    [
        ("17.06", 20_000, "3.812", 1_951, True),
        ("17.98", 29_000, "2.892", 1_480, False),
        ("15.05", 35_000, "5.822", 2_980, True),
    ],
)
def test_a02_activations_decide_which_length_fits(
    peak: str, max_model_len: int, available_gib: str, num_blocks: int, fits: bool
) -> None:
    plan = a02_run(peak, max_model_len)
    available = plan.stages[0].ledger.available_bytes
    assert abs(available - gib(available_gib)) < GIB // 1000  # the thread's figures have two decimals
    assert (plan.num_blocks, plan.fits) == (num_blocks, fits)


def test_a02_the_refusal_shows_the_activation_line_and_offers_fewer_batched_tokens() -> None:
    plan = a02_run("17.98", 29_000)
    diagnosis = one_request_does_not_fit(plan)
    assert diagnosis.row == "peak activation"
    assert abs(diagnosis.row_bytes - gib("2.99")) <= 1
    offered = {remedy.parameter: remedy.value for remedy in diagnosis.remedies}
    assert "max_num_batched_tokens" in offered and "gpu_memory_utilization" in offered
    fewer = int(offered["max_num_batched_tokens"])
    assert 0 < fewer < 29_000
    assert a02_run("15.05", 35_000).stages[0].ledger.row("peak activation").num_bytes <= gib("0.07")


# A10: a small explicit pool was refused since utilization * total was demanded all the same.

A10 = {
    "total_bytes": gib("79.15"),
    "free_bytes": gib("59.32"),
    "gpu_memory_utilization": 0.9,
}


def test_a10_without_an_override_the_request_is_short_and_the_largest_utilization_is_named() -> None:
    with pytest.raises(MemoryShortfallError) as refused:
        request_memory(**A10)
    assert f"{refused.value.needed_bytes / GIB:.3f}" == "71.235"
    assert f"{refused.value.shortfall_bytes / GIB:.3f}" == "11.915"
    assert refused.value.largest == {"gpu_memory_utilization": 0.749}


def test_a10_the_real_need_of_an_override_is_checked_and_the_request_is_not() -> None:
    given = GivenMemory(weights_bytes=15 * GIB, non_torch_bytes=2 * GIB, activation_bytes=0)
    asked = deployment(gib("79.15"), given, free_bytes=gib("59.32"), num_gpu_blocks_override=5_000)
    plan = plan_deployment(asked)
    assert plan.fits
    assert plan.num_blocks == 5_000
    need = plan.stages[0].ledger.non_kv_bytes + plan.num_blocks * plan.bytes_per_block
    assert need == 17 * GIB + 5_000 * 2 * MIB
    assert f"{need / GIB:.2f}" == "26.77"
    most = (gib("59.32") - 17 * GIB) // (2 * MIB)
    assert plan_deployment(attrs.evolve(asked, num_gpu_blocks_override=most)).fits
    refused = plan_deployment(attrs.evolve(asked, num_gpu_blocks_override=most + 1)).refusal
    assert isinstance(refused, PlanRefusedError)
    assert refused.largest == {"num_gpu_blocks_override": most}
    without = plan_deployment(attrs.evolve(asked, num_gpu_blocks_override=None))
    assert isinstance(without.refusal, MemoryShortfallError)


def test_a10_strict_startup_demands_the_request_under_an_override_too() -> None:
    given = GivenMemory(weights_bytes=15 * GIB, non_torch_bytes=2 * GIB, activation_bytes=0)
    asked = deployment(gib("79.15"), given, free_bytes=gib("59.32"), num_gpu_blocks_override=5_000)
    refusal = plan_deployment(attrs.evolve(asked, strict_startup=True)).refusal
    assert isinstance(refusal, MemoryShortfallError)
    assert refusal.condition is MemoryCondition.FREE_BELOW_REQUESTED


# A11: another process's memory was subtracted from this instance's own quota.


def reading(
    free: str,
    *,
    total: str = "80",
    process: str | None = None,
    allocated: str = "0",
    peak: str = "0",
    reserved: str = "0",
) -> MemorySnapshot:
    return MemorySnapshot(
        total_bytes=gib(total),
        free_bytes=gib(free),
        torch_allocated_bytes=gib(allocated),
        torch_peak_bytes=gib(peak),
        torch_reserved_bytes=gib(reserved),
        process_bytes=None if process is None else gib(process),
    )


def available(profile: MemoryProfile, utilization: float) -> int:
    """Bytes for the KV cache that a profile leaves of a share of the device."""
    before = profile.before
    budget = MemoryBudget(total_bytes=before.total_bytes, free_bytes=before.free_bytes, fraction=utilization)
    return budget.available_for_kv_bytes(measured_rows(profile, None))


def test_a11_a_neighbours_memory_is_no_part_of_this_engines_quota() -> None:
    requested = request_memory(total_bytes=80 * GIB, free_bytes=48 * GIB, gpu_memory_utilization=0.4)
    assert requested == 32 * GIB
    profile = MemoryProfile(
        before=reading("48", process="0"),
        after=reading("32.5", process="15.5", allocated="15", peak="16", reserved="15"),
        weights_bytes=15 * GIB,
    )
    assert available(profile, 0.4) == gib("15.5")
    assert profile.warnings == ()


def test_a11_a_third_engine_is_refused_with_the_largest_share_that_is_left() -> None:
    with pytest.raises(MemoryShortfallError) as refused:
        request_memory(total_bytes=80 * GIB, free_bytes=16 * GIB, gpu_memory_utilization=0.4)
    assert refused.value.shortfall_bytes == 16 * GIB
    assert refused.value.largest == {"gpu_memory_utilization": 0.2}
    assert neighbour_warnings([0.4, 0.4, 0.4])


# A12: a neighbour that moves during profiling was credited, blamed, or killed the start.


@pytest.mark.parametrize(("free_after", "unexplained"), [("53.5", "0"), ("58.5", "5"), ("48.5", "-5"), ("73.5", "20")])
def test_a12_a_neighbour_that_moves_changes_nothing_where_memory_is_attributed(
    free_after: str, unexplained: str
) -> None:
    profile = MemoryProfile(
        before=reading("70", process="0"),
        after=reading(free_after, process="16.5", allocated="16", peak="18", reserved="16"),
        weights_bytes=16 * GIB,
    )
    assert available(profile, 0.5) == gib("21.5")
    assert profile.unexplained_bytes == gib(unexplained)
    assert bool(profile.warnings) == (unexplained != "0")
    if unexplained != "0":
        assert f"{abs(int(unexplained))}.00 GiB" in profile.warnings[0]


def test_a12_without_attribution_the_figure_is_an_estimate_that_never_falls_below_torchs_own() -> None:
    profile = MemoryProfile(
        before=reading("70"),
        after=reading("73.5", allocated="16", peak="18", reserved="16"),
        weights_bytes=16 * GIB,
    )
    assert available(profile, 0.5) == 22 * GIB
    assert any("estimate" in warning for warning in profile.warnings)
    with pytest.raises(MemoryShortfallError):
        attrs.evolve(profile, strict_profiling=True)


# A13: a pinned size skipped all checks and ran out of memory later.

A13 = {"free_bytes": gib("23.5"), "non_kv_bytes": gib("14") + gib("0.5") + gib("2") + gib("0.5")}


def test_a13_pinned_bytes_that_do_not_fit_are_refused_with_the_largest_that_do() -> None:
    with pytest.raises(MemoryShortfallError) as refused:
        check_explicit_kv_bytes(kv_cache_memory_bytes=8 * GIB, bytes_per_block=2 * MIB, **A13)
    error = refused.value
    assert (error.needed_bytes, error.available_bytes) == (25 * GIB, gib("23.5"))
    largest = error.largest["kv_cache_memory_bytes"]
    assert largest == 6_979_321_856 == 3_328 * 2 * MIB
    assert 3_328 * 16 == 53_248
    assert check_explicit_kv_bytes(kv_cache_memory_bytes=int(largest), bytes_per_block=2 * MIB, **A13)


def test_a13_the_plan_says_that_utilization_is_ignored() -> None:
    given = GivenMemory(weights_bytes=14 * GIB, non_torch_bytes=GIB // 2, activation_bytes=2 * GIB)
    asked = deployment(gib("23.5"), given, kv_cache_memory_bytes=6 * GIB)
    plan = plan_deployment(asked)
    assert any("0.9 is ignored" in warning for warning in plan.warnings)
    assert plan.num_blocks == 3_072
    refused = plan_deployment(attrs.evolve(asked, kv_cache_memory_bytes=8 * GIB)).refusal
    assert isinstance(refused, MemoryShortfallError)
    assert refused.condition is MemoryCondition.EXPLICIT_BYTES_EXCEED_FREE


# A14: graph memory on a line of its own, and a value to paste.


def test_a14_the_utilization_that_keeps_the_old_pool() -> None:
    found = graph_utilizations(0.9350, gib("0.58"), gib("23.56"))
    assert found.to_keep_the_pool == 0.9596


def test_a14_largest_fitting_is_whole_blocks_within_what_the_rows_leave() -> None:
    given = GivenMemory(
        weights_bytes=gib("1.14"),
        activation_bytes=gib("0.22"),
        non_torch_bytes=gib("0.13"),
        graph_bytes=gib("0.04"),
    )
    asked = deployment(gib("61.27"), given, reserve_graph_memory=True, enforce_eager=False)
    plan = plan_deployment(asked)
    assert plan.stages[0].ledger.row("CUDA graphs").role is RowRole.GRAPHS
    limit = gib("61.27") * 9 // 10 - gib("1.14") - gib("0.22") - gib("0.13") - gib("0.04")
    assert f"{limit / GIB:.2f}" == "53.61"
    values = fitting_values(plan)
    assert values.to_requested_limit.num_bytes <= limit + 1
    assert values.to_requested_limit.num_bytes % (2 * MIB) == 0
    again = plan_deployment(attrs.evolve(asked, kv_cache_memory_bytes=values.to_requested_limit.num_bytes))
    assert again.num_blocks == plan.num_blocks == values.to_requested_limit.num_blocks


# A15: "0.9" means different things.


@pytest.mark.parametrize(
    ("semantics", "available"),
    [(BudgetSemantics.OF_TOTAL, 52), (BudgetSemantics.OF_FREE, 54), (BudgetSemantics.STATIC_FRACTION, 55)],
)
def test_a15_each_semantics_is_selectable_and_named(semantics: BudgetSemantics, available: int) -> None:
    given = GivenMemory(weights_bytes=16 * GIB, non_torch_bytes=GIB, activation_bytes=3 * GIB)
    plan = plan_deployment(deployment(80 * GIB, given, semantics=semantics))
    assert plan.stages[0].ledger.available_bytes == available * GIB
    assert plan.deployment.semantics.value == str(semantics)


def test_a15_the_lesser_of_memory_and_tokens_sizes_the_pool() -> None:
    given = GivenMemory(weights_bytes=16 * GIB, non_torch_bytes=GIB, activation_bytes=3 * GIB)
    asked = deployment(80 * GIB, given, semantics=BudgetSemantics.OF_FREE)
    assert plan_deployment(asked).pool.kv_cache_size_tokens == 442_368
    capped = plan_deployment(attrs.evolve(asked, max_total_tokens=200_000))
    assert (capped.num_blocks, capped.pool.kv_cache_size_tokens) == (12_500, 200_000)
    assert any("200,000" in warning for warning in capped.warnings)


def test_a15_blocks_are_rounded_down() -> None:
    bytes_per_block = 2 * 32 * 32 * 128 * 2 * 64
    assert bytes_per_block == 33_554_432
    available = int(Fraction("21.89") * GIB * Fraction("0.9"))
    assert largest_fitting(available, 0, bytes_per_block).num_blocks == 630
    assert 631 * bytes_per_block > available


# A17: users at 8k of a 70B model on H100s.


def a17(quantization: str | None, kv_cache_dtype: str, tensor_parallel_size: int) -> Deployment:
    geometry = builtin_geometry("llama-3.1-70b")
    bytes_a_parameter = 1 if quantization else 2
    weights = geometry.parameters * bytes_a_parameter // tensor_parallel_size
    return Deployment(
        geometry=geometry,
        total_bytes=gib("79.1"),
        free_bytes=gib("79.1"),
        utilization=0.9,
        tensor_parallel_size=tensor_parallel_size,
        max_model_len=8192,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        kv_cache_dtype=kv_cache_dtype,
        reserve_graph_memory=False,
        given=GivenMemory(weights_bytes=weights, non_torch_bytes=2 * GIB, activation_bytes=0),
    )


@pytest.mark.parametrize(
    ("quantization", "kv_cache_dtype", "tensor_parallel_size", "available", "per_block", "num_blocks", "users"),
    [
        (None, "bf16", 2, 3_738_490_306, 2_621_440, 1_426, 2),
        (None, "bf16", 4, 39_015_343_554, 1_310_720, 29_766, 58),
        ("fp8", "bf16", 1, 3_738_490_306, 5_242_880, 713, 1),
        ("fp8", "bf16", 2, 39_015_343_554, 2_621_440, 14_883, 29),
        ("fp8", "fp8", 2, 39_015_343_554, 1_310_720, 29_766, 58),
    ],
)
def test_a17_users_at_full_8k(
    quantization: str | None,
    kv_cache_dtype: str,
    tensor_parallel_size: int,
    available: int,
    per_block: int,
    num_blocks: int,
    users: int,
) -> None:
    plan = plan_deployment(a17(quantization, kv_cache_dtype, tensor_parallel_size))
    # The table rounds down where vLLM's request is a ceiling.
    assert plan.stages[0].ledger.available_bytes - available in (0, 1)
    assert (plan.bytes_per_block, plan.num_blocks) == (per_block, num_blocks)
    assert plan.pool.blocks_per_request == 512
    assert plan.pool.num_usable_blocks // 512 == users


def test_a17_one_gpu_is_62_gib_short_and_two_are_the_fewest() -> None:
    plan = plan_deployment(a17(None, "bf16", 1))
    ledger = plan.stages[0].ledger
    assert ledger.available_bytes - -66_815_216_190 in (0, 1)
    assert f"{-ledger.available_bytes / GIB:.1f}" == "62.2"
    assert not plan.fits
    # With the overhead estimated too, since a given row of one GPU says nothing about two.
    estimated = attrs.evolve(plan.deployment, given=GivenMemory(non_torch_bytes=2 * GIB, activation_bytes=0))
    assert minimum_tensor_parallel_size(estimated, lambda changed: changed.fits) == 2
    diagnosis = one_request_does_not_fit(plan_deployment(estimated))
    assert diagnosis.row == "weights"
    assert any("smallest tensor_parallel_size that fits: 2" in finding for finding in diagnosis.findings)


def test_a10_the_largest_utilization_is_floored_to_three_places() -> None:
    assert largest_utilization(gib("79.15"), gib("59.32")) == 0.749
