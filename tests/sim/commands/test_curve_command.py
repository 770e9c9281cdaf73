"""`kvledger curve`: what it prints, for people and for programs, and how it refuses."""

import json
import subprocess
import sys

import pytest
from rich.console import Console

ROWS = [
    {"timestamp": 0, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 2]},
    {"timestamp": 27, "input_length": 512, "output_length": 1, "hash_ids": [0]},
    {"timestamp": 3000, "input_length": 1025, "output_length": 4, "hash_ids": [0, 1, 3]},
    {"timestamp": 3000, "input_length": 1030, "output_length": 4, "hash_ids": [0, 1, 2]},
]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def test_json_answers_every_size_with_every_key(kvledger, trace):
    code, out, err = kvledger("curve", trace, "--capacities", "100,2,3,2", "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer["policy"] == "lru"
    assert answer["block_size"] == 512
    assert [point["num_blocks"] for point in answer["points"]] == [100, 2, 3, 2]
    assert answer["points"][0] == {
        "num_blocks": 100,
        "tokens": 51_200,
        "hit_blocks": 6,
        "block_hit_rate": 6 / 10,
        "token_hit_rate": (512 + 1024 + 1030) / 3597,
        "full_block_token_hit_rate": (0 + 1024 + 1024) / 3597,
    }
    assert {**answer["infinite"], "num_blocks": 100, "tokens": 51_200} == answer["points"][0]
    assert answer["infinite"]["num_blocks"] == 4


def test_json_echoes_trace_window_and_assumptions(kvledger, trace):
    _, out, _ = kvledger("curve", trace, "--skip-first", "1", "--limit", "2", "--json")
    answer = json.loads(out)
    assert answer["trace"]["name"] == "trace.jsonl"
    assert answer["trace"]["trace_block_size"] == 512
    assert answer["window"]["num_requests"] == 2
    assert (answer["window"]["first_place"], answer["window"]["last_place"]) == (2, 3)
    assert any("outputs take no blocks" in line for line in answer["assumptions"])


def test_the_first_policy_leads_and_all_are_there(kvledger, trace):
    _, out, _ = kvledger("curve", trace, "--capacities", "2,3", "--policy", "fifo, lru,optimum", "--json")
    answer = json.loads(out)
    assert answer["policy"] == "fifo"
    assert list(answer["policies"]) == ["fifo", "lru", "optimum"]
    assert answer["points"] == answer["policies"]["fifo"]
    assert all(len(points) == 2 for points in answer["policies"].values())


def test_all_but_the_timing_is_the_same_from_run_to_run(kvledger):
    runs = [
        json.loads(kvledger("curve", "--workload", "conversation", "--limit", "300", "--seed", "4", "--json")[1])
        for _ in range(2)
    ]
    for run in runs:
        del run["timing"]
    assert runs[0] == runs[1]
    assert runs[0]["trace"]["workload"]["seed"] == 4


def test_a_model_turns_blocks_into_bytes(kvledger, trace):
    _, out, _ = kvledger("curve", trace, "--capacities", "10", "--model", "llama-3.1-8b", "--json")
    assert json.loads(out)["points"][0]["bytes"] == 10 * 512 * 131_072, "2 x 32 layers x 8 heads x 128 x 2 bytes"


def test_a_model_without_equal_tokens_is_refused(kvledger, trace):
    code, _, err = kvledger("curve", trace, "--model", "gpt-oss-20b")
    assert code == 2
    assert "keep a window or a state" in err


def test_other_block_sizes_of_the_cache_are_offered_both_ways(kvledger, trace):
    for block_size, hit_blocks in ((16, 32 + 64 + 65), (1024, 3)):
        _, out, _ = kvledger("curve", trace, "--block-size", str(block_size), "--capacities", "1000", "--json")
        answer = json.loads(out)
        assert answer["block_size"] == block_size
        assert answer["points"][0]["hit_blocks"] == hit_blocks
    _, out, _ = kvledger("curve", trace, "--block-size", "16")
    assert "Blocks of 16 tokens (given; one hash id of the trace covers 512, Mooncake JSONL's own)" in out


def test_the_table_sets_lru_beside_other_policies_and_the_optimum(kvledger, trace):
    code, out, _ = kvledger("curve", trace)
    assert code == 0
    header = next(line for line in out.splitlines() if "optimum" in line)
    assert header.split()[:2] == ["blocks", "tokens"]
    for text in (
        "fifo",
        "s3fifo",
        "unlimited",
        "60.00",
        "4 requests (lines 1 to 4)",
        "Blocks of 512 tokens",
        "90 %",
        "Next:",
    ):
        assert text in out


def test_the_table_fits_80_columns(kvledger, trace, monkeypatch):
    monkeypatch.setattr("kvledger.sim.report.curve.console", lambda: Console(width=80))
    _, out, _ = kvledger("curve", trace, "--capacities", "1000,100000,10000000", "--model", "llama-3.1-8b")
    row = next(line for line in out.splitlines() if line.strip().startswith("10,000,000"))
    assert row.split() == ["10,000,000", "610.4", "TiB", "60.00", "71.34", "56.94", "60.00", "60.00", "60.00"]


def test_skipped_rows_are_counted_on_the_terminal_and_in_json(kvledger, tmp_path):
    path = tmp_path / "dirty.jsonl"
    path.write_text("\n".join([json.dumps(ROWS[0]), "oops", json.dumps(ROWS[1]), '{"timestamp": 1}']))
    code, _, err = kvledger("curve", str(path))
    assert code == 2
    assert err.startswith(f"kvledger: {path}:2: is not JSON")
    _, out, _ = kvledger("curve", str(path), "--on-bad-row", "skip")
    assert "1 row left out (not_json)" in out
    assert "1 row left out (missing_field)" in out
    _, out, _ = kvledger("curve", str(path), "--on-bad-row", "skip", "--json")
    skipped = json.loads(out)["trace"]["rows_skipped"]
    assert {reason: rows["num_rows"] for reason, rows in skipped.items()} == {"not_json": 1, "missing_field": 1}


def test_a_trace_without_ids_claims_no_reuse(kvledger, tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10\r\n")
    code, _, err = kvledger("curve", str(path))
    assert code == 2
    assert "--block-size" in err
    code, out, _ = kvledger("curve", str(path), "--block-size", "16")
    assert code == 0
    assert "no reuse can be claimed" in out
    assert "0.00 here are not measured" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a trace file, --workload NAME, --fit FILE, or --input-len and --output-len"),
        (["TRACE", "--workload", "code"], "not more than one of them"),
        (["--workload", "chat"], "unknown workload 'chat'; known: conversation, sharegpt"),
        (["--workload", "code", "--on-bad-row", "skip"], "--on-bad-row skip has no effect on a built-in workload"),
        (["--workload", "agentic", "--trace-block-size", "16"], "--trace-block-size 16 has no effect on a built-in"),
        (["TRACE", "--seed", "3"], "--seed 3 has no effect on a trace file"),
        (["TRACE", "--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8 has no effect without --model"),
        (["TRACE", "--capacities", "1000,x"], "'x' is not a whole number of blocks"),
        (["TRACE", "--capacities", "1000,-5"], "--capacities holds -5"),
        (["TRACE", "--policy", "mru"], "--policy mru: the policies are lru"),
        (["TRACE", "--block-size", "0"], "--block-size is 0; it must be 1 token or more"),
        (["TRACE", "--block-size", "16", "--policy", "lru,sieve"], "at 16 only lru"),
        (["TRACE", "--trace-block-size", "100"], "fits trace block sizes 344 to 514"),
        (["no-such-file"], "no-such-file: cannot be read as a trace: No such file or directory"),
    ],
)
def test_what_cannot_be_used_is_refused_with_exit_2_and_no_output(kvledger, trace, arguments, message):
    code, out, err = kvledger("curve", *[trace if each == "TRACE" else each for each in arguments])
    assert (code, out) == (2, "")
    assert message in err


def test_json_of_a_file_waits_for_no_library_that_it_does_not_need(trace):
    program = """
import atexit, sys
from kvledger.sim.commands.cli import main
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
sys.argv = ["kvledger", "curve", sys.argv[1], "--policy", "lru", "--json"]
main()
"""
    ended = subprocess.run([sys.executable, "-c", program, trace], capture_output=True, text=True, check=True)
    needless = {
        "rich",
        "simpy",
        "kvledger.core.models.geometry",
        "kvledger.core.events",
        "kvledger.sim.workloads.builtin",
    }
    assert json.loads(ended.stdout)["policy"] == "lru"
    assert not needless & set(ended.stderr.split())
