"""vLLM 0.32 itself with our manager, with our recorder and with both managers; needs an interpreter that has it.

`make test-vllm` builds one and runs these tests; KVLEDGER_VLLM_PYTHON names one that is there.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from kvledger.backends.sinks.log.reader import LogReader
from kvledger.sim.logs.engine_rerun import run_engine_again
from kvledger.sim.logs.verification import verify_log

from tests.backends.vllm.recorded_facts import drive, environment
from tests.parity.scheduler_workloads import KINDS, make_workload
from tests.parity.test_schedules import HAS_VLLM, steps_of_vllm

HERE = Path(__file__).parent
INTERPRETER = os.environ.get("KVLEDGER_VLLM_PYTHON", "")
# Runs of each kind, from this seed on.
RUNS = range(int(os.environ.get("KVLEDGER_PARITY_SEED", "0")), int(os.environ.get("KVLEDGER_PARITY_RUNS", "2")))
LLM_REQUESTS = int(os.environ.get("KVLEDGER_LLM_REQUESTS", "40"))
WITH_EVENTS = {"kv_events": True}


@pytest.fixture(scope="module")
def interpreter() -> str:
    if not INTERPRETER:
        pytest.skip("KVLEDGER_VLLM_PYTHON names no interpreter that has vLLM: `make test-vllm` sets it")
    if subprocess.run([INTERPRETER, "-c", HAS_VLLM], check=False).returncode:
        pytest.skip(f"{INTERPRETER} has no vLLM")
    return INTERPRETER


def workloads_of(kind: str, **settings: Any) -> list[dict[str, Any]]:
    workloads = [make_workload(kind, seed) for seed in RUNS]
    return [each | {"config": each["config"] | settings} for each in workloads]


def served(interpreter: str, model: str, manager: str, *options: str, record: Path | None = None) -> dict[str, Any]:
    command = [interpreter, str(HERE / "serve_requests.py"), model, manager, "--requests", str(LLM_REQUESTS), *options]
    given = environment() | ({} if record is None else {"KVLEDGER_RECORD": str(record)})
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=given)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", KINDS)
def test_our_manager_makes_every_step_of_vllms_scheduler_what_its_own_makes_it(kind: str, interpreter: str) -> None:
    workloads = workloads_of(kind)
    assert drive(interpreter, ["ledger"], workloads) == steps_of_vllm(interpreter, workloads)


@pytest.mark.parametrize("kind", KINDS)
def test_both_managers_answer_every_call_alike_with_the_same_kv_events(kind: str, interpreter: str) -> None:
    for found in drive(interpreter, ["shadow"], workloads_of(kind, **WITH_EVENTS)):
        assert found["found"] is None
        assert found["calls"] > 100
        assert found["checks"] > 1
        assert found["kv_events"] > 10 or kind == "no-caching"


def test_a_manager_that_answers_otherwise_is_reported_with_the_state_around_it(interpreter: str) -> None:
    (found,) = drive(interpreter, ["shadow-without-keys"], workloads_of("plain")[:1])
    assert "vLLM's manager answers" in found["found"]
    assert "free blocks" in found["found"]
    assert "calls before" in found["found"]


@pytest.mark.parametrize("kind", KINDS)
def test_recordings_change_no_decision_verify_and_are_decided_again(kind: str, interpreter: str, tmp_path) -> None:
    workloads = workloads_of(kind)
    assert drive(interpreter, ["recorded", str(tmp_path)], workloads) == steps_of_vllm(interpreter, workloads)
    for workload in workloads:
        reader = LogReader(tmp_path / f"{kind}-{workload['seed']}")
        assert verify_log(reader).fault is None
        if kind not in ("ngram", "eagle"):
            assert run_engine_again(reader).divergence is None


@pytest.mark.parametrize(
    ("model", "options"),
    [("llama", ()), ("llama", ("--drafts", "3")), ("mistral", ()), ("gemma2", ()), ("gemma3", ("--blocks", "90"))],
)
def test_an_engine_generates_the_same_tokens_by_the_same_steps(model: str, options: Any, interpreter: str) -> None:
    own, ours = (served(interpreter, model, manager, *options) for manager in ("own", "ledger"))
    assert len(own["tokens"]) + len(own["aborted"]) == LLM_REQUESTS
    assert ours == own


def test_an_engine_whose_writer_was_killed_serves_on_and_ends(interpreter: str, tmp_path) -> None:
    workloads = workloads_of("plain")
    assert drive(interpreter, ["recorded-to-the-dead", str(tmp_path)], workloads) == steps_of_vllm(
        interpreter, workloads
    )


@pytest.mark.parametrize("manager", ["ledger", "shadow"])
def test_a_recording_of_another_manager_is_refused_before_it_starts(manager: str, interpreter: str, tmp_path) -> None:
    command = [interpreter, str(HERE / "serve_requests.py"), "llama", manager, "--requests", "2"]
    given = environment() | {"KVLEDGER_RECORD": str(tmp_path / "none")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=given)
    assert done.returncode != 0
    assert "unset KVLEDGER_RECORD, or leave out --scheduler-cls" in done.stdout + done.stderr
    assert not (tmp_path / "none").exists()


def test_an_engine_is_recorded_by_an_environment_variable(interpreter: str, tmp_path) -> None:
    own = served(interpreter, "gemma2", "own")
    assert served(interpreter, "gemma2", "own", record=tmp_path) == own
    (directory,) = tmp_path.iterdir()
    reader = LogReader(directory)
    assert verify_log(reader).fault is None
    assert list(reader.state().pool.free_queue.order()) == own["free_queue"]


def test_another_eviction_policy_serves_all_requests_by_other_steps(interpreter: str) -> None:
    own, other = served(interpreter, "llama", "own"), served(interpreter, "llama", "ledger", "--eviction", "s3fifo")
    assert other["steps"] != own["steps"]
    assert {name: list(map(len, outputs)) for name, outputs in other["tokens"].items()} == {
        name: list(map(len, outputs)) for name, outputs in own["tokens"].items()
    }


def test_a_killed_engine_leaves_a_log_that_verifies(interpreter: str, tmp_path) -> None:
    command = [interpreter, str(HERE / "kill_recorded.py"), str(tmp_path), os.environ.get("KVLEDGER_KILLS", "6")]
    workload = json.dumps(make_workload("priority", 0))
    done = subprocess.run(command, input=workload, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    logs = [path.parent for path in tmp_path.glob("*/*/manifest.json")]
    assert len(logs) >= len(done.stdout.splitlines())
    for log in logs:
        assert verify_log(LogReader(log)).fault is None
