"""Our scheduler decides what vLLM 0.32's does: every step of random workloads, block tables and free queue included.

The recorded runs were made by `python tests/parity/test_schedules.py` where vLLM is installed. `make parity` also runs
N new workloads of each kind through both, if KVLEDGER_VLLM_PYTHON names an interpreter that has vLLM.
"""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parity.golden import golden_dir
from tests.parity.scheduler_runs import Run, Step, first_difference
from tests.parity.scheduler_workloads import KINDS, Workload, make_workload

RECORDER = Path(__file__).with_name("record_schedules.py")
HAS_VLLM = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"


def recorded_runs() -> list[dict[str, Any]]:
    """Each recorded run: its workload and vLLM's steps."""
    runs: list[dict[str, Any]] = []
    for path in sorted((golden_dir() / "scheduler").glob("*.jsonl.gz")):
        with gzip.open(path, "rt") as lines:
            runs += [json.loads(line) for line in lines]
    return runs


def steps_of_vllm(interpreter: str, workloads: list[Workload]) -> list[list[Step]]:
    """Run vLLM's scheduler over workloads, in a process of its own."""
    lines = "".join(json.dumps(workload) + "\n" for workload in workloads)
    done = subprocess.run([interpreter, str(RECORDER)], input=lines, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def name_of(run: dict[str, Any]) -> str:
    return f"{run['workload']['kind']}-{run['workload']['seed']}"


@pytest.mark.parametrize("run", recorded_runs(), ids=name_of)
def test_schedules_are_those_of_a_recorded_run(run) -> None:
    assert first_difference(Run(run["workload"]).run(), run["steps"]) is None


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_are_those_of_the_vllm_installed_here(kind) -> None:
    interpreter = os.environ.get("KVLEDGER_VLLM_PYTHON", "")
    if not interpreter:
        pytest.skip("KVLEDGER_VLLM_PYTHON names no interpreter that has vLLM: `make parity` sets it")
    if subprocess.run([interpreter, "-c", HAS_VLLM], check=False).returncode:
        pytest.skip(f"{interpreter} has no vLLM, so only recorded runs are compared")
    first, count = int(os.environ.get("KVLEDGER_PARITY_SEED", "0")), int(os.environ.get("KVLEDGER_PARITY_RUNS", "5"))
    workloads = [make_workload(kind, seed) for seed in range(first, first + count)]
    theirs = steps_of_vllm(interpreter, workloads)
    differences = {
        workload["seed"]: first_difference(Run(workload).run(), steps)
        for workload, steps in zip(workloads, theirs, strict=True)
    }
    assert {seed: difference for seed, difference in differences.items() if difference} == {}


def record(interpreter: str, directory: Path, seeds: range = range(100, 130), keep: int = 2) -> None:
    """Record, of each kind, the runs with the most preemptions."""
    directory.mkdir(exist_ok=True)
    for kind in KINDS:
        workloads = [make_workload(kind, seed, num_requests=12) for seed in seeds]
        runs = list(zip(workloads, steps_of_vllm(interpreter, workloads), strict=True))
        runs.sort(key=lambda run: sum(len(step["preempted"]) for step in run[1]), reverse=True)
        with gzip.GzipFile(directory / f"{kind}.jsonl.gz", "wb", mtime=0) as out:
            for workload, steps in runs[:keep]:
                line = json.dumps({"workload": workload, "steps": steps}, separators=(",", ":"))
                out.write(line.encode() + b"\n")


if __name__ == "__main__":
    record(os.environ.get("KVLEDGER_VLLM_PYTHON", sys.executable), golden_dir() / "scheduler")
