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


def policy(flush: str, fsync: bool, first: int, every: int) -> dict[str, Any]:
    segment_bytes = 14_000 if flush == "commit" else 4_000
    return {"flush": flush, "fsync": fsync, "segment_bytes": segment_bytes, "first": first, "every": every}


def check_kills(directory: Path, history_of: Callable, policies: list[dict[str, Any]]) -> None:
    truth = history_of(seed=31, num_commands=24, pool="hybrid").log
    with DurableLog.create(directory / "truth", flush=FlushPolicy(every_commits=1000)) as log:
        for commit in truth:
            log.apply(commit)
    out = subprocess.run(
        [sys.executable, str(KILL_POINTS), str(directory), json.dumps(policies)],
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert out.returncode == 0, out.stderr
    results = [json.loads(line) for line in out.stdout.splitlines()]
    whole = [result for result in results if "point" not in result]
    assert len(whole) == len(policies)
    for result in whole:
        assert result["error"] is None
        assert result["segments"] >= 4
        assert {"open", "write", "fsync", "rename", "truncate", "unlink", "close"} <= set(result["names"])
    runs = [result for result in results if "point" in result]
    failures = [result | {"names": []} for result in runs if result["error"] is not None]
    assert not failures, f"{len(failures)} of {len(runs)}; the first: {failures[0]}"
    # The thread of a policy by time may need fewer calls than in the whole run.
    assert all(result["killed"] for result in runs if result["flush"] != "2ms")
    killed = sum(result["killed"] for result in runs)
    assert killed > 0.9 * len(runs)
    twice = sum(bool(each.get("killed_again")) for each in runs)
    print(
        f"{killed} killed, {twice} of them twice, {len(runs)} opened; {[len(each['names']) for each in whole]} calls,"
    )
    print(f"{[each['segments'] for each in whole]} segments; the first: {dict(Counter(whole[0]['names']))}")


def test_some_writers_killed_at_a_system_call_leave_what_was_promised(tmp_path: Path, history_of: Callable) -> None:
    """Also halfway through a write, and a second time while the log is resumed."""
    check_kills(tmp_path, history_of, [policy(*each, 11 * n, 67) for n, each in enumerate(POLICIES)])


@pytest.mark.slow
@pytest.mark.parametrize(("flush", "fsync"), POLICIES, ids=[f"{flush}{'-fsync' * fsync}" for flush, fsync in POLICIES])
def test_a_writer_killed_at_any_system_call_leaves_what_was_promised(
    tmp_path: Path, history_of: Callable, flush: str, fsync: bool
) -> None:
    check_kills(tmp_path, history_of, [policy(flush, fsync, 0, 1)])
