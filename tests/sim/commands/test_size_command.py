"""`kvledger size`: the answer meets the SLO and one replica less does not, on three workloads."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kvledger.sim.report.size import print_size

BIN = Path(sys.executable).parent / "kvledger"
POOL = ("--num-gpu-blocks-override", "3000", "--block-size", "64", "--max-num-seqs", "32")
CODE = ("--workload", "code", "--limit", "150", "--rate-scale", "15")
SHAREGPT = ("--workload", "sharegpt", "--limit", "250", "--rate-scale", "12")


def kvledger(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN, *arguments], capture_output=True, text=True, timeout=300)


def size(*arguments: str, code: int = 0) -> dict:
    done = kvledger("size", *arguments, "--json")
    assert done.returncode == code, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "question",
    [
        ("--workload", "conversation", "--limit", "120", "--rate-scale", "4", "--slo-ttft-p99", "4"),
        (*SHAREGPT, "--slo-ttft-p99", "0.1", "--slo-tpot-p99", "0.012"),
        (*CODE, "--slo-goodput", "0.98", "--slo-ttft", "0.3", "--slo-tpot", "0.02"),
    ],
    ids=["conversation", "sharegpt", "code"],
)
def test_the_answer_meets_the_slo_and_one_replica_less_does_not(question: tuple[str, ...]) -> None:
    document = size(*question, *POOL)
    replicas = document["answer"]["replicas"]
    assert replicas > 1
    (shape,) = document["shapes"]
    (search,) = shape["searches"]
    trials = {trial["value"]: trial for trial in search["trials"]}
    assert trials[replicas]["met"]
    assert not trials[replicas - 1]["met"]
    assert replicas + 1 in trials
    for count in (replicas, replicas - 1):  # both sides of the bracket are full replays
        assert trials[count]["requests"]["finished"] == document["trace"]["num_requests"]
        figures = trials[count]["slo"].values()
        assert all(figure["value"] is not None for figure in figures)
        assert trials[count]["met"] == all(figure["met"] for figure in figures)


def test_several_seeds_give_an_interval_and_the_answer_of_the_worst() -> None:
    document = size(*CODE, *POOL, "--slo-ttft-p99", "0.4", "--seeds", "3")
    (shape,) = document["shapes"]
    answers = [search["replicas"] for search in shape["searches"]]
    assert [search["seed"] for search in shape["searches"]] == [0, 1, 2]
    assert shape["replicas"] == document["answer"]["replicas"] == max(answers)
    interval = shape["replicas_over_seeds"]
    assert interval["num_samples"] == 3
    assert interval["low"] <= interval["mean"] <= interval["high"]


def test_a_model_is_tried_in_every_shape_and_the_fewest_gpus_win() -> None:
    question = ("--workload", "code", "--limit", "80", "--rate-scale", "10", "--slo-ttft-p99", "1.5")
    document = size(*question, "--model", "llama-3.1-70b", "--gpu", "H100", "--max-model-len", "16384")
    by_size = {shape["tensor_parallel_size"]: shape for shape in document["shapes"]}
    assert set(by_size) == {1, 2, 4, 8}
    assert "GiB" in by_size[1]["reason"]
    answers = [shape["gpus"] for shape in document["shapes"] if shape["gpus"] is not None]
    assert document["answer"]["gpus"] == min(answers)
    assert "x H100" in document["answer"]["sentence"]
    best = by_size[document["answer"]["tensor_parallel_size"]]
    assert best["assumptions"]["gpu_memory_utilization"] == 0.92
    assumptions = document["assumptions"]
    assert assumptions["latency_model"].startswith("roofline")
    assert assumptions["model"].startswith("llama-3.1-70b")
    assert assumptions["num_replicas"] == document["answer"]["replicas"]
    assert assumptions["gpu_memory_utilization"] == 0.92


def test_the_tornado_names_the_two_assumptions_that_matter_most() -> None:
    document = size(*CODE, *POOL, "--slo-ttft-p99", "0.4", "--tornado")
    rows = document["tornado"]
    assert len(rows) >= 8
    swings = [(row["swing_replicas"], row["swing_slo"]) for row in rows]
    assert swings == sorted(swings, reverse=True)
    assert document["most_important"] == [row["assumption"] for row in rows[:2]]
    assert swings[0] > (0, 0)
    assert {row["assumption"] for row in rows} >= {"traffic", "routing", "latency: prefill_token_s"}


def test_where_a_larger_fleet_is_not_allowed_the_largest_says_how_near_it_came() -> None:
    document = size(*CODE, *POOL, "--slo-ttft-p99", "0.4", "--max-replicas", "2", code=1)
    assert document["answer"] is None
    (shape,) = document["shapes"]
    last = shape["searches"][0]["trials"][-1]
    assert last["requests"]["finished"] == 150  # a full replay
    assert (
        shape["reason"]
        == f"needs more than 2 replicas: 2 gave p99 TTFT {last['slo']['ttft_p99_s']['value']:.4g} s (limit 0.4)"
    )
    assert document["assumptions"]["num_replicas"] == 2


def test_an_slo_that_no_number_of_replicas_can_keep_is_answered_with_the_nearest_that_can(
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = ("--workload", "code", "--limit", "80", "--rate-scale", "15")
    document = size(*short, *POOL, "--slo-ttft-p99", "0.1", code=1)
    assert document["answer"] is None
    (shape,) = document["shapes"]
    assert shape["searches"] == []
    assert shape["reason"].startswith(
        "no number of replicas helps; each request alone on an idle engine gives p99 TTFT 0.2"
    )
    assert shape["idle"]["ttft_p99_s"]["value"] > 0.1
    assert document["assumptions"]["latency_model"].startswith("linear")
    instead = document["instead"]
    share = instead["slo"]["goodput_share"]
    assert share == pytest.approx(0.99 * shape["idle_share_in_time"], abs=1.001e-3)
    assert instead["slo"]["ttft_s"] == 0.1
    replicas = instead["answer"]["replicas"]
    trials = {trial["value"]: trial for trial in instead["shapes"][0]["searches"][0]["trials"]}
    assert trials[replicas]["slo"]["goodput_share"]["value"] >= share
    assert not trials[replicas - 1]["met"]
    print_size(document)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("No tried fleet keeps p99 TTFT within 0.1 s: only ")
    assert lines[0].endswith("even alone on an idle engine of 1 GPU with all earlier prompts cached")
    assert lines[1].endswith(instead["answer"]["sentence"])
    assert any(line.startswith("Assumptions") for line in lines)


def test_the_highest_rate_that_a_given_fleet_serves() -> None:
    document = size(*CODE, *POOL, "--slo-ttft-p99", "0.4", "--replicas", "2")
    answer, search = document["answer"], document["shapes"][0]["searches"][0]
    trials = {trial["value"]: trial for trial in search["trials"]}
    best = trials[answer["rate_scale"]]
    assert best["met"]
    assert best["requests"]["finished"] == 150
    missed = min(value for value, trial in trials.items() if not trial["met"] and value > answer["rate_scale"])
    assert missed <= answer["rate_scale"] * 1.0201
    assert answer["replicas"] == 2
    assert answer["requests_per_s"] == pytest.approx(
        150 / document["trace"]["window"]["end_s"] * 15 * answer["rate_scale"]
    )
    assert "times the traffic" in answer["sentence"]


def test_the_highest_rate_over_several_seeds_is_that_of_the_worst() -> None:
    document = size(*CODE, *POOL, "--slo-ttft-p99", "0.4", "--replicas", "3", "--seeds", "2", "--probes", "0")
    (shape,) = document["shapes"]
    rates = [search["rate_scale"] for search in shape["searches"]]
    assert [search["seed"] for search in shape["searches"]] == [0, 1]
    assert document["answer"]["rate_scale"] == shape["rate_scale"] == min(rates)
    interval = shape["rate_scale_over_seeds"]
    assert interval["num_samples"] == 2
    assert interval["low"] <= interval["mean"] == pytest.approx(sum(rates) / 2)


def test_a_price_turns_the_answer_into_money() -> None:
    model = ("--model", "llama-3.1-8b", "--gpu", "H100", "--tensor-parallel-sizes", "1", "--block-size", "64")
    document = size(*CODE, *model, "--slo-ttft-p99", "1", "--price-per-gpu-hour", "2.5")
    answer, cost = document["answer"], document["answer"]["cost"]
    assert cost["per_hour"] == 2.5 * answer["gpus"]
    assert cost["per_month_of_730_hours"] == 730 * cost["per_hour"]
    trials = document["shapes"][0]["searches"][0]["trials"]
    per_s = next(one["output_tokens_per_s"] for one in trials if one["value"] == answer["replicas"])
    assert cost["per_million_output_tokens"] == pytest.approx(cost["per_hour"] / 3600 / per_s * 1e6)


def test_a_workload_fitted_to_a_trace_is_sized_as_well(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 500 * n, "input_length": 600 + n, "output_length": 20 + n % 7, "hash_ids": [0, n + 1]}
        for n in range(60)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = size("--fit", str(trace), "--limit", "50", *POOL, "--slo-ttft-p99", "1", "--seeds", "2")
    assert document["trace"]["num_requests"] == 50
    assert document["answer"]["replicas"] >= 1


def interrupted(*arguments: str, after: Callable[[], bool]) -> tuple[int, str, str]:
    """Run a search, send it a Ctrl-C as soon as `after` is true, and return what it says."""
    command = [BIN, "size", *arguments]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not after() and time.monotonic() < deadline and running.poll() is None:
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    out, complaints = running.communicate(timeout=60)
    return running.returncode, out, complaints


def test_an_interrupted_search_tells_what_it_ran_and_goes_on_from_there(tmp_path: Path) -> None:
    question = ("--workload", "code", "--limit", "250", "--rate-scale", "15", *POOL, "--slo-ttft-p99", "0.4")
    command = (*question, "--keep", str(tmp_path), "--json")
    code, out, complaints = interrupted(*command, after=lambda: len(list(tmp_path.glob("*.json"))) >= 2)
    assert code == 130
    assert "the same command goes on" in complaints
    partial = json.loads(out)
    assert partial["answer"] is None
    assert partial["not_done"] == "interrupted before it finished"
    (shape,) = partial["shapes"]
    assert shape["reason"].startswith("interrupted before it finished: above ")
    (search,) = shape["searches"]
    done = {trial["value"] for trial in search["trials"]}
    assert len(done) >= 2
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    whole = size(*question, "--keep", str(tmp_path))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert done <= {trial["value"] for trial in whole["shapes"][0]["searches"][0]["trials"]}
    assert whole == size(*question)  # kept or not, the answer is the same


def test_the_answer_comes_first_on_the_terminal() -> None:
    done = kvledger("size", *CODE, *POOL, "--slo-ttft-p99", "0.4")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == "3 replicas of one engine each keep p99 TTFT within 0.4 s"
    assert "Assumptions" in done.stdout
    assert "latency_model" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "there is no SLO"),
        (("--slo-goodput", "0.9"), "go together"),
        (("--slo-ttft-p99", "1", "--tensor-parallel-sizes", "two"), "is not a whole number of GPUs"),
        (("--slo-ttft-p99", "1", "--seeds", "0"), "--seeds 0 has no effect"),
        (("--slo-ttft-p99", "1", "--max-replicas", "0"), "--max-replicas is 0"),
        (("--slo-ttft-p99", "1", "--probes", "-1"), "--probes is -1; it must be at least 0"),
        (("--slo-ttft-p99", "1", "--jobs", "2"), "--jobs 2 has no effect without --tornado"),
        (("--slo-ttft-p99", "1", "--price-per-gpu-hour", "2"), "needs --model and --gpu"),
        (("--slo-ttft-p99", "1", "--routing", "luck"), "unknown router 'luck'"),
    ],
)
def test_bad_input_exits_with_2(arguments: tuple[str, ...], message: str) -> None:
    done = kvledger("size", *CODE, *POOL, *arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.slow
def test_the_tornado_of_a_rate_says_how_far_the_rate_moves_whatever_the_number_of_processes() -> None:
    question = ("--workload", "code", "--limit", "60", "--rate-scale", "15", *POOL, "--probes", "0")
    promise = ("--slo-goodput", "0.9", "--slo-ttft", "0.3", "--replicas", "2", "--tornado")
    document = size(*question, *promise)
    rows = {row["assumption"]: row for row in document["tornado"]}
    assert document["most_important"] == list(rows)[:2]
    traffic = rows["traffic"]
    assert traffic["low"]["rate_scale"] > document["answer"]["rate_scale"] > traffic["high"]["rate_scale"]
    assert traffic["swing_rate_scale"] == pytest.approx(traffic["low"]["rate_scale"] - traffic["high"]["rate_scale"])
    assert size(*question, *promise, "--jobs", "2") == document


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (("--model", "nosuch", "--gpu", "H100"), "no built-in model is called 'nosuch'"),
        (("--model", "llama-3.1-8b", "--gpu", "Abacus"), "is no preset"),
        (("--model", "llama-3.1-8b", "--gpu", "H100", "--kv-cache-dtype", "fp9"), "is not a KV-cache dtype"),
        (("--model", "llama-3.1-8b", "--gpu", "H100", "--quantization", "int3"), "unknown quantization 'int3'"),
    ],
)
def test_a_mistake_that_no_shape_mends_exits_with_2_and_is_no_row(mistake: tuple[str, ...], message: str) -> None:
    done = kvledger("size", *CODE, "--slo-ttft-p99", "1", *mistake)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_a_reader_that_leaves_is_no_failure() -> None:
    question = f"{BIN} compare --workload code --limit 20 --num-gpu-blocks-override 500 --max-model-len 9K"
    done = subprocess.run(
        ["bash", "-c", f"{question} | (exec <&-; sleep 3); echo ${{PIPESTATUS[0]}}"], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("0\n", "")
