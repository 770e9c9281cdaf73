"""The same sweep on a real local Ray: the same rows, to the last byte."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent / "kvledger"
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'kvledger[cluster]'"
)
QUESTION = (
    *("--set", "workload=code", "--set", "limit=6"),
    *("--grid", "num-gpu-blocks-override=600,700,800,900", "--grid", "max-num-seqs=2,4,8,16,32", "--grid", "seed=0..9"),
)


def sweep(*arguments: str) -> bytes:
    done = subprocess.run(
        [BIN, "sweep", *QUESTION, *arguments, "--json"],
        capture_output=True,
        timeout=400,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"},
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@needs_ray
@pytest.mark.slow
def test_two_hundred_points_on_a_local_ray_and_on_two_processes_give_identical_rows(tmp_path: Path) -> None:
    on_ray = sweep("--cluster", "--jobs", "2", "--keep", str(tmp_path))
    assert len(list(tmp_path.glob("*.json"))) == 200
    assert on_ray == sweep("--jobs", "2")
