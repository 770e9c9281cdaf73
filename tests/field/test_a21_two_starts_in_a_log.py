"""A21: a log of a service that was restarted holds two starts, and the last complete one counts."""

from pathlib import Path
from typing import Any

import pytest
from kvledger.core.deployment.startup_log import StartupLog, read_startup_log
from kvledger.sim import Scenario

LOG = """\
INFO 09-01 10:00:00 [gpu_model_runner.py:2653] Model loading took 14.99 GiB and 12.1 seconds
INFO 09-01 10:00:20 [gpu_worker.py:298] Available KV cache memory: 20.50 GiB
INFO 09-01 10:00:21 [kv_cache_utils.py:1291] GPU KV cache size: 167,936 tokens
INFO 09-01 10:00:40 [gpu_model_runner.py:3480] Graph capturing finished in 15 secs, took 0.60 GiB
systemd[1]: llm.service: Scheduled restart job, restart counter is at 1.
INFO 09-01 11:00:00 [gpu_model_runner.py:2653] Model loading took 14.99 GiB and 3.1 seconds
INFO 09-01 11:00:20 [gpu_worker.py:298] Available KV cache memory: 52.10 GiB
INFO 09-01 11:00:21 [kv_cache_utils.py:1291] GPU KV cache size: 426,800 tokens
INFO 09-01 11:00:40 [gpu_model_runner.py:3480] Graph capturing finished in 15 secs, took 0.60 GiB
"""
FIRST, SECOND = LOG.splitlines()[:4], LOG.splitlines()[5:]


def read(*lines: str) -> StartupLog:
    return read_startup_log(lines, "log")


def figures(log: StartupLog) -> tuple[Any, ...]:
    assert log.available is not None
    return log.available.text, log.kv_cache_tokens


def test_a21_the_last_start_sizes_the_plan_and_a_warning_names_both(tmp_path: Path) -> None:
    path = tmp_path / "journal.txt"
    path.write_text(LOG)
    scenario = Scenario(model="llama-3.1-8b", gpu="H100", startup_log=str(path), gpu_memory_utilization=0.9)
    document = scenario.plan().to_dict()
    assert document["num_gpu_blocks"] == 26_675
    assert document["bytes_per_block"] == 2 << 20
    (other,) = [row["bytes"] for row in document["ledger"] if row["name"] == "peak activation and other"]
    assert other < 4 << 30  # the least of 20.50 and 52.10 GiB would leave 35 GiB
    (said,) = [warning for warning in document["warnings"] if "starts" in warning]
    assert "2 starts that differ" in said and "20.50, 52.10" in said and "167,936, 426,800" in said


def test_a21_the_service_managers_line_is_not_needed() -> None:
    log = read(*FIRST, *SECOND)
    assert figures(log) == ("52.10", 426_800)
    assert len(log.warnings) == 1


def test_a21_two_lines_of_each_start_are_enough() -> None:
    assert figures(read(*FIRST[1:3], *SECOND[1:3])) == ("52.10", 426_800)


def test_a21_a_last_start_that_came_to_no_pool_does_not_count() -> None:
    log = read(*FIRST, *SECOND[:1])
    assert figures(log) == ("20.50", 167_936)
    assert "number 1 counts, the last that came to a pool" in log.warnings[0]


def test_a21_a_start_that_was_repeated_without_a_change_needs_no_warning() -> None:
    assert read(*SECOND, *SECOND).warnings == ()


def test_a21_ranks_of_one_start_are_no_starts() -> None:
    lines = [
        f"(Worker_TP{rank} pid=1{rank}) INFO Model loading took 14.9{rank} GiB memory and 3 seconds" for rank in (0, 1)
    ] + [f"(Worker_TP{rank} pid=1{rank}) INFO Available KV cache memory: 50.1{rank} GiB" for rank in (1, 0)]
    log = read(*lines, *SECOND[2:])
    assert figures(log) == ("50.10", 426_800)
    assert log.weights is not None and log.weights.text == "14.91"
    assert log.warnings == ()


def test_a21_engines_that_start_side_by_side_are_no_starts_either() -> None:
    starts = [[f"(EngineCore_DP{rank} pid=9) {line}" for line in SECOND] for rank in (0, 1)]
    assert read(*starts[0], *starts[1]).warnings == ()
    again = [f"(EngineCore_DP1 pid=10) {line}" for line in FIRST]
    log = read(*starts[0], *starts[1], *again)
    assert figures(log) == ("20.50", 167_936)  # the tightest engine
    assert len(log.warnings) == 1


@pytest.mark.parametrize("marker", ["vLLM API server version 0.32.0", "Initializing a V1 LLM engine (v0.32.0)"])
def test_a21_a_start_that_failed_before_its_pool_ends_with_the_next_marker(marker: str) -> None:
    failed = "INFO Model loading took 71.10 GiB memory and 3 seconds"
    log = read(marker, failed, marker, *SECOND)
    assert log.weights is not None and log.weights.text == "14.99"
