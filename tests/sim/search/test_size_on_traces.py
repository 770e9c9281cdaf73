"""Sizing on public traces: the answer keeps the SLO and one replica less does not; a promise that nobody can keep."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent / "kvledger"
TRACES = os.environ.get("KVLEDGER_TRACES")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(TRACES is None, reason="KVLEDGER_TRACES names no directory of public traces"),
]
MODEL = ("--model", "llama-3.1-70b", "--gpu", "H100", "--block-size", "64")
CONVERSATION = "mooncake/conversation_trace.jsonl.gz"
QUESTIONS = {
    "conversation": (CONVERSATION, "--limit", "2500", "--slo-ttft-p99", "12", "--slo-tpot-p99", "0.3"),
    "code": ("azure/AzureLLMInferenceTrace_code.csv.gz", "--limit", "2500", "--slo-ttft-p99", "1"),
    "agentic": ("agentic", "--slo-goodput", "0.8", "--slo-ttft", "5", "--slo-tpot", "0.05"),
}


def size(trace: str, *arguments: str, code: int = 0) -> dict:
    path = Path(TRACES or "") / trace
    if not path.exists():
        pytest.skip(f"{trace} is not in the directory of traces")
    done = subprocess.run(
        [BIN, "size", str(path), *arguments, *MODEL, "--json"], capture_output=True, text=True, timeout=580
    )
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_the_answer_keeps_the_slo_and_one_replica_less_does_not(question: tuple[str, ...]) -> None:
    document = size(*question, "--tensor-parallel-sizes", "4")
    replicas = document["answer"]["replicas"]
    assert document["answer"]["gpus"] == 4 * replicas > 4
    trials = {trial["value"]: trial for trial in document["shapes"][0]["searches"][0]["trials"]}
    assert trials[replicas]["met"]
    assert not trials[replicas - 1]["met"]
    for count in (replicas, replicas - 1):
        assert trials[count]["requests"]["total"] == document["trace"]["num_requests"]
        assert all(figure["value"] is not None for figure in trials[count]["slo"].values())


def test_prompts_that_no_gpu_of_the_shape_computes_in_time_make_the_answer_no() -> None:
    document = size(CONVERSATION, "--limit", "2500", "--slo-ttft-p99", "2", code=1)
    assert document["answer"] is None
    shapes = {shape["tensor_parallel_size"]: shape for shape in document["shapes"]}
    assert "GiB" in shapes[1]["reason"]
    reason = "no number of replicas helps; each request alone on an idle engine gives p99 TTFT "
    assert shapes[8]["reason"].startswith(reason)
    assert shapes[8]["idle"]["ttft_p99_s"]["value"] > 2
    assert document["assumptions"]["latency_model"].startswith("roofline")
    instead = document["instead"]
    replicas = instead["answer"]["replicas"]
    best = next(one for one in instead["shapes"] if one["replicas"] == replicas)
    trials = {trial["value"]: trial for trial in best["searches"][0]["trials"]}
    assert trials[replicas]["slo"]["goodput_share"]["value"] >= instead["slo"]["goodput_share"]
    assert not trials[replicas - 1]["met"]
