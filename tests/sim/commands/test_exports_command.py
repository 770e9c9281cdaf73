"""The files of `kvledger replay` from the outside."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families

BIN = Path(sys.executable).parent / "kvledger"
RUN = ("--workload", "conversation", "--limit", "60", "--num-gpu-blocks-override", "4000")


def kvledger(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN, "replay", *arguments], capture_output=True, text=True, timeout=120, cwd=folder)


def test_one_run_leaves_every_file_and_all_of_them_agree_with_its_json(tmp_path: Path) -> None:
    files = ("--requests-out", "r.parquet", "--series-out", "s.csv", "--prometheus-out", "p", "--perfetto-out", "t.gz")
    done = kvledger(tmp_path, *RUN, *files, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "r.parquet", "s.csv", "t.gz"]
    requests = pq.read_table(tmp_path / "r.parquet").to_pylist()
    assert len(requests) == report["requests"]["finished"] == 60 - report["requests"]["rejected"]
    assert sum(row["num_cached_tokens"] for row in requests) == report["prefix_cache"]["hits_tokens"]
    assert sum(row["num_prompt_tokens"] for row in requests) == report["prefix_cache"]["queries_tokens"]
    assert sum(row["num_preemptions"] for row in requests) == report["preemptions"]["total"]
    for name in ("ttft_s", "e2e_s", "tpot_s"):
        values = [row[name] for row in requests if row[name] is not None]
        assert len(values) == report[name]["count"]
        assert sum(values) / len(values) == pytest.approx(report[name]["mean"])
        assert max(values) == report[name]["max"]
    families = {family.name: family for family in text_string_to_metric_families((tmp_path / "p").read_text())}
    assert families["vllm:request_success"].samples[1].value == len(requests)
    assert {sample.labels["model_name"] for sample in families["vllm:prompt_tokens"].samples} == {"simulated"}
    events = json.loads(gzip.decompress((tmp_path / "t.gz").read_bytes()))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == report["steps"]


def test_a_model_names_the_series_and_its_cache(tmp_path: Path) -> None:
    model = ("--model", "llama-3.1-8b", "--gpu", "H100", "--kv-cache-dtype", "fp8")
    done = kvledger(tmp_path, "--workload", "conversation", "--limit", "5", *model, "--prometheus-out", "p", "--json")
    assert done.returncode == 0, done.stderr
    assumptions = json.loads(done.stdout)["assumptions"]
    families = {family.name: family for family in text_string_to_metric_families((tmp_path / "p").read_text())}
    labels = families["vllm:cache_config_info"].samples[0].labels
    assert labels["num_gpu_blocks"] == str(assumptions["num_blocks"])
    assert labels["cache_dtype"] == assumptions["kv_cache_dtype"]
    assert labels["gpu_memory_utilization"] == "0.92"
    assert families["vllm:kv_cache_usage_perc"].samples[0].labels["model_name"] == "llama-3.1-8b"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*RUN, "--requests-out", "r.txt"), "--requests-out r.txt: the name must end in .csv, .jsonl or .parquet"),
        ((*RUN, "--perfetto-out", "no/t.json"), "create it first"),
        (("in.jsonl", *RUN[4:], "--requests-out", "in.jsonl"), "is an input of this run; give another file"),
    ],
)
def test_a_place_that_cannot_be_written_exits_with_2_before_the_replay(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    trace = '{"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": [1]}\n'
    (tmp_path / "in.jsonl").write_text(trace)
    done = kvledger(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    assert (tmp_path / "in.jsonl").read_text() == trace
