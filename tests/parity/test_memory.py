"""vLLM's memory arithmetic, byte for byte: one test per line of memory.jsonl."""

import json
from typing import Any

import attrs
import pytest
from kvledger.core.memory.budget import (
    MemoryShortfallError,
    applicable_startup_plan,
    request_memory,
    requested_bytes,
)
from kvledger.core.memory.ledger import MemoryBudget, MemoryLedger, RowRole, given_row, measured_rows
from kvledger.core.memory.profile import MemoryProfile, MemorySnapshot
from kvledger.core.planner.inputs import PlanInputs
from kvledger.core.planner.plan import plan_kv_cache
from kvledger.core.planner.specs import KVCacheSpec, MambaLikeSpec, OpaqueSpec, StateArray
from kvledger.core.planner.verdict import PlanRefusedError
from kvledger.core.quantities import gib_to_bytes

from tests.parity.golden import golden_dir


def _cases(fn: str) -> list[Any]:
    path = golden_dir() / "memory.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    cases = [json.loads(line) for line in lines if line.strip()]
    return [pytest.param(case, id=f"{i}") for i, case in enumerate(cases) if case["fn"] == fn]


@pytest.mark.parametrize("case", _cases("request_memory"))
def test_memory_requested_is_vllms(case: dict[str, Any]) -> None:
    given, expected = case["in"], case["out"]

    def request() -> int:
        return request_memory(
            total_bytes=given["total"],
            free_bytes=given["free"],
            gpu_memory_utilization=given["util"],
            externally_held_bytes=given["external"],
        )

    if "error" in expected:
        with pytest.raises(MemoryShortfallError) as refused:
            request()
        assert refused.value.condition == expected["error"]
    else:
        assert request() == expected["requested"]


def _snapshot(given: dict[str, Any], free_bytes: int, allocated_bytes: int, peak_bytes: int) -> MemorySnapshot:
    return MemorySnapshot(
        total_bytes=given["total"],
        free_bytes=free_bytes,
        torch_allocated_bytes=allocated_bytes,
        torch_peak_bytes=peak_bytes,
        torch_reserved_bytes=allocated_bytes,
    )


def _ledger(given: dict[str, Any]) -> MemoryLedger:
    """The memory ledger of the recorded readings; without pinned bytes of 0, which vLLM takes for unset when sizing."""
    profile = MemoryProfile(
        before=_snapshot(given, given["free_before"], 0, 0),
        after=_snapshot(given, given["free_after"], given["torch_allocated_after"], given["torch_peak_after"]),
        weights_bytes=0,
        strict_profiling=True,
    )
    estimate = given["cudagraph_estimate"] if given["estimate_enabled"] else 0
    reservation = given["mm_ipc_gb"]
    return MemoryLedger(
        budget=MemoryBudget(total_bytes=given["total"], free_bytes=given["free_before"], fraction=given["util"]),
        non_kv_rows=measured_rows(profile, given_row("CUDA graphs", estimate, RowRole.GRAPHS)),
        kv_cache_memory_bytes=given["kv_cache_memory_bytes"] or None,
        frontend_reservation_bytes=0 if reservation is None else gib_to_bytes(reservation),
    )


@pytest.mark.parametrize("case", _cases("available_memory"))
def test_memory_available_is_vllms(case: dict[str, Any]) -> None:
    given, expected = case["in"], case["out"]
    assert requested_bytes(given["total"], given["util"]) == expected["requested"]
    if expected.get("error") == "free_grew_during_profiling":
        with pytest.raises(MemoryShortfallError) as refused:
            _ledger(given)
        assert refused.value.condition == expected["error"]
        return
    ledger = _ledger(given)
    by_utilization = attrs.evolve(ledger, kv_cache_memory_bytes=None, frontend_reservation_bytes=0)
    if "error" in expected:
        assert expected["error"] == "frontend_reservation_leaves_nothing"
        assert ledger.available_bytes <= 0 < by_utilization.available_bytes
        return
    assert ledger.available_bytes == expected["available"]
    if "total_consumed" in expected:
        sums = {role: sum(row.num_bytes for row in ledger.non_kv_rows if row.role is role) for role in RowRole}
        assert sums[RowRole.RESIDENT] == expected["total_consumed"]
        assert sums[RowRole.TRANSIENT] + sums[RowRole.GRAPHS] == expected["peak_activation_memory"]
        assert by_utilization.available_bytes == expected["available_kv_cache_memory_bytes"]
    if expected.get("suggestion") == "none":
        assert given["kv_cache_memory_bytes"] is not None
    else:
        suggestion = ledger.suggested_by_vllm(given["cudagraph_actual"])
        assert given["kv_cache_memory_bytes"] is None
        assert suggestion.to_requested_limit_bytes == expected["suggest_to_requested_limit"]
        assert suggestion.to_gpu_limit_bytes == expected["suggest_to_gpu_limit"]


@pytest.mark.parametrize("case", _cases("startup_plan_gate"))
def test_memory_startup_plan_is_reused_as_vllm_does(case: dict[str, Any]) -> None:
    reused = applicable_startup_plan(case["in"]["plan"], case["in"]["free"])
    assert reused == case["out"]["kv_cache_memory_bytes"]


@pytest.mark.parametrize("case", _cases("check_enough"))
def test_memory_check_for_one_request_is_vllms(case: dict[str, Any]) -> None:
    """The planner refuses as vLLM does, in blocks of one byte; the null block comes on top of what is left."""
    given, expected = case["in"], case["out"]
    if given["estimate"] > 0:
        # A block a token, so that shorter requests need less.
        spec: KVCacheSpec = OpaqueSpec(block_size=1, opaque_bytes_per_token=1)
    else:
        # A state and its drafts, which every request needs whole, so that no length fits.
        state = StateArray(shape=(1,), dtype="int8")
        spec = MambaLikeSpec(block_size=1, states=(state,), num_speculative_blocks=given["needed"] - 1)
    inputs = PlanInputs(
        layer_specs={"layer": spec},
        available_bytes=(given["available_after_reserved_block"] + spec.page_size_bytes,),
        max_model_len=given["needed"],
        enable_prefix_caching=False,
        state_cache_mode="none",
    )
    plan = plan_kv_cache(inputs)
    assert plan.blocks_per_request == given["needed"]
    if "error" not in expected:
        assert plan.require_fits() is plan
        return
    with pytest.raises(PlanRefusedError) as refused:
        plan.require_fits()
    assert refused.value.condition == expected["error"]
    assert ("max_model_len" in refused.value.largest) == expected["mentions_estimate"]


def test_memory_file_holds_no_function_that_is_not_checked() -> None:
    path = golden_dir() / "memory.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    functions = {json.loads(line)["fn"] for line in path.read_text().splitlines() if line.strip()}
    assert functions <= {"request_memory", "available_memory", "startup_plan_gate", "check_enough"}
