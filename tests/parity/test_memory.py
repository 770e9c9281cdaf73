"""vLLM's memory arithmetic, byte for byte: one test per line of memory.jsonl."""

import json
from typing import Any

import pytest
from kvledger.core.memory.budget import (
    MemoryShortfallError,
    check_enough_kv_cache_memory,
    request_memory,
    requested_bytes,
)
from kvledger.core.memory.profile import (
    MemoryProfile,
    MemorySnapshot,
    SizingOptions,
    applicable_startup_plan,
    determine_available_memory,
    suggested_vllm,
)
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


@pytest.mark.parametrize("case", _cases("available_memory"))
def test_memory_available_is_vllms(case: dict[str, Any]) -> None:
    given, expected = case["in"], case["out"]
    reservation = given["mm_ipc_gb"]
    options = SizingOptions(
        gpu_memory_utilization=given["util"],
        kv_cache_memory_bytes=given["kv_cache_memory_bytes"],
        frontend_reservation_bytes=0 if reservation is None else gib_to_bytes(reservation),
        reserve_graph_memory=given["estimate_enabled"],
        validate=False,
    )

    def size():
        profile = MemoryProfile(
            before=_snapshot(given, given["free_before"], 0, 0),
            after=_snapshot(given, given["free_after"], given["torch_allocated_after"], given["torch_peak_after"]),
            weights_bytes=None,
            strict_profiling=True,
        )
        return determine_available_memory(profile, options, cudagraph_estimate_bytes=given["cudagraph_estimate"])

    assert requested_bytes(given["total"], given["util"]) == expected["requested"]
    if "error" in expected:
        with pytest.raises(MemoryShortfallError) as refused:
            size()
        assert refused.value.condition == expected["error"]
        return
    sized = size()
    assert sized.available_bytes == expected["available"]
    if "total_consumed" in expected:
        assert sized.total_consumed_bytes == expected["total_consumed"]
        assert sized.peak_activation_bytes == expected["peak_activation_memory"]
        assert sized.profiled_available_bytes == expected["available_kv_cache_memory_bytes"]
    if expected.get("suggestion") == "none":
        assert sized.is_pinned
    else:
        suggestion = suggested_vllm(sized, given["cudagraph_actual"])
        assert not sized.is_pinned
        assert suggestion.to_requested_limit_bytes == expected["suggest_to_requested_limit"]
        assert suggestion.to_gpu_limit_bytes == expected["suggest_to_gpu_limit"]


@pytest.mark.parametrize("case", _cases("startup_plan_gate"))
def test_memory_startup_plan_is_reused_as_vllm_does(case: dict[str, Any]) -> None:
    reused = applicable_startup_plan(case["in"]["plan"], case["in"]["free"])
    assert reused == case["out"]["kv_cache_memory_bytes"]


@pytest.mark.parametrize("case", _cases("check_enough"))
def test_memory_check_for_one_request_is_vllms(case: dict[str, Any]) -> None:
    given, expected = case["in"], case["out"]

    def check() -> None:
        check_enough_kv_cache_memory(
            available_bytes=given["available_after_reserved_block"],
            needed_bytes=given["needed"],
            estimated_max_model_len=given["estimate"],
            max_model_len=8192,
        )

    if "error" not in expected:
        check()
        return
    with pytest.raises(MemoryShortfallError) as refused:
        check()
    assert refused.value.condition == expected["error"]
    assert ("--max-model-len" in refused.value.largest) == expected["mentions_estimate"]


def test_memory_file_holds_no_function_that_is_not_checked() -> None:
    path = golden_dir() / "memory.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    functions = {json.loads(line)["fn"] for line in path.read_text().splitlines() if line.strip()}
    assert functions <= {"request_memory", "available_memory", "startup_plan_gate", "check_enough"}
