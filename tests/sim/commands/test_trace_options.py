"""Every format goes through `kvledger curve` and `kvledger replay`, with every option that says which requests."""

import json

import pytest

QWEN = {"parent_chat_id": -1, "output_length": 3, "type": "text", "turn": 1}
FILES = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    + "\n".join(f"2024-05-10 00:00:{second:02d}+00:00,40,3" for second in range(6)),
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    + "\n".join(f"{second},ChatGPT,40,3,43,API log" for second in range(6)),
    "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "\n".join(f"{second},40,3" for second in range(6)),
    "qwen-bailian": "\n".join(
        json.dumps({**QWEN, "chat_id": i, "timestamp": i, "input_length": 40, "hash_ids": [0, 1, 2]}) for i in range(6)
    ),
    "agentic": json.dumps(
        {
            "id": "one",
            "block_size": 16,
            "hash_id_scope": "local",
            "requests": [{"t": i, "in": 40, "out": 3, "hash_ids": [0, 1], "think_time": 0.5} for i in range(6)],
        }
    ),
    "sharegpt": json.dumps(
        [
            {"id": str(i), "conversations": [{"from": "human", "value": "q" * 160}, {"from": "gpt", "value": "a" * 12}]}
            for i in range(6)
        ]
    ),
    "log": "\n".join(json.dumps({"arrival_s": i, "input_tokens": 40, "output_tokens": 3}) for i in range(6)),
    "mooncake": "\n".join(
        json.dumps({"timestamp": 1000 * i, "input_length": 40, "output_length": 3, "hash_ids": [0]}) for i in range(6)
    ),
}
BLOCKS = ["--block-size", "16"]
POOL = [*BLOCKS, "--num-gpu-blocks-override", "50"]


def arguments_for(tmp_path, name: str) -> list[str]:
    path = tmp_path / "trace.txt"
    path.write_text(FILES[name])
    return [str(path), *(["--tokenizer", "chars:4"] if name == "sharegpt" else [])]


@pytest.mark.parametrize("name", FILES)
def test_every_format_has_a_curve_within_a_window(kvledger, tmp_path, name):
    window = ["--skip-first", "1", "--limit", "3", "--rate-scale", "2"]
    code, out, err = kvledger("curve", *arguments_for(tmp_path, name), *BLOCKS, *window, "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["trace"]["format"] == name
    assert answer["window"]["num_requests"] == 3
    assert answer["trace"]["rate_scale"] == 2.0
    assert answer["trace"]["input_tokens"] == 3 * 40


@pytest.mark.parametrize("name", FILES)
def test_every_format_is_replayed_within_a_window(kvledger, tmp_path, name):
    window = ["--skip-first", "1", "--limit", "3", "--rate-scale", "2"]
    code, out, err = kvledger("replay", *arguments_for(tmp_path, name), *POOL, *window, "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert answer["requests"] == {"total": 3, "finished": 3, "rejected": 0, "aborted": 0}
    assert answer["trace"]["timestamp_unit"]
    closed = name in ("agentic", "sharegpt")
    assert answer["assumptions"]["arrivals"].startswith("closed loop" if closed else "open loop")


def test_the_loop_can_be_opened_and_closed(kvledger, tmp_path):
    agentic = arguments_for(tmp_path, "agentic")
    code, out, _ = kvledger("replay", *agentic, *POOL, "--open-loop", "--json")
    assert code == 0
    assert json.loads(out)["assumptions"]["arrivals"].startswith("open loop")
    qwen = arguments_for(tmp_path, "qwen-bailian")
    code, out, _ = kvledger("replay", *qwen, *POOL, "--closed-loop", "--json")
    assert json.loads(out)["assumptions"]["arrivals"].startswith("closed loop")
    code, _, err = kvledger("replay", *arguments_for(tmp_path, "azure"), *POOL, "--closed-loop")
    assert code == 2
    assert "--closed-loop has no effect on trace.txt" in err


def test_a_seed_fixes_arrivals_that_the_file_does_not_record(kvledger, tmp_path):
    sharegpt = arguments_for(tmp_path, "sharegpt")
    seconds = {}
    for seed in ("1", "1 ", "2"):
        options = ["--request-rate", "0.5", "--seed", seed.strip(), "--json"]
        seconds[seed] = json.loads(kvledger("replay", *sharegpt, *POOL, *options)[1])["simulated_seconds"]
    assert seconds["1"] == seconds["1 "] != seconds["2"]
    code, _, err = kvledger("replay", *sharegpt, *POOL, "--seed", "1")
    assert code == 2
    assert "--seed 1 has no effect on a trace file without --request-rate" in err


def test_several_files_are_one_trace_of_conversations(kvledger, tmp_path):
    paths = []
    for name in ("a", "b"):
        paths.append(str(tmp_path / f"{name}.json"))
        (tmp_path / f"{name}.json").write_text(FILES["agentic"].replace("one", name))
    code, out, _ = kvledger("replay", *paths, *POOL, "--json")
    assert code == 0
    assert json.loads(out)["requests"]["finished"] == 12
    assert json.loads(kvledger("curve", str(tmp_path), "--json")[1])["trace"]["num_requests"] == 12


def test_what_was_done_to_the_trace_is_told(kvledger, tmp_path):
    _, out, _ = kvledger("replay", *arguments_for(tmp_path, "sharegpt"), *POOL)
    assert "Note: tokens counted by an estimate: one token every 4 characters" in out
    assert "Note: the file records no times" in out


@pytest.mark.parametrize(
    "option",
    [["--timestamp-unit", "ms"], ["--tokenizer", "chars:4"], ["--request-rate", "3.0"]],
    ids=lambda option: option[0],
)
def test_options_of_files_are_refused_for_a_built_in_workload(kvledger, option):
    code, _, err = kvledger("curve", "--workload", "code", "--block-size", "16", "--limit", "5", *option)
    assert code == 2
    assert f"{option[0]} {option[1]} has no effect on a built-in workload" in err


BENCHMARK = ["--isl", "40", "--osl", "5", "--num-prompts", "30"]


@pytest.mark.parametrize(
    "command",
    [
        ["replay", *POOL, "--concurrency", "4"],
        ["replay", *POOL, "--request-rate", "20", "--range-ratio", "0.5"],
        ["fleet", *POOL, "--concurrency", "4"],
        ["curve", "--prefix-len", "64"],
        ["optimum", *POOL, "--prefix-len", "64"],
        ["compare", *POOL, "--max-model-len", "64"],
        ["sampling", "--beam-width", "2"],
        ["ab", *POOL, "--concurrency", "4", "--b", "concurrency=8"],
        ["block-size", *POOL[2:], "--concurrency", "4", "--block-sizes", "8,16"],
        ["size", *POOL, "--concurrency", "4", "--slo-ttft-p99", "1"],
        ["size", *POOL, "--request-rate", "20", "--slo-ttft-p99", "1", "--replicas", "1"],
    ],
    ids=lambda command: command[0],
)
def test_every_command_that_takes_a_trace_takes_a_benchmark_instead(kvledger, command):
    code, out, err = kvledger(command[0], *BENCHMARK, *command[1:], "--json")
    assert (code, err) == (0, "")
    assert "30 requests" in out


def test_a_study_and_a_sweep_take_a_benchmark(kvledger, tmp_path):
    code, out, _ = kvledger("study", *BENCHMARK, "--concurrency", "4", "--output", str(tmp_path / "report"), "--json")
    assert code == 0
    assert json.loads(out)["replay"]["requests"]["finished"] == 30
    settings = ["isl=40", "osl=5", "num-prompts=30", "num-gpu-blocks-override=50"]
    given = [part for text in settings for part in ("--set", text)]
    code, out, _ = kvledger("sweep", *given, "--grid", "concurrency=1,4", "--json")
    assert code == 0
    seconds = [row["result"]["simulated_seconds"] for row in json.loads(out)["rows"]]
    assert seconds[0] > 2 * seconds[1]


def test_half_a_benchmark_is_refused(kvledger):
    code, _, err = kvledger("replay", "--input-len", "40", *POOL)
    assert code == 2
    assert "--input-len 40 needs --output-len too" in err
    code, _, err = kvledger("size", *BENCHMARK, *POOL, "--concurrency", "4", "--slo-ttft-p99", "1", "--replicas", "1")
    assert code == 2
    assert "--replicas 1 asks for a rate: give the benchmark a --request-rate" in err
    code, _, err = kvledger("replay", *BENCHMARK, *POOL, "--concurrency", "4", "--n", "2")
    assert code == 2
    assert "--n 2 and --max-concurrency exclude each other" in err


@pytest.mark.parametrize(
    ("command", "expected"),
    [(["replay"], 1), (["fleet"], 1), (["ab", "--b", "max-num-seqs=2"], 2), (["replay", "--log", "log"], 1)],
)
def test_a_run_that_serves_none_of_its_requests_does_not_exit_with_0(
    kvledger, tmp_path, monkeypatch, command, expected
):
    monkeypatch.chdir(tmp_path)
    code, out, err = kvledger(command[0], "--isl", "900", "--osl", "5", *POOL, *command[1:])
    assert (code, out) == (expected, "")
    assert "none of the 1,000 requests was served; the first: request '1' of 904 tokens" in err


def test_a_study_that_serves_none_of_its_requests_does_not_exit_with_0(kvledger, tmp_path):
    limits = ["--max-model-len", "500", "--output", str(tmp_path / "report")]
    code, out, _ = kvledger("study", "--isl", "900", "--osl", "5", "--num-prompts", "3", *limits, "--json")
    assert code == 1
    assert "none of the 3 requests was served" in json.loads(out)["not_done"]["replay"]
