"""Every example runs as it is and prints what it promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PRINTED = {
    "allocator_under_test.py": ["trial.do(Free(", "conservation"],
    "capacity_study.py": ["<PlanResult: fits,", "block_hit_rate", "at twice the traffic"],
    "printing_backend.py": ["0 PoolCreated", "BlocksAllocated", "2 requests in"],
    "two_queues.py": [],
}


def test_every_example_is_tried() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for text in PRINTED[name]:
        assert text in done.stdout
