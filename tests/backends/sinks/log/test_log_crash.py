"""kill -9 at every step of writing a log, and at random times: what was flushed is there, and the log goes on."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvledger.backends.sinks.log.durable_log import DurableLog
from kvledger.backends.sinks.log.flush_policy import FlushPolicy

CAMPAIGN = Path(__file__).with_name("crash_campaign.py")
OPERATIONS = range(150)


def run_campaign(directory: Path, history_of: Callable, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    truth = history_of(seed=31, num_commands=90, pool="hybrid").log
    with DurableLog.create(directory / "truth", flush=FlushPolicy(every_commits=1000)) as log:
        for commit in truth:
            log.apply(commit)
    (directory / "cases.json").write_text(json.dumps(cases))
    out = subprocess.run(
        [sys.executable, str(CAMPAIGN), str(directory), str(directory / "cases.json")],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.returncode == 0, out.stderr
    return [json.loads(line) for line in out.stdout.splitlines()]


def check(results: list[dict[str, Any]], num_cases: int) -> None:
    assert len(results) == num_cases
    for result in results:
        assert result["is_prefix"], result
        assert result["recovered"] >= result["flushed"], result
        assert result["goes_on"], result
        assert result["kept"] == [], result


@pytest.mark.parametrize(
    "operations", [OPERATIONS[::3], pytest.param(OPERATIONS, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_writer_killed_at_any_operation_leaves_whole_commits(
    tmp_path: Path, history_of: Callable, operations: range
) -> None:
    """At a write (which is cut short), sync, rename, removal or truncation, closing of segments included."""
    cases = [
        {"name": f"operation {n}", "operation": n, "every_commits": 1, "segment_bytes": 25_000} for n in operations
    ]
    results = run_campaign(tmp_path, history_of, cases)
    check(results, len(cases))
    assert all(result["killed"] for result in results)
    assert len({result["recovered"] for result in results}) > len(cases) // 4
    assert sum(result["torn"] for result in results) > len(cases) // 4


@pytest.mark.parametrize("num_runs", [10, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", [{"every_commits": 1}, {"every_commits": 8}, {"every_ms": 2}], ids=str)
def test_a_writer_killed_at_a_random_time_loses_what_was_not_flushed_at_most(
    tmp_path: Path, history_of: Callable, policy: dict[str, Any], num_runs: int
) -> None:
    chance = random.Random(str(policy))
    cases = [
        {"name": f"run {n}", "after_ms": chance.uniform(1, 90), "pause_us": 500, "segment_bytes": 25_000, **policy}
        for n in range(num_runs)
    ]
    results = run_campaign(tmp_path, history_of, cases)
    check(results, len(cases))
    assert any(result["killed"] and result["recovered"] for result in results)
