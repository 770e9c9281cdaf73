"""The same sweep on a real local Ray: the same rows, to the last byte."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent / "kvledger"
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'kvledger[cluster]'"
)
FIXED = ("--set", "workload=code", "--set", "limit=6")
LARGE = (
    *("--grid", "num-gpu-blocks-override=600,700,800,900"),
    *("--grid", "max-num-seqs=2,4,8,16,32"),
    *("--grid", "seed=0..9"),
)
SMALL = ("--grid", "num-gpu-blocks-override=600,0", "--grid", "seed=0..1")
ENVIRONMENT = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}


def sweep(*arguments: str) -> bytes:
    done = subprocess.run(
        [BIN, "sweep", *FIXED, *arguments, "--json"], capture_output=True, timeout=500, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@needs_ray
def test_a_sweep_on_a_local_ray_gives_the_rows_of_one_process() -> None:
    """One of the points in two fails."""
    on_ray = sweep(*SMALL, "--cluster", "--jobs", "2")
    assert json.loads(on_ray)["num_failed"] == 2
    assert on_ray == sweep(*SMALL)


@needs_ray
@pytest.mark.slow
def test_two_hundred_points_on_a_local_ray_and_on_two_processes_give_identical_rows(tmp_path: Path) -> None:
    """The sweep on Ray is killed half-way, and finishes the rest only."""
    folder = tmp_path / "ray"
    command = [BIN, "sweep", *FIXED, *LARGE, "--cluster", "--jobs", "2", "--keep", str(folder), "--json"]
    running = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, env=ENVIRONMENT
    )
    deadline = time.monotonic() + 300
    while len(list(folder.glob("*.json"))) < 60 and time.monotonic() < deadline and running.poll() is None:
        time.sleep(0.05)
    assert running.poll() is None, "the sweep ended before it could be killed"
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    assert 60 <= len(before) < 200
    on_ray = sweep(*LARGE, "--cluster", "--jobs", "2", "--keep", str(folder))
    after = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.json")}
    assert len(after) == 200
    assert {name: after[name] for name in before} == before
    assert json.loads(on_ray)["num_failed"] == 0
    assert on_ray == sweep(*LARGE, "--jobs", "2")
