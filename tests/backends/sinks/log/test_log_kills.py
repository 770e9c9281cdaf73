"""kill -9 between any two system calls of a log's writer: the log opens, holds what was promised, and goes on."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvledger.backends.sinks.log.durable_log import DurableLog
from kvledger.backends.sinks.log.flush_policy import FlushPolicy

KILL_POINTS = Path(__file__).with_name("kill_points.py")
POLICIES = [(flush, fsync) for flush in ("commit", "5commits", "2ms") for fsync in (False, True)]


def run_cases(directory: Path, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (directory / "cases.json").write_text(json.dumps(cases))
    out = subprocess.run(
        [sys.executable, str(KILL_POINTS), str(directory), str(directory / "cases.json")],
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert out.returncode == 0, out.stderr
    results = [json.loads(line) for line in out.stdout.splitlines()]
    assert len(results) == len(cases)
    return results


@pytest.mark.parametrize("every", [97, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize(("flush", "fsync"), POLICIES, ids=[f"{flush}{'-fsync' * fsync}" for flush, fsync in POLICIES])
def test_a_writer_killed_at_any_system_call_leaves_what_was_promised(
    tmp_path: Path, history_of: Callable, flush: str, fsync: bool, every: int
) -> None:
    """Also halfway through a write, and a second time while the log is resumed."""
    truth = history_of(seed=31, num_commands=36, pool="hybrid").log
    with DurableLog.create(tmp_path / "truth", flush=FlushPolicy(every_commits=1000)) as log:
        for commit in truth:
            log.apply(commit)
    policy = {"flush": flush, "fsync": fsync, "segment_bytes": 14_000 if flush == "commit" else 5_000}
    (whole,) = run_cases(tmp_path, [policy])
    assert whole["error"] is None
    assert whole["segments"] >= 4
    names = whole["names"]
    assert {"open", "write", "fsync", "rename", "truncate", "unlink", "close"} <= set(names)
    first = POLICIES.index((flush, fsync)) * 17 % every
    cases: list[dict[str, Any]] = [
        {**policy, "point": point, "half": half, "again": 60 if (point + half) % 5 == 0 else None}
        for point in range(first, len(names), every)
        # Parquet files are hundreds of writes in a row; every fourth of those is also done by half.
        for half in (
            [False, True] if names[point] == "write" and (names[point - 1] != "write" or point % 4 == 0) else [False]
        )
    ]
    results = run_cases(tmp_path, cases)
    failures = [result for result in results if result["error"] is not None]
    assert not failures, f"{len(failures)} of {len(results)}; the first: {failures[0] | {'names': []}}"
    # The thread of a policy by time may take fewer calls than in the whole run.
    killed = sum(result["killed"] for result in results)
    assert killed == len(results) if flush != "2ms" else killed > 0.8 * len(results)
    print(f"{flush} fsync={fsync}: {killed} killed, {sum(bool(each.get('killed_again')) for each in results)} twice,")
    print(f"{len(results)} opened; {len(names)} calls {dict(Counter(names))}; {whole['segments']} segments")
