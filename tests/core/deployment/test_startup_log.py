"""Start-up log lines are written, read back and explained."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvledger.core.deployment.deployment import Deployment
from kvledger.core.deployment.diagnosis import explain_pool, uniform_stacks
from kvledger.core.deployment.plan import DeploymentPlan, plan_deployment
from kvledger.core.deployment.startup_log import (
    GibFigure,
    StartupLog,
    calibrated_rows,
    graph_memory_line,
    log_lines,
    read_startup_log,
)
from kvledger.core.errors import InputError
from kvledger.core.memory.budget import requested_bytes
from kvledger.core.memory.ledger import RowSource
from kvledger.core.models.geometry import builtin_geometry

GIB = 1 << 30
TOTAL = 85_031_714_816


def plan(**options: Any) -> DeploymentPlan:
    settings = {
        "free_bytes": TOTAL,
        "utilization": 0.9,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
    } | options
    return plan_deployment(Deployment(geometry=builtin_geometry("llama-3.1-8b"), total_bytes=TOTAL, **settings))


def test_the_lines_have_their_familiar_shape() -> None:
    lines = log_lines(plan(max_model_len=8192))
    assert lines[0].startswith("Available KV cache memory: 5") and lines[0].endswith(" GiB")
    assert any(line.startswith("# GPU blocks: ") for line in lines)
    assert any(line.startswith("GPU KV cache size: ") and line.endswith(" tokens") for line in lines)
    assert any(line.startswith("Maximum concurrency for 8,192 tokens per request: ") for line in lines)
    assert any(line.startswith("Estimated CUDA graph memory: ") for line in lines)


def test_an_auto_fit_that_reduced_the_length_says_from_and_to() -> None:
    small = plan(max_model_len=-1, utilization=0.25)
    (line,) = [line for line in log_lines(small) if line.startswith("Auto-fit max_model_len")]
    assert f"reduced from 131072 to {small.pool.max_model_len} to fit" in line
    assert small.fits
    (line,) = [line for line in log_lines(plan(max_model_len=-1)) if line.startswith("Auto-fit max_model_len")]
    assert "full model context length 131072 fits" in line


def test_the_graph_memory_line_shows_actual_and_estimated_bytes() -> None:
    line = graph_memory_line(GIB, GIB // 2)
    assert line == ("CUDA graph pool memory: 1.00 GiB (actual), 0.50 GiB (estimated), difference: 0.50 GiB (50.0%)")
    assert graph_memory_line(0, 0).endswith("difference: 0.00 GiB")


def test_the_printed_lines_can_be_read_back() -> None:
    found = plan(max_model_len=8192)
    log = read_startup_log(log_lines(found), "lines")
    assert log.num_gpu_blocks == found.num_blocks
    assert log.kv_cache_tokens == found.pool.kv_cache_size_tokens
    assert log.concurrency_tokens == 8192
    assert log.max_concurrency == pytest.approx(found.pool.max_concurrency, abs=0.01)
    assert log.available is not None
    low, high = log.available.range_bytes
    assert low <= found.stages[0].ledger.available_bytes <= high


REAL = """
INFO gpu_model_runner.py:1112] Model loading took 14.9889 GiB memory and 3.65 seconds
INFO worker.py:267] model weights take 14.99GiB; non_torch_memory takes 0.09GiB; PyTorch activation peak memory takes 1.23GiB; the rest of the memory reserved for KV Cache is 54.96GiB.
INFO Graph capturing finished in 20 secs, took 0.53 GiB
INFO Available KV cache memory: 54.96 GiB
INFO GPU KV cache size: 450,224 tokens
INFO Maximum concurrency for 8,192 tokens per request: 54.96x
"""  # noqa: E501


def test_old_and_new_spellings_are_known() -> None:
    log = read_startup_log(REAL.splitlines(), "log")
    assert log.weights is not None and log.weights.text == "14.99"
    assert log.non_torch is not None and log.non_torch.text == "0.09"
    assert log.activation is not None and log.activation.text == "1.23"
    assert log.graphs is not None and log.graphs.text == "0.53"
    assert log.available is not None and log.available.text == "54.96"
    assert log.kv_cache_tokens == 450_224


def test_of_several_ranks_lines_the_tightest_counts() -> None:
    log = read_startup_log(["Available KV cache memory: 8.69 GiB", "Available KV cache memory: 7.46 GiB"], "log")
    assert log.available is not None and log.available.text == "7.46"


def test_a_log_without_any_known_line_is_refused() -> None:
    with pytest.raises(InputError, match=r"here: none of the known lines"):
        read_startup_log(["hello"], "here")


def test_a_real_log_calibrates_the_rows_and_gives_its_pool_back() -> None:
    log = read_startup_log(REAL.splitlines(), "log")
    requested = requested_bytes(TOTAL, 0.9)
    rows = calibrated_rows(log, requested, reserve_graph_memory=False)
    assert all(row.source is RowSource.MEASURED for row in rows)
    assert log.available is not None
    assert requested - sum(row.num_bytes for row in rows) == log.available.num_bytes
    calibrated = plan(max_model_len=8192, measured=rows, reserve_graph_memory=False)
    fewest, most = calibrated.blocks_range
    assert log.kv_cache_tokens is not None
    assert fewest <= log.kv_cache_tokens // 16 <= most
    # A larger device with the same engine: only the budget changes.
    larger = plan_deployment(
        Deployment(
            geometry=builtin_geometry("llama-3.1-8b"),
            total_bytes=2 * TOTAL,
            free_bytes=2 * TOTAL,
            utilization=0.9,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            max_model_len=8192,
            measured=rows,
        )
    )
    assert larger.stages[0].ledger.available_bytes > calibrated.stages[0].ledger.available_bytes + TOTAL // 2


def test_a_log_that_cannot_calibrate_names_the_missing_line() -> None:
    with pytest.raises(InputError, match="no line Model loading took"):
        calibrated_rows(StartupLog(available=GibFigure(text="1.00")), 10 * GIB, reserve_graph_memory=True)


def test_a_log_of_another_device_does_not_fit_its_request() -> None:
    log = read_startup_log(REAL.splitlines(), "log")
    with pytest.raises(InputError, match="total_memory and gpu_memory_utilization of that server"):
        calibrated_rows(log, 40 * GIB, reserve_graph_memory=False)


def test_the_two_lines_of_a_log_fix_the_blocks_and_the_bytes_of_one() -> None:
    found = explain_pool(GibFigure(text="41.73"), 261_648, 16, page_size_bytes=65_536)
    assert found.num_blocks == 16_353
    assert (found.low_bytes_per_block, found.high_bytes_per_block) == (2_739_506, 2_740_329)
    assert f"{found.low_bytes_per_block / (1 << 20):.3f}" == "2.613"
    assert not found.is_whole
    assert found.candidates == ()
    text = " ".join(found.sentences())
    assert "41 leave 52,530 to 53,353 bytes of every block unexplained, 42 would not fit" in text
    assert "What could" in text


def test_a_pool_of_equal_layers_is_recognised() -> None:
    per_block = 32 * 65_536
    found = explain_pool(GibFigure(text=f"{27_681 * per_block / GIB:.2f}"), 27_681 * 16, 16, page_size_bytes=65_536)
    assert found.is_whole
    assert any((stack.num_layers, stack.num_kv_heads, stack.head_size) == (32, 8, 128) for stack in found.candidates)
    assert "32 layers with pages of 65,536 B" in " ".join(found.sentences())


@given(num_layers=st.integers(1, 100), heads=st.sampled_from([1, 2, 4, 8]), num_blocks=st.integers(1000, 100_000))
def test_the_range_always_holds_the_true_block(num_layers: int, heads: int, num_blocks: int) -> None:
    per_block = num_layers * 2 * heads * 128 * 2 * 16
    available = num_blocks * per_block + per_block // 2
    found = explain_pool(GibFigure(text=f"{available / GIB:.2f}"), num_blocks * 16, 16)
    assert found.low_bytes_per_block <= per_block <= found.high_bytes_per_block


def test_tokens_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(InputError, match="no whole number of blocks of 16 tokens"):
        explain_pool(GibFigure(text="1.00"), 17, 16)


def test_stacks_lie_within_the_range() -> None:
    stacks = uniform_stacks(2_097_152, 2_097_152, 16)
    assert {stack.bytes_per_block for stack in stacks} == {2_097_152}
    assert any(stack.num_layers == 32 for stack in stacks)
