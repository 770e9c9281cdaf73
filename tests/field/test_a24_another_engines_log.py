"""A24: start-up lines of SGLang, whose GB are GiB, and of TensorRT-LLM are read like vLLM's."""

from pathlib import Path

import pytest
from kvledger.core import InputError
from kvledger.core.deployment.startup_log import StartupLog, read_startup_log
from kvledger.sim import Scenario
from kvledger.sim.scenario.plan import PlanOptions, explain_log

LOG = """\
[2025-10-07 23:17:19 DP0 TP0] KV Cache is allocated. #tokens: 975424, KV size: 43.67 GB
[2025-10-07 23:17:19 DP0 TP0] Memory pool end. avail mem=37.71 GB
"""
WHOLE = """\
[2026-03-02 08:00:01] server_args=ServerArgs(model_path='llama')
[2026-03-02 08:00:09 TP0] Load weight begin. avail mem=78.50 GB
[2026-03-02 08:00:31 TP0] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=63.40 GB, mem usage=15.10 GB.
[2026-03-02 08:00:31 TP0] KV Cache is allocated. #tokens: 431008, K size: 26.31 GB, V size: 26.31 GB
[2026-03-02 08:00:31 TP0] Memory pool end. avail mem=10.10 GB
[2026-03-02 08:00:44 TP0] Capture cuda graph end. Time elapsed: 12.1 s. mem usage=0.60 GB. avail mem=9.50 GB.
[2026-03-02 08:00:45 TP0] max_total_num_tokens=431008, chunked_prefill_size=8192
"""  # noqa: E501


def read(text: str) -> StartupLog:
    return read_startup_log(text.splitlines(), "log")


def test_a24_tokens_bytes_of_the_pool_and_what_stays_free(tmp_path: Path) -> None:
    path = tmp_path / "sglang.txt"
    path.write_text(LOG)
    scenario = Scenario(model="deepseek-v3.2", tensor_parallel_size=8, startup_log=str(path))
    found = explain_log(scenario, PlanOptions()).to_dict()
    assert (found["engine"], found["kv_cache_tokens"]) == ("SGLang", 975_424)
    assert found["kv_cache_bytes"] == int(43.67 * (1 << 30))
    assert found["free_bytes_after"] == int(37.71 * (1 << 30))
    assert found["model_candidates"][0].startswith("61 latents of 656 B and 61 keys of 132 B")
    assert "its GB are GiB" in found["sentences"][0]


def test_a24_keys_and_values_that_are_printed_apart_are_summed() -> None:
    log = read(WHOLE)
    assert log.available is not None and log.available.text == "52.62"
    low, high = log.available.range_bytes
    assert high - low == pytest.approx(0.02 * (1 << 30), abs=2)  # each of the two figures was rounded
    assert log.weights is not None and log.weights.text == "15.10"
    assert log.graphs is not None and log.graphs.text == "0.60"
    assert log.free_after is not None and log.free_after.text == "10.10"


def test_a24_a_whole_log_calibrates_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "sglang.txt"
    path.write_text(WHOLE)
    plan = Scenario(model="llama-3.1-8b", gpu="H100", mem_fraction_static=0.875, startup_log=str(path)).plan()
    low, high = plan.plan.blocks_range
    assert low <= 431_008 // 16 <= high


def test_a24_a_drafters_pool_is_part_of_the_pool() -> None:
    drafter = (
        "[2026-03-02 08:00:33 TP0] Load weight begin. avail mem=10.10 GB\n"
        "[2026-03-02 08:00:34 TP0] KV Cache is allocated. #tokens: 431008, K size: 0.82 GB, V size: 0.82 GB"
    )
    lines = WHOLE.splitlines()
    log = read("\n".join([*lines[:5], drafter, *lines[5:]]))
    assert log.available is not None and log.available.text == "54.26"
    assert log.warnings == ()


def test_a24_two_starts_are_two_starts() -> None:
    log = read(WHOLE.replace("431008", "9000").replace("26.31", "0.55") + WHOLE)
    assert log.kv_cache_tokens == 431_008
    assert "2 starts that differ" in log.warnings[0]


def test_a24_of_several_ranks_the_tightest_counts() -> None:
    log = read(LOG + LOG.replace("TP0", "TP1").replace("43.67", "43.60"))
    assert log.available is not None and log.available.text == "43.60"


def test_a24_a_log_without_weights_calibrates_nothing_and_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "sglang.txt"
    path.write_text(LOG)
    with pytest.raises(InputError, match="no line Load weight end"):
        Scenario(model="deepseek-v3.2", gpu="H200", tensor_parallel_size=8, startup_log=str(path)).plan()


TENSORRT = """\
[12/20/2025-04:20:21] [TRT-LLM] [I] Use 63.32 GB for model weights.
[TensorRT-LLM][INFO] Number of tokens per block: 32.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 0.56 GiB for max tokens in paged KV cache (8224).
[12/20/2025-04:21:50] [TRT-LLM] [I] Memory used after loading model weights (inside torch) in memory usage profiling: 63.52 GiB
[12/20/2025-04:21:51] [TRT-LLM] [I] Memory dynamically allocated during inference (inside torch) in memory usage profiling: 0.85 GiB
[12/20/2025-04:21:51] [TRT-LLM] [I] Memory used outside torch (e.g., NCCL and CUDA graphs) in memory usage profiling: 49.28 GiB
[12/20/2025-04:21:51] [TRT-LLM] [I] Peak memory during memory usage profiling (torch + non-torch): 113.65 GiB, available KV cache memory when calculating max tokens: 5.95 GiB, fraction is set 0.9, kv size is 73728. device total memory 119.70 GiB, , tmp kv_mem 0.56 GiB
[TensorRT-LLM][INFO] Number of tokens per block: 32.
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 5.95 GiB for max tokens in paged KV cache (86720).
[12/20/2025-04:21:57] [TRT-LLM] [I] Setting PyTorch memory fraction to 0.598 (71.62 GiB)
"""  # noqa: E501


def test_a24_the_pool_of_tensorrt_llm_is_the_one_behind_its_measurement(tmp_path: Path) -> None:
    path = tmp_path / "tensorrt.txt"
    path.write_text(TENSORRT)
    found = explain_log(Scenario(model="gpt-oss-120b", startup_log=str(path)), PlanOptions()).to_dict()
    assert (found["engine"], found["kv_cache_tokens"], found["block_size"]) == ("TensorRT-LLM", 86_720, 32)
    # The log says 73,728 B a token: all 36 layers, as if none had a window.
    low, high = found["bytes_per_block_range"]
    assert low <= 32 * 73_728 <= high
    log = read(TENSORRT)
    figures = (log.weights, log.activation, log.non_torch, log.total)
    assert [figure.text for figure in figures if figure is not None] == ["63.52", "0.85", "49.28", "119.70"]


def test_a24_two_starts_of_tensorrt_llm_are_two_starts() -> None:
    log = read(TENSORRT.replace("5.95", "4.12").replace("86720", "60032") + TENSORRT)
    assert log.kv_cache_tokens == 86_720
    assert "2 starts that differ" in log.warnings[0]


def test_a24_a_log_of_tensorrt_llm_calibrates_no_plan_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "tensorrt.txt"
    path.write_text(TENSORRT)
    with pytest.raises(InputError, match="a plan is not calibrated by a log of TensorRT-LLM"):
        Scenario(model="gpt-oss-120b", gpu="H200", startup_log=str(path)).plan()
