"""Facts that our recorder sent from vLLM 0.32: golden files, and how they were made.

    KVLEDGER_VLLM_PYTHON=... python -m tests.backends.vllm.recorded_facts

records them anew. Keys are numbered, because hashes are long and their values do not matter.
"""

import gzip
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.parity.golden import golden_dir
from tests.parity.scheduler_workloads import make_workload

DRIVER = Path(__file__).with_name("drive_scheduler.py")
# Of each kind a run with many preemptions.
KINDS = {"plain": 7, "priority": 44, "hybrid-3": 38, "states": 57, "async": 52, "ngram": 11}


def recorded_facts() -> list[dict[str, Any]]:
    """Each recording: its workload, the messages of facts, and vLLM's free queue at the end."""
    recordings: list[dict[str, Any]] = []
    for path in sorted((golden_dir() / "vllm").glob("*.json.gz")):
        with gzip.open(path, "rt") as lines:
            recordings.append(json.load(lines))
    return recordings


def keys_restored(value: Any) -> Any:
    """Facts as they were sent: keys as bytes, None and lists as they are, counts by request as a dict."""
    if isinstance(value, dict):
        return b"%d" % value["key"] if "key" in value else {name: keys_restored(each) for name, each in value.items()}
    return [keys_restored(each) for each in value] if isinstance(value, list) else value


def _numbered(value: Any, numbers: dict[str, int]) -> Any:
    if isinstance(value, dict):
        if "key" in value:
            return {"key": numbers.setdefault(value["key"], len(numbers))}
        return {name: _numbered(each, numbers) for name, each in value.items()}
    return [_numbered(each, numbers) for each in value] if isinstance(value, list) else value


def drive(interpreter: str, mode: list[str], workloads: list[dict[str, Any]]) -> list[Any]:
    """Run vLLM's scheduler over workloads in a process of its own; see drive_scheduler.py."""
    lines = "".join(json.dumps(workload) + "\n" for workload in workloads)
    command = [interpreter, str(DRIVER), *mode]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line[:1] in "[{"]


def environment() -> dict[str, str]:
    """The environment of a process of another interpreter that imports this checkout."""
    root = Path(__file__).parents[3]
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "tests" / "bare"), str(root)])}


def record(interpreter: str) -> None:
    """Record the golden files."""
    golden = golden_dir() / "vllm"
    golden.mkdir(exist_ok=True)
    workloads = [make_workload(kind, seed, num_requests=10) for kind, seed in KINDS.items()]
    with tempfile.TemporaryDirectory() as directory:
        drive(interpreter, ["recorded", directory], workloads)
        for workload in workloads:
            name = f"{workload['kind']}-{workload['seed']}"
            sent = json.loads(Path(directory, f"{name}.json").read_text())
            document = {"workload": workload, **_numbered(sent, {})}
            with gzip.GzipFile(golden / f"{workload['kind']}.json.gz", "wb", mtime=0) as out:
                out.write(json.dumps(document, separators=(",", ":")).encode())


if __name__ == "__main__":
    record(os.environ["KVLEDGER_VLLM_PYTHON"])
